//! The state of one rank of the world, whatever groups it is in.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::carried::Watcher;
use crate::checksum::Checksums;
use crate::lock::lock;
use crate::recording::Recording;
use crate::{At, BufferPool, Check, CommStage, Error, Fault, Ledger, Moment, Operation, Seal};

/// Shared by all groups of a rank, and read by its peers when they explain a failure.
#[derive(Debug)]
pub(crate) struct RankState {
    pub(crate) world_rank: usize,
    pub(crate) pool: BufferPool,
    pub(crate) ledger: Mutex<Ledger>,
    /// While someone records.
    pub(crate) recording: Mutex<Option<Recording>>,
    /// While someone compares what operations carry.
    pub(crate) watcher: Mutex<Option<Watcher>>,
    faults: Mutex<Faults>,
    /// What the rank compares of the others.
    pub(crate) check: Check,
    /// Number of the numbers that this rank has given to groups.
    num_groups: AtomicU64,
}

#[derive(Debug, Default)]
struct Faults {
    armed: Option<Fault>,
    /// The number of places that an armed flip has passed by.
    passed: u64,
    step: Option<u64>,
}

impl Faults {
    /// Returns true if a flip is armed for this place in this step.
    fn flips_at(&self, at: At) -> bool {
        let is_here = |fault: &Fault| fault.flips() && fault.at == at;
        let armed = self.armed.filter(is_here);
        armed.is_some_and(|fault| self.step == Some(fault.step))
    }
}

impl RankState {
    pub(crate) fn new(world_rank: usize, check: Check) -> Self {
        let (pool, ledger, recording, watcher, faults) = Default::default();
        Self {
            world_rank,
            pool,
            ledger,
            recording,
            watcher,
            faults,
            check,
            num_groups: AtomicU64::new(0),
        }
    }

    /// Returns a number for a group of which this rank is the first; no other rank gives it.
    pub(crate) fn next_group(&self) -> u64 {
        let count = self.num_groups.fetch_add(1, Ordering::Relaxed);
        (self.world_rank as u64) << u32::BITS | count
    }

    /// Notes a span that ends now, if someone records.
    pub(crate) fn note(
        &self,
        operation: &Operation,
        stage: CommStage,
        bytes: usize,
        start: Instant,
    ) {
        if let Some(recording) = &mut *lock(&self.recording) {
            recording.add(operation, stage, bytes, start);
        }
    }

    /// Arms a fault if it is this rank's.
    pub(crate) fn set_fault(&self, fault: Fault) {
        if fault.rank == self.world_rank {
            let mut faults = lock(&self.faults);
            (faults.armed, faults.passed) = (Some(fault), 0);
        }
    }

    pub(crate) fn begin_step(&self, step: u64) {
        lock(&self.faults).step = Some(step);
    }

    /// Returns true if a flip is armed for this place in this step.
    pub(crate) fn awaits_flip(&self, at: At) -> bool {
        lock(&self.faults).flips_at(at)
    }

    /// Returns the bit that is to flip in `num_bytes` bytes at this place, if one is; each fault strikes once, and never
    /// where there are no bytes.
    pub(crate) fn flips_now(&self, at: At, num_bytes: usize) -> Option<usize> {
        let mut faults = lock(&self.faults);
        if !faults.flips_at(at) || num_bytes == 0 {
            return None;
        }
        let fault = faults.armed?;
        faults.passed += 1;
        if faults.passed <= fault.places_passed() {
            return None;
        }
        faults.armed = None;
        Some(fault.bit(num_bytes))
    }

    /// Returns where the rank is now.
    pub(crate) fn moment(&self) -> Moment {
        let last = |ledger: &Ledger| Some(ledger.entries().next_back()?.operation.clone());
        Moment {
            step: self.step(),
            after: last(&lock(&self.ledger)),
        }
    }

    /// Returns seals of values with these checksums, taken now.
    pub(crate) fn seals(&self, checksums: Vec<Checksums>) -> Vec<Seal> {
        let written = self.moment();
        let seal = |checksums| Seal {
            checksums,
            written: written.clone(),
        };
        checksums.into_iter().map(seal).collect()
    }

    /// Returns the step that the rank is in, if anybody has said so.
    pub(crate) fn step(&self) -> Option<u64> {
        lock(&self.faults).step
    }

    /// Fails if a fault is armed for here and now; each fault strikes once.
    pub(crate) fn fault_point(&self, at: At) -> Result<(), Error> {
        let struck = {
            let mut faults = lock(&self.faults);
            let step = faults.step;
            faults
                .armed
                .take_if(|fault| fault.at == at && step == Some(fault.step) && !fault.flips())
        };
        struck.map_or(Ok(()), Fault::strike)
    }
}
