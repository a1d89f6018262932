//! The engine of a rank without peers, which pretends that they are there.
//!
//! Every operation is complete at once: the peers are taken to have contributed what this rank did.
//! So a training step of one rank of many runs on one thread, with the operations, the buffers and
//! the memory that it would have among real peers. Only the values are made up.

use std::sync::Arc;
use std::time::Duration;

use crate::arithmetic::{copy, reduce};
use crate::control::Control;
use crate::engine::{Awaited, Claim, Engine, Flight, Request, Subgroup, Withdrawn};
use crate::operation::{Extent, OperationKind};
use crate::rank_state::RankState;
use crate::world::{NobodyElse, World};
use crate::{Buffer, ElementType, ProcessGroup, Reduction, Source};

/// Rank `rank` of a group of `size` ranks of which no other exists.
pub(crate) fn group(size: usize, rank: usize) -> ProcessGroup {
    let state = Arc::new(RankState::new(rank));
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

/// One rank's end of a group whose other ranks do not exist.
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

    fn receive(&mut self) -> Result<Vec<Buffer>, Withdrawn> {
        let signature = &self.claim.signature;
        let mut buffers = std::mem::take(&mut self.into);
        let sources = std::mem::take(&mut self.sources);
        let reduction = signature.reduction.unwrap_or(Reduction::sum());
        let parts = signature.extents.iter().zip(&sources).zip(&mut buffers);
        for ((extent, source), buffer) in parts {
            match signature.kind {
                OperationKind::AllGather | OperationKind::Gather => {
                    self.repeat(extent, source, buffer);
                }
                OperationKind::ReduceScatter => {
                    let own = self.own_bytes(extent, source);
                    self.combine(&reduction, extent.element, own, buffer);
                }
                OperationKind::AllReduce => {
                    self.combine(&reduction, extent.element, source.as_bytes(), buffer);
                }
                // Only the root has a source; what it would have sent elsewhere is not known.
                OperationKind::Scatter if !source.is_empty() => {
                    copy(self.own_bytes(extent, source), buffer.as_mut());
                }
                OperationKind::Scatter | OperationKind::Broadcast => buffer.as_mut().fill(0),
                OperationKind::Barrier | OperationKind::Exchange => {}
            }
        }
        Ok(buffers)
    }
}

impl FakeFlight {
    /// This rank's shard of its full tensor.
    fn own_bytes<'a>(&self, extent: &Extent, source: &'a Source) -> &'a [u8] {
        let range = extent.partition.range(self.rank);
        let size = extent.element.size();
        &source.as_bytes()[range.start * size..range.end * size]
    }

    /// Puts this rank's shard in every rank's place, as far as it fits; the rest is zero.
    fn repeat(&self, extent: &Extent, source: &Source, buffer: &mut Buffer) {
        let own = source.as_bytes();
        let full = buffer.as_mut();
        for rank in 0..self.size {
            let range = extent.partition.range(rank);
            let size = extent.element.size();
            let place = &mut full[range.start * size..range.end * size];
            let (fits, rest) = place.split_at_mut(own.len().min(place.len()));
            copy(&own[..fits.len()], fits);
            rest.fill(0);
        }
    }

    /// Combines as many copies of this rank's elements as there are ranks.
    fn combine(&self, by: &Reduction, element: ElementType, own: &[u8], buffer: &mut Buffer) {
        reduce(by, element, &vec![own; self.size], buffer.as_mut());
    }
}
