//! Errors of scaling the loss.

use burn_fsdp_mesh::ScalingFault;

/// The reason why a loss cannot be scaled.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScaleError {
    /// A scaling option that is out of range.
    #[error(transparent)]
    Option(#[from] ScalingFault),

    /// A scale that has become too small, because gradients overflow at every scale.
    #[error(
        "gradients overflow at every scale of the loss down to {scale:e}, and the step was skipped; look for infinities \
         in the model or the batch, lower the learning rate, or compute in bf16"
    )]
    Vanished {
        /// The last scale.
        scale: f64,
    },

    /// A scaled loss in a step with a memory budget.
    #[error(
        "a step with a scaled loss has several graphs, for which a memory budget is not supported; use bf16, or choose \
         units with Options::recompute_units"
    )]
    Budget,

    /// A graph without a factor for its loss.
    #[error(
        "the graph was traced without a factor for its loss; trace it with TraceConfig::scales_loss"
    )]
    NotTraced,

    /// A step that does not scale its loss.
    #[error("this step does not scale its loss; compile it with Options::scale_loss")]
    Off,
}
