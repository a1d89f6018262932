//! Values of parameters on one rank.

use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};
use burn_fsdp_tensors as tensors;

use crate::files;
use crate::op;
use crate::seal;
use crate::shown::{Shown, of_any, plain};
use crate::slot::Slots;

/// The values of a unit, by slot.
pub(super) struct Values {
    pub(super) own: Slots<Value>,
    /// Values of slots that have not moved from the previous generation yet.
    pub(super) inherited: Slots<Value>,
}

/// The value of a parameter, without its autodiff node. Backward graphs hold generations, and a graph that holds its
/// own leaf is never dropped.
#[derive(Clone)]
pub(super) struct Value {
    pub(super) plain: Tensor<1>,
    /// The device of the value, with autodiff if the module uses it.
    pub(super) device: Device,
    /// The id of the value's graph node, if it is trainable.
    pub(super) node: Option<NodeId>,
    /// The CRC-32 of the value's bytes as they were written, if they are in a file.
    pub(super) checksum: Option<u32>,
    /// The elements in 32 bits, for a moving average of a 16-bit parameter.
    pub(super) exact: Option<Tensor<1>>,
    /// True if the elements were freed, because the optimizer replaced them before backward ended.
    pub(super) is_freed: bool,
}

impl Value {
    pub(super) fn of(shown: &Shown) -> Self {
        of_any!(shown, param => Self::of_tensor(param.base()))
    }

    fn of_tensor<const D: usize>(value: Tensor<D>) -> Self {
        let is_trained = value.is_autodiff() && value.is_require_grad();
        let len = value.shape().num_elements();
        Self {
            device: value.device(),
            node: is_trained.then(|| op::node_of(value.clone())),
            plain: plain(value).reshape([len]),
            checksum: None,
            exact: None,
            is_freed: false,
        }
    }

    /// Frees the elements; the device and the graph node stay.
    pub(super) fn free(&mut self) {
        let device = self.device.clone().without_autodiff();
        self.plain = Tensor::zeros([0], (&device, self.plain.dtype()));
        self.checksum = None;
        self.exact = None;
        self.is_freed = true;
    }

    /// Returns true if the value shares the memory of `before`, so it is unchanged. It then keeps the 32-bit elements of
    /// `before`, if any.
    pub(super) fn stays(&mut self, before: Option<&Self>) -> bool {
        let before = before.filter(|before| seal::is_same_memory(&before.plain, &self.plain));
        self.exact = before.and_then(|before| before.exact.clone());
        before.is_some()
    }

    /// Adds the checksum of a value in a file. A value that shares the memory of `before` is unchanged.
    pub(super) fn summed(mut self, before: Option<&Self>) -> Self {
        if !tensors::is_host(&self.device) {
            return self;
        }
        let before = before.filter(|before| seal::is_same_memory(&before.plain, &self.plain));
        let known = before.and_then(|before| before.checksum);
        self.checksum = Some(known.unwrap_or_else(|| files::checksum(&self.plain)));
        self
    }
}

impl Values {
    /// Returns the value of `slot`, own or inherited, if there is one.
    pub(super) fn known(&self, slot: usize) -> Option<&Value> {
        self.own[slot].as_ref().or(self.inherited[slot].as_ref())
    }

    /// Returns the value of `slot`, which must exist.
    pub(super) fn held(&self, slot: usize) -> Value {
        self.known(slot)
            .expect("a first generation is filled before it is used")
            .clone()
    }
}
