//! Moving averages of a sharded module, computed only from shards.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_tensors::{self as tensors, is_half};

use crate::error::Error;
use crate::inspect::{self, Member};
use crate::path::{self, Location};
use crate::state::local::{LocalPart, LocalTensor, load_local_state, local_state};

/// Returns the updated moving average: `decay * average + (1 - decay) * model`, element by element.
///
/// `average` must originally be a clone of the sharded `model`. It can be evaluated, recorded and saved, and needs the
/// memory of one more shard of each parameter. Each rank computes with its own shards, so nothing is gathered. A
/// hand-written mapper over the module's tensors would see stand-ins instead of the parameters.
///
/// A frozen base in [fewer bits](crate::ShardPolicy::base_in) that is the same in both stays unchanged.
///
/// Parameters that no unit manages and running states are also averaged; integers and booleans are copied from the
/// model. A clone shares its running states with the model, so they stay the model's. For averages of these, shard a
/// second copy of the model.
///
/// In 16 bits, a share of 0.001 is rounded away, so the average would never change. The host therefore also holds the
/// elements of a 16-bit average in 32 bits (4 bytes each); the module shows them rounded. They belong to this copy and
/// its clones. A checkpoint contains the rounded elements, from which a resumed run continues. For an average that has
/// 32 bits in checkpoints and evaluation as well, shard a copy of the model cast to f32: `average` may be f32 if
/// `model` has 16 bits and the same shards.
///
/// Not collective; all ranks must call it in the same way, between steps.
///
/// # Errors
///
/// [`Error::NotSharded`]; [`Error::Option`] for a `decay` that is not between 0 and 1; [`Error::Returned`] if `average`
/// is not a copy of `model`; [`Error::Average`] for a running state, or a parameter that no unit manages, of 16 bits.
///
/// ```
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::Device;
/// # use burn_fsdp_collectives::{launch, LaunchConfig};
/// # use burn_fsdp_shard::{Error, ShardPolicy, fully_shard, moving_average};
/// launch(LaunchConfig::new(2), |world| {
///     let device = Device::flex().autodiff().gradient_checkpointing();
///     let model: Linear = LinearConfig::new(8, 8).init(&device);
///     let model = fully_shard(model, &world, ShardPolicy::new())?;
///     let mut average = model.clone();
///     // After each step of the optimizer:
///     average = moving_average(average, &model, 0.999)?;
///     # drop(average);
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), burn_fsdp_collectives::LaunchError>(())
/// ```
pub fn moving_average<M: Module>(average: M, model: &M, decay: f64) -> Result<M, Error> {
    if !(0.0..=1.0).contains(&decay) {
        return Err(Error::Option {
            option: "decay",
            expected: "between 0 and 1",
            got: decay.to_string(),
        });
    }
    let mut of_model: HashMap<_, _> = local_state(model)?
        .into_iter()
        .map(|tensor| (tensor.path.clone(), tensor))
        .collect();
    let mut exact: HashMap<_, _> = inspect::places(&average)
        .into_iter()
        .filter_map(|(path, member)| Some((path, member.generation.exact(member.index)?)))
        .collect();
    let same = unchanged_bases(&average, model);
    // A policy may have cast running states, whose local state is in the original type.
    let mut held = Types::default();
    inspect::visit(&average, &mut held);
    let mut next = HashMap::new();
    let average = load_local_state(average, |tensor| {
        let new = of_model.remove(&tensor.path);
        let new = new.filter(|new| is_alike(tensor, new));
        let new = new.ok_or_else(|| differing(&tensor.path))?;
        if same.contains(&tensor.path) {
            return Ok(None);
        }
        if !tensor.dtype.is_float() {
            return Ok(Some(new.elements.as_bytes().to_vec()));
        }
        if tensor.part == LocalPart::Own
            && let Some(&dtype) = held.0.get(&tensor.path)
            && is_half(dtype)
        {
            return Err(Error::Average {
                path: tensor.path.clone(),
                dtype,
            });
        }
        let old = exact.remove(&tensor.path);
        let sum = averaged(old.unwrap_or_else(|| wide(tensor)), wide(&new), decay);
        let bytes = sum.clone().cast(tensor.dtype).into_data();
        if is_half(tensor.dtype) {
            next.insert(tensor.path.clone(), sum);
        }
        Ok(Some(bytes.as_bytes().to_vec()))
    })?;
    if let Some(path) = of_model.into_keys().min() {
        return Err(differing(&path));
    }
    for (path, member) in inspect::places(&average) {
        if let Some(sum) = next.remove(&path) {
            member.generation.keep_exact(member.index, sum)?;
        }
    }
    Ok(average)
}

/// Returns the paths of frozen bases in fewer bits that are the same in both modules. Their average would be rounded.
fn unchanged_bases<M: Module>(average: &M, model: &M) -> HashSet<String> {
    let of_model: HashMap<_, _> = inspect::places(model).into_iter().collect();
    let places = inspect::places(average).into_iter();
    let same = places.filter(|(path, member)| {
        let is_held = member.slot().quantized().is_some();
        let is_same = |other: &Member| {
            let held = |member: &Member| {
                let held = member.generation.raw(member.index);
                tensors::source(held, None)
            };
            held(member).as_bytes() == held(other).as_bytes()
        };
        is_held && of_model.get(path).is_some_and(is_same)
    });
    same.map(|(path, _)| path).collect()
}

/// A visitor that collects the types of float tensors, by path.
#[derive(Default)]
struct Types(HashMap<String, DType>);

impl path::Visitor for Types {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        self.0.insert(place.path(), param.base().dtype());
    }
}

/// Returns true if both are the same part of tensors with the same shape and type. A 32-bit average may also differ in
/// type.
fn is_alike(average: &LocalTensor, model: &LocalTensor) -> bool {
    let is_wider = average.dtype == DType::F32 && is_half(model.dtype);
    let is_type = average.dtype == model.dtype || is_wider;
    is_type && average.shape == model.shape && average.part == model.part
}

fn differing(path: &str) -> Error {
    Error::Returned {
        path: path.to_owned(),
        expected: "the same tensor as in the model".to_owned(),
        got: "another tensor or none".to_owned(),
    }
}

/// Returns this rank's elements, widened to 32 bits if they have 16.
fn wide(tensor: &LocalTensor) -> Tensor<1> {
    let bytes = tensor.elements.as_bytes().to_vec();
    let values = tensors::owned(bytes, tensor.dtype, &Device::flex());
    if is_half(tensor.dtype) {
        values.cast(DType::F32)
    } else {
        values
    }
}

fn averaged(old: Tensor<1>, new: Tensor<1>, decay: f64) -> Tensor<1> {
    old.mul_scalar(decay) + new.mul_scalar(1.0 - decay)
}
