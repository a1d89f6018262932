//! Moving averages of a sharded module, made of shards alone.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::error::Error;
use crate::state::local::{LocalTensor, load_local_state, local_state};
use crate::transport;

/// Returns the moving average after another step: `decay * average + (1 - decay) * model`, element by element.
///
/// `average` began as a clone of the sharded `model`, and is a module like it: it can be evaluated, recorded and saved, and
/// takes the memory of one more shard of each parameter. Each rank computes with what it holds, so that nothing is
/// gathered. A moving average that a program writes itself, as a mapper over the module's tensors, would see the stand-ins
/// of the parameters.
///
/// Parameters that no unit manages and running states are averaged as well; integers and booleans are the model's.
///
/// Not collective; all ranks do so alike, between steps.
///
/// # Errors
///
/// [`Error::NotSharded`]; [`Error::Option`] for a `decay` that is not between 0 and 1; [`Error::Returned`] if `average` is no
/// copy of `model`.
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
    let average = load_local_state(average, |tensor| {
        let new = of_model.remove(&tensor.path);
        match new.filter(|new| is_alike(tensor, new)) {
            Some(new) => Ok(Some(averaged(tensor, &new, decay))),
            None => Err(differing(&tensor.path)),
        }
    })?;
    match of_model.into_keys().min() {
        Some(path) => Err(differing(&path)),
        None => Ok(average),
    }
}

/// Returns true if both are the same part of tensors of one shape and type.
fn is_alike(average: &LocalTensor, model: &LocalTensor) -> bool {
    let of = |tensor: &LocalTensor| (tensor.shape.clone(), tensor.dtype, tensor.part.clone());
    of(average) == of(model)
}

fn differing(path: &str) -> Error {
    Error::Returned {
        path: path.to_owned(),
        expected: "the same tensor in the average as in the model".to_owned(),
        got: "another one, or none".to_owned(),
    }
}

/// Returns the bytes of the new average of a tensor.
fn averaged(average: &LocalTensor, model: &LocalTensor, decay: f64) -> Vec<u8> {
    let bytes = |tensor: &LocalTensor| tensor.elements.as_bytes().to_vec();
    if !average.dtype.is_float() {
        return bytes(model);
    }
    let values = |tensor: &LocalTensor| -> Tensor<1> {
        transport::owned(bytes(tensor), tensor.dtype, &Device::flex())
    };
    let old = values(average).mul_scalar(decay);
    let new = old + values(model).mul_scalar(1.0 - decay);
    new.into_data().as_bytes().to_vec()
}
