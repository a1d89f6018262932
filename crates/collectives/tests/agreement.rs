//! Bytes that change in transit are detected and named.

mod ranks;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use burn_fsdp_collectives::{
    At, Check, CrossPart, ElementType, Error, Fault, FullPart, How, Label, LaunchConfig,
    OperationKind, Part, Partition, Pending, ProcessGroup, Reduction, Sealed, Source, launch,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

use ranks::LONG;

/// Bytes in which one bit flips when the flag is set.
struct Fickle {
    right: Vec<u8>,
    wrong: Vec<u8>,
    is_wrong: Arc<AtomicBool>,
}

impl AsRef<[u8]> for Fickle {
    fn as_ref(&self) -> &[u8] {
        if self.is_wrong.load(Ordering::Acquire) {
            &self.wrong
        } else {
            &self.right
        }
    }
}

/// One operation, and the bit that flips between its start and its end.
#[derive(Debug, Clone)]
struct Flip {
    kind: OperationKind,
    num_ranks: usize,
    /// The number of elements in each part, of four bytes each.
    lens: Vec<usize>,
    giver: usize,
    part: usize,
    /// The position of the bit, as a fraction of the giver's bits.
    place: f64,
}

const KINDS: [OperationKind; 7] = [
    OperationKind::AllGather,
    OperationKind::ReduceScatter,
    OperationKind::AllReduce,
    OperationKind::Broadcast,
    OperationKind::Scatter,
    OperationKind::Gather,
    OperationKind::AllToAll,
];

fn flips() -> impl Strategy<Value = Flip> {
    let kind = prop::sample::select(&KINDS[..]);
    let lens = vec(1..40_usize, 1..4);
    (kind, 1..5_usize, lens, 0..4_usize, 0..4_usize, 0.0..1.0).prop_map(
        |(kind, num_ranks, lens, giver, part, place)| Flip {
            kind,
            num_ranks,
            giver: giver % num_ranks,
            part: part % lens.len(),
            lens,
            place,
        },
    )
}

impl Flip {
    /// Returns the root: the giver if only one rank gives, or another rank if only one receives.
    fn root(&self) -> usize {
        match self.kind {
            OperationKind::Gather => (self.giver + 1) % self.num_ranks,
            _ => self.giver,
        }
    }

    /// Returns the number of bytes that a rank gives of a part.
    fn given(&self, part: usize, rank: usize) -> usize {
        let partition = Partition::flat(self.lens[part], self.num_ranks).unwrap();
        let gives_shard = matches!(
            self.kind,
            OperationKind::AllGather | OperationKind::Gather | OperationKind::AllToAll
        );
        let is_root = rank == self.root();
        let is_rooted = matches!(self.kind, OperationKind::Broadcast | OperationKind::Scatter);
        match (gives_shard, is_rooted && !is_root) {
            // In an all-to-all a rank gives its shard of one dim, across all of the other dim.
            (true, _) if self.kind == OperationKind::AllToAll => 4 * 5 * partition.len(rank),
            (true, _) => 4 * partition.len(rank),
            (false, true) => 0,
            (false, false) => 4 * self.lens[part],
        }
    }

    fn source(&self, part: usize, rank: usize, is_wrong: &Arc<AtomicBool>) -> Source {
        let right: Vec<u8> = (0..self.given(part, rank))
            .map(|index| (index * 31 + rank * 7 + part) as u8)
            .collect();
        let mut wrong = right.clone();
        if (rank, part) == (self.giver, self.part) && !wrong.is_empty() {
            let bit = (self.place * (8 * wrong.len()) as f64) as usize;
            wrong[bit / 8] ^= 1 << (bit % 8);
        }
        Source::new(Fickle {
            right,
            wrong,
            is_wrong: is_wrong.clone(),
        })
    }

    fn start(&self, world: &ProcessGroup, is_wrong: &Arc<AtomicBool>) -> Result<Pending, Error> {
        let (rank, size, root) = (world.rank(), world.size(), self.root());
        let element = ElementType::U32;
        let all = 0..self.lens.len();
        let cut = |part: usize| Partition::flat(self.lens[part], size).unwrap();
        let parts = || {
            let part = |part| Part::new(self.source(part, rank, is_wrong), cut(part), element);
            all.clone().map(part).collect()
        };
        let shards = || {
            let take = |part: usize| world.pool().take(4 * cut(part).len(rank));
            all.clone().map(take).collect()
        };
        let fulls = |gets: bool| {
            let take = |part: usize| world.pool().take(4 * self.lens[part]);
            all.clone().filter(|_| gets).map(take).collect()
        };
        let whole = |part: usize| match self.given(part, rank) {
            0 => FullPart::absent(self.lens[part], element),
            _ => FullPart::new(self.source(part, rank, is_wrong), element),
        };
        match self.kind {
            OperationKind::AllGather => world.start_all_gather("it", vec![], parts(), fulls(true)),
            OperationKind::ReduceScatter => {
                let sum = Reduction::sum();
                world.start_reduce_scatter("it", vec![], sum, parts(), shards())
            }
            OperationKind::AllReduce => {
                let parts = all.clone().map(whole).collect();
                world.start_all_reduce("it", vec![], Reduction::sum(), parts, fulls(true))
            }
            OperationKind::Broadcast => {
                let parts = all.clone().map(whole).collect();
                world.start_broadcast("it", vec![], root, parts, fulls(rank != root))
            }
            OperationKind::Scatter => world.start_scatter("it", vec![], root, parts(), shards()),
            OperationKind::Gather => {
                world.start_gather("it", vec![], root, parts(), fulls(rank == root))
            }
            _ => {
                let across = Partition::flat(5, size).unwrap();
                let part = |part: usize| {
                    let source = self.source(part, rank, is_wrong);
                    CrossPart::new(source, cut(part), across, element)
                };
                let take = |part: usize| world.pool().take(4 * self.lens[part] * across.len(rank));
                let into = all.clone().map(take).collect();
                let parts = all.clone().map(part).collect();
                world.start_all_to_all("it", vec![], parts, into)
            }
        }
    }

    /// Runs the operation and returns the outcome on each rank.
    fn run(&self, flips: bool) -> Vec<Result<(), Error>> {
        let config = LaunchConfig::new(self.num_ranks)
            .deadline(LONG)
            .check(Check::Agreement);
        let meeting = Arc::new(Barrier::new(self.num_ranks));
        let flip = self.clone();
        let body = move |world: ProcessGroup| {
            let is_wrong = Arc::new(AtomicBool::new(false));
            let pending = flip.start(&world, &is_wrong);
            meeting.wait();
            is_wrong.store(flips, Ordering::Release);
            meeting.wait();
            let seen = pending
                .and_then(Pending::wait)
                .and_then(|_| world.barrier("what it was"));
            Ok::<_, Error>(seen)
        };
        launch(config, body).unwrap()
    }

    /// Returns true if the flip is in bytes that a rank receives.
    fn travels(&self) -> bool {
        let is_own = self.kind == OperationKind::Broadcast && self.num_ranks == 1;
        self.given(self.part, self.giver) > 0 && !is_own
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for seen in self.run(false) {
            prop_assert!(seen.is_ok(), "without a flip: {}", seen.unwrap_err());
        }
        if !self.travels() {
            return Ok(());
        }
        let mut named = 0;
        for seen in self.run(true) {
            match seen {
                Err(Error::Altered {
                    operation,
                    peer,
                    part,
                    ..
                }) => {
                    prop_assert_eq!((peer, part), (self.giver, self.part));
                    prop_assert_eq!((operation.kind, operation.sequence), (self.kind, 0));
                    named += 1;
                }
                Err(Error::PeerFailed { reason, .. }) => {
                    let says = format!("than rank {} passed to the call", self.giver);
                    prop_assert!(reason.contains(&says), "{}", reason);
                }
                // The rank had received its own result before another found the flip in its part.
                Ok(()) => {}
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
        prop_assert!(named > 0, "nobody noticed");
        Ok(())
    }
}

#[test]
fn each_flipped_bit_is_named_by_operation_tensor_and_rank() {
    let cases = match std::env::var_os("BURN_FSDP_LONG") {
        Some(_) => 5_000,
        None => 1_000,
    };
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let found = TestRunner::new_with_rng(config, rng).run(&flips(), |flip| flip.check());
    match found {
        Ok(()) => {}
        Err(TestError::Fail(reason, flip)) => panic!("{reason}: {flip:?}"),
        Err(error) => panic!("{error}"),
    }
}

/// A shard that has changed before it is gathered is reported as corruption in its rank's memory, regardless of the
/// receiver.
#[test]
fn a_changed_sealed_shard_is_reported_for_any_receiver() {
    for (size, receivers) in [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 2)] {
        let body = move |world: ProcessGroup| {
            let partition = Partition::flat(7 * size, size)?;
            let right = vec![5; partition.len(world.rank())];
            let what = Label::from("the shard of `a`");
            let seal = world.seal(&right);
            let sealed = seal.map(|seal| Arc::new(Sealed { seal, what }));
            let mut held = right;
            let is_faulty = world.rank() == size - 1;
            held[3] ^= u8::from(is_faulty) << 6;
            let source = Source::new(held).noted(sealed);
            let parts = vec![Part::new(source, partition, ElementType::U8)];
            let pending = if world.rank() < receivers {
                let into = vec![world.pool().take(7 * size)];
                world.start_all_gather("it", vec![], parts, into)
            } else {
                world.join_all_gather("it", vec![], parts)
            };
            let got = pending.and_then(Pending::wait);
            Ok::<_, Error>(got.and_then(|_| world.barrier("what it was")))
        };
        let config = LaunchConfig::new(size).check(Check::Agreement);
        let seen = launch(config, body).unwrap();
        let mut found = false;
        for seen in seen {
            match seen {
                Err(Error::AlteredAtRest { rank, what, .. }) => {
                    assert_eq!((rank, what.as_str()), (size - 1, "the shard of `a`"));
                    found = true;
                }
                Err(Error::PeerFailed { reason, .. }) => {
                    assert!(reason.contains("the shard of `a`"), "{reason}");
                }
                other => panic!("{size} ranks, {receivers} receive: {other:?}"),
            }
        }
        assert!(found, "{size} ranks, {receivers} receive");
    }
}

/// Runs three gathers in two steps with a fault that flips a bit of rank 1 in step 7.
fn with_fault(check: Check) -> Vec<Result<Vec<u8>, Error>> {
    let fault = Fault::new(1, 7, At::Collective, How::Flip);
    let body = move |world: ProcessGroup| {
        world.set_fault(fault);
        let gather = |label: &str| {
            let partition = Partition::flat(8, world.size())?;
            let source = Source::new(vec![4; partition.len(world.rank())]);
            let part = Part::new(source, partition, ElementType::U8);
            let received =
                world.all_gather(label, vec![], vec![part], vec![world.pool().take(8)])?;
            Ok::<_, Error>(received.buffers[0].as_ref().to_vec())
        };
        let seen = (|| {
            world.begin_step(6);
            gather("before")?;
            world.begin_step(7);
            world.barrier("carries nothing")?;
            gather("layers.3")
        })();
        Ok::<_, Error>(seen)
    };
    launch(LaunchConfig::new(2).deadline(LONG).check(check), body).unwrap()
}

#[test]
fn the_error_has_the_step_operation_and_rank() {
    for seen in with_fault(Check::Agreement) {
        let text = seen.unwrap_err().to_string();
        for word in [
            "in step 7",
            "than rank 1 passed to the call",
            "layers.3",
            "tensor 0",
            "checkpoint",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}

#[test]
fn comparing_only_calls_does_not_detect_flips() {
    for seen in with_fault(Check::Calls) {
        assert_eq!(seen.unwrap(), [4, 4, 4, 4, 4, 4, 5, 4]);
    }
}

#[test]
fn flips_require_values_and_values_require_flips() {
    let error = Fault::parse("rank:1,step:7,at:forward,how:flip").unwrap_err();
    assert!(error.to_string().contains("at:collective"), "{error}");
    let text = "rank:1,step:7,at:collective,how:flip";
    assert_eq!(Fault::parse(text).unwrap().to_string(), text);
    let error = Fault::parse("rank:1,step:7,at:shard,how:panic").unwrap_err();
    assert!(error.to_string().contains("how:flip"), "{error}");
    let text = "rank:1,step:7,at:state,how:flip,seed:9";
    assert_eq!(Fault::parse(text).unwrap().to_string(), text);
}
