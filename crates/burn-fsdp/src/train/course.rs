//! What all ranks of a training do.

use std::ops::RangeInclusive;
use std::sync::Arc;

use burn::train::{Interrupter, LearnerModel};

use crate::train::outputs::Outputs;
use crate::train::settings::Settings;

/// What all ranks do.
#[derive(Clone)]
pub(crate) struct Course<M: LearnerModel> {
    pub(crate) settings: Settings,
    pub(crate) among: Ranks,
    pub(crate) epochs: RangeInclusive<usize>,
    /// Batches of a rank whose gradients make one step.
    pub(crate) accumulation: Option<usize>,
    /// True if epochs may be saved.
    pub(crate) saves: bool,
    /// The items of an epoch, of all ranks.
    pub(crate) items: usize,
    pub(crate) validated_items: usize,
    pub(crate) interrupter: Interrupter,
    pub(crate) outputs: Arc<Outputs<M>>,
}

/// What ranks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// Of this process, which has one of all that Burn's loop has.
    Threads,
    /// Each with a loop of its own, of which rank 0's speaks for all.
    Processes,
}
