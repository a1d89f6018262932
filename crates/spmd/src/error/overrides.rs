//! Errors of modules that are traced in place of a step's module.

/// The reason why a module cannot be traced in place of the step's module.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OverrideError {
    /// A parameter or buffer that the module lacks.
    #[error(
        "the module of an override has no \"{path}\", but the step's module does; an override must keep all parameters \
         under the same paths: keep the part that contains it, or compile another model"
    )]
    Lacks {
        /// The path.
        path: String,
    },

    /// A parameter or buffer that has another type, shape or kind in the module.
    #[error(
        "an override changes parameter \"{path}\" from {expected} to {got}; replace parts only with ones that have the \
         same parameters under the same paths"
    )]
    Differs {
        /// The path.
        path: String,
        /// Type, shape and kind in the step's module.
        expected: String,
        /// Type, shape and kind in the module of the override.
        got: String,
    },
}
