//! The choice of the parameters that one rank holds whole.

use std::sync::Arc;

use burn_fsdp_mesh::Pattern;

use super::Mode;
use super::owners::Owners;
use crate::error::Error;

impl Mode {
    /// Assigns each matching parameter to one rank, instead of sharding it. That rank holds all of it between steps and
    /// runs its optimizer. A pattern names a parameter, or a module with everything in it, as in the eager engine's
    /// `ShardPolicy::one_owner`.
    ///
    /// Use it for optimizers that compute with whole tensors, such as Muon, Adafactor and LAMB. For these parameters
    /// only the owner runs the optimizer, on the whole parameter and gradient, and only the owner holds their states. A
    /// gradient is reduced to the owner, and the next gather distributes the new parameter, so the traffic is the same
    /// as for shards. These parameters are distributed over the ranks of the shard axis by size: the largest first,
    /// each to the rank with the fewest elements so far. With [`Strategy::NoShard`](burn_fsdp_mesh::Strategy::NoShard),
    /// where every rank has all parameters, this method has no effect.
    ///
    /// A pattern that matches no parameter is an [`Error::UnknownName`] of [`compile`](crate::compile()). A pattern in
    /// a step with placements ([`expand`](Self::expand), [`DataParallel::Automatic`](crate::DataParallel::Automatic))
    /// is an [`Error::Placement`], because the placements decide where each parameter is.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::AdafactorConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fsdp_collectives::ProcessGroup;
    /// use burn_fsdp_mesh::Strategy;
    /// use burn_fsdp_spmd::{Mode, compile};
    ///
    /// let mode = Mode::data_parallel(ProcessGroup::solo(), Strategy::FullShard).one_owner(["**"]);
    /// let init = |device: &Device| LinearConfig::new(3, 2).init(device);
    /// let loss = |model: &Linear, x: Tensor<2>| model.forward(x).square().mean();
    /// let mut step = compile(init, loss, AdafactorConfig::new().build(), mode)?;
    /// step.step(1e-2, &Tensor::ones([4, 3], &Device::flex()))?;
    /// # Ok::<(), burn_fsdp_spmd::Error>(())
    /// ```
    #[must_use]
    pub fn one_owner<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.names.owners = Owners::matching(patterns.into_iter().map(Pattern::new));
        self
    }

    /// Assigns an owner to each matching parameter of a step, given all parameters with their shapes. Does nothing if
    /// owners are already assigned.
    pub(crate) fn assign_owners<'a>(
        &mut self,
        parameters: impl Iterator<Item = (&'a Arc<str>, &'a [usize])> + Clone,
    ) -> Result<(), Error> {
        let axis = self.division.shard_axis(&self.ranks.mesh()?);
        let (num_ranks, is_placed) = (axis.map(|axis| axis.size), self.division.is_placed());
        self.names.owners.assign(parameters, num_ranks, is_placed)
    }
}
