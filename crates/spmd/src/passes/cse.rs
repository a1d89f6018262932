//! The pass that merges equal operations.
//!
//! It requires a graph without collectives, and never merges operations of different phases.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use burn_ir::{IrVisitorMut, OperationIr, TensorId, TensorIr, TensorStatus};

use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role, rename};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that merges equal values: constants with equal data, and equal operations on equal inputs in the same
/// phase.
///
/// Parameters, inputs and states are never merged, regardless of their values; nor are random numbers, collectives,
/// gradients, and optimizer operations. Operations in different phases are not merged, because a value that forward and
/// backward both compute would otherwise be kept in between.
///
/// ```text
/// before                          after
/// %2 = Float.Exp(%1)              %2 = Float.Exp(%1)
/// %3 = Float.Exp(%1)              %4 = NumericFloat.Add(%2, %2)
/// %4 = NumericFloat.Add(%2, %3)
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct CommonSubexpressions;

impl GraphTransform for CommonSubexpressions {
    fn id(&self) -> PassId {
        PassId::CommonSubexpressions
    }

    fn before(&self) -> &'static [PassId] {
        &[
            PassId::InsertCollectives,
            PassId::RecomputeUnits,
            PassId::Recompute,
            PassId::Liveness,
        ]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let kept = graph.kept();
        let mut same: BTreeMap<TensorId, TensorId> = BTreeMap::new();
        merge_constants(&graph, &mut same);
        // Only looked up, never iterated: the order of its keys differs between ranks.
        let mut seen: HashMap<u64, Vec<(Phase, OperationIr, Vec<TensorId>)>> = HashMap::new();
        let mut scheduled = Vec::new();
        for mut node in graph.take_nodes() {
            rename(&mut node.operation, &same);
            let outputs: Vec<_> = node.outputs().collect();
            let is_own = |id: &TensorId| {
                let role = graph.value(*id).map(|value| &value.role);
                kept.contains(id) || matches!(role, Some(Role::Gradient(_)))
            };
            let can_merge =
                !node.is_opaque() && node.phase != Phase::Optimizer && !outputs.iter().any(is_own);
            if can_merge {
                let operation = without_outputs(&node);
                let alike = seen.entry(hash_of(&operation)).or_default();
                let first = alike
                    .iter()
                    .find(|(phase, other, _)| (*phase, other) == (node.phase, &operation));
                if let Some((.., first)) = first {
                    same.extend(outputs.into_iter().zip(first.iter().copied()));
                    continue;
                }
                alike.push((node.phase, operation, outputs));
            }
            scheduled.push(node);
        }
        graph.set_nodes(scheduled);
        graph.prune();
        Ok(graph)
    }
}

fn hash_of(operation: &OperationIr) -> u64 {
    let mut hasher = DefaultHasher::new();
    operation.hash(&mut hasher);
    hasher.finish()
}

fn merge_constants(graph: &Graph, same: &mut BTreeMap<TensorId, TensorId>) {
    let mut firsts: HashMap<(Vec<usize>, &[u8]), TensorId> = HashMap::new();
    for (id, data) in graph.constants() {
        let key = (data.shape().to_vec(), data.as_bytes());
        let first = *firsts.entry(key).or_insert(*id);
        let is_equal = graph
            .constants()
            .get(&first)
            .is_some_and(|other| other.dtype() == data.dtype());
        if first != *id && is_equal {
            same.insert(*id, first);
        }
    }
}

fn without_outputs(node: &Node) -> OperationIr {
    struct Blank;
    impl IrVisitorMut for Blank {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            if tensor.status == TensorStatus::NotInit {
                tensor.id = TensorId::new(u64::MAX);
            }
        }
    }
    let mut operation = node.operation.clone();
    operation.visit_mut(&mut Blank);
    operation
}
