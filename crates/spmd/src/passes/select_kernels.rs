//! The pass that selects kernels for single operations of Burn.

use burn_fsdp_kernels::{FusedOperation, KernelPattern, Replaced};

use super::kernels::put;
use crate::error::Error;
use crate::graph::{Graph, Node, Sizes};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that selects kernels for matrix products, for casts to `bf16` and back, and for sums along any dim except
/// the last, of `bf16` or of many elements. Each computes the same function as the operation that it replaces.
///
/// ```text
/// before                                 after
/// %4 = Float.Matmul(%1, %9)              %4 = models.matmul(%1, %9)
/// ```
///
/// Burn's CPU backend fills the memory of a product with zeros before it writes there, copies the product to aligned
/// memory, and processes `bf16` element by element. Results are bit-identical, except for `bf16` products. Both sum in
/// 32 bits, but the kernel does not convert the factors first, so it adds in a different order.
///
/// The pass runs after collectives are placed, because the passes that place them only handle Burn's operations. Typing
/// treats such a kernel as the operation that it replaces.
#[derive(Debug, Clone, Copy, Default)]
pub struct SelectKernels;

impl GraphTransform for SelectKernels {
    fn id(&self) -> PassId {
        PassId::SelectKernels
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut nodes = graph.take_nodes();
        for node in &mut nodes {
            if let Some((kernel, call)) = kernel_for(node, graph.sizes()) {
                put(node, kernel, call);
            }
        }
        graph.set_nodes(nodes);
        Ok(graph)
    }
}

/// Returns the call of the kernel that replaces a node; `None` if the node stays.
fn kernel_for(node: &Node, sizes: &Sizes) -> Option<(FusedOperation, Replaced)> {
    if node.collective.is_some() || node.shift.is_some() || !node.scalars.is_empty() {
        return None;
    }
    let first = node.operation.inputs().next();
    let num_elements = first.map_or(0, |first| {
        sizes.elements(first.id, first.shape.num_elements())
    });
    FusedOperation::ALL.into_iter().find_map(|kernel| {
        let KernelPattern::Placed(replaced) = kernel.record().pattern else {
            return None;
        };
        Some((kernel, replaced(&node.operation, num_elements)?))
    })
}
