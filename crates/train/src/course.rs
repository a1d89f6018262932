//! The settings of a training run that all ranks share.

use std::ops::RangeInclusive;
use std::sync::Arc;

use burn::train::{Interrupter, LearnerModel};

use crate::outputs::Outputs;
use crate::settings::Settings;

/// The settings that all ranks share.
#[derive(Clone)]
pub(crate) struct Course<M: LearnerModel> {
    pub(crate) settings: Settings,
    pub(crate) among: Ranks,
    pub(crate) epochs: RangeInclusive<usize>,
    /// Number of batches that each rank accumulates per optimizer step, if it accumulates.
    pub(crate) accumulation: Option<usize>,
    /// True if epochs may be saved as checkpoints.
    pub(crate) saves: bool,
    /// The number of items in an epoch, over all ranks.
    pub(crate) items: usize,
    pub(crate) validated_items: usize,
    pub(crate) interrupter: Interrupter,
    pub(crate) outputs: Arc<Outputs<M>>,
}

/// Whether ranks are threads or processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// Threads of this process, which share one instance of Burn's loop.
    Threads,
    /// Processes, each with its own loop; rank 0's loop represents all.
    Processes,
}
