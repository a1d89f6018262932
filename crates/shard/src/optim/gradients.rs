//! The individual gradients of a module, and the ranks that hold each.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Shape, Tensor};
use burn_fsdp_collectives::{Label, ProcessGroup};

use crate::error::Error;
use crate::files;
use crate::inspect::{self, Member};
use crate::path::{self, Location};
use crate::root::Root;
use crate::shown::plain;
use crate::unit::Unit;

/// The ranks that hold the elements of a gradient.
#[derive(Debug, Clone)]
pub(crate) enum Share {
    /// Each rank of the group has a part.
    Shard(ProcessGroup),
    /// All ranks have the same elements: the parameter is kept whole, and its gradient was reduced.
    Everywhere,
    /// Each rank has its own gradient: no unit manages the parameter.
    Local,
}

/// The gradient of one parameter.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) path: String,
    pub(crate) share: Share,
    /// The gradient's elements on this rank, without autodiff.
    pub(crate) flat: Tensor<1>,
}

/// Returns the gradients of `module` in module order. The gradient of a shared parameter appears once.
pub(crate) fn entries<M: Module>(module: &M, gradients: &GradientsParams) -> Vec<Entry> {
    let mut entries = Vec::new();
    for_each(module, |parameter| {
        if let Some(flat) = parameter.gradient(gradients) {
            entries.push(Entry {
                path: parameter.path.to_owned(),
                share: parameter.share(),
                flat: flat.inner(),
            });
        }
    });
    entries
}

/// Returns the gradients, multiplied by `factor`. Gradients that belong to no parameter of `module` are left
/// unchanged.
pub(crate) fn scaled<M: Module>(
    module: &M,
    mut gradients: GradientsParams,
    factor: f64,
) -> Result<GradientsParams, Error> {
    let roots = inspect::roots_of(module)?;
    let mut scaled = Ok(());
    for_each(module, |parameter| {
        if scaled.is_ok() {
            scaled = parameter.scale_sealed(&roots, &mut gradients, factor);
        }
    });
    scaled.map(|()| gradients)
}

/// Returns the distinct groups over which gradients of `module` are sharded. `root`, the group of all its ranks, is
/// added if a parameter is unmanaged or there is no other group. The result depends only on the module, so it is equal
/// on all ranks.
pub(crate) fn groups<M: Module>(module: &M, root: &ProcessGroup) -> Vec<ProcessGroup> {
    let mut groups: Vec<ProcessGroup> = Vec::new();
    let mut has_local = false;
    for_each(module, |parameter| {
        let group = match parameter.share() {
            Share::Shard(group) => group,
            Share::Local => {
                has_local = true;
                return;
            }
            Share::Everywhere => return,
        };
        if !groups.iter().any(|known| is_same(known, &group)) {
            groups.push(group);
        }
    });
    if (has_local || groups.is_empty()) && !groups.iter().any(|known| is_same(known, root)) {
        groups.push(root.clone());
    }
    groups
}

/// Returns the distinct groups in which a single rank [owns](crate::ShardPolicy::one_owner) a parameter of `module`, in
/// module order, which is the same on all ranks. Other ranks of the group have the owner's optimizer state only if the
/// owner sends it.
///
/// Not collective.
pub fn owner_groups<M: Module>(module: &M) -> Vec<ProcessGroup> {
    let mut groups: Vec<ProcessGroup> = Vec::new();
    for member in inspect::members(module) {
        let group = &member.generation.unit.groups.shard;
        let has_owner = member.slot().partition.sole_owner().is_some();
        if has_owner && !groups.iter().any(|known| is_same(known, group)) {
            groups.push(group.clone());
        }
    }
    groups
}

/// Returns the path of each sharded parameter of `module` and the name of its unit, as in [`UnitGradients`], in module
/// order.
///
/// Not collective.
pub fn units_of_params<M: Module>(module: &M) -> Vec<(String, String)> {
    let places = inspect::places(module).into_iter();
    let units = places.map(|(path, member)| (path, member.generation.unit.label()));
    units.collect()
}

/// Returns the path of each sharded parameter of `module`, and the group of ranks that hold its parts.
///
/// Not collective.
pub fn shard_groups<M: Module>(module: &M) -> Vec<(String, ProcessGroup)> {
    let places = inspect::places(module).into_iter();
    let groups = places.map(|(path, member)| (path, member.generation.unit.groups.shard.clone()));
    groups.collect()
}

/// Returns true if both are handles to the same group of ranks.
pub(crate) fn is_same(one: &ProcessGroup, other: &ProcessGroup) -> bool {
    one == other
}

/// Returns the paths of the parameters of `module` that have a gradient on this rank, in module order.
///
/// Not collective. A sharded parameter has a gradient on all ranks, including those with an empty shard, or on none.
/// The gradient of a parameter with [one owner](crate::ShardPolicy::one_owner) exists only on its owner.
pub fn params_with_gradient<M: Module>(module: &M, gradients: &GradientsParams) -> Vec<String> {
    let entries = entries(module, gradients);
    entries.into_iter().map(|entry| entry.path).collect()
}

/// The gradients of one unit.
#[derive(Debug)]
#[non_exhaustive]
pub struct UnitGradients {
    /// Name of the unit, as in [`UnitHandle::name`](crate::UnitHandle::name); empty for parameters that no unit
    /// manages.
    pub unit: String,
    /// The gradients of the unit's parameters.
    pub gradients: GradientsParams,
}

/// Splits the gradients of `module` by unit, for optimizers that step unit by unit. Units are ordered by their first
/// parameter, and parameters that no unit manages come last. Units without a gradient are skipped, except those in
/// which a rank [owns](crate::ShardPolicy::one_owner) a trained parameter: only the owner has the gradient, but all
/// ranks must step the same units.
///
/// Not collective. Gradients that belong to no parameter of `module` are dropped.
pub fn gradients_by_unit<M: Module>(
    module: &M,
    mut gradients: GradientsParams,
) -> Vec<UnitGradients> {
    let mut order: Vec<String> = Vec::new();
    let mut by_unit: HashMap<String, GradientsParams> = HashMap::new();
    let mut with_owners = HashSet::new();
    for_each(module, |parameter| {
        let unit = parameter
            .member
            .map_or_else(String::new, |member| member.generation.unit.label());
        if parameter.has_owner() {
            with_owners.insert(unit.clone());
        }
        let own = by_unit.entry(unit.clone()).or_insert_with(|| {
            order.push(unit);
            GradientsParams::new()
        });
        parameter.transfer(&mut gradients, own);
    });
    let (managed, others): (Vec<_>, Vec<_>) = order.into_iter().partition(|unit| !unit.is_empty());
    let units = managed.into_iter().chain(others).filter_map(|unit| {
        let gradients = by_unit.remove(&unit)?;
        let is_stepped = !gradients.is_empty() || with_owners.contains(&unit);
        is_stepped.then_some(UnitGradients { unit, gradients })
    });
    units.collect()
}

/// A parameter of a module, for access to its gradient.
pub(super) struct Parameter<'a> {
    pub(super) path: &'a str,
    id: ParamId,
    /// The sharded parameter, if a unit manages it.
    pub(super) member: Option<&'a Member>,
    by_rank: ByRank,
    /// The id that a plain copy of the module has for the parameter.
    plain_id: ParamId,
    /// Functions with the number of dims in a plain copy.
    by_plain_rank: ByRank,
}

type MoveToFile = fn(&mut GradientsParams, ParamId, (&Unit, usize)) -> Result<(), Error>;

/// Functions on gradients with the parameter's number of dims.
#[derive(Clone, Copy)]
struct ByRank {
    get: fn(&GradientsParams, ParamId) -> Option<Tensor<1>>,
    shape: fn(&GradientsParams, ParamId) -> Option<Shape>,
    scale: fn(&mut GradientsParams, ParamId, f64),
    register: fn(&mut GradientsParams, ParamId, Tensor<1>, Shape),
    /// Moves the gradient into a file if the parameter in this slot is in one.
    file: MoveToFile,
    transfer: fn(&mut GradientsParams, &mut GradientsParams, ParamId),
}

impl ByRank {
    const fn of<const D: usize>() -> Self {
        Self {
            get: |gradients, id| {
                let gradient = gradients.get::<D>(id)?;
                let len = gradient.shape().num_elements();
                Some(gradient.reshape([len]))
            },
            shape: |gradients, id| Some(gradients.get::<D>(id)?.shape()),
            scale: |gradients, id, factor| {
                if let Some(gradient) = gradients.remove::<D>(id) {
                    gradients.register(id, gradient.mul_scalar(factor));
                }
            },
            register: |gradients, id, flat, shape| {
                gradients.register(id, flat.reshape::<D, _>(shape));
            },
            file: |gradients, id, (unit, slot)| {
                if let Some(gradient) = gradients.remove::<D>(id) {
                    let shape = gradient.shape();
                    let flat = gradient.reshape([shape.num_elements()]);
                    let flat = unit.in_file(slot, files::GRADIENT, flat)?;
                    gradients.register(id, flat.reshape::<D, _>(shape));
                }
                Ok(())
            },
            transfer: |from, to, id| {
                if let Some(gradient) = from.remove::<D>(id) {
                    to.register(id, gradient);
                }
            },
        }
    }
}

impl Parameter<'_> {
    /// Returns this rank's part of the gradient, flat.
    pub(super) fn gradient(&self, gradients: &GradientsParams) -> Option<Tensor<1>> {
        (self.by_rank.get)(gradients, self.id)
    }

    /// Returns the shape of this rank's part of the gradient.
    pub(super) fn shape(&self, gradients: &GradientsParams) -> Option<Shape> {
        (self.by_rank.shape)(gradients, self.id)
    }

    /// Registers this rank's part of the gradient, in the shape that optimizers see.
    pub(super) fn register(&self, gradients: &mut GradientsParams, part: Tensor<1>, shape: Shape) {
        (self.by_rank.register)(gradients, self.id, part, shape);
    }

    /// Returns the shape and the elements of the gradient of the parameter in a plain copy of the module.
    pub(super) fn plain_gradient(&self, gradients: &GradientsParams) -> Option<(Shape, Tensor<1>)> {
        let shape = (self.by_plain_rank.shape)(gradients, self.plain_id)?;
        let flat = (self.by_plain_rank.get)(gradients, self.plain_id)?;
        Some((shape, flat))
    }

    /// Registers a whole gradient for the parameter in a plain copy of the module.
    pub(super) fn register_plain(
        &self,
        gradients: &mut GradientsParams,
        whole: Tensor<1>,
        shape: Shape,
    ) {
        (self.by_plain_rank.register)(gradients, self.plain_id, whole, shape);
    }

    /// Scales the parameter's gradient.
    fn scale_sealed(
        &self,
        roots: &[Arc<Root>],
        gradients: &mut GradientsParams,
        factor: f64,
    ) -> Result<(), Error> {
        self.changed_sealed(roots, gradients, "the scaled gradient", |gradients| {
            (self.by_rank.scale)(gradients, self.id, factor);
            self.file(gradients)
        })
    }

    /// Calls `change`, which changes the parameter's gradient to what `called` describes. If ranks compare bytes, first
    /// checks that the gradient is unchanged, and seals the result.
    pub(super) fn changed_sealed(
        &self,
        roots: &[Arc<Root>],
        gradients: &mut GradientsParams,
        called: &str,
        change: impl FnOnce(&mut GradientsParams) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let sealed = self.member.and_then(|member| {
            let generation = &member.generation;
            let root = roots.iter().find(|root| root.owns(&generation.unit))?;
            let leaf = generation.node(member.index)?;
            root.group.compares_bytes().then_some((root, member, leaf))
        });
        let Some((root, member, leaf)) = sealed else {
            return change(gradients);
        };
        root.with_waiting(|waiting| waiting.release_of(leaf))?;
        change(gradients)?;
        if let Some(changed) = self.gradient(gradients) {
            let what = Label::from(member.generation.named_as(called, member.index));
            let changed = plain(changed);
            root.with_waiting(|waiting| waiting.replace(&root.group, leaf, changed, what));
        }
        Ok(())
    }

    /// Moves the gradient into a file if the parameter is in one.
    pub(super) fn file(&self, gradients: &mut GradientsParams) -> Result<(), Error> {
        match self.member {
            Some(member) if member.slot().folder.is_some() => {
                let place = (&*member.generation.unit, member.index);
                (self.by_rank.file)(gradients, self.id, place)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn transfer(&self, from: &mut GradientsParams, to: &mut GradientsParams) {
        (self.by_rank.transfer)(from, to, self.id);
    }

    /// Returns true if the parameter is trained and owned by a single rank, this one or another.
    fn has_owner(&self) -> bool {
        self.member.is_some_and(|member| {
            let is_owned = member.slot().partition.sole_owner().is_some();
            is_owned && member.generation.is_trainable(member.index)
        })
    }

    pub(super) fn share(&self) -> Share {
        match self.member {
            Some(member) if member.slot().is_gathered() => {
                Share::Shard(member.generation.unit.groups.shard.clone())
            }
            Some(_) => Share::Everywhere,
            None => Share::Local,
        }
    }
}

/// Calls `body` for each parameter of `module` in module order, managed or not. Running states are also passed, as
/// unmanaged parameters.
pub(super) fn for_each<M: Module>(module: &M, mut body: impl FnMut(&Parameter<'_>)) {
    let mut members = inspect::fields(module).into_iter().peekable();
    let mut plain = Plain::default();
    inspect::visit(module, &mut plain);
    // A tied parameter is visited under each of its paths.
    let mut seen = HashSet::new();
    for (path, id, by_rank) in &plain.found {
        let member = members.next_if(|(place, _)| place == path);
        let member = member.as_ref().map(|(_, member)| member);
        if member.is_some_and(|member| member.is_tied) {
            continue;
        }
        let parameter = Parameter {
            path,
            id: member.map_or(*id, |member| member.id),
            member,
            by_rank: match member {
                Some(member) if member.slot().is_flattened() => ByRank::of::<1>(),
                // The stand-in's functions, since it has the parameter's number of dims.
                _ => *by_rank,
            },
            plain_id: *id,
            by_plain_rank: *by_rank,
        };
        if seen.insert(parameter.id) {
            body(&parameter);
        }
    }
}

/// A visitor that collects all parameters, with stand-ins instead of shards.
#[derive(Default)]
struct Plain {
    found: Vec<(String, ParamId, ByRank)>,
}

impl path::Visitor for Plain {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        self.found.push((place.path(), param.id, ByRank::of::<D>()));
    }
}
