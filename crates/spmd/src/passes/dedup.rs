//! The pass that merges equal collectives.
//!
//! It comes before [`Regather`](super::Regather), which repeats gathers on purpose.

use std::collections::{BTreeMap, HashMap};

use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Collective, CollectiveKind, Graph, Role, Stage, rename};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that merges equal collectives: the same operation on the same values along the same axis, such as
/// all-gathers of the same shard. Collectives that produce the gradients of different parameters stay separate.
///
/// A weight is then gathered at its first use and stays until its last use, in backward. [`Regather`](super::Regather)
/// frees it in between.
///
/// ```text
/// before                          after
/// %9 = all_gather(%0)             %9 = all_gather(%0)
/// %4 = Float.Matmul(%1, %9)       %4 = Float.Matmul(%1, %9)
/// %10 = all_gather(%0)            %5 = Float.Matmul(%4, %9)
/// %5 = Float.Matmul(%4, %10)
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Deduplicate;

impl GraphTransform for Deduplicate {
    fn id(&self) -> PassId {
        PassId::Deduplicate
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives]
    }

    fn before(&self) -> &'static [PassId] {
        // This pass would undo `Regather`.
        &[
            PassId::Regather,
            PassId::Bucket,
            PassId::Split,
            PassId::Liveness,
        ]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut seen: HashMap<(CollectiveKind, String, Vec<TensorId>), Vec<TensorId>> =
            HashMap::new();
        let mut same: BTreeMap<TensorId, TensorId> = BTreeMap::new();
        let kept = graph.kept();
        let mut scheduled = Vec::new();
        for mut node in graph.take_nodes() {
            rename(&mut node.operation, &same);
            if let Some(Collective {
                kind,
                axis,
                stage: Stage::Whole,
                reduction,
                parts,
                ..
            }) = &node.collective
            {
                let results = parts.iter().map(|part| part.result);
                let results: Vec<_> = results.collect();
                let key = (
                    *kind,
                    format!("{axis} {reduction:?} {results:?}"),
                    node.inputs().collect(),
                );
                let outputs: Vec<_> = node.outputs().collect();
                // The trace decided which parameters share a gradient, and steps rely on it.
                let is_gradient = |id: &TensorId| {
                    let role = graph.value(*id).map(|value| &value.role);
                    matches!(role, Some(Role::Gradient(_)))
                };
                let stays = |id: &TensorId| kept.contains(id) || is_gradient(id);
                match seen.get(&key) {
                    Some(first) if !outputs.iter().any(stays) => {
                        same.extend(outputs.into_iter().zip(first.iter().copied()));
                        continue;
                    }
                    _ => {
                        seen.insert(key, outputs);
                    }
                }
            }
            scheduled.push(node);
        }
        for parameter in graph.parameters_mut() {
            if let Some(gradient) = parameter.gradient.and_then(|id| same.get(&id)) {
                parameter.gradient = Some(*gradient);
            }
        }
        graph.set_nodes(scheduled);
        graph.prune();
        Ok(graph)
    }
}
