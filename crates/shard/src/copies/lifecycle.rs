//! The life cycle of a unit's full parameters.

use std::fmt;

use burn::tensor::Tensor;
use burn_fsdp_collectives::{Pending, Received};
use parking_lot::Mutex;

use crate::error::Error;
use crate::hooks::PendingTensors;
use crate::slot::Slots;

/// The state of a unit's full parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitState {
    /// Only the shards exist.
    Sharded,
    /// A gather is in progress, and its memory is allocated.
    Gathering,
    /// The full parameters exist.
    Unsharded,
}

impl fmt::Display for UnitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A gather that is in progress.
pub(crate) enum Gather {
    /// No communication: the shard is the whole parameter.
    Own,
    /// A gather of shards, which are packed if the policy gathers in 8 bits.
    Shards(Pending<Received>),
    /// A gather of pieces of the full parameters, among neighbours.
    Pieces(Pending<Received>),
    /// A gather by the policy's hook: the full parameters, one for each gathered slot.
    ByHook(PendingTensors),
}

/// The state of the full parameters, with their tensors.
#[derive(Default)]
enum State {
    /// Only the shards exist.
    #[default]
    Sharded,
    /// A gather is in progress. Its buffers are allocated, and this rank's shards are published.
    Gathering(Box<Gather>),
    /// The full parameters exist, flat and without autodiff, one for each gathered slot.
    Unsharded(Slots<Tensor<1>>),
}

/// The life cycle of the full parameters of one generation.
///
/// ```text
/// Sharded --begin_gather--> Gathering --fill--> Unsharded
///    ^                          |                   |
///    +-------- drop_full -------+---- drop_full ----+
///                                     take_full
/// ```
#[derive(Default)]
pub(crate) struct LifeCycle(Mutex<State>);

impl LifeCycle {
    pub(crate) fn state(&self) -> UnitState {
        match *self.0.lock() {
            State::Sharded => UnitState::Sharded,
            State::Gathering(_) => UnitState::Gathering,
            State::Unsharded(_) => UnitState::Unsharded,
        }
    }

    pub(crate) fn is_unsharded(&self) -> bool {
        self.state() == UnitState::Unsharded
    }

    /// Returns true if only the shards exist and no gather is in progress.
    pub(crate) fn is_sharded(&self) -> bool {
        self.state() == UnitState::Sharded
    }

    pub(crate) fn begin_gather(&self, gather: Gather) {
        *self.0.lock() = State::Gathering(Box::new(gather));
    }

    /// Creates the full parameters from the current gather. `arrive` waits for the gather, and also returns a result
    /// for the caller. Returns `None` if no gather is in progress. After an error only the shards exist.
    pub(crate) fn fill<T>(
        &self,
        arrive: impl FnOnce(Gather) -> Result<(Slots<Tensor<1>>, T), Error>,
    ) -> Result<Option<T>, Error> {
        let mut state = self.0.lock();
        let gather = match std::mem::take(&mut *state) {
            State::Gathering(gather) => *gather,
            other => {
                *state = other;
                return Ok(None);
            }
        };
        let (full, told) = arrive(gather)?;
        *state = State::Unsharded(full);
        Ok(Some(told))
    }

    /// Returns the full parameter of `slot`, which must be gathered; `None` if the full parameters do not exist.
    pub(crate) fn full(&self, slot: usize) -> Option<Tensor<1>> {
        match &*self.0.lock() {
            State::Unsharded(full) => {
                let tensor = full[slot].clone();
                Some(tensor.expect("gathered slots are filled"))
            }
            State::Sharded | State::Gathering(_) => None,
        }
    }

    /// Drops the full parameters, or cancels their gather.
    pub(crate) fn drop_full(&self) {
        *self.0.lock() = State::Sharded;
    }

    /// Drops the full parameters or cancels their gather, and returns them if they exist.
    pub(crate) fn take_full(&self) -> Option<Slots<Tensor<1>>> {
        let state = std::mem::take(&mut *self.0.lock());
        match state {
            State::Unsharded(full) => Some(full),
            State::Sharded | State::Gathering(_) => None,
        }
    }
}
