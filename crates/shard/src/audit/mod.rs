//! The audit of a step: each gradient of each parameter is summed exactly once over each group, and divided once.
//!
//! Every gradient of a parameter draws a [`Tag`], a random element of a prime field, which follows the gradient. Tags
//! are added where gradients are added, sent in the note of the reduction that carries the gradient, and scaled by the
//! reduction's factor. They arrive where the reduced gradient is passed to Burn. At the end of backward each rank tells
//! the others how many gradients it computed, so all of them know all tags. The tag that arrives must be the sum of
//! these tags, divided as the policy specifies. The [`Auditor`] of a rank compares the two; a difference becomes a
//! `Finding`.
//!
//! This module does not depend on units, tensors or process groups: parameters are numbered over all units of
//! a root.

mod auditor;
mod finding;
mod tag;

#[cfg(test)]
mod mutants;

pub(crate) use auditor::{Auditor, Due, Fault, Wanted};
pub(crate) use tag::{
    Tag, announce_more, announces_more, flags, is_flagged, scale_of, tag_of_sum, tags,
};

/// The steps whose gradients are audited. An audit checks that each gradient of each parameter was summed exactly once
/// over each group of ranks, and divided once. Its arithmetic is exact: random elements of a prime field stand for the
/// gradients.
///
/// An audited step issues no additional operation. If an audit fails, `backward` returns
/// [`Error::Audit`](crate::Error::Audit) on the ranks that hold the gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audit {
    /// No step.
    Off,
    /// The first step, and each step that follows an order of operations for the first time: the second step, and steps
    /// after units were switched or an operation was added or dropped.
    NewOrders,
    /// Every step.
    EveryStep,
}

/// [`NewOrders`](Self::NewOrders) in debug builds, otherwise [`Off`](Self::Off).
impl Default for Audit {
    fn default() -> Self {
        if cfg!(debug_assertions) {
            Self::NewOrders
        } else {
            Self::Off
        }
    }
}
