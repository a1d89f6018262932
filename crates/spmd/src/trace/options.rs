//! What a trace takes from the mode of the step.

use burn_fsdp_mesh::Pattern;

use super::capture::Defaults;
use super::module::Stored;
use crate::Precision;

/// What a trace takes from the mode of the step: types, and the names that it keeps.
#[derive(Debug, Clone, Default)]
pub(crate) struct TraceOptions {
    /// The default types of the device.
    pub(crate) defaults: Option<Defaults>,
    /// The types in which parameters compute.
    pub(crate) precision: Precision,
    /// True for a graph that takes a factor of the loss, behind the tensors of the batch.
    pub(crate) scales_loss: bool,
    /// The activations of which placements are asked.
    pub(crate) activations: Vec<Pattern>,
    /// The types in which the module's tensors are stored, where new ones are of another.
    pub(crate) stored: Stored,
}
