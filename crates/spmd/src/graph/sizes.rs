//! The sizes that passes decide by.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_ir::TensorId;

use super::value::Value;

/// The numbers of elements that passes decide by. These are the values' own sizes, or, in a graph that represents the
/// same step at other shapes, the sizes at those shapes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sizes(Option<Arc<BTreeMap<TensorId, usize>>>);

impl Sizes {
    /// Returns the sizes of values. If a value occurs twice, the last one counts.
    pub(crate) fn of<'a>(values: impl Iterator<Item = &'a Value>) -> Self {
        let sizes = values.map(|value| (value.id, value.num_elements()));
        Self(Some(Arc::new(sizes.collect())))
    }

    /// Returns the number of elements of a value that passes decide by. `own` is its own number of elements.
    pub(crate) fn elements(&self, id: TensorId, own: usize) -> usize {
        let known = self.0.as_ref().and_then(|sizes| sizes.get(&id));
        known.copied().unwrap_or(own)
    }
}
