//! The sizes by which passes decide.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_ir::TensorId;

use super::value::Value;

/// The numbers of elements by which passes decide what is worth it: those of the values, or, in a graph that stands for the same
/// step at other shapes, those that its values have there.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sizes(Option<Arc<BTreeMap<TensorId, usize>>>);

impl Sizes {
    /// Returns the sizes of values. Of one that is there twice the last counts.
    pub(crate) fn of<'a>(values: impl Iterator<Item = &'a Value>) -> Self {
        let sizes = values.map(|value| (value.id, value.num_elements()));
        Self(Some(Arc::new(sizes.collect())))
    }

    /// Returns the number of elements of a value by which passes decide, where it has `own` itself.
    pub(crate) fn elements(&self, id: TensorId, own: usize) -> usize {
        let known = self.0.as_ref().and_then(|sizes| sizes.get(&id));
        known.copied().unwrap_or(own)
    }
}
