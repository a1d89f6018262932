//! The pass that moves the optimizer into backward.
//!
//! It runs after the insertion of collectives, and only moves nodes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Graph, Node, Phase};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that splits the optimizer by parameter and moves each part up to the point where its gradient is complete.
/// Gradients are then freed during backward instead of living until its end.
///
/// If backward still reads the parameter after that point, the part runs after the last read.
///
/// ```text
/// before                                  after
/// %9 = reduce_scatter(%7) backward        %9 = reduce_scatter(%7) backward
/// ... rest of backward ...                %12 = NumericFloat.Sub(%0, %9) optimizer
/// %12 = NumericFloat.Sub(%0, %9) opt.     ... rest of backward ...
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct EarlyOptimizer;

impl GraphTransform for EarlyOptimizer {
    fn id(&self) -> PassId {
        PassId::EarlyOptimizer
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let nodes = graph.take_nodes();
        let mut parts: BTreeMap<Arc<str>, Vec<Node>> = BTreeMap::new();
        let mut rest = Vec::new();
        for node in nodes {
            match (&node.path, node.phase) {
                (Some(path), Phase::Optimizer) => parts.entry(path.clone()).or_default().push(node),
                _ => rest.push(node),
            }
        }
        // The node after which each part may run: the last that writes its gradient or reads its parameter.
        let mut last: HashMap<TensorId, usize> = HashMap::new();
        for (index, node) in rest.iter().enumerate() {
            last.extend(node.inputs().map(|id| (id, index)));
        }
        let written: HashMap<TensorId, usize> = rest
            .iter()
            .enumerate()
            .flat_map(|(index, node)| node.outputs().map(move |id| (id, index)))
            .collect();
        let mut ready: BTreeMap<usize, Vec<Arc<str>>> = BTreeMap::new();
        for parameter in graph.parameters() {
            if !parts.contains_key(&parameter.path) {
                continue;
            }
            let read = last.get(&parameter.value).copied();
            let complete = parameter.gradient.and_then(|id| written.get(&id).copied());
            let at = read.max(complete).unwrap_or(rest.len().saturating_sub(1));
            ready.entry(at).or_default().push(parameter.path.clone());
        }
        let mut scheduled = Vec::new();
        for (index, node) in rest.into_iter().enumerate() {
            scheduled.push(node);
            for path in ready.remove(&index).unwrap_or_default() {
                scheduled.extend(parts.remove(&path).unwrap_or_default());
            }
        }
        scheduled.extend(parts.into_values().flatten());
        graph.set_nodes(scheduled);
        Ok(graph)
    }
}
