//! The choice of which plans of a mode are proved.

/// The plans that are proved before they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Certify {
    Never,
    /// Plans that take little work to prove: the default of debug builds.
    Small,
    Always,
}

impl Default for Certify {
    fn default() -> Self {
        if cfg!(debug_assertions) {
            Self::Small
        } else {
            Self::Never
        }
    }
}

/// Replaces a pass with one that does the same, except for a fault.
#[cfg(test)]
pub(crate) type Planted =
    fn(Box<dyn crate::transform::GraphTransform>) -> Box<dyn crate::transform::GraphTransform>;
