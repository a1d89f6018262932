//! The state of one rank of the world, regardless of its groups.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::agreement::Check;
use super::carried::Watcher;
use super::checksum::Checksums;
use super::error::Error;
use super::fault::{At, Fault};
use super::ledger::Ledger;
use super::lock::lock;
use super::operation::Operation;
use super::recording::{CommStage, Recording};
use super::seal::{Moment, Seal};

/// The state that all groups of a rank share. Its peers read it when they explain a failure.
#[derive(Debug)]
pub(crate) struct RankState {
    pub(crate) world_rank: usize,
    pub(crate) ledger: Mutex<Ledger>,
    /// Present during a recording.
    pub(crate) recording: Mutex<Option<Recording>>,
    /// Present while a watcher receives checksums.
    pub(crate) watcher: Mutex<Option<Watcher>>,
    faults: Mutex<Faults>,
    /// The data that the rank compares with the other ranks.
    pub(crate) check: Check,
    /// The count of group numbers that this rank has assigned.
    num_groups: AtomicU64,
}

#[derive(Debug, Default)]
struct Faults {
    armed: Option<Fault>,
    /// The number of values that an armed flip has skipped.
    passed: u64,
    step: Option<u64>,
}

impl Faults {
    /// Returns true if a flip is armed for this point in this step.
    fn flips_at(&self, at: At) -> bool {
        let is_here = |fault: &Fault| fault.flips() && fault.at == at;
        let armed = self.armed.filter(is_here);
        armed.is_some_and(|fault| self.step == Some(fault.step))
    }
}

impl RankState {
    pub(crate) fn new(world_rank: usize, check: Check) -> Self {
        let (ledger, recording, watcher, faults) = Default::default();
        Self {
            world_rank,
            ledger,
            recording,
            watcher,
            faults,
            check,
            num_groups: AtomicU64::new(0),
        }
    }

    /// Returns a unique number for a group in which this rank is the first.
    pub(crate) fn next_group(&self) -> u64 {
        let count = self.num_groups.fetch_add(1, Ordering::Relaxed);
        (self.world_rank as u64) << u32::BITS | count
    }

    /// Records a span that ends now, if a recording is active.
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

    /// Arms a fault if it names this rank.
    pub(crate) fn set_fault(&self, fault: Fault) {
        if fault.rank == self.world_rank {
            let mut faults = lock(&self.faults);
            (faults.armed, faults.passed) = (Some(fault), 0);
        }
    }

    pub(crate) fn begin_step(&self, step: u64) {
        lock(&self.faults).step = Some(step);
    }

    /// Returns true if a flip is armed for this point in this step.
    pub(crate) fn awaits_flip(&self, at: At) -> bool {
        lock(&self.faults).flips_at(at)
    }

    /// Returns the bit that is to flip in `num_bytes` bytes at this point, if a flip is armed. Each fault triggers
    /// once, and never where there are no bytes.
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

    /// Returns the rank's current moment.
    pub(crate) fn moment(&self) -> Moment {
        let last = |ledger: &Ledger| Some(ledger.entries().next_back()?.operation.clone());
        Moment {
            step: self.step(),
            after: last(&lock(&self.ledger)),
        }
    }

    /// Returns seals with these checksums, taken now.
    pub(crate) fn seals(&self, checksums: Vec<Checksums>) -> Vec<Seal> {
        let written = self.moment();
        let seal = |checksums| Seal {
            checksums,
            written: written.clone(),
        };
        checksums.into_iter().map(seal).collect()
    }

    /// Returns the current step of the rank, if it was set.
    pub(crate) fn step(&self) -> Option<u64> {
        lock(&self.faults).step
    }

    /// Fails if a fault is armed for this point in this step. Each fault triggers once.
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
