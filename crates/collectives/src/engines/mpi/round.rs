//! An operation of this rank: the state shared between its threads and MPI's thread, and the work of MPI's thread for
//! it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::addends::{combine, scratch};
use super::header::{ClaimHeader, signature_of};
use super::landing::Landing;
use super::wire::{Transfer, Wire, WireError};
use burn_fsdp_rendezvous::{Claim, Control, Meeting, OperationKind, Signature};
use burn_fsdp_transport::{AlteredPart, Awaited, Buffer, BufferPool, Source};

/// The state of an operation that MPI's thread shares with the rank's threads. Rank numbers are ranks of the group.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) rank: usize,
    claims: Vec<OnceLock<Claim>>,
    num_claims: AtomicUsize,
    /// Ranks whose bytes have all arrived.
    arrived: Vec<AtomicBool>,
    /// True once the other ranks' data has arrived.
    result: AtomicBool,
    /// True once a thread has started to add this rank's share: to copy it next to the others' data or to combine it
    /// with them. MPI's thread starts and finishes this before it sets `result`. The rank's thread may start at any
    /// time.
    is_completed: AtomicBool,
    /// Ranks that have received all of this rank's bytes.
    given: Vec<AtomicBool>,
    released: AtomicBool,
    pub(super) landing: Arc<Landing>,
    /// The addends of the other ranks in a reduction.
    addends: Mutex<Vec<Option<Arc<Landing>>>>,
    /// The first addend that did not match its announced checksum.
    altered: OnceLock<AlteredPart>,
}

impl Shared {
    pub(super) fn new(size: usize, rank: usize, claim: Claim, into: Vec<Buffer>) -> Self {
        let claims: Vec<_> = (0..size).map(|_| OnceLock::new()).collect();
        // An all-reduce is combined slice by slice, and this rank's slice is placed like the others.
        let is_by_slices = claim.signature.kind == OperationKind::AllReduce;
        let is_completed = into.is_empty() || is_by_slices;
        let _ = claims[rank].set(claim);
        Self {
            rank,
            claims,
            num_claims: AtomicUsize::new(1),
            arrived: (0..size)
                .map(|other| AtomicBool::new(other == rank))
                .collect(),
            result: AtomicBool::new(false),
            is_completed: AtomicBool::new(is_completed),
            given: (0..size)
                .map(|other| AtomicBool::new(other == rank))
                .collect(),
            released: AtomicBool::new(false),
            landing: Arc::new(Landing::new(into)),
            addends: Mutex::new((0..size).map(|_| None).collect()),
            altered: OnceLock::new(),
        }
    }

    pub(super) fn has_result(&self) -> bool {
        self.result.load(Ordering::Acquire)
    }

    /// Returns true if this rank's share can be added before the others' data arrives.
    pub(super) fn is_moved(&self) -> bool {
        self.claim(self.rank).signature.reduction.is_none()
    }

    /// Adds this rank's share, unless a thread has already begun to. For a reduction, the others' data must have
    /// arrived.
    pub(super) fn complete(&self, sources: &[Source]) {
        if self.is_completed.swap(true, Ordering::AcqRel) {
            return;
        }
        let signature = &self.claim(self.rank).signature;
        let Some(reduction) = &signature.reduction else {
            let routes = signature.routes(self.rank, self.rank);
            for (part, (route, source)) in routes.into_iter().zip(sources).enumerate() {
                let bytes = &source.as_bytes()[route.given];
                self.landing.put(part, route.placed, bytes);
            }
            return;
        };
        let addends = self.take_addends();
        self.check_addends(sources, &addends);
        self.landing.fill(|buffers| {
            combine(signature, reduction, self.rank, sources, &addends, buffers);
        });
    }

    /// Compares the addends of this rank's share with the announced checksums.
    fn check_addends(&self, sources: &[Source], addends: &[Option<Vec<Buffer>>]) {
        for (from, addend) in addends.iter().enumerate() {
            let Claim {
                signature, checks, ..
            } = self.claim(from);
            if checks.given.is_empty() {
                return;
            }
            let routes = signature.routes(from, self.rank);
            let given = (0..routes.len()).map(|part| match addend {
                Some(buffers) => buffers[part].as_ref(),
                None => &sources[part].as_bytes()[routes[part].given.clone()],
            });
            if let Some(part) = checks.first_altered(self.rank, given) {
                let _ = self.altered.set(AlteredPart::on_its_way(from, part));
                return;
            }
        }
    }

    /// Returns the first addend that did not match its announced checksum.
    pub(super) fn altered_addend(&self) -> Option<AlteredPart> {
        self.altered.get().cloned()
    }

    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    pub(super) fn missing(&self, awaited: Awaited) -> Vec<usize> {
        let has_done = |rank: &usize| match awaited {
            Awaited::Result => self.arrived[*rank].load(Ordering::Acquire),
            Awaited::Release => self.given[*rank].load(Ordering::Acquire),
        };
        (0..self.claims.len())
            .filter(|rank| !has_done(rank))
            .collect()
    }

    /// Returns the addends of the other ranks; `None` in the place of this one.
    fn take_addends(&self) -> Vec<Option<Vec<Buffer>>> {
        let addends = std::mem::take(&mut *self.addends.lock());
        let taken = |landing: Option<Arc<Landing>>| landing.map(|landing| landing.take());
        addends.into_iter().map(taken).collect()
    }
}

impl Meeting for Shared {
    fn is_complete(&self) -> bool {
        self.num_claims.load(Ordering::Acquire) == self.claims.len()
    }

    fn absent(&self) -> Vec<usize> {
        let is_absent = |rank: &usize| self.claims[*rank].get().is_none();
        (0..self.claims.len()).filter(is_absent).collect()
    }

    fn claim(&self, rank: usize) -> &Claim {
        let claim = self.claims[rank].get();
        claim.expect("read after the ranks have met")
    }
}

/// The request of a rank to MPI's thread.
pub(super) struct Start {
    pub(super) key: (u64, u64),
    pub(super) members: Arc<[usize]>,
    pub(super) control: Arc<Control>,
    /// The signature of this rank as bytes.
    pub(super) signature: Vec<u8>,
    pub(super) sources: Vec<Source>,
    /// True if this rank has buffers for its result.
    pub(super) receives: bool,
    pub(super) pool: BufferPool,
    pub(super) shared: Arc<Shared>,
}

/// An operation that MPI's thread carries out.
pub(super) struct Round {
    pub(super) start: Start,
    /// The tag of the data that this rank sends to each other rank.
    pub(super) tags: Vec<u32>,
    /// The number of ranks whose signature equals this rank's.
    num_agreeing: usize,
    /// The transfers of the data that this rank sends, by receiver.
    sends: Vec<(usize, Transfer)>,
    /// The transfers of data to be moved or combined, by sender.
    receives: Vec<(usize, Transfer)>,
    /// The others' slices of an all-reduce.
    slices: Vec<(usize, Transfer)>,
    /// True once this rank's slice of an all-reduce is combined.
    has_combined: bool,
}

impl Round {
    pub(super) fn new(start: Start, tags: Vec<u32>) -> Self {
        Self {
            start,
            tags,
            num_agreeing: 1,
            sends: Vec::new(),
            receives: Vec::new(),
            slices: Vec::new(),
            has_combined: false,
        }
    }

    fn rank(&self) -> usize {
        self.start.shared.rank
    }

    fn signature(&self) -> &Signature {
        &self.start.shared.claim(self.rank()).signature
    }

    /// Returns true if nothing waits for the operation any more and it cannot complete.
    pub(super) fn is_given_up(&self) -> bool {
        Arc::strong_count(&self.start.shared) == 1 && self.start.control.failure().is_some()
    }

    /// Processes the header of a rank of the world, and begins the exchange with that rank if the signatures are equal.
    pub(super) fn hear(
        &mut self,
        wire: &Wire,
        from: usize,
        header: ClaimHeader,
    ) -> Result<(), WireError> {
        let Some(from) = self.start.members.iter().position(|rank| *rank == from) else {
            return Ok(());
        };
        let agrees = header.signature == self.start.signature;
        let signature = if agrees {
            Some(self.signature().clone())
        } else {
            signature_of(&header.signature)
        };
        let Some(signature) = signature else {
            let reason = "sent a header that cannot be read; run the same binary on all ranks";
            let rank = self.start.members[from];
            self.start.control.fail(rank, reason.to_owned());
            return Ok(());
        };
        let ClaimHeader { note, checks, .. } = header;
        let shared = &self.start.shared;
        if shared.claims[from]
            .set(Claim {
                signature,
                note,
                checks,
            })
            .is_err()
        {
            return Ok(());
        }
        // No transfer begins before this check: equal signatures mean equal lengths, so no data can overrun its buffer.
        if agrees {
            self.num_agreeing += 1;
            self.send(wire, from, header.receives)?;
            self.receive(wire, from, header.tag)?;
        }
        // After the transfers have begun, so a rank that sees the claims also sees the transfers.
        let shared = &self.start.shared;
        shared.num_claims.fetch_add(1, Ordering::AcqRel);
        self.start.control.ring();
        Ok(())
    }

    fn send(&mut self, wire: &Wire, to: usize, receives: bool) -> Result<(), WireError> {
        if !receives {
            return Ok(());
        }
        let routes = self.signature().routes(self.rank(), to);
        for (source, route) in self.start.sources.iter().zip(routes) {
            let sent = wire.send(source, route.given, self.start.members[to], self.tags[to])?;
            self.sends.extend(sent.into_iter().map(|one| (to, one)));
        }
        Ok(())
    }

    fn receive(&mut self, wire: &Wire, from: usize, tag: u32) -> Result<(), WireError> {
        if !self.start.receives {
            return Ok(());
        }
        let (rank, world_rank) = (self.rank(), self.start.members[from]);
        let signature = self.signature().clone();
        let routes = signature.routes(from, rank);
        let shared = self.start.shared.clone();
        let landing = match &signature.reduction {
            Some(_) => {
                let scratch = Arc::new(scratch(&signature, from, rank, &self.start.pool));
                shared.addends.lock()[from] = Some(scratch.clone());
                scratch
            }
            None => shared.landing.clone(),
        };
        for (part, route) in routes.into_iter().enumerate() {
            let place = match &signature.reduction {
                Some(_) => 0..route.given.len(),
                None => route.placed,
            };
            let transfers = wire.receive(&landing, part, place, world_rank, tag)?;
            self.receives
                .extend(transfers.into_iter().map(|one| (from, one)));
        }
        let Some(reduction) = signature.reduction else {
            return Ok(());
        };
        if signature.kind == OperationKind::AllReduce {
            for (part, extent) in signature.extents.iter().enumerate() {
                let size = reduction.output_of(extent.element).size();
                let range = extent.partition.range(from);
                let place = range.start * size..range.end * size;
                let transfers = wire.receive(&shared.landing, part, place, world_rank, tag)?;
                self.slices
                    .extend(transfers.into_iter().map(|one| (from, one)));
            }
        }
        Ok(())
    }

    /// Checks the progress of the transfers. Returns whether anything has changed, and whether the operation is over.
    pub(super) fn advance(&mut self, wire: &Wire) -> Result<(bool, bool), WireError> {
        let before = (self.sends.len(), self.receives.len(), self.slices.len());
        drop_complete(&mut self.sends)?;
        drop_complete(&mut self.receives)?;
        drop_complete(&mut self.slices)?;
        let mut has_moved = before != (self.sends.len(), self.receives.len(), self.slices.len());
        let size = self.start.members.len();
        // The rank has one reference unless it has discarded the operation.
        let is_wanted = self.start.receives && Arc::strong_count(&self.start.shared) > 1;
        let (shared, is_all) = (self.start.shared.clone(), self.num_agreeing == size);
        let is_reduced = self.signature().kind == OperationKind::AllReduce;
        if is_all && is_reduced && !self.has_combined && self.receives.is_empty() {
            self.combine_slice(wire, is_wanted)?;
            self.has_combined = true;
            has_moved = true;
        }
        if has_moved {
            self.note_progress();
        }
        let is_there = is_all && self.receives.is_empty() && self.slices.is_empty();
        if is_there && !shared.has_result() && (self.has_combined || !is_reduced) {
            // Overlaps with the rank's computation. A waiting rank does this itself, because it is idle and has more
            // threads.
            if is_wanted && !self.start.control.is_awaited() {
                shared.complete(&self.start.sources);
            }
            shared.result.store(true, Ordering::Release);
            self.start.control.ring();
            has_moved = true;
        }
        let is_over = shared.has_result() && self.sends.is_empty();
        if is_over {
            self.start.sources.clear();
            shared.released.store(true, Ordering::Release);
            self.start.control.ring();
        }
        Ok((has_moved, is_over))
    }

    /// Records which ranks have sent all their data to this one, and which have received all of its data.
    fn note_progress(&self) {
        let shared = &self.start.shared;
        let note = |done: &[AtomicBool], open: &mut dyn Iterator<Item = usize>| {
            let mut is_open = vec![false; done.len()];
            open.for_each(|rank| is_open[rank] = true);
            for (rank, is_open) in is_open.into_iter().enumerate() {
                let is_done = !is_open && shared.claims[rank].get().is_some();
                done[rank].store(is_done, Ordering::Release);
            }
        };
        let receives = self.receives.iter().chain(&self.slices);
        note(&shared.arrived, &mut receives.map(|(from, _)| *from));
        note(&shared.given, &mut self.sends.iter().map(|(to, _)| *to));
    }

    /// Combines this rank's slice of an all-reduce, and sends it to all others.
    fn combine_slice(&mut self, wire: &Wire, is_wanted: bool) -> Result<(), WireError> {
        let signature = self.signature().clone();
        let Some(reduction) = &signature.reduction else {
            return Ok(());
        };
        let rank = self.rank();
        let mut slice: Vec<Buffer> = signature
            .extents
            .iter()
            .map(|extent| {
                let size = reduction.output_of(extent.element).size();
                self.start.pool.take(extent.partition.len(rank) * size)
            })
            .collect();
        let addends = self.start.shared.take_addends();
        let sources = &self.start.sources;
        self.start.shared.check_addends(sources, &addends);
        combine(&signature, reduction, rank, sources, &addends, &mut slice);
        drop(addends);
        let slice: Vec<_> = slice.into_iter().map(Source::new).collect();
        for to in (0..self.start.members.len()).filter(|to| *to != rank) {
            for source in &slice {
                let world_rank = self.start.members[to];
                let sent = wire.send(source, 0..source.len(), world_rank, self.tags[to])?;
                self.sends.extend(sent.into_iter().map(|one| (to, one)));
            }
        }
        if is_wanted {
            for (part, (extent, source)) in signature.extents.iter().zip(&slice).enumerate() {
                let size = reduction.output_of(extent.element).size();
                let range = extent.partition.range(rank);
                let place = range.start * size..range.end * size;
                let landing = &self.start.shared.landing;
                landing.put(part, place, source.as_bytes());
            }
        }
        Ok(())
    }
}

/// Drops the transfers that are complete.
fn drop_complete(all: &mut Vec<(usize, Transfer)>) -> Result<(), WireError> {
    let mut failed = None;
    all.retain_mut(|(_, transfer)| match transfer.is_complete() {
        Ok(is_complete) => !is_complete,
        Err(error) => {
            failed = Some(error);
            true
        }
    });
    failed.map_or(Ok(()), Err)
}
