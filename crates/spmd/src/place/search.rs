//! Searches for placements of parameters with which a step moves few bytes: a descent over groups of parameters, which
//! may end at a local minimum.

use std::collections::BTreeMap;

use burn_fsdp_mesh::{Mesh, Pattern, Placement};

use super::expand::Expand;
use super::propagate::{ExpandPlacements, Signed};
use crate::Precision;
use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role, Trait, is};
use crate::trace::LOSS_FACTOR;

/// Maximum number of rounds. Each round tries every group of parameters.
const MAX_SWEEPS: usize = 3;

/// Finds placements of batch and parameters on one axis with which a step moves few bytes. The batch is sharded along
/// its first dim. Each parameter is replicated or sharded along the best dim, given the others. Parameters whose paths
/// differ only in numbers have equal placements. To save memory, parameters are sharded if that costs nothing.
///
/// `graph` comes from [`trace`](crate::trace::trace), over the joined batch.
///
/// # Errors
///
/// [`Error::Placement`] if the batch cannot be sharded; errors of the rules.
pub fn least_communication(graph: &Graph, mesh: &Mesh, axis: &str) -> Result<Expand, Error> {
    least_communication_with(graph, mesh, (axis, &[]), &Precision::default())
}

/// Like [`least_communication`], but inputs with names in `shared` are the same on all ranks, and gradients are sent in
/// the types of `precision`.
pub(crate) fn least_communication_with(
    graph: &Graph,
    mesh: &Mesh,
    (axis, shared): (&str, &[Pattern]),
    precision: &Precision,
) -> Result<Expand, Error> {
    // The bytes that a rank receives in a step; `None` if they exceed `limit`.
    let moved = |signed: &Signed, expand: &Expand, limit: f64| {
        let pass = ExpandPlacements::new(expand.clone(), mesh.clone());
        pass.precision(precision.clone()).received(signed, limit)
    };
    let inputs = cut_inputs(graph, axis, shared);
    let signed = &Signed::new(without_optimizer(graph));
    let mut groups: BTreeMap<String, Vec<Vec<usize>>> = BTreeMap::new();
    for parameter in graph.parameters() {
        if !parameter.is_buffer {
            let shapes = groups.entry(pattern_of(&parameter.path)).or_default();
            shapes.push(parameter.shape.clone());
        }
    }
    let num_ranks = mesh.axis(axis)?.size;
    let mut chosen: BTreeMap<String, Placement> = BTreeMap::new();
    let replicated = placed(&inputs, axis, &chosen);
    let mut least = moved(signed, &replicated, f64::INFINITY)?.unwrap_or(f64::INFINITY);
    for _ in 0..MAX_SWEEPS {
        let mut improved = false;
        for (pattern, shapes) in &groups {
            let now = chosen.get(pattern).copied();
            for dim in 0..shapes[0].len() {
                let placement = Placement::Shard(dim);
                let fits = shapes
                    .iter()
                    .all(|shape| shape.get(dim).is_some_and(|s| s.is_multiple_of(num_ranks)));
                if !fits || now == Some(placement) {
                    continue;
                }
                let mut other = chosen.clone();
                other.insert(pattern.clone(), placement);
                // Placements that the rules reject are skipped.
                let Ok(Some(bytes)) = moved(signed, &placed(&inputs, axis, &other), least) else {
                    continue;
                };
                let is_replicated = !chosen.contains_key(pattern);
                if bytes < least || bytes == least && is_replicated {
                    least = bytes;
                    chosen = other;
                    improved = true;
                }
            }
        }
        if !improved {
            break;
        }
    }
    Ok(placed(&inputs, axis, &chosen))
}

/// Returns the path with its numbers replaced with `*`.
fn pattern_of(path: &str) -> String {
    let names = path.split('.').map(|name| {
        let is_number = name.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { "*" } else { name }
    });
    names.collect::<Vec<_>>().join(".")
}

/// Returns placements that shard the batch along its first dim, except for inputs with names in `shared`.
pub(crate) fn cut_inputs(graph: &Graph, axis: &str, shared: &[Pattern]) -> Expand {
    let mut expand = Expand::new();
    for input in graph.inputs() {
        if let Some(value) = graph.value(*input)
            && let Role::Input(name) = &value.role
            && !value.shape.is_empty()
            && **name != *LOSS_FACTOR
            && !shared.iter().any(|pattern| pattern.matches(name))
        {
            expand = expand.input(name, axis, Placement::Shard(0));
        }
    }
    expand
}

fn placed(inputs: &Expand, axis: &str, chosen: &BTreeMap<String, Placement>) -> Expand {
    chosen
        .iter()
        .fold(inputs.clone(), |expand, (pattern, placement)| {
            expand.parameter(pattern, axis, *placement)
        })
}

/// Returns the graph without its optimizer if that is elementwise, which saves most of the nodes. An elementwise
/// optimizer communicates nothing, because states and redistributed gradients have their parameters' placements.
fn without_optimizer(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    let is_of_optimizer = |node: &Node| node.phase == Phase::Optimizer;
    let mut of_optimizer = graph.nodes().iter().filter(|node| is_of_optimizer(node));
    if !of_optimizer.all(|node| is(&node.operation, Trait::Elementwise)) {
        return graph;
    }
    let mut nodes = graph.take_nodes();
    nodes.retain(|node| !is_of_optimizer(node));
    graph.set_nodes(nodes);
    let mut updates = graph.updates().to_vec();
    updates.retain(|update| !graph.is_of_optimizer(update));
    *graph.updates_mut() = updates;
    graph
}
