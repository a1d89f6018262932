//! The parameters that low-rank adapters add to a module.

use std::collections::HashMap;

use burn::module::{Lora, LoraAdapter, Param, ParamId, Reparameterization};
use burn::tensor::{DType, Tensor};

use super::detached::Adapters;
use crate::adapter::{Adapter, Method, Origin};
use crate::error::Error;
use crate::path::{FACTOR_A, FACTOR_B, MAGNITUDE};
use crate::policy::AdapterGroup;
use crate::slot::Slot;
use crate::survey::{Declared, Found, NewAdapter};

/// Maximum number of paths in an error.
const NAMED: usize = 12;

/// Returns `parameters`, with the adapter's parameters after each parameter that is one of those in `adapters` or that
/// one of `groups` adapts. If several groups match, the last one adapts it.
///
/// # Errors
///
/// [`Error::Reparameterized`] for an adapter of a weight that is not among `parameters`, because it would be lost.
/// [`Error::Option`] if a group matches no parameter, has rank 0, an infinite or NaN alpha or an invalid `init_std`, or
/// sets another type than that of a parameter that it adapts.
pub(super) fn with_factors(
    parameters: Vec<Found>,
    groups: &[AdapterGroup],
    adapters: &Adapters,
) -> Result<Vec<Found>, Error> {
    let is_lost = |path: &&String| parameters.iter().all(|found| found.path != **path);
    if let Some(path) = adapters.keys().filter(is_lost).min() {
        return Err(Error::Reparameterized {
            path: path.clone(),
            name: LoraAdapter::NAME.to_owned(),
        });
    }
    groups.iter().try_for_each(check)?;
    expect_own_factors(&parameters, adapters)?;
    check_matches(&parameters, groups)?;
    let mut all = Vec::with_capacity(parameters.len());
    for base in parameters {
        let mut latest = groups.iter().rev();
        let group = latest.find(|group| is_adapted(&base, &group.lora));
        let factors = match (adapters.get(&base.path), group) {
            (Some(adapter), _) => Some(factors_of(&base, adapter)?),
            (None, Some(group)) => Some(factors(&base, group)?),
            (None, None) => None,
        };
        all.push(base);
        all.extend(factors.into_iter().flatten());
    }
    Ok(all)
}

/// Returns true if `lora` adapts a parameter. Adapters are products of two matrices.
fn is_adapted(found: &Found, lora: &Lora) -> bool {
    found.shape.len() == 2 && lora.param_group.matches(&found.id, Some(&found.path))
}

/// Checks that each group matches a parameter.
fn check_matches(parameters: &[Found], groups: &[AdapterGroup]) -> Result<(), Error> {
    let matches = |lora: &Lora| parameters.iter().any(|found| is_adapted(found, lora));
    let mut groups_of = groups.iter();
    let Some(index) = groups_of.position(|group| !matches(&group.lora)) else {
        return Ok(());
    };
    let matrices = parameters.iter().filter(|found| found.shape.len() == 2);
    let mut paths: Vec<_> = matrices.map(|found| found.path.as_str()).collect();
    let more = match paths.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    paths.truncate(NAMED);
    let call = match groups.len() {
        1 => String::new(),
        calls => format!(" in call {} of {calls}", index + 1),
    };
    Err(refused(
        groups[index].method,
        "set for a group that matches one",
        format!(
            "set{call} for a group that matches no sharded parameter of two dims (convolutions get no adapters); these \
             are: {}{more}",
            paths.join(", ")
        ),
    ))
}

/// Returns the factors `a` and `b` of a parameter that a group adapts, and the magnitudes if it has any.
fn factors(base: &Found, group: &AdapterGroup) -> Result<Vec<Found>, Error> {
    let lora = &group.lora;
    if let Some(dtype) = lora.dtype.map(DType::from)
        && dtype != base.dtype
    {
        return Err(refused(
            group.method,
            "set with factors of the type of the parameter that they adapt, in which the sharded weight computes; \
             omit `set_dtype`, and choose types with `ShardPolicy::precision`",
            format!(
                "set with factors of {dtype:?} for `{}` of {:?}",
                base.path, base.dtype
            ),
        ));
    }
    let adapter = NewAdapter {
        path: base.path.clone(),
        scale: lora.alpha / lora.rank as f64,
        origin: Origin::Policy {
            std: lora.init_std.unwrap_or(1.0 / lora.rank as f64),
        },
    };
    let new = |name, shape: &[usize]| factor(base, name, shape, &adapter);
    let mut factors = vec![
        new(FACTOR_A, &[base.shape[0], lora.rank]),
        new(FACTOR_B, &[lora.rank, base.shape[1]]),
    ];
    if group.method == Method::Dora {
        factors.push(new(MAGNITUDE, &[base.shape[1]]));
    }
    Ok(factors)
}

/// Checks that no factor is shared, which Burn permits: its own optimizers then update only one of the fields.
fn expect_own_factors(parameters: &[Found], adapters: &Adapters) -> Result<(), Error> {
    let mut fields: HashMap<_, _> = parameters
        .iter()
        .map(|found| (found.id, found.path.clone()))
        .collect();
    let mut paths: Vec<_> = adapters.keys().collect();
    paths.sort();
    for path in paths {
        let adapter = &adapters[path];
        for (name, factor) in [(FACTOR_A, &adapter.a), (FACTOR_B, &adapter.b)] {
            let second = format!("{path}.{name}");
            if let Some(first) = fields.insert(factor.id, second.clone()) {
                return Err(Error::Tied {
                    first,
                    second,
                    problem: "but a factor of an adapter cannot be shared; give each adapter factors of its own, for \
                              example with `Param::from_tensor(factor.val())`",
                });
            }
        }
    }
    Ok(())
}

/// Returns the factors of an adapter that the module already has.
fn factors_of(base: &Found, adapter: &LoraAdapter) -> Result<Vec<Found>, Error> {
    let [a, b] = [&adapter.a, &adapter.b].map(|factor| factor.lazy_shape().to_vec());
    if a[1] != b[0] || a[1] == 0 || a[0] * b[1] != base.num_elements() {
        return Err(Error::Option {
            option: "apply_lora",
            expected: "called with factors `a` of [rows, rank] and `b` of [rank, columns], where rows times columns is \
                       the weight's number of elements and the rank is 1 or more",
            got: format!(
                "called for `{}` of shape {:?} with factors of {a:?} and {b:?}",
                base.path, base.shape
            ),
        });
    }
    let new = NewAdapter {
        path: base.path.clone(),
        scale: adapter.scale,
        origin: Origin::Module,
    };
    let found = |name, param: &Param<Tensor<2>>| {
        let dtype = param.base().dtype();
        // A quantized base is rejected later, like any quantized parameter.
        if dtype != base.dtype && base.dtype.is_float() {
            return Err(Error::Option {
                option: "apply_lora",
                expected: "called without `set_dtype`, because the sharded weight computes in one type; choose types \
                           with `ShardPolicy::precision`",
                got: format!(
                    "called for `{}` of {:?} with factors of {dtype:?}",
                    base.path, base.dtype
                ),
            });
        }
        let shape = param.lazy_shape().to_vec();
        Ok(Found {
            id: param.id,
            is_trainable: Declared::of(param).is_trainable,
            ..factor(base, name, &shape, &new)
        })
    };
    Ok(vec![
        found(FACTOR_A, &adapter.a)?,
        found(FACTOR_B, &adapter.b)?,
    ])
}

/// Returns a new factor of `base`.
fn factor(base: &Found, name: &str, shape: &[usize], adapter: &NewAdapter) -> Found {
    Found {
        path: format!("{}.{name}", base.path),
        id: ParamId::new(),
        shape: shape.to_vec(),
        dtype: base.dtype,
        device: base.device.clone(),
        is_trainable: true,
        factor_of: Some(adapter.clone()),
        layer: base.layer.clone(),
    }
}

/// Checks the settings that do not depend on the module.
fn check(group: &AdapterGroup) -> Result<(), Error> {
    let (lora, method) = (&group.lora, group.method);
    if lora.rank == 0 {
        let got = "of rank 0".to_owned();
        return Err(refused(method, "of rank 1 or more", got));
    }
    if !lora.alpha.is_finite() {
        let got = format!("set with an alpha of {}", lora.alpha);
        return Err(refused(method, "set with a finite alpha", got));
    }
    match lora.init_std {
        Some(std) if !std.is_finite() || std < 0.0 => Err(refused(
            method,
            "set with a finite `init_std` of 0 or more",
            format!("set with an `init_std` of {std}"),
        )),
        _ => Ok(()),
    }
}

fn refused(method: Method, expected: &'static str, got: String) -> Error {
    Error::Option {
        option: method.option(),
        expected,
        got,
    }
}

/// Sets the adapter of each slot that has factors among `slots`, which are those of the parameters `found`.
pub(super) fn join(slots: &mut [Slot], found: &[Found]) {
    let index_of: HashMap<_, _> = found
        .iter()
        .enumerate()
        .map(|(index, found)| (found.path.clone(), index))
        .collect();
    for slot in slots {
        let factor = |name: &str| index_of.get(&format!("{}.{name}", slot.path)).copied();
        let (Some(a), Some(b)) = (factor(FACTOR_A), factor(FACTOR_B)) else {
            continue;
        };
        slot.adapter = found[a].factor_of.as_ref().map(|new| Adapter {
            a,
            b,
            magnitude: factor(MAGNITUDE),
            rows: found[a].shape[0],
            columns: found[b].shape[1],
            rank: found[a].shape[1],
            scale: new.scale,
            origin: new.origin,
        });
    }
}
