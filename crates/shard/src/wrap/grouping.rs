//! Groups parameters into units, and finds those that belong to none.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::{Partition, Pattern, balanced_owners};
use burn_fsdp_tensors as tensors;

use super::{base, factors};
use crate::base_bits::BaseBits;
use crate::error::Error;
use crate::offload::Offload;
use crate::packing::{Packed, Packing};
use crate::policy::ShardPolicy;
use crate::slot::{Element, Elements, Holding, MAX_DIMS, Slot};
use crate::spec::{Groups, UnitSpec};
use crate::survey::{Found, Survey};
use crate::unit::{Keep, Unit};
use burn_fsdp_mesh::{Cut, Strategy};

/// Returns the paths of the modules that contain the parameter at `path`, outermost first.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('.').map(|(end, _)| &path[..end])
}

pub(crate) struct Ignored(HashSet<String>);

impl Ignored {
    /// Finds the parameters that the policy ignores.
    ///
    /// # Errors
    ///
    /// [`Error::IgnoredSharded`], [`Error::UnmatchedPattern`].
    pub(crate) fn new(survey: &Survey, policy: &ShardPolicy) -> Result<Self, Error> {
        let pattern_of = |path: &str| {
            let mut patterns = policy.ignored.iter();
            patterns.find(|pattern| pattern.prefix_of(path).is_some())
        };
        if let Some(path) = survey
            .sharded
            .iter()
            .find(|path| pattern_of(path).is_some())
        {
            return Err(Error::IgnoredSharded { path: path.clone() });
        }
        let paths = survey.parameters.iter().map(|found| &found.path);
        let ignored: HashSet<_> = paths
            .filter(|path| pattern_of(path).is_some())
            .cloned()
            .collect();
        for pattern in &policy.ignored {
            expect_match(pattern, survey.parameters.iter())?;
        }
        Ok(Self(ignored))
    }

    pub(crate) fn contains(&self, path: &str) -> bool {
        self.0.contains(path)
    }
}

/// Rejects a pattern that matches neither a parameter nor a module that contains one.
fn expect_match<'a>(
    pattern: &Pattern,
    parameters: impl Iterator<Item = &'a Found> + Clone,
) -> Result<(), Error> {
    let paths = parameters.map(|found| found.path.as_str());
    if paths.clone().any(|path| pattern.prefix_of(path).is_some()) {
        Ok(())
    } else {
        Err(unmatched(pattern.as_str(), paths))
    }
}

/// Maximum number of modules that an error message lists.
const NAMED: usize = 12;

pub(crate) fn unmatched<'a>(pattern: &str, paths: impl Iterator<Item = &'a str>) -> Error {
    let modules: BTreeSet<_> = paths.flat_map(ancestors).collect();
    let more = modules.len().saturating_sub(NAMED);
    let names: Vec<_> = modules.into_iter().take(NAMED).collect();
    let more = match more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Error::UnmatchedPattern {
        pattern: pattern.to_owned(),
        modules: format!("{}{more}", names.join(", ")),
    }
}

/// Returns the patterns that select units. Patterns of joint units come first, each with the unit's name, so no
/// single-module pattern splits them.
fn named_units(policy: &ShardPolicy) -> Vec<(&Pattern, Option<String>)> {
    let joint = policy.joint_units.iter().flat_map(|patterns| {
        let names: Vec<_> = patterns.iter().map(Pattern::as_str).collect();
        let name = names.join("+");
        patterns
            .iter()
            .map(move |pattern| (pattern, Some(name.clone())))
    });
    let single = policy.patterns.iter().map(|pattern| (pattern, None));
    joint.chain(single).collect()
}

/// The parameters of each unit. A parameter belongs to the innermost module that matches a pattern.
pub(crate) struct Grouping {
    /// The parameters by unit path: the root's first, with the empty path, then the other units' in the order
    /// of first appearance.
    by_unit: Vec<(String, Vec<Found>)>,
}

impl Grouping {
    /// Groups `parameters` by the policy's patterns. A pattern may also match only tied fields, at the paths `tied`,
    /// which share another field's parameter.
    ///
    /// # Errors
    ///
    /// [`Error::UnmatchedPattern`].
    pub(crate) fn new<'a>(
        parameters: &[Found],
        tied: impl Iterator<Item = &'a str> + Clone,
        policy: &ShardPolicy,
    ) -> Result<Self, Error> {
        let named = named_units(policy);
        let is_tied = |(pattern, _): &(&Pattern, _)| {
            let mut tied = tied.clone();
            tied.any(|path| pattern.module_of(path).is_some())
        };
        let mut matched: Vec<_> = named.iter().map(is_tied).collect();
        let mut by_unit: Vec<(String, Vec<Found>)> = vec![(String::new(), Vec::new())];
        for found in parameters {
            let (mut innermost, mut unit) = ("", "");
            // A factor belongs to the unit of the weight that it adapts.
            let adapter = found.factor_of.as_ref();
            let path = adapter.map_or(&found.path, |adapter| &adapter.path);
            for ((pattern, joint), matched) in named.iter().zip(&mut matched) {
                if let Some(module) = pattern.module_of(path) {
                    *matched = true;
                    // All of these modules contain the parameter, so the longest path is the innermost.
                    let name = joint.as_deref().unwrap_or(module);
                    if module.len() > innermost.len() {
                        (innermost, unit) = (module, name);
                    } else if module == innermost && joint.is_some() && name != unit {
                        return Err(Error::Option {
                            option: "unit_of",
                            expected: "given each module once",
                            got: format!("given `{module}` for both `{unit}` and `{name}`"),
                        });
                    }
                }
            }
            match by_unit.iter_mut().find(|(path, _)| *path == unit) {
                Some((_, members)) => members.push(found.clone()),
                None => by_unit.push((unit.to_owned(), vec![found.clone()])),
            }
        }
        if let Some(index) = matched.iter().position(|matched| !matched) {
            let paths = parameters.iter().map(|found| found.path.as_str());
            return Err(unmatched(named[index].0.as_str(), paths));
        }
        let in_files = policy.files.iter().flat_map(|files| &files.patterns);
        for pattern in policy
            .cuts
            .iter()
            .map(|(pattern, _)| pattern)
            .chain(in_files)
        {
            expect_match(pattern, parameters.iter())?;
        }
        by_unit.retain(|(_, members)| !members.is_empty());
        Ok(Self { by_unit })
    }

    /// Returns the owner of each parameter that the policy assigns to one rank, by path.
    ///
    /// # Errors
    ///
    /// [`Error::UnmatchedPattern`]; [`Error::Option`] for a parameter with too many dims for an optimizer.
    fn owners(
        &self,
        num_ranks: usize,
        policy: &ShardPolicy,
    ) -> Result<HashMap<String, usize>, Error> {
        let parameters = self.by_unit.iter().flat_map(|(_, members)| members);
        for pattern in &policy.one_owner {
            expect_match(pattern, parameters.clone())?;
        }
        let is_owned = |found: &&Found| {
            let mut patterns = policy.one_owner.iter();
            let matches = patterns.any(|pattern| pattern.prefix_of(&found.path).is_some());
            matches && holding(found, policy) == Holding::Shard
        };
        let owned: Vec<_> = parameters.filter(is_owned).collect();
        if let Some(found) = owned.iter().find(|found| found.shape.len() > MAX_DIMS) {
            return Err(Error::Option {
                option: "one_owner",
                expected: "given patterns that match only parameters of at most 6 dims",
                got: format!(
                    "given a pattern that matches `{}` of shape {:?}",
                    found.path, found.shape
                ),
            });
        }
        let sizes: Vec<_> = owned.iter().map(|found| found.num_elements()).collect();
        let paths = owned.iter().map(|found| found.path.clone());
        Ok(paths.zip(balanced_owners(&sizes, num_ranks)).collect())
    }

    /// Returns the units, without values or a root. `is_replica` is true if `replicate` creates them.
    ///
    /// # Errors
    ///
    /// [`Error::ElementType`]; [`Error::UnmatchedPattern`]; [`Error::Mesh`]; [`Error::Option`] for a host that is not
    /// the CPU backend, for types that cannot be reduced, and for a parameter with too many dims for an owner.
    pub(crate) fn units(
        &self,
        groups: &Groups,
        policy: &ShardPolicy,
        is_replica: bool,
    ) -> Result<Vec<Arc<Unit>>, Error> {
        let num_shards = groups.shard.size();
        let owners = self.owners(num_shards, policy)?;
        let units = self.by_unit.iter().map(|(path, members)| {
            let adapted = base::adapted(members);
            let slots: Result<Vec<_>, _> = members
                .iter()
                .map(|found| {
                    let bits = policy.base_bits;
                    let bits = bits.filter(|_| adapted.contains(found.path.as_str()));
                    let owner = owners.get(&found.path);
                    slot(found, (num_shards, owner), bits, policy)
                })
                .collect();
            let keep = match policy.strategy {
                Strategy::FullShard if path.is_empty() && policy.keep_root => Keep::AsRoot,
                Strategy::FullShard if policy.reshard_to == Some(1) => Keep::Always,
                Strategy::FullShard => Keep::No,
                Strategy::ShardGradOp | Strategy::NoShard => Keep::Always,
            };
            let mut slots = slots?;
            factors::join(&mut slots, members);
            let offload = Offload::new(policy, &members[0].device)?;
            if offload.is_none() {
                expect_host(&slots, &members[0])?;
            }
            let spec = UnitSpec {
                slots,
                groups: groups.clone(),
                offload,
                hooks: policy.hooks.clone(),
                strategy: members[0].device.gradient_checkpointing_strategy(),
                is_replica,
                recomputed: policy.recomputed.clone(),
            };
            Ok(Arc::new(Unit::new(
                path.clone(),
                keep,
                policy.factors,
                spec,
            )))
        });
        units.collect()
    }
}

/// Returns which part of a parameter a rank holds.
fn holding(found: &Found, policy: &ShardPolicy) -> Holding {
    let is_kept_vector = found.shape.len() < 2 && !policy.shard_vectors;
    let stays_whole = is_kept_vector || found.num_elements() < policy.whole_below;
    match policy.strategy {
        Strategy::NoShard => Holding::Replica,
        _ if stays_whole => Holding::Whole,
        _ => Holding::Shard,
    }
}

/// Returns the folder for a parameter that is not in memory. A value that every rank keeps whole is small.
fn folder(found: &Found, holding: Holding, policy: &ShardPolicy) -> Option<Arc<Path>> {
    let files = policy.files.as_ref()?;
    let mut patterns = files.patterns.iter();
    let matches = patterns.any(|pattern| pattern.prefix_of(&found.path).is_some());
    (matches && holding != Holding::Whole).then(|| files.folder.clone())
}

/// Rejects slots in files if shards are not on the CPU backend.
fn expect_host(slots: &[Slot], found: &Found) -> Result<(), Error> {
    if tensors::is_host(&found.device) || slots.iter().all(|slot| slot.folder.is_none()) {
        return Ok(());
    }
    Err(Error::Option {
        option: "in_files",
        expected: "set for shards on the CPU backend; add `offload_to(Device::flex())`",
        got: format!("set for `{}` on {:?}", found.path, found.device),
    })
}

/// Checks that gradients in the policy's types can be reduced to the shards' type.
///
/// # Errors
///
/// [`Error::Option`].
fn expect_types(found: &Found, compute: DType, reduce: DType) -> Result<(), Error> {
    if tensors::can_reduce([found.dtype, compute, reduce]) {
        Ok(())
    } else {
        Err(Error::Option {
            option: "a type of `Precision`",
            expected: "f32, bf16 or f16; leave a module in f64 unchanged",
            got: format!(
                "{compute:?}, reduced as {reduce:?}, for `{}` in {:?}",
                found.path, found.dtype
            ),
        })
    }
}

/// Returns the slot of a parameter; `bits` are those of an adapter's base in fewer bits.
fn slot(
    found: &Found,
    (num_shards, owner): (usize, Option<&usize>),
    bits: Option<BaseBits>,
    policy: &ShardPolicy,
) -> Result<Slot, Error> {
    let num_elements = found.num_elements();
    let compute = found.compute_type(policy);
    let reduce = policy.precision.reduce_of(compute);
    expect_types(found, compute, reduce)?;
    let element_of = |dtype| match tensors::reduced_type(dtype) {
        Some(wire) => Ok(Element { dtype, wire }),
        None => Err(Error::ElementType {
            path: found.path.clone(),
            got: format!("{dtype:?}"),
        }),
    };
    let stored = element_of(found.dtype)?;
    let holding = holding(found, policy);
    let mut cuts = policy.cuts.iter().rev();
    let of_pattern = cuts.find(|(pattern, _)| pattern.prefix_of(&found.path).is_some());
    let cut = base::cut(of_pattern.map_or(policy.cut, |(_, cut)| *cut), bits);
    let partition = match (holding, cut) {
        (Holding::Shard, Cut::Elements) => Partition::flat(num_elements, num_shards)?,
        (Holding::Shard, Cut::Dims) => Partition::rows(&found.shape, num_shards)?,
        (Holding::Shard, Cut::Multiples(multiple)) => {
            Partition::multiples(num_elements, multiple, num_shards)?
        }
        (Holding::Whole | Holding::Replica, _) => Partition::flat(num_elements, 1)?,
    };
    let partition = match owner {
        Some(&owner) => Partition::one_owner(num_elements, num_shards, owner)?,
        None => partition,
    };
    // A policy's adapters freeze all other parameters.
    let starts_trained =
        found.is_trainable && (found.factor_of.is_some() || policy.adapters.is_empty());
    let packed = match (bits, holding) {
        (Some(_), _) if starts_trained => return Err(base::trained(found)),
        (Some(bits), _) => Some(Packed::Held(base::form(bits, found, partition)?)),
        (None, Holding::Shard) if policy.gathers_in_8_bits => {
            Some(Packed::Sent(Packing::new(partition)?))
        }
        (None, _) => None,
    };
    Ok(Slot {
        path: found.path.clone(),
        shape: found.shape.clone(),
        elements: Elements {
            stored,
            compute: element_of(compute)?,
            reduce: element_of(reduce)?,
        },
        partition,
        holding,
        packed,
        adapter: None,
        unfit: found.layer.clone().filter(|layer| layer.dtype != compute),
        folder: folder(found, holding, policy),
        starts_trained,
    })
}
