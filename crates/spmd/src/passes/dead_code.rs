use std::collections::BTreeSet;

use super::GraphTransform;
use crate::Error;
use crate::graph::Graph;

/// Removes nodes whose results nothing needs.
///
/// Nodes that draw random numbers stay, because the numbers drawn after them depend on it, and so do
/// collectives, because other ranks take part in them.
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
    fn name(&self) -> &'static str {
        "dead code"
    }

    fn before(&self) -> &'static [&'static str] {
        &["liveness"]
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
