//! Nodes: the operations of a step, in the order in which they run.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use burn_ir::{IrVisitorMut, OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus};

use super::collective::Collective;
use super::draw::Draw;
use super::flops::Flops;
use super::operation::{Trait, is, operation_name};
use super::shift::AxisShift;
use super::value::Value;

/// An operation of the schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Burn's operation. [`OperationIr::Custom`] for collectives, [`OperationIr::Drop`] for drops.
    pub operation: OperationIr,
    /// The node's phase in the step.
    pub phase: Phase,
    /// The collective that the node runs, if it runs one.
    pub collective: Option<Collective>,
    /// Sources of the operation's scalars that change from step to step.
    pub scalars: Vec<ScalarSlot>,
    /// Path of the parameter that the node belongs to: for optimizer nodes, and operations on one parameter.
    pub path: Option<Arc<str>>,
    /// The part that each rank takes of a slice, or has of an optimizer state that it rounds; `None` for other operations,
    /// and for slices that are the same on all ranks.
    pub shift: Option<AxisShift>,
    /// The random numbers that the node draws from a seed; `None` for all other operations, and for numbers from the
    /// backend's generator.
    pub draw: Option<Draw>,
    /// Properties of a custom operation; `None` for all others, and before it is
    /// [described](crate::CustomOperations::describe).
    pub custom: Option<CustomProfile>,
}

/// The properties of a custom operation, for passes and plans.
///
/// By default it is pure, not cheap, and allocates new memory for its results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CustomProfile {
    /// True if equal operands produce equal results, without side effects. Such a node may be dropped, repeated, or
    /// merged with an equal one.
    pub is_pure: bool,
    /// True if the operation costs little more than reading and writing its operands. Backward may then recompute it
    /// instead of keeping its result.
    pub is_cheap: bool,
    /// Index of the input whose memory the first result overwrites. This requires that no other tensor shares that
    /// memory, and that the input covers all of it in row-major order. All other results have separate memory.
    pub written_over: Option<usize>,
    /// Number of arithmetic operations in a call.
    pub flops: Flops,
}

impl Default for CustomProfile {
    fn default() -> Self {
        Self {
            is_pure: true,
            is_cheap: false,
            written_over: None,
            flops: Flops::default(),
        }
    }
}

/// A phase of a train step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Computes the loss from the batch.
    Forward,
    /// Computes the gradients from the loss.
    Backward,
    /// Computes new parameters from the gradients.
    Optimizer,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
        })
    }
}

/// Host scalars of an optimizer operation, which are patched before each step.
///
/// The optimizer's step is recorded anew each time. The scalars come from its operation at `position`, for the node's
/// parameter ([`Node::path`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarSlot {
    /// Index of the operation in the optimizer's step.
    pub position: usize,
    /// Index of the first scalar among the node's scalars.
    pub first: usize,
    /// Number of scalars.
    pub len: usize,
    /// True if the scalars belong to the previous step, because the node was moved from there.
    pub is_of_before: bool,
}

impl Node {
    /// Creates a node in this phase, with all other fields empty.
    pub fn new(operation: OperationIr, phase: Phase) -> Self {
        Self {
            operation,
            phase,
            collective: None,
            scalars: Vec::new(),
            path: None,
            shift: None,
            draw: None,
            custom: None,
        }
    }

    /// Creates a node that drops a value.
    pub fn drop_of(value: TensorIr, phase: Phase) -> Self {
        let value = TensorIr {
            status: TensorStatus::ReadWrite,
            ..value
        };
        Self::new(OperationIr::Drop(value), phase)
    }

    /// Returns the ids of the values that the node reads, with repetitions.
    pub fn inputs(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.operation.inputs().map(|tensor| tensor.id)
    }

    /// Returns the ids of the values that the node writes.
    pub fn outputs(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.operation.outputs().map(|tensor| tensor.id)
    }

    /// Returns true if the node only frees a value.
    pub fn is_drop(&self) -> bool {
        matches!(self.operation, OperationIr::Drop(_))
    }

    /// Returns true if the result may depend on earlier operations or on other ranks. Such a node is never dropped,
    /// repeated or merged with another.
    pub fn is_opaque(&self) -> bool {
        match (&self.operation, &self.custom) {
            (OperationIr::Custom(_), custom) => !custom.is_some_and(|custom| custom.is_pure),
            (operation, _) => is(operation, Trait::Opaque),
        }
    }

    /// Returns the name of the operation, such as `Float.Matmul`.
    pub fn name(&self) -> String {
        match &self.collective {
            Some(collective) => collective.name(),
            None => operation_name(&self.operation),
        }
    }

    /// Returns the operation's scalars in Burn's order.
    pub fn scalar_values(&self) -> Vec<ScalarIr> {
        struct Collect(Vec<ScalarIr>);
        impl IrVisitorMut for Collect {
            fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
                self.0.push(*scalar);
            }
        }
        let mut collect = Collect(Vec::new());
        // Burn's visitor needs a mutable operation; the copy is dropped.
        self.operation.clone().visit_mut(&mut collect);
        collect.0
    }

    /// Replaces the operation's scalars. Returns false if the numbers of scalars differ; scalars without a replacement
    /// then stay unchanged.
    pub fn set_scalar_values(&mut self, scalars: &[ScalarIr]) -> bool {
        struct Patch<'a>(std::slice::Iter<'a, ScalarIr>, bool);
        impl IrVisitorMut for Patch<'_> {
            fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
                match self.0.next() {
                    Some(new) => *scalar = *new,
                    None => self.1 = false,
                }
            }
        }
        let mut patch = Patch(scalars.iter(), true);
        self.operation.visit_mut(&mut patch);
        patch.1 && patch.0.len() == 0
    }
}

/// Renames the tensors of an operation by `map`. Ids that are not in the map stay unchanged.
pub fn rename(operation: &mut OperationIr, map: &BTreeMap<TensorId, TensorId>) {
    struct Rename<'a>(&'a BTreeMap<TensorId, TensorId>);
    impl IrVisitorMut for Rename<'_> {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            if let Some(id) = self.0.get(&tensor.id) {
                tensor.id = *id;
            }
        }
    }
    operation.visit_mut(&mut Rename(map));
}

/// Sets the status of every tensor that an operation reads.
pub(crate) fn set_status(
    operation: &mut OperationIr,
    status: impl FnMut(TensorId) -> TensorStatus,
) {
    struct Mark<F>(F);
    impl<F: FnMut(TensorId) -> TensorStatus> IrVisitorMut for Mark<F> {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            if tensor.status != TensorStatus::NotInit {
                tensor.status = (self.0)(tensor.id);
            }
        }
    }
    operation.visit_mut(&mut Mark(status));
}

/// Sets the shape and type of every tensor of an operation from its value.
pub(super) fn set_values(operation: &mut OperationIr, values: &BTreeMap<TensorId, Value>) {
    struct Sync<'a>(&'a BTreeMap<TensorId, Value>);
    impl IrVisitorMut for Sync<'_> {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            if let Some(value) = self.0.get(&tensor.id) {
                tensor.shape = value.shape.clone().into();
                tensor.dtype = value.dtype;
            }
        }
    }
    operation.visit_mut(&mut Sync(values));
}
