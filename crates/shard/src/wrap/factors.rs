//! The parameters that low-rank adapters add to a module.

use std::collections::HashMap;

use burn::module::{Lora, ParamId};
use burn::tensor::DType;

use crate::adapter::Adapter;
use crate::error::Error;
use crate::path::{FACTOR_A, FACTOR_B};
use crate::slot::Slot;
use crate::survey::Found;

/// Returns `parameters`, with the adapter's factors after each parameter that `lora` adapts.
///
/// # Errors
///
/// [`Error::Option`] if `lora` adapts no parameter, has rank 0, an infinite or NaN alpha or an invalid `init_std`, or
/// sets another type than that of a parameter that it adapts.
pub(super) fn with_factors(parameters: Vec<Found>, lora: &Lora) -> Result<Vec<Found>, Error> {
    check(lora)?;
    let mut all = Vec::with_capacity(parameters.len());
    let num_parameters = parameters.len();
    for found in parameters {
        let is_matrix = found.shape.len() == 2;
        let is_adapted = is_matrix && lora.param_group.matches(&found.id, Some(&found.path));
        all.push(found);
        if !is_adapted {
            continue;
        }
        let base = all.last().expect("it was just put there");
        if let Some(dtype) = lora.dtype.map(DType::from)
            && dtype != base.dtype
        {
            return Err(refused(
                "set with factors of the type of the parameter that they adapt, in which the sharded weight computes; \
                 omit `set_dtype`, and choose types with `ShardPolicy::precision`",
                format!(
                    "set with factors of {dtype:?} for `{}` of {:?}",
                    base.path, base.dtype
                ),
            ));
        }
        let factor = |name: &str, shape: [usize; 2]| Found {
            path: format!("{}.{name}", base.path),
            id: ParamId::new(),
            shape: shape.to_vec(),
            dtype: base.dtype,
            device: base.device.clone(),
            is_trainable: true,
            factor_of: Some(base.path.clone()),
            layer: base.layer.clone(),
        };
        let a = factor(FACTOR_A, [base.shape[0], lora.rank]);
        let b = factor(FACTOR_B, [lora.rank, base.shape[1]]);
        all.extend([a, b]);
    }
    if all.len() == num_parameters {
        Err(refused(
            "set for a group that matches one",
            "set for a group that matches no sharded parameter of two dims (convolutions get no adapters)"
                .to_owned(),
        ))
    } else {
        Ok(all)
    }
}

/// Checks the settings that do not depend on the module.
fn check(lora: &Lora) -> Result<(), Error> {
    if lora.rank == 0 {
        return Err(refused("of rank 1 or more", "of rank 0".to_owned()));
    }
    if !lora.alpha.is_finite() {
        let got = format!("set with an alpha of {}", lora.alpha);
        return Err(refused("set with a finite alpha", got));
    }
    match lora.init_std {
        Some(std) if !std.is_finite() || std < 0.0 => Err(refused(
            "set with a finite `init_std` of 0 or more",
            format!("set with an `init_std` of {std}"),
        )),
        _ => Ok(()),
    }
}

fn refused(expected: &'static str, got: String) -> Error {
    Error::Option {
        option: "lora",
        expected,
        got,
    }
}

/// Sets the adapter of each slot that has factors among `slots`.
pub(super) fn join(slots: &mut [Slot], lora: &Lora) {
    let index_of: HashMap<_, _> = slots
        .iter()
        .enumerate()
        .map(|(index, slot)| (slot.path.clone(), index))
        .collect();
    for slot in slots {
        let factor = |name: &str| index_of.get(&format!("{}.{name}", slot.path)).copied();
        if let (Some(a), Some(b)) = (factor(FACTOR_A), factor(FACTOR_B)) {
            slot.adapter = Some(Adapter {
                a,
                b,
                rows: slot.shape[0],
                columns: slot.shape[1],
                rank: lora.rank,
                scale: lora.alpha / lora.rank as f64,
            });
        }
    }
}
