//! Names of operations and groups.

use std::fmt;
use std::sync::Arc;

/// The name that a caller gives an operation or a group, such as `blocks.3 unshard`. Cheap to clone.
///
/// Errors and ledgers print it, and the ranks of a group must use the same label for the same operation.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Label(Arc<str>);

impl Label {
    /// Returns the text.
    #[inline]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<T: Into<Arc<str>>> From<T> for Label {
    fn from(text: T) -> Self {
        Self(text.into())
    }
}

impl From<&Label> for Label {
    fn from(label: &Label) -> Self {
        label.clone()
    }
}

/// Prints in quotes.
impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
