//! Activation checkpointing, in both engines.

use burn::module::Module;
use burn_fsdp_shard::{refuse_offload_in_trace, region_device};
use burn_fsdp_spmd::Batch;
use burn_fsdp_spmd::trace::{is_traced, traced_region};

/// Runs `forward(module, input)`, and keeps only `input` for backward, which recomputes the rest. This saves the
/// activations of the region at the cost of a second forward. `internals::sharding::offload_activations` also moves
/// `input` to the host until then.
///
/// Checkpoint one unit at a time: the full weights of all units in a region exist together in its backward.
/// With [`ShardPolicy::units`](crate::ShardPolicy::units) `["blocks.*"]`, call it once around each block.
/// A region that is only a part of a unit adds no gathers: it shares the unit's full weights with the rest of the unit.
///
/// `input` and the output are tensors or any nesting of tensors: tuples, arrays, vectors, options, maps, and structs
/// that implement [`Batch`](crate::compile::Batch). Float tensors get their gradients; ints and bools pass through. If
/// the loss depends on the region but not on one of its inputs, the eager engine passes gradients of zero through that
/// input, unless it is a leaf.
///
/// `module` may be sharded, contain sharded modules, or be plain. `forward` must compute the same result both times. It
/// must capture no tracked tensor, because the tensor's gradient would be lost: pass it in `input`. Violations are
/// errors. Running statistics, such as BatchNorm's, are updated once. If `input` has float tensors, but none on an
/// autodiff device, or inside another region, `forward` is simply called. All ranks must make the same calls.
///
/// In the loss of a compiled step, the region is a part of the graph. Backward recomputes everything in it except
/// random numbers and the values that are also read outside, which are kept. Captured tensors get their gradients.
///
/// In the eager engine dropout draws the same numbers twice if each rank is a process. A region draws a seed from
/// Burn's generator and seeds the generator with it, in forward and again in backward. After backward, it gives the
/// generator a new seed. If ranks are threads, they share one generator, so dropout in a region is an error.
///
/// # Errors
///
/// Errors unwind, as in forward and backward: see [`catch`](crate::catch).
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp::recompute;
///
/// let device = Device::flex().autodiff();
/// let layer: Linear = LinearConfig::new(4, 4).init(&device);
/// let input = Tensor::<2>::ones([2, 4], &device);
/// let output = recompute(&layer, input.clone(), |layer, input| layer.forward(input).exp());
/// let (output, sum) = recompute(&layer, (input, output), |layer, (input, other)| {
///     let output = layer.forward(input) * other.clone();
///     (output.clone(), output + other)
/// });
/// let gradients = (output.sum() + sum.sum()).backward();
/// assert!(layer.weight.val().grad(&gradients).is_some());
/// ```
pub fn recompute<M, F, I, O>(module: &M, input: I, forward: F) -> O
where
    M: Module + Sync + 'static,
    I: Batch + Send + Sync,
    O: Batch,
    F: Fn(&M, I) -> O + Send + Sync + 'static,
{
    let device = if is_traced() {
        region_device(module, &input)
    } else {
        None
    };
    match device {
        Some(device) => {
            refuse_offload_in_trace();
            traced_region(&device, || forward(module, input))
        }
        None => burn_fsdp_shard::recompute(module, input, forward),
    }
}
