//! The pass that replaces weights in operations that need only their shape.
//!
//! It runs before gathers are inserted, so weights that are not read are not gathered.

use burn_ir::{BaseOperationIr, CreationOpIr, ModuleOperationIr, OperationIr, ShapeOpIr, TensorIr};

use crate::error::Error;
use crate::graph::{Graph, Node, Role};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that replaces weights with one expanded element in operations that need only their shape. Otherwise
/// backward would keep or gather weights that it does not read.
///
/// ```text
/// before                                    after
/// %7 = EmbeddingBackward(%w, %5, %6)        %8 = Zeros()              f32[1, 1]
///                                           %9 = Expand(%8)           f32[1000, 64]
///                                           %7 = EmbeddingBackward(%9, %5, %6)
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct StandIns;

impl GraphTransform for StandIns {
    fn id(&self) -> PassId {
        PassId::StandIns
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives, PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut scheduled = Vec::new();
        for mut node in graph.take_nodes() {
            let phase = node.phase;
            if let OperationIr::Module(ModuleOperationIr::EmbeddingBackward(op)) =
                &mut node.operation
            {
                let weights = &op.weights;
                let ones = vec![1; weights.shape.num_dims()];
                let element = graph.add_value(ones, weights.dtype, Role::Temporary);
                let shape = weights.shape.to_vec();
                let whole = graph.add_value(shape, weights.dtype, Role::Temporary);
                let out = graph.write(element)?;
                let zeros = OperationIr::BaseFloat(BaseOperationIr::Zeros(CreationOpIr { out }));
                let expand = OperationIr::BaseFloat(BaseOperationIr::Expand(ShapeOpIr {
                    input: graph.read(element)?,
                    out: graph.write(whole)?,
                }));
                scheduled.extend([Node::new(zeros, phase), Node::new(expand, phase)]);
                op.weights = TensorIr {
                    id: whole,
                    ..op.weights.clone()
                };
            }
            scheduled.push(node);
        }
        graph.set_nodes(scheduled);
        Ok(graph)
    }
}
