//! The root, one per rank and sharded module. It owns the order of operations, the token of the current pass, the
//! gradients in transit to the shards, and the buffers.
//!
//! - `state`: the root, and the state of its step. Its parts are `pass` (the units that forward has used), `order` (the
//!   next operations), `known` (tensors that no unit manages), `accumulate` (gradients that wait), `reductions` (gradients
//!   in transit).
//! - `gather` and `reduce`: one gather and one reduction. `arrival`: inputs and results of a reduction. `hooked` and
//!   `by_hook`: reductions by the policy's hooks.
//! - `early`: units that the optimizer steps before backward ends. `steps`: the optimizer, and these units.
//! - `audited` and `audit`: the data for the audit of a step, and the check that each gradient was summed and
//!   divided once.
//! - `advance`: operations in the order common to all ranks.
//! - `evaluation`: an evaluation in which ranks use different units. `routes`: the root's interface to it
//!   before a gather.
//! - `forward` and `backward`: the two parts of a step. `access`: the calls from the autodiff nodes. `reading`: forwards
//!   without autodiff.

mod access;
mod accumulate;
mod advance;
mod arrival;
mod audit;
mod audited;
mod backward;
mod by_hook;
mod delivery;
mod early;
mod evaluation;
mod forward;
mod gather;
mod hooked;
mod known;
mod order;
mod pass;
mod reading;
mod reduce;
mod reductions;
mod routes;
mod ruler;
mod state;
mod steps;

pub(crate) use evaluation::{Evaluable, Evaluation, are_equal};
pub(crate) use known::{Known, Named};
pub(crate) use pass::Place;
pub(crate) use state::Root;
pub(crate) use steps::Steps;
