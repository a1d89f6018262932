//! The message that a walk passes from a stand-in to the shard next to it.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::unit::Unit;

/// A message from a stand-in, during a load or a record, to the shard next to it, which Burn visits next.
pub(crate) enum Handed {
    /// A new value for the shard.
    Value {
        value: Box<Tensor<1>>,
        /// True if the stand-in has kept its id.
        keeps_id: bool,
    },
    /// Notice that the whole parameter has already been recorded.
    Recorded,
}

thread_local! {
    static HANDED: RefCell<Option<(*const Unit, usize, Handed)>> = const { RefCell::new(None) };
}

/// Leaves a message for the shard next to the stand-in of this parameter.
pub(crate) fn hand(unit: &Arc<Unit>, index: usize, handed: Handed) {
    HANDED.set(Some((Arc::as_ptr(unit), index, handed)));
}

/// Takes the message that the stand-in of this parameter has just left. Drops a message for another parameter, which
/// remains from an interrupted walk.
fn take_handed(unit: &Arc<Unit>, index: usize) -> Option<Handed> {
    let (of, at, handed) = HANDED.take()?;
    (of == Arc::as_ptr(unit) && at == index).then_some(handed)
}

/// Takes the value for the shard that a mapper is about to visit, and whether the stand-in kept its id.
pub(crate) fn take_value(unit: &Arc<Unit>, index: usize) -> Option<(Tensor<1>, bool)> {
    match take_handed(unit, index)? {
        Handed::Value { value, keeps_id } => Some((*value, keeps_id)),
        Handed::Recorded => None,
    }
}

/// Takes the message, and returns true if the current visitor has just recorded the parameter.
pub(crate) fn take_recorded(unit: &Arc<Unit>, index: usize) -> bool {
    matches!(take_handed(unit, index), Some(Handed::Recorded))
}

/// Replaces the value of this shard when the current walk reaches it.
pub(crate) fn replace(unit: &Arc<Unit>, index: usize, value: Tensor<1>) {
    let keeps_id = true;
    let value = Box::new(value);
    hand(unit, index, Handed::Value { value, keeps_id });
}
