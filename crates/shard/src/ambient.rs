//! What this thread is doing to a module, where Burn's visitors and mappers cannot be told.

use std::cell::RefCell;

/// Why a module is being walked over, or its forward run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The engine looks for sharded parameters and does not want to see their values.
    Inspect,
    /// Mappers of sharded parameters do only what they did before sharding.
    PlainMappers,
    /// A parameter is taken out of its reparameterization with the value put in its place.
    KeepBase,
    /// A module is being made ready for a checkpointed region: what is sharded stays as it is.
    Prepare,
    /// A module gets running states of its own: what is sharded stays as it is.
    OwnStates,
    /// A copy is made for a graph. Graphs must not make an abandoned copy look alive.
    CopyForGraph,
    /// The first forward of a checkpointed region, without a graph.
    Region,
    /// The second forward of a checkpointed region, or its backward.
    RegionAgain,
    /// The engine maps over a module for a purpose of its own.
    Map,
    /// A gradient hook runs.
    Hook,
    /// Somebody turns errors that unwind back into values.
    Catch,
}

thread_local! {
    /// The innermost purpose comes last.
    static PURPOSES: RefCell<Vec<Purpose>> = const { RefCell::new(Vec::new()) };
}

/// Ends a purpose when it is dropped, by unwinding or otherwise, with all that began after it.
struct Entered {
    depth: usize,
}

impl Drop for Entered {
    fn drop(&mut self) {
        PURPOSES.with_borrow_mut(|purposes| purposes.truncate(self.depth));
    }
}

/// Runs `body` for a purpose.
pub(crate) fn within<T>(purpose: Purpose, body: impl FnOnce() -> T) -> T {
    let _entered = PURPOSES.with_borrow_mut(|purposes| {
        purposes.push(purpose);
        Entered {
            depth: purposes.len() - 1,
        }
    });
    body()
}

/// Whether this thread is at it.
pub(crate) fn is_within(purpose: Purpose) -> bool {
    PURPOSES.with_borrow(|purposes| purposes.contains(&purpose))
}

/// Whether this thread is at anything but the program's own code.
pub(crate) fn is_engine() -> bool {
    PURPOSES.with_borrow(|purposes| purposes.iter().any(|purpose| *purpose != Purpose::Catch))
}

/// The innermost of some purposes.
pub(crate) fn innermost(of: &[Purpose]) -> Option<Purpose> {
    PURPOSES.with_borrow(|purposes| {
        let mut purposes = purposes.iter().rev();
        purposes.find(|purpose| of.contains(purpose)).copied()
    })
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::{Purpose, innermost, is_within, within};

    #[test]
    fn a_panic_ends_what_was_begun() {
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
    fn the_innermost_counts() {
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
