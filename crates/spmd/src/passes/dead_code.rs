//! The pass that removes nodes whose results are not needed.
//!
//! It accepts any graph without drops.

use std::collections::BTreeSet;

use crate::error::Error;
use crate::graph::Graph;
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that removes nodes whose results are not needed.
///
/// Nodes that draw random numbers stay, because later draws depend on them. Collectives stay because other ranks take
/// part in them.
///
/// ```text
/// before                          after
/// %2 = Float.Exp(%1)              %3 = NumericFloat.Mean(%1)
/// %3 = NumericFloat.Mean(%1)      loss %3
/// loss %3
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct DeadCode;

impl GraphTransform for DeadCode {
    fn id(&self) -> PassId {
        PassId::DeadCode
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut wanted: BTreeSet<_> = graph.kept();
        let mut kept = Vec::new();
        for node in graph.take_nodes().into_iter().rev() {
            if node.is_opaque() || node.outputs().any(|output| wanted.contains(&output)) {
                wanted.extend(node.inputs());
                kept.push(node);
            }
        }
        kept.reverse();
        graph.set_nodes(kept);
        graph.prune();
        Ok(graph)
    }
}
