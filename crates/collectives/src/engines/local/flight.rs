//! One rank's part in one operation.

use std::sync::Arc;

use super::round::{Round, Sources};
use super::shared;
use super::team::Team;
use super::transfer::{self, Combined};
use burn_fsdp_rendezvous::{Checksums, Extent, Meeting, OperationKind, Reduction, Signature};
use burn_fsdp_transport::{
    AlteredPart, Awaited, Buffer, Completion, Findings, Flight, Source, Stopped,
};

/// An operation for which this rank has published its part.
#[derive(Debug)]
pub(super) struct LocalFlight {
    team: Arc<Team>,
    /// This rank's number in the group.
    rank: usize,
    round: Arc<Round>,
    into: Vec<Buffer>,
    finished: bool,
    findings: Findings,
}

impl LocalFlight {
    pub(super) fn new(team: Arc<Team>, rank: usize, round: Arc<Round>, into: Vec<Buffer>) -> Self {
        Self {
            team,
            rank,
            round,
            into,
            finished: false,
            findings: Findings {
                has_compared_placed: true,
                ..Findings::default()
            },
        }
    }

    fn signature(&self) -> &Signature {
        &self.round.claim(self.rank).signature
    }

    /// Fills the buffers. All ranks must have published the same signature.
    fn transfer(&mut self, into: &mut [Buffer]) -> Result<(), Stopped> {
        if shared::are_on_device(into) {
            return self.transfer_on_device(into);
        }
        if into.iter().all(Buffer::is_empty) && !self.compares() {
            // Nothing is read for a rank without results.
            return Ok(());
        }
        let round = self.round.clone();
        let signature = &round.claim(self.rank).signature;
        match (signature.kind, &signature.reduction) {
            (OperationKind::AllReduce, Some(reduction)) => {
                let slices = self.all_on_host(|rank| self.round.slice(rank))?;
                let whose = (self.rank, self.compares());
                self.findings.results =
                    transfer::join(reduction, &signature.extents, &slices, whose, into);
            }
            (_, Some(reduction)) => {
                let tensors = self.all_on_host(|rank| self.round.sources(rank))?;
                let whose = (self.rank, self.compares());
                let combined =
                    transfer::combine(reduction, &signature.extents, &tensors, whose, into);
                self.check_addends(&tensors, self.rank, &combined);
                let results = combined.iter().zip(&*into).map(|(combined, buffer)| {
                    Checksums::of_pieces([(buffer.len(), combined.result)])
                });
                self.findings.results = results.collect();
            }
            (_, None) => {
                // Each rank begins with its own source, so at any moment the ranks read from different places.
                for from in (self.rank..self.team.size()).chain(0..self.rank) {
                    if signature.travels(from, self.rank) && !into.is_empty() {
                        let routes = signature.routes(from, self.rank);
                        if routes.iter().all(|route| route.given.is_empty()) && !self.compares() {
                            continue;
                        }
                        let checks = &round.claim(from).checks;
                        let told = checks.told_to(self.rank, into.len());
                        let sources = self.published(from)?;
                        let part = transfer::copy_all(&sources, &routes, told, into);
                        self.note_altered(from, part, &sources);
                    }
                }
            }
        }
        Ok(())
    }

    /// Replaces the buffers by results in their device's memory. All ranks must have published the same signature.
    fn transfer_on_device(&self, into: &mut [Buffer]) -> Result<(), Stopped> {
        let signature = self.signature();
        match (signature.kind, &signature.reduction) {
            (OperationKind::AllReduce, Some(reduction)) => {
                let slices = self.all(|rank| self.round.slice(rank))?;
                shared::join(reduction, &signature.extents, &slices, into)
            }
            (_, Some(reduction)) => {
                let tensors = self.all(|rank| self.round.sources(rank))?;
                shared::combine(reduction, &signature.extents, &tensors, self.rank, into)
            }
            (_, None) => {
                let gives = |rank: &usize| signature.travels(*rank, self.rank);
                let from = (0..self.team.size()).filter(gives);
                let given = from.map(|rank| {
                    let routes = signature.routes(rank, self.rank);
                    Ok((self.round.sources(rank).ok_or(Stopped::Withdrawn)?, routes))
                });
                let given = given.collect::<Result<Vec<_>, Stopped>>()?;
                shared::place(&signature.extents, &given, into)
            }
        }
    }

    /// Combines this rank's slice of an all-reduce, then the slices that no rank has begun yet.
    ///
    /// A rank therefore waits only for slices that another rank is working on. A rank that arrives late or has
    /// discarded the operation delays no other rank. The bits of a slice do not depend on the rank that combines it.
    fn combine_slices(&mut self, reduction: &Reduction, extents: &[Extent]) -> Result<(), Stopped> {
        let is_on_device = shared::are_on_device(&self.into);
        let tensors = if is_on_device {
            self.all(|rank| self.round.sources(rank))?
        } else {
            self.all_on_host(|rank| self.round.sources(rank))?
        };
        let num_ranks = self.team.size();
        for slice in (self.rank..num_ranks).chain(0..self.rank) {
            if self.round.take_slice(slice, self.rank) {
                let parts = if is_on_device {
                    shared::slice(reduction, extents, &tensors, slice, &self.into)?
                } else {
                    let mut parts = self.slice_buffers(slice, reduction, extents);
                    let whose = (slice, self.compares());
                    let combined =
                        transfer::combine(reduction, extents, &tensors, whose, &mut parts);
                    self.check_addends(&tensors, slice, &combined);
                    parts.into_iter().map(Source::new).collect()
                };
                self.round.publish_slice(slice, parts);
                self.team.ring();
            }
        }
        Ok(())
    }

    /// Returns true if this rank has announced checksums. Either all ranks do or none.
    fn compares(&self) -> bool {
        !self.round.claim(self.rank).checks.given.is_empty()
    }

    /// Compares the checksums of a slice's addends, taken while they were combined, with the announced ones.
    fn check_addends(&mut self, tensors: &[Sources], slice: usize, combined: &[Combined]) {
        let round = self.round.clone();
        for (from, sources) in tensors.iter().enumerate() {
            let told = round.claim(from).checks.told_to(slice, combined.len());
            let mut pairs = told.into_iter().flatten().zip(combined);
            let part = pairs.position(|(told, combined)| *told != combined.addends[from]);
            self.note_altered(from, part, sources);
        }
    }

    /// Records that a part of a rank's data does not match its announced checksum, unless a mismatch was recorded
    /// before.
    fn note_altered(&mut self, from: usize, part: Option<usize>, sources: &Sources) {
        let Some(part) = part.filter(|_| self.findings.altered.is_none()) else {
            return;
        };
        self.findings.altered = Some(AlteredPart {
            from,
            part,
            source: Some(sources[part].clone()),
        });
    }

    /// Takes memory for a slice from the pool of the rank that the slice is assigned to, no matter which rank combines
    /// it. A rank's pool therefore has the same contents in each run.
    fn slice_buffers(
        &self,
        slice: usize,
        reduction: &Reduction,
        extents: &[Extent],
    ) -> Vec<Buffer> {
        let pool = self.team.pool(slice);
        let len = |Extent {
                       element, partition, ..
                   }: &Extent| {
            partition.len(slice) * reduction.output_of(*element).size()
        };
        extents
            .iter()
            .map(|extent| pool.take(len(extent)))
            .collect()
    }

    /// Returns a rank's sources, for reading on the host.
    fn published(&self, rank: usize) -> Result<Sources, Stopped> {
        let sources = self.round.sources(rank).ok_or(Stopped::Withdrawn)?;
        shared::on_host(sources)
    }

    fn all(&self, of: impl Fn(usize) -> Option<Sources>) -> Result<Vec<Sources>, Stopped> {
        (0..self.team.size())
            .map(|rank| of(rank).ok_or(Stopped::Withdrawn))
            .collect()
    }

    /// Returns the sources of all ranks, for reading on the host.
    fn all_on_host(&self, of: impl Fn(usize) -> Option<Sources>) -> Result<Vec<Sources>, Stopped> {
        self.all(of)?.into_iter().map(shared::on_host).collect()
    }

    /// Marks this rank as done reading. The rank must have dropped everything that it took from the round.
    fn finish(&mut self) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        if self.team.control.failure().is_some() {
            // Some ranks may never finish.
            self.round.withdraw(self.rank);
        }
        if self.round.finish(self.rank) {
            self.team.ring();
        }
    }
}

impl Flight for LocalFlight {
    fn meeting(&self) -> &dyn Meeting {
        &*self.round
    }

    fn is_there(&self, awaited: Awaited) -> bool {
        match awaited {
            Awaited::Result => match self.signature().kind {
                OperationKind::AllReduce => self.round.has_all_slices(),
                _ => true,
            },
            Awaited::Release => self.round.is_released(),
        }
    }

    fn missing(&self, awaited: Awaited) -> Vec<usize> {
        let has_done = |rank: &usize| match awaited {
            Awaited::Result => self.round.has_combined(*rank),
            Awaited::Release => self.round.has_finished(*rank),
        };
        (0..self.team.size())
            .filter(|rank| !has_done(rank))
            .collect()
    }

    fn begin(&mut self) -> Result<(), Stopped> {
        let round = self.round.clone();
        let signature = &round.claim(self.rank).signature;
        match (signature.kind, &signature.reduction) {
            (OperationKind::AllReduce, Some(reduction)) => {
                self.combine_slices(reduction, &signature.extents)
            }
            _ => Ok(()),
        }
    }

    fn findings(&mut self) -> Findings {
        std::mem::take(&mut self.findings)
    }

    fn receive(&mut self) -> Result<Completion, Stopped> {
        let mut buffers = std::mem::take(&mut self.into);
        self.transfer(&mut buffers)?;
        self.finish();
        Ok(Completion::Done(buffers))
    }
}

impl Drop for LocalFlight {
    fn drop(&mut self) {
        self.finish();
    }
}
