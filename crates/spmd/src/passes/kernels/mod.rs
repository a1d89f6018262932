//! The pass that puts kernels in place of what Burn composes of many operations.
//!
//! It takes the graph of one rank, or of each rank by placements, forward and backward, and leaves nodes that read less memory.

mod attention;
mod layer_norm;
mod likelihood;
mod pattern;
mod product;
mod rms_norm;
mod scaled;
mod silu;
mod softmax;
mod walk;

use burn_fsdp_kernels::FusedOperation;
use burn_ir::{ActivationOperationIr, OperationIr, ScalarIr, TensorIr};

use super::dead_code::DeadCode;
use super::verify::written_before_read;
use crate::error::Error;
use crate::graph::{Graph, Node};
use crate::kernels::{are_alike, fused_node};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;
use pattern::Patterns;

/// The pass that puts one operation of the crate `kernels` in place of what Burn composes of many, in any graph, forward and
/// backward: attention (with what dropout does to its probabilities), softmax, its logarithm and what a cross entropy reads of
/// it, layer norms, root-mean-square norms, GELU, SiLU and the products that it gates. Products that Burn makes one for each row
/// of a batch become one product each.
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
/// A function is replaced with its gradient or not at all: the operations of both must be those that Burn composes,
/// and no other may read what is between them. Values are those of the operations that are replaced, to about 1e-7 of the largest
/// of a row, and to a 256th of it in halves, which a kernel rounds once and the composed form at every step: sums are taken in
/// another order, and `exp` and `erf` are of the kernels' own.
///
/// In a graph whose values are placed it comes when they are: of what is cut, the operations that ranks combine stay as composed,
/// and so do products.
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
        // What units compute again comes where backward first reads it, which may be behind the first node of a pattern.
        let has_repeated = graph.applied().contains(&PassId::RecomputeUnits);
        let before = has_repeated.then(|| graph.clone());
        let mut graph = graph;
        let kinds: [Replace; 6] = [
            softmax::replace,
            // Of those, some are attention.
            attention::replace,
            // Of their logarithms, some are read for one class alone.
            likelihood::replace,
            layer_norm::replace,
            // Of what those left.
            rms_norm::replace,
            silu::replace,
        ];
        // Nobody says how the parts of a product lie that is made of another.
        let products = (!graph.is_placed()).then_some(product::replace as Replace);
        for replace in kinds.into_iter().chain(products) {
            let mut patterns = Patterns::new(graph);
            replace(&mut patterns)?;
            // What was replaced is read by nothing.
            graph = DeadCode.transform(patterns.finish())?;
        }
        let mut nodes = graph.take_nodes();
        nodes.iter_mut().for_each(use_gelu);
        graph.set_nodes(nodes);
        Ok(match before {
            Some(before) if written_before_read(&graph).is_some() => before,
            _ => graph,
        })
    }
}

/// What replaces one kind of function wherever it is found.
type Replace = fn(&mut Patterns) -> Result<(), Error>;

/// Replaces Burn's GELU, and its gradient, by a kernel.
fn use_gelu(node: &mut Node) {
    let (operation, inputs, out) = match &node.operation {
        OperationIr::Activation(ActivationOperationIr::Gelu(op)) => {
            (FusedOperation::Gelu, vec![op.input.clone()], &op.out)
        }
        OperationIr::Activation(ActivationOperationIr::GeluBackward(op)) => {
            let inputs = vec![op.lhs.clone(), op.rhs.clone()];
            (FusedOperation::GeluBackward, inputs, &op.out)
        }
        _ => return,
    };
    let out = out.clone();
    if are_alike(inputs.iter().chain([&out])) {
        put(node, operation, inputs, out, Vec::new());
    }
}

/// Puts a kernel in the place of a node.
pub(super) fn put(
    node: &mut Node,
    operation: FusedOperation,
    inputs: Vec<TensorIr>,
    out: TensorIr,
    scalars: Vec<ScalarIr>,
) {
    let (phase, path) = (node.phase, node.path.take());
    *node = fused_node(operation, (inputs, vec![out]), scalars, phase);
    node.path = path;
}
