//! The state of an optimizer between two steps, without the elements of its tensors: made by the step before.

use std::collections::{BTreeMap, BTreeSet};

use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, Shape};
use burn_pack::{Scalar, Tensor as PackedTensor};

use crate::optimizer_record::{OptimizerParts, RANK_KEY, plainly, usual};
use crate::recorded::{Kind, Outline, Place, Slot};

/// The learning rates at which the last step is tried. A sum of rates stays as it is at the first; an optimizer that divides by
/// the rate takes the second.
const RATES: [f64; 2] = [0.0, 1e-3];

/// Returns an optimizer with the numbers of a state, and tensors without elements.
///
/// A state whose numbers are those before the last step is loaded as Burn does, and the last step is recorded. Counters count by
/// one; a number that does not come out so is one that stays as it is, or the state is refused.
pub(crate) fn outline_of<const D: usize>(
    optimizer: &ModuleOptimizer,
    place: &Place,
    scalars: &[(String, Scalar)],
    slots: &[Slot],
) -> Result<Outline, String> {
    let mut still = BTreeSet::new();
    let mut problem = String::new();
    for rate in RATES {
        still.clear();
        loop {
            let before = scalars.iter().map(|(field, scalar)| {
                let before = match still.contains(field) {
                    true => *scalar,
                    false => one_less(*scalar),
                };
                (field.as_str(), before)
            });
            let step = step_from::<D>(optimizer, place, before.collect(), slots);
            let outline = match step.and_then(|(outline, kind)| outline.record(place, rate, kind)) {
                Ok(recorded) => recorded.outline,
                Err(reason) => {
                    problem = reason;
                    break;
                }
            };
            match other_number(&outline, scalars) {
                None => return Ok(outline),
                Some(field) if still.insert(field.clone()) => {}
                Some(field) => {
                    problem = format!("its number `{field}` does not follow from one step before");
                    break;
                }
            }
        }
    }
    Err(problem)
}

/// Returns the field of a number that is another one than was saved, or that only one of both has.
fn other_number(outline: &Outline, saved: &[(String, Scalar)]) -> Option<String> {
    let found: BTreeMap<_, _> = outline.scalars.iter().cloned().collect();
    let saved: BTreeMap<_, _> = saved.iter().cloned().collect();
    let fields = found.keys().chain(saved.keys());
    let is_other = |field: &&String| match (found.get(*field), saved.get(*field)) {
        (Some(found), Some(saved)) => !is_same(*found, *saved),
        _ => true,
    };
    fields.into_iter().find(is_other).cloned()
}

/// Returns the optimizer before a step, with these numbers, and what steps.
fn step_from<const D: usize>(
    optimizer: &ModuleOptimizer,
    place: &Place,
    scalars: Vec<(&str, Scalar)>,
    slots: &[Slot],
) -> Result<(Outline, Kind<D>), String> {
    // A step of one element says as much as one of all.
    let is_alike = slots.iter().all(|slot| slot.shape == slots[0].shape);
    let mut shape = [1; D];
    if !is_alike {
        for slot in slots {
            let sides = shape.iter_mut().zip(&slot.shape);
            sides.for_each(|(all, one)| *all = (*all).max(*one));
        }
    }
    let small = |slot: &Slot| match is_alike {
        true => vec![1; D],
        false => slot.shape.clone(),
    };
    let loaded = loaded_at(optimizer, place, scalars, slots, small, D)?;
    let dtype = usual();
    let kind = Kind {
        shape,
        dtype,
        gradient: dtype,
    };
    Ok((Outline::new(loaded, slots.to_vec()), kind))
}

/// Returns an optimizer with a state of these numbers, and of zeros in the type that Burn makes of them.
fn loaded_at(
    optimizer: &ModuleOptimizer,
    place: &Place,
    scalars: Vec<(&str, Scalar)>,
    slots: &[Slot],
    shape_of: impl Fn(&Slot) -> Vec<usize>,
    rank: usize,
) -> Result<ModuleOptimizer, String> {
    let (id, dtype) = (place.id.val(), usual());
    let tensors = slots.iter().map(|slot| {
        let shape = shape_of(slot);
        let len = shape.iter().product::<usize>() * dtype.size();
        let bytes = Bytes::from_bytes_vec(vec![0; len]);
        let name = format!("{id}.{}", slot.field);
        PackedTensor::new(name, dtype, Shape::from(shape), Some(id), bytes)
    });
    let scalars = scalars.into_iter();
    let mut scalars: BTreeMap<_, _> = scalars
        .map(|(field, scalar)| (format!("{id}.{field}"), scalar))
        .collect();
    scalars.insert(format!("{id}.{RANK_KEY}"), Scalar::from(rank));
    let path = place.path.iter().map(|path| (id.to_string(), path.clone()));
    let parts = OptimizerParts {
        tensors: tensors.collect(),
        scalars,
        paths: path.collect(),
    };
    plainly(optimizer.clone(), parts).map_err(|error| error.to_string())
}

/// Returns a number that counts, one step before.
fn one_less(scalar: Scalar) -> Scalar {
    match scalar {
        Scalar::UInt(number) => Scalar::UInt(number.saturating_sub(1)),
        Scalar::Int(number) => Scalar::Int(number.saturating_sub(1)),
        other => other,
    }
}

/// Returns true if two numbers are the same, whatever the kind of an integer.
fn is_same(one: Scalar, other: Scalar) -> bool {
    match (one, other) {
        (Scalar::Float(one), Scalar::Float(other)) => one.to_bits() == other.to_bits(),
        (Scalar::Bool(one), Scalar::Bool(other)) => one == other,
        (Scalar::Float(_) | Scalar::Bool(_), _) | (_, Scalar::Float(_) | Scalar::Bool(_)) => false,
        (one, other) => i128_of(one) == i128_of(other),
    }
}

fn i128_of(scalar: Scalar) -> i128 {
    match scalar {
        Scalar::Int(number) => number.into(),
        Scalar::UInt(number) => number.into(),
        Scalar::Float(_) | Scalar::Bool(_) => 0,
    }
}
