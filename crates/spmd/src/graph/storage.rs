//! The memory of a node's outputs: newly allocated, or shared with an input.

use burn_ir::TensorId;

use super::collective::Stage;
use super::node::Node;
use super::operation::{Trait, is};

/// The memory of a node's outputs, on a backend with strided views such as Flex.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Storage {
    /// Separate memory, unless the backend reuses the memory of an input that it may overwrite.
    New,
    /// The memory of this input, which the output keeps alive.
    View(TensorId),
    /// For each output, the memory of the input with the same index.
    Same,
    /// No memory: the node writes nothing.
    None,
}

/// Returns the memory of the outputs of a node.
///
/// `Reshape` counts as [`Storage::View`], although a backend copies if the strides of the input do not allow a view.
pub fn storage_of(node: &Node) -> Storage {
    if let Some(collective) = &node.collective {
        return match collective.stage {
            Stage::Wait => Storage::Same,
            Stage::Whole | Stage::Start => Storage::New,
        };
    }
    let operation = &node.operation;
    if node.is_drop() {
        return Storage::None;
    }
    let ends = (operation.inputs().next(), operation.outputs().next());
    match ends {
        (Some(input), Some(output)) => {
            let is_same = is(operation, Trait::Cast) && input.dtype == output.dtype;
            if is_same || is(operation, Trait::View) {
                Storage::View(input.id)
            } else {
                Storage::New
            }
        }
        _ => Storage::New,
    }
}
