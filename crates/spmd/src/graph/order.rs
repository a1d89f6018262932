//! The order of a graph's parameters, and the ids that follow from it.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_ir::TensorId;

use super::{Graph, rename};

impl Graph {
    /// Sorts parameters and buffers in the order of these paths, and renumbers their values by position. All graphs of
    /// a step must agree on these ids. Parameters with other paths come last.
    pub(crate) fn order_parameters<'a>(&mut self, paths: impl IntoIterator<Item = &'a Arc<str>>) {
        let paths: BTreeMap<&Arc<str>, usize> = paths.into_iter().zip(0..).collect();
        let place = |path: &Arc<str>| paths.get(path).copied().unwrap_or(usize::MAX);
        if self
            .parameters
            .is_sorted_by_key(|parameter| place(&parameter.path))
        {
            return;
        }
        let mut numbers: Vec<TensorId> = self.parameters.iter().map(|p| p.value).collect();
        numbers.sort_by_key(TensorId::value);
        self.parameters
            .sort_by_key(|parameter| place(&parameter.path));
        let pairs = self.parameters.iter().map(|p| p.value).zip(numbers);
        let map: BTreeMap<TensorId, TensorId> = pairs.collect();
        let new = |id: &mut TensorId| *id = map.get(id).copied().unwrap_or(*id);
        for parameter in &mut self.parameters {
            new(&mut parameter.value);
            parameter.gradient.iter_mut().for_each(new);
        }
        for node in &mut self.nodes {
            rename(&mut node.operation, &map);
        }
        let values = std::mem::take(&mut self.values).into_values();
        self.values = values
            .map(|mut value| {
                new(&mut value.id);
                (value.id, value)
            })
            .collect();
        for update in &mut self.updates {
            new(&mut update.into);
            new(&mut update.from);
        }
        self.results.loss.iter_mut().for_each(new);
        self.results.outputs.values_mut().for_each(new);
        let activations = self.results.activations.iter_mut();
        activations.for_each(|named| new(&mut named.value));
    }
}
