//! One rank's part in one operation.

use std::sync::Arc;

use super::group::LocalGroup;
use super::round::{Round, Sources};
use super::transfer;
use super::world::Wait;
use crate::engine::{Flight, Received};
use crate::operation::{Extent, OperationKind};
use crate::{Buffer, Error, Operation, Reduction, Source, Stage};

/// An operation that this rank has published its part of.
#[derive(Debug)]
pub(super) struct LocalFlight {
    group: Arc<LocalGroup>,
    /// This rank in the group.
    rank: usize,
    operation: Operation,
    round: Arc<Round>,
    into: Vec<Buffer>,
    finished: bool,
}

impl LocalFlight {
    pub(super) fn new(
        group: Arc<LocalGroup>,
        rank: usize,
        operation: Operation,
        round: Arc<Round>,
        into: Vec<Buffer>,
    ) -> Self {
        Self {
            group,
            rank,
            operation,
            round,
            into,
            finished: false,
        }
    }

    /// Waits until all ranks have published, and makes sure that they want the same.
    fn meet(&self) -> Result<(), Error> {
        self.wait_for(
            Stage::Start,
            || self.round.has_all(),
            |rank| self.round.has(rank),
        )?;
        self.compare()?;
        self.group.world.check(&self.operation)
    }

    /// Every rank compares the same claims with the first, so all find the same difference.
    fn compare(&self) -> Result<(), Error> {
        let first = &self.round.claim(0).signature;
        let difference = (1..self.group.size()).find_map(|rank| {
            let difference = first.difference(&self.round.claim(rank).signature);
            difference.map(|(expected, got)| (rank, expected, got))
        });
        let Some((peer, expected, got)) = difference else {
            return Ok(());
        };
        let (world, members) = (&self.group.world, &self.group.members);
        let error = Error::Mismatch {
            operation: Box::new(self.operation.clone()),
            rank: members[0],
            expected,
            peer: members[peer],
            got,
            ledger: world.report(),
        };
        Err(world.end_with(members[self.rank], error))
    }

    /// Fills the buffers. All ranks have published the same signature.
    fn transfer(&self, into: &mut [Buffer]) -> Result<(), Error> {
        let signature = &self.round.claim(self.rank).signature;
        let extents = &signature.extents;
        // Operations without a root read none, those without a reduction reduce nothing.
        let root = signature.root.unwrap_or(0);
        let reduction = signature.reduction.unwrap_or(Reduction::sum());
        match signature.kind {
            OperationKind::AllGather | OperationKind::Gather => {
                let shards = self.all(|rank| self.round.sources(rank))?;
                transfer::gather(extents, |element| element, &shards, self.rank, into);
            }
            OperationKind::ReduceScatter => {
                let tensors = self.all(|rank| self.round.sources(rank))?;
                transfer::combine(&reduction, extents, &tensors, self.rank, into);
            }
            OperationKind::AllReduce => {
                self.combine_slices(&reduction, extents)?;
                let slices = self.all(|rank| self.round.slice(rank))?;
                let output = |element| reduction.output_of(element);
                transfer::gather(extents, output, &slices, self.rank, into);
            }
            OperationKind::Broadcast => transfer::read(&self.published(root)?, into),
            OperationKind::Scatter => {
                transfer::read_shard(extents, &self.published(root)?, self.rank, into);
            }
            OperationKind::Barrier | OperationKind::Exchange => {}
        }
        Ok(())
    }

    /// Combines this rank's slice of an all-reduce, then those that no rank has begun with yet, and
    /// waits for the rest.
    ///
    /// So a rank only ever waits for slices that another rank is working on: one that comes late, or
    /// has discarded the operation, holds nobody up. Who combines a slice does not show in its bits.
    fn combine_slices(&self, reduction: &Reduction, extents: &[Extent]) -> Result<(), Error> {
        let tensors = self.all(|rank| self.round.sources(rank))?;
        let num_ranks = self.group.size();
        for slice in (self.rank..num_ranks).chain(0..self.rank) {
            if self.round.take_slice(slice, self.rank) {
                let mut parts = self.slice_buffers(slice, reduction, extents);
                transfer::combine(reduction, extents, &tensors, slice, &mut parts);
                self.round
                    .publish_slice(slice, parts.into_iter().map(Source::new).collect());
                self.group.world.bell.ring();
            }
        }
        let has_combined = |rank| self.round.has_combined(rank);
        self.wait_for(Stage::Finish, || self.round.has_all_slices(), has_combined)
    }

    /// Memory for a slice, from the pool of the rank that it falls to, whoever combines it: what a
    /// rank's pool holds is the same each time.
    fn slice_buffers(
        &self,
        slice: usize,
        reduction: &Reduction,
        extents: &[Extent],
    ) -> Vec<Buffer> {
        let pool = &self.group.world.ranks[self.group.members[slice]].pool;
        let len = |Extent { element, partition }: &Extent| {
            partition.len(slice) * reduction.output_of(*element).size()
        };
        extents
            .iter()
            .map(|extent| pool.take(len(extent)))
            .collect()
    }

    fn published(&self, rank: usize) -> Result<Sources, Error> {
        self.there(self.round.sources(rank))
    }

    fn all(&self, of: impl Fn(usize) -> Option<Sources>) -> Result<Vec<Sources>, Error> {
        (0..self.group.size())
            .map(|rank| self.there(of(rank)))
            .collect()
    }

    /// What a rank published stays until this rank has finished, unless the world has ended.
    fn there(&self, published: Option<Sources>) -> Result<Sources, Error> {
        match published {
            Some(sources) => Ok(sources),
            None => {
                self.group.world.check(&self.operation)?;
                unreachable!(
                    "a source was withdrawn under a reader in {}",
                    self.operation
                )
            }
        }
    }

    fn wait_for(
        &self,
        stage: Stage,
        is_over: impl Fn() -> bool,
        has_done: impl Fn(usize) -> bool,
    ) -> Result<(), Error> {
        let members = &self.group.members;
        let missing = || {
            let missing = (0..members.len()).filter(|rank| !has_done(*rank));
            missing.map(|rank| members[rank]).collect()
        };
        let (rank, operation) = (members[self.rank], &self.operation);
        let (is_over, missing) = (&is_over, &missing);
        self.group.world.wait(&Wait {
            is_over,
            missing,
            stage,
            rank,
            operation,
        })
    }

    /// This rank will read nothing more. Nothing that it got from the round may be alive.
    fn finish(&mut self) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        if self.group.world.failure().is_some() {
            // Not all ranks may ever finish.
            self.round.withdraw(self.rank);
        }
        if self.round.finish(self.rank) {
            self.group.world.bell.ring();
        }
    }
}

impl Flight for LocalFlight {
    fn wait(&mut self) -> Result<Received, Error> {
        self.meet()?;
        let mut buffers = std::mem::take(&mut self.into);
        self.transfer(&mut buffers)?;
        self.finish();
        let notes = (0..self.group.size()).map(|rank| self.round.claim(rank).note.clone());
        Ok(Received {
            buffers,
            notes: notes.collect(),
        })
    }

    fn wait_released(&mut self) -> Result<(), Error> {
        let has_finished = |rank| self.round.has_finished(rank);
        self.wait_for(Stage::Finish, || self.round.is_released(), has_finished)
    }
}

impl Drop for LocalFlight {
    fn drop(&mut self) {
        self.finish();
    }
}
