//! The pass that joins collectives.
//!
//! It joins collectives of parameters, gradients and the loss that are not split into start and wait.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_fsdp_mesh::ReduceOp;
use burn_ir::TensorId;

use super::complete_early::complete_early;
use super::unit::unit_in;
use crate::error::Error;
use crate::graph::{Collective, CollectiveKind, Graph, Node, Payload, Stage};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that joins collectives, to send many tensors in one operation.
///
/// All-gathers of a unit are joined at the first of them, reduce-scatters of a unit at the last, and all-reduces of all
/// units at the last of a bucket. A bucket is closed when the next tensor would make it larger than the cap. A tensor
/// larger than the cap gets a bucket to itself. The first bucket of each kind is smaller, to start communication early.
///
/// Before that, gradients are completed and reduced as soon as their operands are available, without waiting for
/// another unit's collectives.
///
/// ```text
/// before                                after
/// %9 = all_gather(%0) [fc.weight]       %9, %11 = all_gather(%0, %2) [fc]
/// %4 = Float.Matmul(%1, %9)             %4 = Float.Matmul(%1, %9)
/// %11 = all_gather(%2) [fc.bias]        %5 = NumericFloat.Add(%4, %11)
/// %5 = NumericFloat.Add(%4, %11)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// Maximum bytes of the first bucket of each kind: 1 MiB by default.
    pub first_bytes: usize,
    /// Maximum bytes of every other bucket: 25 MiB by default.
    pub cap_bytes: usize,
}

impl Default for Bucket {
    fn default() -> Self {
        Self {
            first_bytes: 1 << 20,
            cap_bytes: 25 << 20,
        }
    }
}

impl GraphTransform for Bucket {
    fn id(&self) -> PassId {
        PassId::Bucket
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives, PassId::Deduplicate]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Split, PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let nodes = complete_early(&mut graph);
        let buckets = self.assign(&graph, &nodes);
        // A bucket of gathers runs at its first member, and a bucket of reductions at its last.
        let mut runs_at: BTreeMap<usize, Vec<&Members>> = BTreeMap::new();
        // Another bucket may write a bucket's inputs. For example, the mean over replicas reads the mean over shards.
        let mut written_at: BTreeMap<TensorId, usize> = BTreeMap::new();
        for bucket in &buckets {
            let ends = (bucket.nodes.first(), bucket.nodes.last());
            let (Some(first), Some(last)) = ends else {
                continue;
            };
            // Parameters are given; other gathered values have to be written first.
            let is_given = bucket.key.payload == Payload::Parameter;
            let own = match bucket.key.kind {
                CollectiveKind::AllGather if is_given => *first,
                _ => *last,
            };
            let members = bucket.nodes.iter().map(|index| &nodes[*index]);
            let inputs = members.clone().flat_map(Node::inputs);
            let at = inputs.filter_map(|id| written_at.get(&id)).copied();
            let at = at.max().map_or(own, |written| written.max(own));
            written_at.extend(members.flat_map(Node::outputs).map(|id| (id, at)));
            runs_at.entry(at).or_default().push(bucket);
        }
        let mut scheduled = Vec::with_capacity(nodes.len());
        for (index, node) in nodes.iter().enumerate() {
            for bucket in runs_at.remove(&index).unwrap_or_default() {
                scheduled.push(bucket.join(&graph, &nodes, node)?);
            }
            if !node.collective.as_ref().is_some_and(can_join) {
                scheduled.push(node.clone());
            }
        }
        graph.set_nodes(scheduled);
        Ok(graph)
    }
}

/// The properties that collectives must share to be joined.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    kind: CollectiveKind,
    payload: Payload,
    axis: Arc<str>,
    reduction: Option<String>,
    unit: Option<Arc<str>>,
    /// The type of a reduction's results; `None` for other collectives.
    reduced: Option<String>,
}

/// The collectives that become one node.
struct Members {
    key: Key,
    nodes: Vec<usize>,
    num_bytes: usize,
}

impl Bucket {
    fn assign(&self, graph: &Graph, nodes: &[Node]) -> Vec<Members> {
        let mut closed = Vec::new();
        let mut open: BTreeMap<Key, Members> = BTreeMap::new();
        let mut begun: BTreeMap<CollectiveKind, usize> = BTreeMap::new();
        let mut visited: Option<Arc<str>> = None;
        for (index, node) in nodes.iter().enumerate() {
            let Some(collective) = &node.collective else {
                continue;
            };
            if !can_join(collective) {
                continue;
            }
            let key = key_of(graph, collective);
            if collective.kind == CollectiveKind::AllGather && key.unit != visited {
                // Another unit begins: its gathers are not joined with earlier ones.
                visited = key.unit.clone();
                let gathers = open
                    .keys()
                    .filter(|key| key.kind == CollectiveKind::AllGather);
                for key in gathers.cloned().collect::<Vec<_>>() {
                    closed.extend(open.remove(&key));
                }
            }
            let num_bytes = num_bytes(graph, node, collective);
            let begin = |begun: &mut BTreeMap<CollectiveKind, usize>| {
                *begun.entry(collective.kind).or_default() += 1;
                Members {
                    key: key.clone(),
                    nodes: Vec::new(),
                    num_bytes: 0,
                }
            };
            let members = open.entry(key.clone()).or_insert_with(|| begin(&mut begun));
            let is_first = begun.get(&collective.kind) == Some(&1);
            let limit = if is_first {
                self.first_bytes
            } else {
                self.cap_bytes
            };
            if !members.nodes.is_empty() && members.num_bytes + num_bytes > limit {
                closed.push(std::mem::replace(members, begin(&mut begun)));
            }
            members.nodes.push(index);
            members.num_bytes += num_bytes;
        }
        closed.extend(open.into_values());
        // Reduce-scatters to shards come before all-reduces of shards.
        closed.sort_by_key(|members| members.key.kind);
        closed
    }
}

/// Returns the bytes of the whole tensors of a collective, which count towards the cap of its bucket.
fn num_bytes(graph: &Graph, node: &Node, collective: &Collective) -> usize {
    // A gather's results are whole, and so are a reduction's operands.
    let whole: Vec<TensorId> = match collective.kind {
        CollectiveKind::AllGather => node.outputs().collect(),
        _ => node.inputs().collect(),
    };
    let parts = collective.parts.iter().zip(whole);
    let bytes =
        parts.map(|(part, id)| graph.sizes().elements(id, part.num_elements()) * part.dtype.size());
    bytes.sum()
}

/// Returns true if the collective may be joined with others: it is not split into start and wait, and does not carry
/// activations, which are read soon.
fn can_join(collective: &Collective) -> bool {
    collective.stage == Stage::Whole && collective.payload != Payload::Activation
}

fn key_of(graph: &Graph, collective: &Collective) -> Key {
    let unit = collective
        .parts
        .first()
        .map(|part| unit_in(graph, &part.path).into());
    let reduced = collective.parts.first();
    let reduced = reduced.filter(|_| collective.kind.contract().reduces);
    Key {
        kind: collective.kind,
        payload: collective.payload,
        axis: collective.axis.clone(),
        reduction: collective.reduction.map(|op: ReduceOp| op.to_string()),
        // All-reduces are joined across units, because they free no whole gradients.
        unit: unit.filter(|_| collective.kind != CollectiveKind::AllReduce),
        reduced: reduced.map(|part| format!("{:?}", part.result)),
    }
}

impl Members {
    /// Creates the node that replaces all members.
    fn join(&self, graph: &Graph, nodes: &[Node], at: &Node) -> Result<Node, Error> {
        let members: Vec<&Node> = self
            .nodes
            .iter()
            .filter_map(|index| nodes.get(*index))
            .collect();
        let collectives = members.iter().filter_map(|node| node.collective.as_ref());
        let collectives: Vec<&Collective> = collectives.collect();
        let Some(first) = collectives.first() else {
            return Err(Error::Internal("a bucket is empty".to_owned()));
        };
        let label: Arc<str> = match (&self.key.unit, collectives.len()) {
            (_, 1) => first.label.clone(),
            (Some(unit), n) => format!("{unit} ({} and {} more)", first.label, n - 1).into(),
            (None, n) => format!("{} and {} more", first.label, n - 1).into(),
        };
        let collective = Collective {
            label,
            parts: collectives.iter().flat_map(|c| c.parts.clone()).collect(),
            ..(*first).clone()
        };
        let inputs: Vec<TensorId> = members.iter().flat_map(|node| node.inputs()).collect();
        let outputs: Vec<TensorId> = members.iter().flat_map(|node| node.outputs()).collect();
        graph.collective_node(collective, &inputs, &outputs, at.phase)
    }
}
