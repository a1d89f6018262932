//! The parameters of a step that one rank holds whole.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_fsdp_mesh::{Pattern, balanced_owners};

use super::Mode;
use crate::error::Error;

/// The parameters that one rank holds whole, and their owners.
#[derive(Debug, Clone, Default)]
pub(super) struct Owners {
    patterns: Vec<Pattern>,
    /// The index of the owner along the axis of the shards; `None` until the parameters are known.
    by_path: Option<BTreeMap<Arc<str>, usize>>,
    none: BTreeMap<Arc<str>, usize>,
}

impl Owners {
    /// Returns the owner of a parameter, if one rank holds it whole.
    pub(super) fn of(&self, path: &str) -> Option<usize> {
        self.by_path().get(path).copied()
    }

    /// Returns the owners by path.
    pub(super) fn by_path(&self) -> &BTreeMap<Arc<str>, usize> {
        self.by_path.as_ref().unwrap_or(&self.none)
    }
}

impl Mode {
    /// Gives every parameter that matches to one rank, instead of a shard to every rank. That rank holds all of it
    /// between steps and runs its optimizer. A pattern names a parameter, or a module with everything in it, as in the
    /// eager engine's `ShardPolicy::one_owner`.
    ///
    /// It is for optimizers that compute with whole tensors, such as Muon, Adafactor and LAMB. For these parameters
    /// only the owner runs the optimizer, on the whole parameter and gradient, and only the owner holds their states. A
    /// gradient is reduced to the owner, and the next gather spreads the new parameter, so no more bytes travel than
    /// for shards. The ranks along the axis of the shards share these parameters by their numbers of elements: the
    /// largest first, each to the rank that owns least. With [`Strategy::NoShard`](burn_fsdp_mesh::Strategy::NoShard),
    /// where every rank has all parameters, it changes nothing.
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
        let patterns = patterns.into_iter().map(Pattern::new);
        self.names.owners = Owners {
            patterns: patterns.collect(),
            ..Owners::default()
        };
        self
    }

    /// Decides which rank owns each matching parameter of a step, given all parameters with their shapes. Does nothing
    /// if that is already decided.
    pub(crate) fn assign_owners<'a>(
        &mut self,
        parameters: impl Iterator<Item = (&'a Arc<str>, &'a [usize])> + Clone,
    ) -> Result<(), Error> {
        let owners = &self.names.owners;
        if owners.patterns.is_empty() || owners.by_path.is_some() {
            return Ok(());
        }
        let matches = |pattern: &Pattern, path: &str| pattern.prefix_of(path).is_some();
        for pattern in &owners.patterns {
            let mut matching = parameters.clone();
            match matching.find(|(path, _)| matches(pattern, path)) {
                Some((path, shape)) if self.division.is_placed() => {
                    return Err(Error::Placement {
                        what: "parameter",
                        name: path.to_string(),
                        placement: "whole on one rank (Mode::one_owner)".to_owned(),
                        shape: shape.to_vec(),
                        reason: "this step lays every value out by placements, and owners are of Mode::data_parallel and \
                                 Mode::hybrid"
                            .to_owned(),
                    });
                }
                Some(_) => {}
                None => {
                    let paths = parameters.map(|(path, _)| path.as_ref()).take(8);
                    return Err(Error::UnknownName {
                        what: "parameter for one owner",
                        name: pattern.to_string(),
                        known: paths.collect::<Vec<&str>>().join(", "),
                    });
                }
            }
        }
        let mut by_path = BTreeMap::new();
        if let Some(axis) = self.division.shard_axis(&self.ranks.mesh()?) {
            let is_owned = |path: &str| owners.patterns.iter().any(|of| matches(of, path));
            let owned = parameters.filter(|(path, _)| is_owned(path));
            let owned = owned.map(|(path, shape)| (path.clone(), shape.iter().product::<usize>()));
            let (paths, sizes): (Vec<_>, Vec<_>) = owned.unzip();
            let owners = balanced_owners(&sizes, axis.size);
            by_path.extend(paths.into_iter().zip(owners));
        }
        self.names.owners.by_path = Some(by_path);
        Ok(())
    }
}
