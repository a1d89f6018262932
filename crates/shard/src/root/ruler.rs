//! Rulers: tensors at a given depth of the autodiff graph, kept for later steps.

use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor};

use crate::op;

/// Untracked tensors of certain graph depths, by device.
///
/// Burn's backward runs by depth, and a node is one deeper than its deepest parent, tracked or not. So one link on a
/// ruler replaces a chain as long as the ruler is deep. The chain is built only once, to create the ruler.
#[derive(Default)]
pub(super) struct Rulers(Vec<(Device, BTreeMap<usize, Tensor<1>>)>);

impl Rulers {
    /// Returns a ruler of `depth` on `device`, created if necessary.
    pub(super) fn of_depth(&mut self, depth: usize, device: &Device) -> Tensor<1> {
        let known = self.0.iter().position(|(known, _)| known == device);
        let index = known.unwrap_or_else(|| {
            self.0.push((device.clone(), BTreeMap::new()));
            self.0.len() - 1
        });
        let rulers = &mut self.0[index].1;
        if let Some(ruler) = rulers.get(&depth) {
            return ruler.clone();
        }
        let shorter = rulers.range(..depth).next_back();
        let (reached, ruler) = match shorter {
            Some((&reached, ruler)) => (reached, ruler.clone()),
            None => (0, Tensor::zeros([1], device)),
        };
        let ruler = op::extend(ruler, depth - reached);
        rulers.insert(depth, ruler.clone());
        ruler
    }
}
