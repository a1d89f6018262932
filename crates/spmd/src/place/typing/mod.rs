//! SPMD types: they describe how the ranks hold each value of a graph, and whether each node accepts its operands.
//!
//! Types follow from the types of given values, node by node, separately on each axis of the mesh. Type errors reveal a
//! wrong placement rule, a reduction that is missing, doubled or along the wrong axis, and an incomplete gradient that
//! reaches the optimizer, without running anything.

mod flow;
mod program;
mod spmd_type;
mod way;

use std::collections::BTreeMap;

use burn_ir::TensorId;

use crate::graph::{Carried, Graph, Owner};
pub(crate) use flow::check;
use flow::flow_of;
use spmd_type::SpmdType;

/// Returns the placements of a graph's values according to their types, one per axis. Types do not include the sharded
/// dim, so it is always 0. There is no placement for values that differ on each rank.
pub(crate) fn types_of(graph: &Graph) -> BTreeMap<TensorId, Carried> {
    let types = flow_of(graph).map_or_else(BTreeMap::new, |(flow, _)| flow.types);
    let placed = types.into_iter().map(|(id, types)| {
        let owner = types.iter().find_map(|of| of.owner());
        let on = types.into_iter().map(SpmdType::to_placement);
        let on = on.collect();
        (id, Carried { on, owner })
    });
    placed.collect()
}

/// Returns the owners of the values that only one rank has.
pub fn owned_of(graph: &Graph) -> BTreeMap<TensorId, Owner> {
    if !graph.has_owners() {
        return BTreeMap::new();
    }
    flow_of(graph).map_or_else(BTreeMap::new, |(flow, _)| flow.owned())
}
