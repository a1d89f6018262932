//! The sizes on which passes base decisions.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_ir::TensorId;

use super::value::Value;

/// The numbers of elements on which passes base decisions. By default these are the values' own. In a graph that
/// represents the same step at other shapes, they are the numbers at those shapes.
#[derive(Debug, Clone, Default)]
pub struct Sizes(Option<Arc<BTreeMap<TensorId, usize>>>);

impl Sizes {
    /// Returns the sizes of values. If a value occurs twice, the last one counts.
    pub fn of<'a>(values: impl Iterator<Item = &'a Value>) -> Self {
        let sizes = values.map(|value| (value.id, value.num_elements()));
        Self(Some(Arc::new(sizes.collect())))
    }

    /// Returns the number of elements by which passes judge a value: the recorded one, or else `own`, the value's own.
    pub fn elements(&self, id: TensorId, own: usize) -> usize {
        let known = self.0.as_ref().and_then(|sizes| sizes.get(&id));
        known.copied().unwrap_or(own)
    }
}
