//! The operations of an optimizer's step in a comparable form, without their scalars.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_tensors::{LowBits, StateFormat};
use burn_ir::{
    IrVisitorMut, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorId, TensorIr,
    TensorStatus,
};

use crate::graph::{Node, Phase, operation_name, rename, set_status};
use crate::low_bit::{BYTES, round, widen};

/// Returns the id of the parameter in a [`Structure`].
pub(crate) fn parameter_id() -> TensorId {
    TensorId::new(0)
}

/// Returns the id of the gradient in a [`Structure`].
pub(crate) fn gradient_id() -> TensorId {
    TensorId::new(1)
}

/// Returns the id of this slot's state in a [`Structure`].
pub(crate) fn state_id(slot: usize) -> TensorId {
    TensorId::new(2 + slot as u64)
}

/// A tensor of an optimizer's state, identified across steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) name: Arc<str>,
    /// Shape of the whole tensor.
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    /// The format in which it is kept between steps, if it is rounded.
    pub(crate) format: Option<StateFormat>,
}

impl Slot {
    /// Returns the shape and type in which the whole tensor is kept between steps.
    pub(crate) fn kept(&self) -> (Vec<usize>, DType) {
        match self.format {
            None => (self.shape.clone(), self.dtype),
            Some(format) => (vec![format.num_bytes(self.shape.iter().product())], BYTES),
        }
    }

    /// Returns the tensor in the shape and type in which the optimizer computes with it.
    fn tensor(&self, id: TensorId) -> TensorIr {
        TensorIr {
            id,
            shape: self.shape.clone().into(),
            status: TensorStatus::ReadOnly,
            dtype: self.dtype,
        }
    }
}

/// The operations of one step of an optimizer on a parameter, regardless of the values of its host scalars.
///
/// Tensors are numbered: the parameter, its gradient, a number for each slot of the state, and then the results of the
/// operations, in their order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Structure {
    /// Operations, with zeros in place of their scalars.
    pub(crate) operations: Vec<OperationIr>,
    pub(crate) new_parameter: TensorId,
    /// The slots that the step writes, with their new values.
    pub(crate) new_states: Vec<(usize, TensorId)>,
}

impl Structure {
    /// Separates operations from their scalars. `known` maps the given tensors to their numbers. A new state that would
    /// share memory with another value is copied. States that are kept in fewer `bits` are widened first, and rounded
    /// last.
    pub(super) fn new(
        operations: Vec<OperationIr>,
        mut known: BTreeMap<TensorId, TensorId>,
        (slots, bits): (&[Slot], Option<LowBits>),
        new_parameter: TensorId,
        new_states: &[(usize, TensorId)],
    ) -> (Self, Vec<Vec<ScalarIr>>) {
        let num_slots = slots.len();
        let mut next = 2 + num_slots as u64;
        let mut fresh = || {
            next += 1;
            TensorId::new(next - 1)
        };
        let mut numbered = Vec::with_capacity(operations.len());
        for (index, slot) in slots.iter().enumerate() {
            let kept = state_id(index);
            let mut reads = known.values_mut().filter(|id| **id == kept).peekable();
            if let (Some(format), Some(_)) = (slot.format, reads.peek()) {
                let wide = fresh();
                reads.for_each(|id| *id = wide);
                let out = TensorIr::uninit(wide, slot.shape.clone().into(), slot.dtype);
                numbered.push(widen(format, kept, out));
            }
        }
        let mut tensors: BTreeMap<TensorId, TensorIr> = BTreeMap::new();
        for mut operation in operations {
            for output in operation.outputs() {
                known.entry(output.id).or_insert_with(&mut fresh);
            }
            rename(&mut operation, &known);
            set_status(&mut operation, |_| TensorStatus::ReadOnly);
            tensors.extend(operation.nodes().into_iter().map(|t| (t.id, t.clone())));
            numbered.push(operation);
        }
        let number = |id: TensorId| known.get(&id).copied().unwrap_or(id);
        let new_parameter = number(new_parameter);
        let mut taken = vec![new_parameter];
        let mut states = Vec::with_capacity(new_states.len());
        for (slot, from) in new_states {
            let from = number(*from);
            if let Some(bits) = bits {
                let (slot_of, into) = (&slots[*slot], fresh());
                numbered.push(round(bits, &slot_of.name, slot_of.tensor(from), into));
                states.push((*slot, into));
                continue;
            }
            let is_own = from == state_id(*slot);
            let is_given = from.value() < 2 + num_slots as u64 && from != gradient_id();
            let is_shared = taken.contains(&from) || is_given;
            let value = match tensors.get(&from).filter(|_| is_shared && !is_own) {
                Some(tensor) => {
                    let copy = fresh();
                    numbered.push(copy_of(tensor, copy));
                    copy
                }
                None => from,
            };
            taken.push(value);
            states.push((*slot, value));
        }
        let scalars = numbered.iter_mut().map(take_scalars).collect();
        let structure = Self {
            operations: numbered,
            new_parameter,
            new_states: states,
        };
        (structure, scalars)
    }

    /// Describes the first difference between this structure and another.
    pub(super) fn difference(&self, other: &Self) -> String {
        let name = |of: &Self, index: usize| of.operations.get(index).map(operation_name);
        let longest = self.operations.len().max(other.operations.len());
        let differs = |index: &usize| self.operations.get(*index) != other.operations.get(*index);
        match (0..longest).find(differs) {
            Some(index) => {
                let text = |name: Option<String>| name.unwrap_or_else(|| "none".to_owned());
                let (before, now) = (name(other, index), name(self, index));
                format!(
                    "operation {index} changed from {} to {}",
                    text(before),
                    text(now)
                )
            }
            None => "other operations compute its new states".to_owned(),
        }
    }
}

/// Creates an operation whose result has the same elements in separate memory.
fn copy_of(tensor: &TensorIr, copy: TensorId) -> OperationIr {
    let lhs = TensorIr {
        status: TensorStatus::ReadOnly,
        ..tensor.clone()
    };
    let out = TensorIr::uninit(copy, lhs.shape.clone(), lhs.dtype);
    let rhs = ScalarIr::Float(1.0);
    let operation = NumericOperationIr::MulScalar(ScalarOpIr { lhs, rhs, out });
    OperationIr::NumericFloat(tensor.dtype, operation)
}

/// Replaces the scalars of an operation with zeros, and returns them.
fn take_scalars(operation: &mut OperationIr) -> Vec<ScalarIr> {
    struct Take(Vec<ScalarIr>);
    impl IrVisitorMut for Take {
        fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
            self.0.push(*scalar);
            *scalar = ScalarIr::Float(0.0);
        }
    }
    let mut take = Take(Vec::new());
    operation.visit_mut(&mut take);
    take.0
}

/// Returns an operation with these scalars.
pub(crate) fn with_scalars(operation: &OperationIr, scalars: &[ScalarIr]) -> OperationIr {
    let mut node = Node::new(operation.clone(), Phase::Optimizer);
    node.set_scalar_values(scalars);
    node.operation
}
