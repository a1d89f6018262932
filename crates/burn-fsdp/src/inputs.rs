//! Inputs of a sharded module.

use burn::module::Module;
use burn_fsdp_shard::{Error, input_type};
use burn_fsdp_spmd::{Batch, cast_floats};

/// Casts the float tensors of `input` to the compute type of the sharded `module`: the type of its first sharded
/// parameter. Integers and booleans stay unchanged. Burn has no hooks before a module's forward, so programs cast a
/// module's inputs with this function.
///
/// `input` is a tensor or any nesting of tensors: tuples, arrays, vectors, options, maps, and structs that implement
/// [`Batch`](crate::compile::Batch). Cast the output of a module with Burn's `cast`, to the type that the loss needs.
///
/// ```
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
/// # use burn_fsdp::{Precision, ProcessGroup, ShardPolicy, cast_input, fully_shard};
/// let device = Device::flex().autodiff().gradient_checkpointing();
/// let layer: Linear = LinearConfig::new(4, 2).init(&device);
/// let policy = ShardPolicy::new().precision(Precision::new(FloatDType::BF16));
/// let layer = fully_shard(layer, &ProcessGroup::solo(), policy)?;
///
/// let batch = (Tensor::<2>::ones([3, 4], &device), Tensor::<1, Int>::zeros([3], &device));
/// let (x, _labels) = cast_input(&layer, batch)?;
/// let output = layer.forward(x);
/// assert_eq!(output.dtype(), DType::BF16);
/// assert_eq!(output.cast(DType::F32).dtype(), DType::F32);
/// # Ok::<(), burn_fsdp::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::NotSharded`] if `module` is not sharded.
pub fn cast_input<M: Module, B: Batch>(module: &M, input: B) -> Result<B, Error> {
    Ok(cast_floats(input, input_type(module)?))
}
