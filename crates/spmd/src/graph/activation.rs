//! Values for which the user requested placements or recomputation.

use std::collections::BTreeSet;

use burn_ir::TensorId;

use super::Graph;
use super::value::NamedActivation;

impl Graph {
    /// Declares that a placement is requested for a named value. Every pass keeps the value until it is placed.
    pub(crate) fn add_activation(&mut self, activation: NamedActivation) {
        self.results.activations.push(activation);
    }

    /// Removes and returns the values with requested placements, to be placed.
    pub(crate) fn take_activations(&mut self) -> Vec<NamedActivation> {
        std::mem::take(&mut self.results.activations)
    }

    /// Declares the values of a region to recompute. Only the region's inputs and outputs are kept for backward.
    pub(crate) fn add_region(&mut self, values: BTreeSet<TensorId>) {
        self.results.regions.push(values);
    }

    /// Returns the values of each region.
    pub(crate) fn regions(&self) -> &[BTreeSet<TensorId>] {
        &self.results.regions
    }

    /// Returns the values with requested placements.
    pub(super) fn activations(&self) -> impl Iterator<Item = TensorId> + '_ {
        let activations = self.results.activations.iter();
        activations.map(|activation| activation.value)
    }
}
