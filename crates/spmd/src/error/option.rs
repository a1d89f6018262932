//! Errors of options that do not fit the step.

/// The reason why an option does not fit the step.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// Gradient clipping with an invalid limit or norm.
    #[error(
        "gradients cannot be clipped with {clip:?}; use a nonnegative maximum norm, and an order of at least 1 or \
         Norm::Infinity"
    )]
    Clip {
        /// The requested clipping.
        clip: burn_fsdp_mesh::Clip,
    },

    /// A loss that cannot be computed in parts.
    #[error(
        "the loss cannot be computed in {chunks} parts: {reason}; leave out Options::loss_chunks \
         (`--loss-chunks`)"
    )]
    LossChunks {
        /// The requested number of parts.
        chunks: usize,
        /// The reason.
        reason: String,
    },
}
