//! Keeps the inputs of recomputed regions on the host until backward.

use std::cell::RefCell;

use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_fsdp_tensors::{self as tensors, Batch, BatchMapper, Staging};

use crate::error::Error;
use crate::thrown::throw;

const OPTION: &str = "offload_activations";

thread_local! {
    /// The host of the regions that this thread runs, inside [`offload_activations`].
    static HOST: RefCell<Option<Device>> = const { RefCell::new(None) };
}

/// Runs `body`, a forward, and keeps the inputs of its [`recompute`](crate::recompute()) regions on `host`, the CPU
/// backend `Device::flex()`, until backward. This is fairscale's `checkpoint_wrapper(offload_to_cpu=True)` and PyTorch's
/// `offload_wrapper` around checkpointed modules. The model does not change.
///
/// Between forward and backward, a region keeps only its inputs: nests of floats, ints and bools. They are copied to
/// `host` after the region's forward. When backward reaches the region, it copies each back to its own device, in its
/// own type. Tensors that are on `host` already are not copied. Results have the same bits as without this function,
/// except that a strided view returns contiguous, and a kernel may round its elements in another order.
///
/// The device frees an input when no other code uses it. An input of several regions is copied for each of them, and a
/// broadcast view with all of its elements. Parameters, tensors that a region captures, and everything outside of
/// regions stay on the device.
///
/// The module may be sharded or plain. Backward may run inside or outside of `body`. Only regions on this thread are
/// affected, and ranks may differ: nothing is communicated. [`memory`](crate::memory()) counts the copies of regions that
/// use sharded parameters. A copy waits for the device, and no copy overlaps with arithmetic.
///
/// # Errors
///
/// [`Error::Option`] if `host` is not the CPU backend, or has autodiff.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_shard::{offload_activations, recompute};
///
/// # fn main() -> Result<(), burn_fsdp_shard::Error> {
/// let device = Device::flex().autodiff(); // or a GPU
/// let layers: Vec<Linear> = (0..3).map(|_| LinearConfig::new(4, 4).init(&device)).collect();
/// let loss = offload_activations(Device::flex(), || {
///     let x = Tensor::<2>::ones([2, 4], &device);
///     let run = |x, layer| recompute(layer, x, |layer: &Linear, x| layer.forward(x).tanh());
///     layers.iter().fold(x, run).mean()
/// })?;
/// let gradients = loss.backward();
/// assert!(layers[0].weight.val().grad(&gradients).is_some());
/// # Ok(())
/// # }
/// ```
pub fn offload_activations<T>(host: Device, body: impl FnOnce() -> T) -> Result<T, Error> {
    if !tensors::is_host(&host) || host.is_autodiff() {
        return Err(Error::Option {
            option: OPTION,
            expected: "given the CPU backend without autodiff, `Device::flex()`",
            got: format!("given {host:?}"),
        });
    }
    let _restore = Restore(HOST.replace(Some(host)));
    Ok(body())
}

/// A guard that restores the previous host when dropped, also by unwinding.
struct Restore(Option<Device>);

impl Drop for Restore {
    fn drop(&mut self) {
        HOST.set(self.0.take());
    }
}

/// Returns the host for inputs of regions that this thread runs now.
pub(crate) fn host() -> Option<Device> {
    HOST.with_borrow(Clone::clone)
}

/// Rejects a region of a compiled step inside of [`offload_activations`], by unwinding. A compiled step plans its memory
/// without the host.
pub fn refuse_offload_in_trace() {
    if host().is_some() {
        throw(Error::Option {
            option: OPTION,
            expected: "called around forwards of the eager engine; compiled steps recompute units with \
                       `Options::recompute_units`, but do not offload",
            got: "called around a region of a compiled step".to_owned(),
        });
    }
}

/// Moves each tensor of `nest` to the next device of `to`, and counts the copies in `staging`. Also returns the devices
/// on which the tensors were.
pub(crate) fn moved<B: Batch>(
    nest: B,
    to: impl Iterator<Item = Device>,
    staging: &Staging,
) -> (B, Vec<Device>) {
    let mut mapper = Move {
        to,
        from: Vec::new(),
        staging,
    };
    let nest = nest.map(&mut mapper);
    (nest, mapper.from)
}

struct Move<'a, T> {
    to: T,
    from: Vec<Device>,
    staging: &'a Staging,
}

impl<T: Iterator<Item = Device>> Move<'_, T> {
    fn moved<const D: usize, K: Basic>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        self.from.push(tensor.device());
        match self.to.next() {
            Some(to) => self.staging.moved(tensor, &to),
            None => tensor,
        }
    }
}

impl<T: Iterator<Item = Device>> BatchMapper for Move<'_, T> {
    fn float<const D: usize>(&mut self, _: &str, tensor: Tensor<D>) -> Tensor<D> {
        self.moved(tensor)
    }
    fn int<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.moved(tensor)
    }
    fn bool<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.moved(tensor)
    }
    fn fixed(&mut self, _: &str, _: &impl std::hash::Hash) {}
    fn enter(&mut self, _: &str) {}
    fn exit(&mut self) {}
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use burn::tensor::Device;

    use super::{host, offload_activations};

    #[test]
    fn the_host_is_set_inside_the_call_only() {
        let inside = offload_activations(Device::flex(), || {
            let inner = offload_activations(Device::flex(), host).expect("a host");
            (inner, host())
        });
        assert_eq!(
            inside.expect("a host"),
            (Some(Device::flex()), Some(Device::flex()))
        );
        assert_eq!(host(), None);
        let unwound = catch_unwind(|| {
            offload_activations(Device::flex(), || {
                std::panic::resume_unwind(Box::new(()));
            })
        });
        assert!(unwound.is_err());
        assert_eq!(host(), None);
    }
}
