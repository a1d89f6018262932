//! The parameter that an optimizer works on, which Burn does not pass to it.

use std::cell::RefCell;

use burn_fsdp_collectives::ProcessGroup;

/// A parameter that a mapper is working on, and the ranks that hold its module.
#[derive(Clone)]
pub(crate) struct Current {
    pub(crate) group: ProcessGroup,
    /// Path in the module.
    pub(crate) path: String,
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// Ends the work on a parameter, by unwinding or otherwise.
struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

/// Runs `body` as work on `current`, if there is one.
pub(crate) fn at<T>(current: Option<Current>, body: impl FnOnce() -> T) -> T {
    let _entered = Entered;
    CURRENT.set(current);
    body()
}

/// Returns the parameter that this thread works on, if it was set.
pub(crate) fn current() -> Option<Current> {
    CURRENT.with_borrow(Clone::clone)
}
