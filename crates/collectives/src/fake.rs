//! The engine of a rank without peers, which simulates them.
//!
//! Every operation completes immediately. The peers are assumed to have contributed the same as this rank. So one of
//! many ranks can run a training step on one thread, with the same operations, buffers and memory as with real peers.
//! Only the values are artificial.

use std::sync::Arc;
use std::time::Duration;

use crate::arithmetic::{copy, reduce};
use crate::contract::Route;
use crate::control::Control;
use crate::engine::{Awaited, Claim, Engine, Findings, Flight, Request, Subgroup, Withdrawn};
use crate::operation::OperationKind;
use crate::rank_state::RankState;
use crate::world::{NobodyElse, World};
use crate::{Buffer, Check, ProcessGroup, Source};

/// Returns rank `rank` of a group of `size` ranks in which no other rank exists.
pub(crate) fn group(size: usize, rank: usize) -> ProcessGroup {
    let state = Arc::new(RankState::new(rank, Check::Calls));
    let mut ranks = vec![None; size];
    ranks[rank] = Some(state.clone());
    let world = World::new(ranks, Box::new(NobodyElse));
    let control = Control::of_world(world, Duration::MAX);
    let engine = Box::new(FakeEnd {
        rank,
        size,
        control,
    });
    ProcessGroup::new("fake".into(), rank, (0..size).collect(), engine, state)
}

/// The end of one rank of a group whose other ranks do not exist.
#[derive(Debug)]
struct FakeEnd {
    rank: usize,
    size: usize,
    control: Arc<Control>,
}

impl Engine for FakeEnd {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn control(&self) -> &Arc<Control> {
        &self.control
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        let Request {
            claim,
            sources,
            into,
            ..
        } = request;
        Box::new(FakeFlight {
            rank: self.rank,
            size: self.size,
            claim,
            sources,
            into,
        })
    }

    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        let control = match subgroup.isolated {
            Some(deadline) => self.control.isolate(subgroup.number, deadline),
            None => self.control.clone(),
        };
        Box::new(Self {
            rank: subgroup.rank,
            size: subgroup.members.len(),
            control,
        })
    }

    fn has_peers(&self) -> bool {
        false
    }
}

struct FakeFlight {
    rank: usize,
    size: usize,
    claim: Claim,
    sources: Vec<Source>,
    into: Vec<Buffer>,
}

impl Flight for FakeFlight {
    fn is_there(&self, _: Awaited) -> bool {
        true
    }

    fn missing(&self, _: Awaited) -> Vec<usize> {
        Vec::new()
    }

    fn claim(&self, _: usize) -> &Claim {
        &self.claim
    }

    fn findings(&mut self) -> Findings {
        Findings::default()
    }

    fn receive(&mut self) -> Result<Vec<Buffer>, Withdrawn> {
        let signature = &self.claim.signature;
        let mut buffers = std::mem::take(&mut self.into);
        let sources = std::mem::take(&mut self.sources);
        for (part, (source, buffer)) in sources.iter().zip(&mut buffers).enumerate() {
            match &signature.reduction {
                Some(reduction) => {
                    let element = signature.extents[part].element;
                    let own = match signature.kind {
                        OperationKind::AllReduce => source.as_bytes(),
                        _ => &source.as_bytes()[self.own_route(part).given],
                    };
                    let copies = vec![own; self.size];
                    reduce(reduction, element, &copies, buffer.as_mut());
                }
                None => self.repeat(part, source, buffer),
            }
        }
        Ok(buffers)
    }
}

impl FakeFlight {
    /// Returns the route of the bytes that this rank sends to itself.
    fn own_route(&self, part: usize) -> Route {
        let mut routes = self.claim.signature.routes(self.rank, self.rank);
        routes.swap_remove(part)
    }

    /// Puts the bytes that this rank sends to itself in every rank's place, as far as they fit. The rest is zero, and
    /// so is the data of a root other than this rank.
    fn repeat(&self, part: usize, source: &Source, buffer: &mut Buffer) {
        let signature = &self.claim.signature;
        let gives = signature.travels(self.rank, self.rank);
        let own = if gives {
            &source.as_bytes()[self.own_route(part).given]
        } else {
            &[]
        };
        for from in (0..self.size).filter(|from| signature.travels(*from, self.rank)) {
            let mut routes = signature.routes(from, self.rank);
            let place = &mut buffer.as_mut()[routes.swap_remove(part).placed];
            let (fits, rest) = place.split_at_mut(own.len().min(place.len()));
            copy(&own[..fits.len()], fits);
            rest.fill(0);
        }
    }
}
