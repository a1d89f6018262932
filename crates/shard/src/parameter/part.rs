//! The part of a module that an optimizer's step maps, if it does not map all of it.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use crate::unit::Unit;

/// A set of sharded parameters, by the address of their unit and their slot.
#[derive(Debug, Clone, Default)]
pub(crate) struct Parameters(HashSet<(usize, usize)>);

impl Parameters {
    /// Adds the parameters in `slots` of `unit`.
    pub(crate) fn add(&mut self, unit: &Arc<Unit>, slots: &[usize]) {
        let address = Arc::as_ptr(unit).addr();
        self.0.extend(slots.iter().map(|&slot| (address, slot)));
    }

    fn contains(&self, unit: &Arc<Unit>, slot: usize) -> bool {
        self.0.contains(&(Arc::as_ptr(unit).addr(), slot))
    }
}

/// The sharded parameters that a map reaches.
#[derive(Debug, Clone)]
pub(crate) enum Part {
    /// These parameters. Their old values are freed as soon as they are replaced.
    Only(Parameters),
    /// All other parameters.
    Except(Parameters),
}

thread_local! {
    static PART: RefCell<Option<Part>> = const { RefCell::new(None) };
}

/// A guard that ends the part when dropped, even by unwinding.
struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        PART.set(None);
    }
}

/// Runs `body`, whose maps reach only `part` of the sharded parameters and leave the others unchanged.
pub(crate) fn within<T>(part: Part, body: impl FnOnce() -> T) -> T {
    let _entered = Entered;
    PART.set(Some(part));
    body()
}

/// Returns true if the current map leaves the parameter in `slot` of `unit` unchanged.
pub(crate) fn leaves_out(unit: &Arc<Unit>, slot: usize) -> bool {
    PART.with_borrow(|part| match part {
        None => false,
        Some(Part::Only(reached)) => !reached.contains(unit, slot),
        Some(Part::Except(left_out)) => left_out.contains(unit, slot),
    })
}

/// Returns true if the current map replaces values while backward still runs.
pub(crate) fn is_in_backward() -> bool {
    PART.with_borrow(|part| matches!(part, Some(Part::Only(_))))
}
