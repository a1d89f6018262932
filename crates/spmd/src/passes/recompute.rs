//! The pass that recomputes cheap forward values in backward.
//!
//! In data parallelism, its input is a graph without collectives; later passes gather the weights that backward then
//! reads. With placements, its input is each rank's graph, and it also repeats gathers of activations.

use std::collections::{BTreeMap, BTreeSet};

use burn_ir::{BaseOperationIr, FloatOperationIr, OperationIr, TensorId};

use super::rewrite::repeat;
use crate::error::Error;
use crate::graph::{
    CollectiveKind, Graph, Node, Payload, Phase, Role, Stage, Storage, Trait, is, rename,
    storage_of,
};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that recomputes cheap values of forward in backward instead of keeping them in between.
///
/// Values are considered from the last to the first. A value is not kept if cheap operations compute it from values
/// that take less memory, not counting values that are kept anyway. Recomputed values are bit-identical.
///
/// A product of weights that together take less memory than the result, as in a low-rank adapter, counts as cheap.
/// Otherwise every layer would keep the whole weight into which an adapter is merged.
///
/// ```text
/// before                                  after
/// %3 = Float.Exp(%2)          forward     %3 = Float.Exp(%2)          forward
/// %4 = Float.Matmul(%3, %0)   forward     %4 = Float.Matmul(%3, %0)   forward
/// ...                                     ...
/// %9 = Float.Matmul(%8, %3)   backward    %12 = Float.Exp(%2)         backward
///                                         %9 = Float.Matmul(%8, %12)  backward
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recompute {
    /// Minimum size in bytes of a value to recompute, 4096 by default; smaller values are kept.
    pub min_bytes: usize,
}

impl Default for Recompute {
    fn default() -> Self {
        Self { min_bytes: 4096 }
    }
}

impl GraphTransform for Recompute {
    fn id(&self) -> PassId {
        PassId::Recompute
    }

    fn before(&self) -> &'static [PassId] {
        &[
            PassId::Regather,
            PassId::Bucket,
            PassId::Split,
            PassId::FusePointwise,
            PassId::SelectKernels,
            PassId::Liveness,
        ]
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        let chosen = Choice::new(&graph, self.min_bytes).choose();
        repeat_in_backward(graph, &chosen)
    }
}

/// Recomputes forward values right before backward first reads them, by repeating their nodes.
pub(super) fn repeat_in_backward(
    mut graph: Graph,
    chosen: &BTreeMap<TensorId, Node>,
) -> Result<Graph, Error> {
    let mut scheduled = Vec::new();
    let mut again: BTreeMap<TensorId, TensorId> = BTreeMap::new();
    for mut node in graph.take_nodes() {
        if node.phase == Phase::Backward {
            let wanted: Vec<_> = node.inputs().filter(|id| chosen.contains_key(id)).collect();
            for id in wanted {
                emit(&mut graph, chosen, id, &mut again, &mut scheduled)?;
            }
            rename(&mut node.operation, &again);
        }
        scheduled.push(node);
    }
    graph.set_nodes(scheduled);
    Ok(graph)
}

/// Schedules the node that recomputes a chosen value, preceded by the nodes that recompute its chosen inputs.
fn emit(
    graph: &mut Graph,
    chosen: &BTreeMap<TensorId, Node>,
    id: TensorId,
    again: &mut BTreeMap<TensorId, TensorId>,
    scheduled: &mut Vec<Node>,
) -> Result<(), Error> {
    let Some(node) = chosen.get(&id).filter(|_| !again.contains_key(&id)) else {
        return Ok(());
    };
    for input in node.inputs() {
        emit(graph, chosen, input, again, scheduled)?;
    }
    let mut copy = repeat(graph, node, again)?;
    copy.phase = Phase::Backward;
    scheduled.push(copy);
    Ok(())
}

struct Choice<'a> {
    graph: &'a Graph,
    writers: BTreeMap<TensorId, &'a Node>,
    /// The values of forward that backward reads, by the value that holds their memory.
    saved: BTreeMap<TensorId, BTreeSet<TensorId>>,
    /// Parameters, and the values of forward that are created only from parameters.
    of_weights: BTreeSet<TensorId>,
    min_bytes: usize,
    order: Vec<TensorId>,
}

impl<'a> Choice<'a> {
    fn new(graph: &'a Graph, min_bytes: usize) -> Self {
        let mut choice = Self {
            graph,
            writers: BTreeMap::new(),
            saved: BTreeMap::new(),
            of_weights: graph
                .values()
                .filter(|value| matches!(value.role, Role::Parameter(_)))
                .map(|value| value.id)
                .collect(),
            min_bytes,
            order: Vec::new(),
        };
        for node in graph.nodes() {
            let mut inputs = node.inputs().peekable();
            if inputs.peek().is_some() && inputs.all(|id| choice.of_weights.contains(&id)) {
                choice.of_weights.extend(node.outputs());
            }
            for id in node.outputs() {
                if node.phase == Phase::Forward {
                    choice.writers.insert(id, node);
                    choice.order.push(id);
                }
            }
        }
        for node in graph
            .nodes()
            .iter()
            .filter(|node| node.phase == Phase::Backward)
        {
            for id in node.inputs().filter(|id| choice.writers.contains_key(id)) {
                choice.saved.entry(choice.owner(id)).or_default().insert(id);
            }
        }
        choice
    }

    /// Returns the value whose memory a view shares, or the value itself if it is no view.
    fn owner(&self, mut id: TensorId) -> TensorId {
        while let Some(base) = self.writers.get(&id).and_then(|node| self.base(node)) {
            id = base;
        }
        id
    }

    /// Returns the base of the view that a node creates; `None` if it creates none. A reshape of a strided view copies.
    fn base(&self, node: &Node) -> Option<TensorId> {
        match storage_of(node) {
            Storage::View(base) if !is_reshape(node) || self.is_contiguous(base) => Some(base),
            _ => None,
        }
    }

    fn is_contiguous(&self, mut id: TensorId) -> bool {
        while let Some(node) = self.writers.get(&id) {
            match storage_of(node) {
                Storage::View(base) if is_reshape(node) => id = base,
                Storage::View(_) => return false,
                _ => return true,
            }
        }
        true
    }

    /// Returns true if recomputing costs no more than reading and writing memory. A gather of an activation is cheap if
    /// each rank's part is, so between two products each rank keeps only its part.
    fn is_cheap(&self, node: &Node) -> bool {
        let Some(collective) = &node.collective else {
            return is_cheap(node) || self.is_product_of_small_weights(node);
        };
        let is_gather = collective.kind == CollectiveKind::AllGather
            && collective.payload == Payload::Activation
            && collective.stage == Stage::Whole;
        let mut parts = node.inputs();
        is_gather && parts.all(|part| self.writers.get(&part).is_some_and(|maker| is_cheap(maker)))
    }

    fn is_product_of_small_weights(&self, node: &Node) -> bool {
        let is_product = matches!(
            node.operation,
            OperationIr::Float(_, FloatOperationIr::Matmul(_))
        );
        let bytes = |ids: &mut dyn Iterator<Item = TensorId>| -> usize {
            ids.map(|id| self.bytes(id)).sum()
        };
        is_product
            && node.inputs().all(|id| self.of_weights.contains(&id))
            && bytes(&mut node.inputs()) < bytes(&mut node.outputs())
    }

    fn bytes(&self, id: TensorId) -> usize {
        let value = self.graph.value(id);
        value.map_or(0, |value| {
            let sizes = self.graph.sizes();
            sizes.elements(id, value.num_elements()) * value.dtype.size()
        })
    }

    /// Chooses the values to recompute, with the nodes that recompute them.
    fn choose(mut self) -> BTreeMap<TensorId, Node> {
        let kept = self.graph.kept();
        let mut chosen = BTreeMap::new();
        for owner in self.order.clone().into_iter().rev() {
            let Some(readers) = self.saved.get(&owner).cloned() else {
                continue;
            };
            let maker = self.writers.get(&owner);
            let can_repeat = maker.is_some_and(|node| self.is_cheap(node));
            if kept.contains(&owner) || !can_repeat || self.bytes(owner) < self.min_bytes {
                continue;
            }
            let mut plan = Plan::default();
            let can_plan = readers.iter().all(|id| self.plan(*id, owner, &mut plan));
            let new: usize = plan
                .needs
                .iter()
                .filter(|id| !self.saved.contains_key(id))
                .map(|id| self.bytes(*id))
                .sum();
            if can_plan && new < self.bytes(owner) {
                self.saved.remove(&owner);
                for id in plan.needs {
                    self.saved.entry(id).or_default().insert(id);
                }
                chosen.extend(plan.nodes);
            }
        }
        chosen
    }

    /// Plans how to recompute a value from kept values through cheap operations. Returns false if that takes too many
    /// operations.
    fn plan(&self, id: TensorId, owner: TensorId, plan: &mut Plan) -> bool {
        const MOST: usize = 24;
        let Some(node) = self.writers.get(&id).copied() else {
            // Given.
            return true;
        };
        if plan.nodes.contains_key(&id) {
            return true;
        }
        let own = self.owner(id);
        if own == id && id != owner && (self.saved.contains_key(&id) || !self.is_cheap(node)) {
            plan.needs.insert(id);
            return true;
        }
        plan.nodes.insert(id, node.clone());
        plan.nodes.len() <= MOST && node.inputs().all(|input| self.plan(input, owner, plan))
    }
}

/// The nodes that recompute a value.
#[derive(Default)]
struct Plan {
    nodes: BTreeMap<TensorId, Node>,
    /// Values that must be kept for the recomputation.
    needs: BTreeSet<TensorId>,
}

fn is_reshape(node: &Node) -> bool {
    use BaseOperationIr as Base;
    match &node.operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            matches!(op, Base::Reshape(_))
        }
        _ => false,
    }
}

/// Returns true if recomputing an operation costs no more than reading and writing memory.
fn is_cheap(node: &Node) -> bool {
    if let Some(custom) = &node.custom {
        return custom.is_pure && custom.is_cheap;
    }
    is(&node.operation, Trait::Cheap)
}
