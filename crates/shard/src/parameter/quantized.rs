//! A frozen base in fewer bits, as Burn's visitors and mappers see it: with the elements that the model computes with.

use super::owned::Owned;
use crate::device;
use crate::error::Error;
use crate::seal;
use crate::shown::Shown;
use crate::thrown::throw;

/// Returns the parameter that a visitor sees instead of `held`. The elements are unpacked when they are read.
pub(super) fn shown(generation: &Owned, held: &Shown) -> Shown {
    let (unit, slot) = (generation.unit.clone(), generation.slot);
    let shape = unit.slots[slot].shown_shape(unit.groups.shard.rank());
    let flat = held.flat();
    let elements = move || unit.elements_of(slot, flat);
    Shown::lazy(held.id(), elements, &held.device(), &shape)
}

/// Passes the elements of `held` to `map`, and returns the result in the form in which it is held. Elements that `map`
/// changes are rounded again.
pub(super) fn mapped(generation: &Owned, held: Shown, map: impl FnOnce(Shown) -> Shown) -> Shown {
    let (unit, slot) = (&generation.unit, generation.slot);
    let before = unit.elements_of(slot, held.flat());
    let shape = unit.slots[slot].shown_shape(unit.groups.shard.rank());
    let elements = device::tracked(before.clone(), &held.device());
    let after = map(Shown::new(held.id(), elements, &shape, false));
    if after.is_trained() {
        throw(rejected(generation, "made trainable"));
    }
    let held = held.with_id(after.id());
    let elements = after.flat();
    if seal::is_same_memory(&before, &elements) {
        return held;
    }
    if elements.dtype() != before.dtype() {
        throw(rejected(generation, "cast to another type"));
    }
    let rounded = unit.held_form(slot, device::tracked(elements, &held.device()));
    let rounded = rounded.unwrap_or_else(|error| throw(error));
    held.with_elements(rounded)
}

/// Returns the error for a change that a base in fewer bits does not support.
fn rejected(generation: &Owned, change: &str) -> Error {
    let path = &generation.unit.slots[generation.slot].path;
    Error::Option {
        option: "base_in",
        expected: "left out of the policy then; the base is frozen, and keeps its bits and type",
        got: format!("set for `{path}`, which is {change}"),
    }
}
