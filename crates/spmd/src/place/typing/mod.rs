//! SPMD types: what the ranks hold of every value of a graph, and whether each node may have it.
//!
//! Types follow from those of given values, node by node, on each axis of the mesh by itself. A rule that places a value
//! wrongly, a reduction that is missing, made twice or along another axis, and a gradient that reaches the optimizer
//! before it is complete have no type, and are found without running anything.

mod flow;
mod program;
mod spmd_type;

pub(crate) use flow::check;
use spmd_type::SpmdType;
