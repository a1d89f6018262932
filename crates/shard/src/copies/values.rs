//! Values of parameters on one rank.

use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};

use crate::op;
use crate::shown::{Shown, of_any, plain};
use crate::slot::Slots;

/// The values of a unit, by slot.
pub(super) struct Values {
    pub(super) own: Slots<Value>,
    /// Values of siblings that have not moved here (yet): those of the generation before.
    pub(super) inherited: Slots<Value>,
}

/// The value of a parameter, without its autodiff node: backward graphs hold generations, and a
/// graph that holds one of its own leaves is never dropped.
#[derive(Clone)]
pub(super) struct Value {
    pub(super) plain: Tensor<1>,
    /// The device of the value, with the autodiff of the module.
    pub(super) device: Device,
    /// The leaf's node, if gradients are wanted.
    pub(super) node: Option<NodeId>,
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
        }
    }
}

impl Values {
    /// Returns the value of `slot`.
    pub(super) fn held(&self, slot: usize) -> Value {
        let value = self.own[slot].as_ref().or(self.inherited[slot].as_ref());
        value
            .expect("a first generation is filled before it is used")
            .clone()
    }
}
