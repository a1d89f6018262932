//! Values that the user has named, so that placements may be asked of them, or has put into regions.

use std::collections::BTreeSet;

use burn_ir::TensorId;

use super::Graph;
use super::value::NamedActivation;

impl Graph {
    /// Declares that a placement is asked of a value by a name: until it is placed, every pass leaves it there.
    pub(crate) fn add_activation(&mut self, activation: NamedActivation) {
        self.results.activations.push(activation);
    }

    /// Takes the values of which placements are asked out, to be placed.
    pub(crate) fn take_activations(&mut self) -> Vec<NamedActivation> {
        std::mem::take(&mut self.results.activations)
    }

    /// Declares the values of a region, of which backward is to keep what comes in and goes out.
    pub(crate) fn add_region(&mut self, values: BTreeSet<TensorId>) {
        self.results.regions.push(values);
    }

    /// Returns the values of each region.
    pub(crate) fn regions(&self) -> &[BTreeSet<TensorId>] {
        &self.results.regions
    }

    /// Returns the values of which placements are asked.
    pub(super) fn activations(&self) -> impl Iterator<Item = TensorId> + '_ {
        let activations = self.results.activations.iter();
        activations.map(|activation| activation.value)
    }
}
