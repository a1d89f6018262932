//! The parameter that an optimizer is updating, which Burn does not pass to the optimizer.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use burn_fsdp_collectives::ProcessGroup;

use crate::slot::Slot;
use crate::unit::Unit;

/// The sharded parameter that a mapper is mapping.
#[derive(Clone)]
pub(crate) struct Current {
    unit: Arc<Unit>,
    slot: usize,
    /// The ranks that train its module, if ranks compare bytes.
    pub(crate) sealed_in: Option<ProcessGroup>,
}

impl Current {
    pub(crate) fn new(unit: Arc<Unit>, slot: usize, sealed_in: Option<ProcessGroup>) -> Self {
        Self {
            unit,
            slot,
            sealed_in,
        }
    }

    pub(crate) fn slot(&self) -> &Slot {
        &self.unit.slots[self.slot]
    }

    /// Returns the index, in the flat whole parameter, of the first element that this rank holds.
    pub(crate) fn start(&self) -> usize {
        let range = self.slot().held_range(self.unit.groups.shard.rank());
        range.start
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
    static IS_TRIAL: Cell<bool> = const { Cell::new(false) };
}

/// A guard that clears the current parameter when dropped, even by unwinding.
struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

/// Runs `body` with `current` as this thread's current parameter.
pub(crate) fn at<T>(current: Option<Current>, body: impl FnOnce() -> T) -> T {
    let _entered = Entered;
    CURRENT.set(current);
    body()
}

/// Returns the sharded parameter that this thread is mapping, if any.
pub(crate) fn current() -> Option<Current> {
    CURRENT.with_borrow(Clone::clone)
}

/// Runs `body`, in which an optimizer is tried on a matrix that belongs to no parameter.
pub(crate) fn trying<T>(body: impl FnOnce() -> T) -> T {
    struct Leave(bool);
    impl Drop for Leave {
        fn drop(&mut self) {
            IS_TRIAL.set(self.0);
        }
    }
    let _leave = Leave(IS_TRIAL.replace(true));
    body()
}

/// Returns true within [`trying`].
pub(crate) fn is_trial() -> bool {
    IS_TRIAL.get()
}
