//! A minimal engine, and a test that it fulfils the contract.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::{Awaited, Claim, Engine, Findings, Flight, Request, Subgroup, Withdrawn};
use crate::control::Control;
use crate::rank_state::RankState;
use crate::world::{NobodyElse, World};
use crate::{
    Buffer, Check, ElementType, Error, FullPart, OperationKind, ProcessGroup, Reduction, Source,
    arithmetic,
};

#[path = "../../tests/contract/mod.rs"]
mod contract;

/// The label of operations in which the engine gives rank 1 a different result.
const SPOILED: &str = "spoiled";

/// The claims and sources of all ranks for one operation, by rank of the group.
struct Slips {
    slips: Vec<OnceLock<(Claim, Vec<Source>)>>,
    num_done: AtomicUsize,
}

/// The slips of all operations, by group and sequence number.
type Board = Arc<Mutex<HashMap<(u64, u64), Arc<Slips>>>>;

#[derive(Debug)]
struct BoardEnd {
    board: Board,
    group: u64,
    rank: usize,
    size: usize,
    control: Arc<Control>,
    domains: Arc<Mutex<HashMap<u64, Arc<Control>>>>,
}

struct BoardFlight {
    slips: Arc<Slips>,
    rank: usize,
    into: Vec<Buffer>,
    control: Arc<Control>,
}

impl std::fmt::Debug for Slips {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slips")
    }
}

impl Engine for BoardEnd {
    fn name(&self) -> &'static str {
        "board"
    }

    fn control(&self) -> &Arc<Control> {
        &self.control
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        let key = (self.group, request.operation.sequence);
        let none = || Slips {
            slips: (0..self.size).map(|_| OnceLock::new()).collect(),
            num_done: AtomicUsize::new(0),
        };
        let slips = self
            .board
            .lock()
            .unwrap()
            .entry(key)
            .or_insert_with(|| Arc::new(none()))
            .clone();
        assert!(
            slips.slips[self.rank]
                .set((request.claim, request.sources))
                .is_ok()
        );
        self.control.world.bell.ring();
        Box::new(BoardFlight {
            slips,
            rank: self.rank,
            into: request.into,
            control: self.control.clone(),
        })
    }

    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        let mut domains = self.domains.lock().unwrap();
        let isolate = |deadline| {
            let control = || self.control.isolate(subgroup.number, deadline);
            domains
                .entry(subgroup.number)
                .or_insert_with(control)
                .clone()
        };
        let control = subgroup
            .isolated
            .map_or_else(|| self.control.clone(), isolate);
        Box::new(Self {
            board: self.board.clone(),
            group: subgroup.number,
            rank: subgroup.rank,
            size: subgroup.members.len(),
            control,
            domains: self.domains.clone(),
        })
    }
}

impl BoardFlight {
    fn slip(&self, rank: usize) -> &(Claim, Vec<Source>) {
        self.slips.slips[rank].get().expect("all claims are there")
    }

    /// Returns the addends of a part for the elements whose sum rank `to` gets.
    fn addends(&self, part: usize, to: usize) -> Vec<&[u8]> {
        let addend = |from: usize| {
            let (claim, sources) = self.slip(from);
            let given = claim.signature.routes(from, to)[part].given.clone();
            &sources[part].as_bytes()[given]
        };
        (0..self.slips.slips.len()).map(addend).collect()
    }
}

impl Flight for BoardFlight {
    fn is_there(&self, awaited: Awaited) -> bool {
        let size = self.slips.slips.len();
        match awaited {
            Awaited::Claims => self.slips.slips.iter().all(|slip| slip.get().is_some()),
            Awaited::Result => true,
            Awaited::Release => self.slips.num_done.load(Ordering::Acquire) == size,
        }
    }

    fn missing(&self, _: Awaited) -> Vec<usize> {
        let is_missing = |rank: &usize| self.slips.slips[*rank].get().is_none();
        (0..self.slips.slips.len()).filter(is_missing).collect()
    }

    fn claim(&self, rank: usize) -> &Claim {
        &self.slip(rank).0
    }

    fn findings(&mut self) -> Findings {
        Findings::default()
    }

    fn receive(&mut self) -> Result<Vec<Buffer>, Withdrawn> {
        let mut buffers = std::mem::take(&mut self.into);
        let signature = &self.claim(self.rank).signature;
        for (part, buffer) in buffers.iter_mut().enumerate() {
            let extent = &signature.extents[part];
            let Some(reduction) = &signature.reduction else {
                for from in 0..self.slips.slips.len() {
                    if let Some(route) = signature.routes(from, self.rank).get(part) {
                        let given = &self.slip(from).1[part].as_bytes()[route.given.clone()];
                        buffer.as_mut()[route.placed.clone()].copy_from_slice(given);
                    }
                }
                continue;
            };
            let mut rest = buffer.as_mut();
            for to in 0..self.slips.slips.len() {
                if signature.kind == OperationKind::AllReduce || to == self.rank {
                    let len = extent.partition.len(to) * reduction.output_of(extent.element).size();
                    let (slice, after) = rest.split_at_mut(len);
                    arithmetic::reduce(reduction, extent.element, &self.addends(part, to), slice);
                    rest = after;
                }
            }
        }
        if self.rank == 1 && signature.label.as_str() == SPOILED {
            buffers[0].as_mut()[2] ^= 1;
        }
        Ok(buffers)
    }
}

impl Drop for BoardFlight {
    fn drop(&mut self) {
        self.slips.num_done.fetch_add(1, Ordering::AcqRel);
        self.control.world.bell.ring();
    }
}

/// Returns the ends of a world of ranks that share a board.
fn ends(size: usize, check: Check) -> Vec<ProcessGroup> {
    let states: Vec<_> = (0..size)
        .map(|rank| Arc::new(RankState::new(rank, check)))
        .collect();
    let world = World::new(
        states.iter().cloned().map(Some).collect(),
        Box::new(NobodyElse),
    );
    let control = Control::of_world(world, Duration::from_secs(30));
    let (board, domains): (Board, Arc<Mutex<_>>) = Default::default();
    let end = |(rank, state)| {
        let engine = Box::new(BoardEnd {
            board: board.clone(),
            group: u64::MAX,
            rank,
            size,
            control: control.clone(),
            domains: domains.clone(),
        });
        ProcessGroup::new("world".into(), rank, (0..size).collect(), engine, state)
    };
    states.into_iter().enumerate().map(end).collect()
}

#[test]
fn an_engine_of_a_hundred_lines_keeps_the_contract() {
    for (name, case) in contract::CASES {
        // Its sources stay on the board.
        if name == "released memory" {
            continue;
        }
        for size in 1..=4 {
            std::thread::scope(|scope| {
                for end in ends(size, Check::Agreement) {
                    scope.spawn(move || {
                        let (control, rank) = (end.control().clone(), end.world_rank());
                        if let Err(error) = case(&end) {
                            control.fail(rank, error.to_string());
                            panic!("{name} on rank {rank} of {size}: {error}");
                        }
                        control.world.depart(rank);
                    });
                }
            });
        }
    }
}

/// Runs an all-reduce followed by another operation, on ranks that share a board.
fn reduce_and_continue(size: usize, label: &'static str) -> Vec<Result<(), Error>> {
    std::thread::scope(|scope| {
        let run = |end: ProcessGroup| {
            let part = FullPart::new(Source::new(vec![end.rank() as u8; 5]), ElementType::U8);
            let into = vec![end.pool().take(5)];
            end.begin_step(4);
            let reduced = end.all_reduce(label, vec![], Reduction::sum(), vec![part], into);
            reduced.and_then(|_| end.barrier("after it"))
        };
        let ends = ends(size, Check::Agreement).into_iter();
        let ranks: Vec<_> = ends.map(|end| scope.spawn(move || run(end))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_differing_result_is_reported_in_the_next_operation() {
    for (size, odd) in [(2, vec![0, 1]), (3, vec![1]), (4, vec![1])] {
        for seen in reduce_and_continue(size, SPOILED) {
            match seen.unwrap_err() {
                Error::Disagreement {
                    operation,
                    step,
                    ranks,
                    ..
                } => {
                    assert_eq!((operation.label.as_str(), step), (SPOILED, Some(4)));
                    assert_eq!(ranks, odd);
                }
                Error::PeerFailed { reason, .. } => {
                    assert!(reason.contains(&format!("ranks {odd:?} hold")), "{reason}");
                }
                other => panic!("{other}"),
            }
        }
        assert!(reduce_and_continue(size, "right").iter().all(Result::is_ok));
    }
}
