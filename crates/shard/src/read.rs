//! The sharded parameter that this thread read last, named in reports of Burn's type errors.

use std::any::Any;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

use burn::tensor::DType;

use crate::error::Error;

/// A unit that can name its parameters.
pub(crate) trait Named {
    /// Returns the path of the parameter in `slot`, and the type in which it computes.
    fn named(&self, slot: usize) -> (String, DType);
}

thread_local! {
    static LAST: RefCell<Option<(Weak<dyn Named>, usize)>> = const { RefCell::new(None) };
}

/// Notes that the model reads the parameter in `slot` of `unit`.
pub(crate) fn note<N: Named + 'static>(unit: &Arc<N>, slot: usize) {
    LAST.set(Some((Arc::downgrade(unit) as Weak<dyn Named>, slot)));
}

/// Forgets the parameter, because failures after a backward do not come from the model's reads.
pub(crate) fn forget() {
    LAST.set(None);
}

/// Returns the error that names the parameter, if Burn's panic reports an operation on two types.
pub(crate) fn two_types(panic: &(dyn Any + Send)) -> Option<Error> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied())?;
    if !text.contains("dtype mismatch") {
        return None;
    }
    LAST.with_borrow(|last| {
        let (unit, slot) = last.as_ref()?;
        let (param, dtype) = unit.upgrade()?.named(*slot);
        Some(Error::TwoTypes {
            param,
            dtype: format!("{dtype:?}"),
            reason: text.split_whitespace().collect::<Vec<_>>().join(" "),
        })
    })
}
