//! The state of one rank of the world, regardless of its groups.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::agreement::Check;
use super::carried::{Carried, Watcher};
use super::checksum::Checksums;
use super::error::Error;
#[cfg(feature = "faults")]
use super::failing::Faults;
use super::fault::{At, Fault};
use super::ledger::{EntryState, Ledger};
#[cfg(not(feature = "faults"))]
use super::not_failing::Faults;
use super::operation::Operation;
use super::recording::{CommSpan, CommStage, Recording};
use super::seal::{Moment, Seal};
use super::vault::Vault;

/// The state that all groups of a rank share. Its peers read it to explain a failure.
#[derive(Debug)]
pub struct RankState {
    world_rank: usize,
    ledger: Mutex<Ledger>,
    /// The recording in progress, if any.
    recording: Mutex<Option<Recording>>,
    /// The callback that receives checksums, if any.
    watcher: Mutex<Option<Watcher>>,
    /// The current step, if it was set.
    step: Mutex<Option<u64>>,
    faults: Faults,
    vault: Vault,
    /// The data that the rank compares with the other ranks.
    check: Check,
    /// Number of groups that this rank has numbered.
    num_groups: AtomicU64,
}

impl RankState {
    /// Returns the state of a rank of the world that has not started anything. `check` is the data that it compares
    /// with the other ranks.
    pub fn new(world_rank: usize, check: Check) -> Self {
        let (ledger, recording, watcher, step, vault) = Default::default();
        Self {
            world_rank,
            ledger,
            recording,
            watcher,
            step,
            faults: Faults::default(),
            vault,
            check,
            num_groups: AtomicU64::new(0),
        }
    }

    /// Returns the rank's number in the world.
    pub fn world_rank(&self) -> usize {
        self.world_rank
    }

    /// Returns the data that the rank compares with the other ranks.
    pub fn check(&self) -> Check {
        self.check
    }

    /// Returns the seals of the values that the rank keeps.
    pub fn vault(&self) -> &Vault {
        &self.vault
    }

    /// Returns the rank's last operations.
    pub fn ledger(&self) -> Ledger {
        self.ledger.lock().clone()
    }

    /// Adds an operation to the ledger and returns its number there.
    pub fn record(&self, operation: Operation, bytes: usize) -> u64 {
        self.ledger.lock().record(operation, bytes)
    }

    /// Records the outcome of an operation by its number in the ledger.
    pub fn settle(&self, number: u64, state: EntryState) {
        self.ledger.lock().settle(number, state);
    }

    /// Starts recording the times of the rank's operations. `sample` returns a number to store at the end of each span.
    pub fn start_recording(&self, sample: impl Fn() -> usize + Send + 'static) {
        *self.recording.lock() = Some(Recording::new(sample));
    }

    /// Ends the recording and returns its spans.
    pub fn end_recording(&self) -> Vec<CommSpan> {
        let recording = self.recording.lock().take();
        recording.map(Recording::into_spans).unwrap_or_default()
    }

    /// From now on, calls `watch` with the checksums of each completed operation.
    pub fn watch(&self, watch: impl FnMut(Carried) + Send + 'static) {
        *self.watcher.lock() = Some(Watcher::new(watch));
    }

    /// Passes the checksums of an operation to the watcher, if there is one. `got` is called only in that case.
    pub fn tell_watcher(
        &self,
        operation: &Operation,
        given: &[u64],
        got: impl FnOnce() -> Vec<u64>,
    ) {
        if let Some(watcher) = &mut *self.watcher.lock() {
            watcher.tell(Carried {
                operation: operation.clone(),
                step: self.step(),
                given: given.to_vec(),
                got: got(),
            });
        }
    }

    /// Returns a number, unique in the world, for a new group whose first rank is this one.
    pub fn next_group(&self) -> u64 {
        let count = self.num_groups.fetch_add(1, Ordering::Relaxed);
        (self.world_rank as u64) << u32::BITS | count
    }

    /// Records a span that ends now, if a recording is active.
    pub fn note(&self, operation: &Operation, stage: CommStage, bytes: usize, start: Instant) {
        if let Some(recording) = &mut *self.recording.lock() {
            recording.add(operation, stage, bytes, start);
        }
    }

    /// Arms a fault if it names this rank.
    pub fn set_fault(&self, fault: Fault) {
        if fault.rank == self.world_rank {
            self.faults.arm(fault);
        }
    }

    /// Sets the rank's current step.
    pub fn begin_step(&self, step: u64) {
        *self.step.lock() = Some(step);
    }

    /// Returns true if a flip is armed for this point in this step.
    pub fn awaits_flip(&self, at: At) -> bool {
        self.faults.flips_at(self.step(), at)
    }

    /// Returns the bit that is to flip in `num_bytes` bytes at this point, if a flip is armed and has skipped the
    /// values before this one. Each fault triggers once, and never on an empty value.
    pub fn flips_now(&self, at: At, num_bytes: usize) -> Option<usize> {
        self.faults.flip(self.step(), at, num_bytes)
    }

    /// Returns the rank's current step and last operation.
    pub fn moment(&self) -> Moment {
        let last = |ledger: &Ledger| Some(ledger.entries().next_back()?.operation.clone());
        Moment {
            step: self.step(),
            after: last(&self.ledger.lock()),
        }
    }

    /// Returns seals with these checksums, taken now.
    pub fn seals(&self, checksums: Vec<Checksums>) -> Vec<Seal> {
        let written = self.moment();
        let seal = |checksums| Seal::new(checksums, written.clone());
        checksums.into_iter().map(seal).collect()
    }

    /// Returns the current step of the rank, if it was set.
    pub fn step(&self) -> Option<u64> {
        *self.step.lock()
    }

    /// Triggers the fault that is armed for this point in this step, unless it is a flip: panics, stalls or returns an
    /// error. Each fault triggers once.
    ///
    /// # Errors
    ///
    /// [`Error::Injected`].
    pub fn fault_point(&self, at: At) -> Result<(), Error> {
        self.faults.strike(self.step(), at)
    }
}
