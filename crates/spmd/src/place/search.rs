//! The placement of parameters that moves the fewest bytes.

use std::collections::BTreeMap;

use burn_fsdp_mesh::{Mesh, Placement};

use super::expand::Expand;
use super::propagate::ExpandPlacements;
use crate::Error;
use crate::graph::{Graph, Role};

/// How often every group of parameters is tried.
const MAX_SWEEPS: usize = 3;

/// The placements of batch and parameters on one axis with which a step moves the fewest bytes: the batch
/// is cut along its first dim, and each parameter is replicated or cut along the dim that is best, given
/// the others. Parameters whose paths differ in numbers alone lie alike. Where cutting costs nothing,
/// parameters are cut, for the sake of memory.
///
/// `graph` is one of [`trace`](crate::trace::trace), over the joined batch.
///
/// # Errors
///
/// [`Error::Placement`] if the batch cannot be cut; errors of the rules.
pub fn least_communication(graph: &Graph, mesh: &Mesh, axis: &str) -> Result<Expand, Error> {
    let mut groups: BTreeMap<String, Vec<Vec<usize>>> = BTreeMap::new();
    for parameter in graph.parameters() {
        if !parameter.is_buffer {
            let shapes = groups.entry(pattern_of(&parameter.path)).or_default();
            shapes.push(parameter.shape.clone());
        }
    }
    let num_ranks = mesh.axis(axis)?.size;
    let mut chosen: BTreeMap<String, Placement> = BTreeMap::new();
    let mut least = moved(graph, mesh, axis, &chosen)?;
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
                // What the rules refuse is not chosen.
                let Ok(bytes) = moved(graph, mesh, axis, &other) else {
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
    Ok(expand(graph, axis, &chosen))
}

/// The path with its numbers left open.
fn pattern_of(path: &str) -> String {
    let names = path.split('.').map(|name| {
        let is_number = name.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { "*" } else { name }
    });
    names.collect::<Vec<_>>().join(".")
}

fn expand(graph: &Graph, axis: &str, chosen: &BTreeMap<String, Placement>) -> Expand {
    let mut expand = Expand::new();
    for input in graph.inputs() {
        if let Some(value) = graph.value(*input)
            && let Role::Input(name) = &value.role
            && !value.shape.is_empty()
        {
            expand = expand.input(name, axis, Placement::Shard(0));
        }
    }
    for (pattern, placement) in chosen {
        expand = expand.parameter(pattern, axis, *placement);
    }
    expand
}

fn moved(
    graph: &Graph,
    mesh: &Mesh,
    axis: &str,
    chosen: &BTreeMap<String, Placement>,
) -> Result<f64, Error> {
    let pass = ExpandPlacements {
        expand: expand(graph, axis, chosen),
        mesh: mesh.clone(),
    };
    Ok(pass.place(graph.clone())?.1)
}
