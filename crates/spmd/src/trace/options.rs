//! The settings that a trace takes from the mode of the step.

use burn_fsdp_mesh::Pattern;

use super::capture::Defaults;
use super::module::Stored;
use crate::Precision;

/// The settings that a trace takes from the mode of the step: types, and the names to keep.
#[derive(Debug, Clone, Default)]
pub(crate) struct TraceOptions {
    /// The default types of the device.
    pub(crate) defaults: Option<Defaults>,
    /// The types in which parameters compute.
    pub(crate) precision: Precision,
    /// True for a graph that reads a loss factor after the tensors of the batch.
    pub(crate) scales_loss: bool,
    /// Patterns of the activations with requested placements.
    pub(crate) activations: Vec<Pattern>,
    /// Stored types of the module's tensors; empty unless new tensors have the parameters' compute type.
    pub(crate) stored: Stored,
}
