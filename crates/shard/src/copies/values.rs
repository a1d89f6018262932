//! Values of parameters on one rank.

use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};

use crate::op;
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
    pub(super) fn of(value: Tensor<1>) -> Self {
        let device = value.device();
        if !value.is_autodiff() {
            return Self {
                plain: value,
                device,
                node: None,
            };
        }
        Self {
            plain: value.clone().inner(),
            device,
            node: value.is_require_grad().then(|| op::node_of(value)),
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
