//! Which operations make new memory.

use burn_ir::{BaseOperationIr, OperationIr, TensorId};

use super::{Node, Stage};

/// Where the outputs of a node lie, on a backend with strided views such as Flex.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Storage {
    /// In memory of their own, unless the backend reuses that of an input it may take.
    New,
    /// In the memory of this input: the output keeps it alive.
    View(TensorId),
    /// Each output in the memory of the input at the same place.
    Same,
    /// Nothing is written.
    None,
}

/// Where the outputs of a node lie.
///
/// `Reshape` is a view only where the strides of its input allow it; [`Storage::View`] is then the
/// usual case, and a backend may copy instead.
pub fn storage_of(node: &Node) -> Storage {
    if let Some(collective) = &node.collective {
        return match collective.stage {
            Stage::Wait => Storage::Same,
            Stage::Whole | Stage::Start => Storage::New,
        };
    }
    let base = match &node.operation {
        OperationIr::Drop(_) => return Storage::None,
        OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base) => {
            base
        }
        _ => return Storage::New,
    };
    match base {
        BaseOperationIr::Reshape(op) => Storage::View(op.input.id),
        BaseOperationIr::Expand(op) => Storage::View(op.input.id),
        BaseOperationIr::SwapDims(op) => Storage::View(op.input.id),
        BaseOperationIr::Permute(op) => Storage::View(op.input.id),
        BaseOperationIr::Slice(op) => Storage::View(op.tensor.id),
        BaseOperationIr::Unfold(op) => Storage::View(op.input.id),
        BaseOperationIr::Cast(op) if op.input.dtype == op.out.dtype => Storage::View(op.input.id),
        _ => Storage::New,
    }
}
