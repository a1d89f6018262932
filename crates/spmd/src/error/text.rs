//! Texts of errors.

use crate::pass_id::PassId;

/// Returns advice on an operation that cannot be captured.
pub(super) fn advice(reason: &str, produced_by: Option<&str>) -> &'static str {
    // Burn panics with this text, and has no error type for it.
    if reason.contains("seeding is not supported") {
        "seed before `compile`, which draws the initial values on rank 0 from the seed at that time"
    } else if reason.contains("do not support autodiff") {
        "inner(), valid() and from_inner() cannot be captured: use detach() for values without a gradient, or train this \
         model with the eager engine (fully_shard)"
    } else if reason.contains("DTypeMismatch") || reason.contains("dtype mismatch") {
        "tensors of two types met: with `Options::precision` the parameters have the compute type, so cast the batch to \
         it in the loss (and back around layers that compute in full precision)"
    } else if reason.contains("to a capture device with autodiff") {
        "do not move tensors between devices in the loss, or train this model with the eager engine (fully_shard)"
    } else if produced_by.is_some_and(|operation| operation.contains("Any")) {
        "the loss tests whether any element holds, as one_hot does with its indices: compare with Tensor::arange instead \
         of one_hot, keep values on the device in `init` and in the loss, or train this model with the eager engine (fully_shard)"
    } else {
        "keep values on the device in `init` and in the loss, or train this model with the eager engine (fully_shard)"
    }
}

/// Lists the known names.
pub(super) struct Known<'a>(pub(super) &'a String);

impl std::fmt::Display for Known<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.as_str() {
            "" => f.write_str("there are none"),
            known => write!(f, "use one of {known}"),
        }
    }
}

/// Names the operation that produced a value.
pub(super) struct Produced<'a>(pub(super) &'a Option<String>);

impl std::fmt::Display for Produced<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(operation) => write!(f, " (the value comes from {operation})"),
            None => Ok(()),
        }
    }
}

/// Names the pass after which a graph is wrong.
pub(super) struct After<'a>(pub(super) &'a Option<PassId>);

impl std::fmt::Display for After<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(pass) => write!(f, " after pass {pass}"),
            None => Ok(()),
        }
    }
}

/// Names a pass in a sentence.
pub(super) struct Pass(pub(super) Option<PassId>);

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(pass) => write!(f, "{pass}"),
            None => f.write_str("trace"),
        }
    }
}

/// Names the faulty node, if it is known.
pub(super) struct At<'a>(pub(super) Option<usize>, pub(super) &'a str);

impl std::fmt::Display for At<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(node) => write!(f, ", first at node {node} ({})", self.1),
            None => Ok(()),
        }
    }
}
