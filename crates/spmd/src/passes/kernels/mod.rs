//! The pass that replaces compositions of many operations with kernels.
//!
//! It runs on the graph of one rank or, with placements, of each rank. Kernels read less memory.

mod product;
mod rewrite;

use burn_fsdp_kernels::{FusedOperation, KernelPattern, Replaced, are_alike};

use super::dead_code::DeadCode;
use super::verify::written_before_read;
use crate::error::Error;
use crate::graph::{Graph, Node};
use crate::kernels::fused_node;
use crate::pass_id::PassId;
use crate::transform::GraphTransform;
use rewrite::rewritten;

/// The pass that replaces functions that consist of many of Burn's operations, in forward and backward. Each becomes
/// one operation of [`burn_fsdp_kernels`]. The functions are attention (with dropout on its probabilities), softmax, its
/// logarithm and the elements of it that a cross entropy reads, layer norms, root-mean-square norms, GELU, SiLU and
/// SiLU-gated products. Products that Burn computes separately for each matrix of a batch become one product.
///
/// ```text
/// before                                      after
/// %111 = NumericFloat.MaxDim(%110)            %115 = models.softmax(%110)
/// %112 = NumericFloat.Sub(%110, %111)
/// %113 = Float.Exp(%112)
/// %114 = NumericFloat.SumDim(%113)
/// %115 = NumericFloat.Div(%113, %114)
/// ```
///
/// A function is replaced together with its gradient or not at all. Both must consist of exactly the operations that
/// Burn composes, and no other operation may read their intermediate values. Values differ from the replaced
/// operations' by at most about 1e-7 of the largest in a row, because sums are taken in a different order, and the
/// kernels have their own `exp` and `erf`. In 16 bits, they differ by at most a 256th of it, because a kernel rounds
/// once and the composed form rounds at every step.
///
/// In a graph whose values are placed, the pass runs after the placement. Products are not replaced then, nor are
/// operations over a sharded dim that ranks combine.
#[derive(Debug, Clone, Copy, Default)]
pub struct UseKernels;

impl GraphTransform for UseKernels {
    fn id(&self) -> PassId {
        PassId::UseKernels
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::CommonSubexpressions]
    }

    fn before(&self) -> &'static [PassId] {
        &[
            PassId::Recompute,
            PassId::Regather,
            PassId::Bucket,
            PassId::Split,
            PassId::FusePointwise,
            PassId::SelectKernels,
            PassId::Liveness,
        ]
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        // Units are recomputed at backward's first read, which may be after the first node of a pattern.
        let has_repeated = graph.applied().contains(&PassId::RecomputeUnits);
        let before = has_repeated.then(|| graph.clone());
        let mut graph = graph;
        for kernel in FusedOperation::ALL {
            graph = match kernel.record().pattern {
                KernelPattern::Steps(steps) => rewritten(graph, |all| steps.replace(all))?,
                KernelPattern::Found(replace) => rewritten(graph, replace)?,
                _ => continue,
            };
            // No node reads the results of the replaced nodes.
            graph = DeadCode.transform(graph)?;
        }
        // The placement of a product that is created from another product is unknown.
        if !graph.is_placed() {
            graph = DeadCode.transform(rewritten(graph, product::replace)?)?;
        }
        let mut nodes = graph.take_nodes();
        nodes.iter_mut().for_each(replace_one);
        graph.set_nodes(nodes);
        Ok(match before {
            Some(before) if written_before_read(&graph).is_some() => before,
            _ => graph,
        })
    }
}

/// Replaces a node with the kernel that stands for its operation alone.
fn replace_one(node: &mut Node) {
    let found = FusedOperation::ALL.into_iter().find_map(|kernel| {
        let KernelPattern::One(replaced) = kernel.record().pattern else {
            return None;
        };
        Some((kernel, replaced(&node.operation)?))
    });
    if let Some((kernel, call)) = found
        && are_alike(call.inputs.iter().chain([&call.output]))
    {
        put(node, kernel, call);
    }
}

/// Replaces a node with a kernel.
pub(super) fn put(node: &mut Node, kernel: FusedOperation, call: Replaced) {
    let (phase, path) = (node.phase, node.path.take());
    *node = fused_node(
        kernel,
        (call.inputs, vec![call.output]),
        call.scalars,
        phase,
    );
    node.path = path;
}
