//! Errors of plans that were not proved.

use super::text::{At, Pass};
use crate::pass_id::PassId;

/// The reason why a plan was not proved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProofError {
    /// A plan whose list of operations differs from its twin's. The twin is the plan of the same step at small shapes,
    /// which can be proved.
    #[error(
        "the plan of the run differs from the one that can be proved at small shapes: after the pass \"{}\", {reason}{}; \
         {}",
        Pass(*pass),
        At(*node, operation.as_str()),
        of_twin(*pass)
    )]
    Twin {
        /// The first pass after which they differ; `None` if the traces do.
        pass: Option<PassId>,
        /// Index of the first node that differs, if any.
        node: Option<usize>,
        /// Description of that node.
        operation: String,
        /// Description of the difference.
        reason: String,
    },

    /// A plan that was not proved: see [`Mode::proved`](crate::Mode::proved).
    #[error(
        "the step has a plan of {nodes} operations that was not proved before the run: its batch has another shape, or \
         its optimizer another step; prove that plan as well, or skip the proof"
    )]
    Unproved {
        /// Number of operations in the plan.
        nodes: usize,
    },

    /// A step that must be [proved](crate::Mode::certified), but was compiled without a prover.
    #[error(
        "the mode requests a proof of each plan, but this step was compiled without a prover; compile it with \
         `burn_fsdp::compile::compile`, which proves plans, or leave out `Mode::certified`"
    )]
    NoProver,
}

/// Returns the advice for a plan that differs from its twin.
fn of_twin(pass: Option<PassId>) -> &'static str {
    match pass {
        None => {
            "choose small shapes at which the model runs the same operations: dims of one element must stay one, and \
             Burn's Linear over three or more dims multiplies few rows differently from many, unless their number is a \
             multiple of 32"
        }
        Some(_) => {
            "turn the pass off where an option allows it, or skip the proof, and report this"
        }
    }
}
