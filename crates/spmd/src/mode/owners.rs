//! The parameters of a step that one rank holds whole.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_fsdp_mesh::{Pattern, balanced_owners};

use crate::error::Error;

/// The parameters that one rank holds whole, and their owners.
#[derive(Debug, Clone, Default)]
pub(super) struct Owners {
    patterns: Vec<Pattern>,
    /// The index of the owner along the shard axis; `None` until the parameters are known.
    by_path: Option<BTreeMap<Arc<str>, usize>>,
}

static NONE: BTreeMap<Arc<str>, usize> = BTreeMap::new();

impl Owners {
    /// Returns the owner of a parameter, if one rank holds it whole.
    pub(super) fn of(&self, path: &str) -> Option<usize> {
        self.by_path().get(path).copied()
    }

    /// Returns the owners by path.
    pub(super) fn by_path(&self) -> &BTreeMap<Arc<str>, usize> {
        self.by_path.as_ref().unwrap_or(&NONE)
    }

    /// Chooses all parameters that match one of the patterns.
    pub(super) fn matching(patterns: impl Iterator<Item = Pattern>) -> Self {
        Self {
            patterns: patterns.collect(),
            ..Self::default()
        }
    }

    /// Assigns each matching parameter of a step to one of `num_ranks` ranks, if they hold shards. `parameters` lists
    /// all parameters with their shapes. Does nothing if owners are already assigned.
    pub(super) fn assign<'a>(
        &mut self,
        parameters: impl Iterator<Item = (&'a Arc<str>, &'a [usize])> + Clone,
        num_ranks: Option<usize>,
        is_placed: bool,
    ) -> Result<(), Error> {
        if self.patterns.is_empty() || self.by_path.is_some() {
            return Ok(());
        }
        let matches = |pattern: &Pattern, path: &str| pattern.prefix_of(path).is_some();
        for pattern in &self.patterns {
            let mut matching = parameters.clone();
            match matching.find(|(path, _)| matches(pattern, path)) {
                Some((path, shape)) if is_placed => {
                    return Err(Error::Placement {
                        what: "parameter",
                        name: path.to_string(),
                        placement: "whole on one rank (Mode::one_owner)".to_owned(),
                        shape: shape.to_vec(),
                        reason: "owners require Mode::data_parallel or Mode::hybrid, but this step divides every value \
                            by placements"
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
        if let Some(num_ranks) = num_ranks {
            let is_owned = |path: &str| self.patterns.iter().any(|of| matches(of, path));
            let owned = parameters.filter(|(path, _)| is_owned(path));
            let owned = owned.map(|(path, shape)| (path.clone(), shape.iter().product::<usize>()));
            let (paths, sizes): (Vec<_>, Vec<_>) = owned.unzip();
            let owners = balanced_owners(&sizes, num_ranks);
            by_path.extend(paths.into_iter().zip(owners));
        }
        self.by_path = Some(by_path);
        Ok(())
    }
}
