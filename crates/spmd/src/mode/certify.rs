//! The choice of which plans of a mode are proved.

/// The plans that are proved before they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Certify {
    /// None: the default of release builds.
    Never,
    /// Plans that take little work to prove: the default of debug builds.
    Small,
    /// All.
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
