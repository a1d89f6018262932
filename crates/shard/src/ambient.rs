//! The reason that this thread visits or maps a module, which Burn's visitors and mappers cannot carry.

use std::cell::RefCell;

/// The purpose of a walk over a module, or of its forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A search for sharded parameters that does not need their values.
    Inspect,
    /// A read of a full parameter by the engine, outside of any forward.
    Read,
    /// A map in which mappers of sharded parameters behave as before sharding.
    PlainMappers,
    /// The removal of reparameterizations, which keeps each base value as the parameter's value.
    KeepBase,
    /// The preparation of a module for a recomputed region. Sharded parameters stay unchanged.
    Prepare,
    /// The creation of separate running states for a module. Sharded parameters stay unchanged.
    OwnStates,
    /// A clone of a module for an autodiff graph, which must not count as a live copy.
    CopyForGraph,
    /// The first forward of a recomputed region, without a graph.
    Region,
    /// The second forward of a recomputed region, or its backward.
    RegionAgain,
    /// A map that the engine itself runs.
    Map,
    /// A call of one of the policy's hooks.
    Hook,
    /// A call of [`catch`](crate::catch), which returns unwinding errors as values.
    Catch,
}

thread_local! {
    /// The current purposes on this thread, the innermost last.
    static PURPOSES: RefCell<Vec<Purpose>> = const { RefCell::new(Vec::new()) };
}

/// A guard that ends a purpose, and all purposes that began after it, when dropped (also by unwinding).
struct Entered {
    depth: usize,
}

impl Drop for Entered {
    fn drop(&mut self) {
        PURPOSES.with_borrow_mut(|purposes| purposes.truncate(self.depth));
    }
}

pub(crate) fn within<T>(purpose: Purpose, body: impl FnOnce() -> T) -> T {
    let _entered = PURPOSES.with_borrow_mut(|purposes| {
        purposes.push(purpose);
        Entered {
            depth: purposes.len() - 1,
        }
    });
    body()
}

/// Runs `body` as code of the program that the engine calls, without the current purposes.
pub(crate) fn outside<T>(body: impl FnOnce() -> T) -> T {
    struct Back(Vec<Purpose>);
    impl Drop for Back {
        fn drop(&mut self) {
            PURPOSES.set(std::mem::take(&mut self.0));
        }
    }
    let _back = Back(PURPOSES.take());
    body()
}

/// Returns true if `purpose` is active on this thread.
pub(crate) fn is_within(purpose: Purpose) -> bool {
    PURPOSES.with_borrow(|purposes| purposes.contains(&purpose))
}

/// Returns true if any purpose except [`Purpose::Catch`] is active, so the thread is running engine code.
pub(crate) fn is_engine() -> bool {
    PURPOSES.with_borrow(|purposes| purposes.iter().any(|purpose| *purpose != Purpose::Catch))
}

/// Returns the innermost active purpose among `of`.
pub(crate) fn innermost(of: &[Purpose]) -> Option<Purpose> {
    PURPOSES.with_borrow(|purposes| {
        let mut purposes = purposes.iter().rev();
        purposes.find(|purpose| of.contains(purpose)).copied()
    })
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::{Purpose, innermost, is_engine, is_within, outside, within};

    #[test]
    fn a_panic_leaves_its_scopes() {
        within(Purpose::Catch, || {
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                within(Purpose::Inspect, || {
                    assert!(is_within(Purpose::Inspect));
                    std::panic::resume_unwind(Box::new(()));
                });
            }));
            assert!(unwound.is_err());
            assert!(!is_within(Purpose::Inspect));
            assert!(is_within(Purpose::Catch));
        });
        assert!(!is_within(Purpose::Catch));
    }

    #[test]
    fn a_call_of_the_program_interrupts_the_scopes() {
        within(Purpose::RegionAgain, || {
            outside(|| assert!(!is_engine()));
            assert!(is_within(Purpose::RegionAgain));
        });
        assert!(!is_engine());
    }

    #[test]
    fn the_innermost_scope_wins() {
        let regions = [Purpose::Region, Purpose::RegionAgain];
        within(Purpose::Region, || {
            within(Purpose::RegionAgain, || {
                within(Purpose::Catch, || {
                    assert_eq!(innermost(&regions), Some(Purpose::RegionAgain));
                });
            });
            assert_eq!(innermost(&regions), Some(Purpose::Region));
        });
        assert_eq!(innermost(&regions), None);
    }
}
