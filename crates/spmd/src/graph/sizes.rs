//! The sizes by which passes decide.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_ir::TensorId;

use super::Graph;

/// The numbers of elements by which passes decide what is worth it: those of the values, or, in a graph that stands for the same
/// step at other shapes, those that its values have there.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sizes(Option<Arc<BTreeMap<TensorId, usize>>>);

impl Sizes {
    /// Returns the sizes that values have in `before`, and in `after` those that are new there.
    pub(crate) fn of_pass(before: &Graph, after: &Graph) -> Self {
        let values = after.values().chain(before.values());
        let sizes = values.map(|value| (value.id, value.num_elements()));
        Self(Some(Arc::new(sizes.collect())))
    }

    /// Returns the number of elements of a value by which passes decide, where it has `own` itself.
    pub(crate) fn elements(&self, id: TensorId, own: usize) -> usize {
        let known = self.0.as_ref().and_then(|sizes| sizes.get(&id));
        known.copied().unwrap_or(own)
    }
}

impl Graph {
    /// Returns the sizes by which passes decide.
    pub(crate) fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Lets passes decide by these sizes.
    pub(crate) fn decide_by(&mut self, sizes: Sizes) {
        self.sizes = sizes;
    }
}
