//! The root: one per rank and sharded module. It owns the order of operations, the token of the
//! pass under way, the gradients on their way to the shards, and the buffers.
//!
//! - `state`: the root, and the state of its step; in parts: `pass` (the units that forward has used), `order`
//!   (what comes next), `accumulate` (gradients that wait), `reductions` (those on their way).
//! - `gather` and `reduce`: one of each; `arrival`: what goes into a reduction and comes out; `hooked`: those that
//!   the policy's hook makes.
//! - `audited` and `audit`: what is known of a step, and whether each gradient was summed and divided once.
//! - `advance`: operations in the order that all ranks have.
//! - `evaluation`: one in which ranks use different units; `routes`: what a root asks it before a gather.
//! - `forward` and `backward`: the two parts of a step. `access`: the calls of the autodiff nodes to them.

mod access;
mod accumulate;
mod advance;
mod arrival;
mod audit;
mod audited;
mod backward;
mod evaluation;
mod forward;
mod gather;
mod hooked;
mod order;
mod pass;
mod reduce;
mod reductions;
mod routes;
mod ruler;
mod state;

pub(crate) use evaluation::{Evaluable, Evaluation, are_equal};
pub(crate) use pass::Place;
pub(crate) use state::Root;
