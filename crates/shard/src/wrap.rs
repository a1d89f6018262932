//! `fully_shard`: from a plain module to a sharded one.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId, Reparameterizer};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Partition;

use crate::error::{Error, catch, throw};
use crate::generation::Generation;
use crate::initial;
use crate::inspect;
use crate::memory;
use crate::parameter::ShardedParam;
use crate::policy::{Layout, ShardPolicy, Strategy, matches};
use crate::record;
use crate::root::Root;
use crate::slot::{Holding, Slot};
use crate::survey::{Declared, Found, Survey, stand_in, survey};
use crate::transport;
use crate::unit::{Keep, Unit};

/// Shards `module` over the policy's axis of `mesh` and returns it, with the same type and to be
/// used in the same way.
///
/// Each unit is gathered when one of its parameters is first touched, freed after its forward
/// and after its backward, and its gradients are averaged over the ranks. All ranks start from
/// rank 0's values: parameters that are not initialized yet are initialized there, one at a
/// time, and the other ranks initialize nothing.
///
/// Applied to a child first and to its parent later, the parent takes the parameters that are
/// left and orders the operations of both.
///
/// Collective: all ranks of the axis call it, with the same module structure and policy.
///
/// # Errors
///
/// A pattern without a module, parameters that cannot be sharded, or a failed collective.
pub fn fully_shard<M: Module>(
    module: M,
    mesh: &ProcessMesh,
    policy: ShardPolicy,
) -> Result<M, Error> {
    let group = mesh.along(&policy.axis)?.clone();
    let survey = survey(&module)?;
    let earlier = earlier_units(&module, &survey.sharded);
    check(&survey, &earlier)?;
    for (unit, prefix) in &earlier {
        check_group(unit, prefix, &group)?;
    }
    let parameters = survey.parameters;
    let grouping = Grouping::new(&parameters, &policy)?;
    let units = grouping.units(&group, &policy)?;
    let root = Root::new(group, policy.prefetch);

    let sharder = Sharder::new(&units);
    let module = catch(|| module.apply_reparameterization(sharder))?;
    for (unit, prefix) in &earlier {
        unit.demote(prefix);
    }
    let earlier = earlier.into_iter().map(|(unit, _)| unit);
    let all: Vec<_> = units.into_iter().chain(earlier).collect();
    root.adopt(&all);
    let module = match survey.has_buffers {
        true => own_buffers(module, survey.devices),
        false => module,
    };
    begin_history(&module);
    memory::warn_at_wrap(&root);
    Ok(module)
}

/// Refuses what cannot be sharded.
fn check(survey: &Survey, earlier: &[(Arc<Unit>, String)]) -> Result<(), Error> {
    if let Some((path, name)) = survey.foreign.first() {
        return Err(Error::Reparameterized {
            path: path.clone(),
            name: name.clone(),
        });
    }
    let mut seen = HashMap::new();
    for found in &survey.parameters {
        if let Some(first) = seen.insert(found.id, &found.path) {
            return Err(Error::Tied {
                first: first.clone(),
                second: found.path.clone(),
            });
        }
    }
    // A parent without parameters of its own still orders the operations of its children.
    let mut roots = earlier.iter().filter_map(|(unit, _)| unit.root());
    let first = roots.next();
    let joins = roots.any(|root| {
        first
            .as_ref()
            .is_some_and(|first| !Arc::ptr_eq(first, &root))
    });
    match survey.parameters.is_empty() && !joins {
        true => Err(Error::NothingToShard),
        false => Ok(()),
    }
}

fn check_group(unit: &Unit, prefix: &str, group: &ProcessGroup) -> Result<(), Error> {
    let same = unit.group.name() == group.name() && unit.group.size() == group.size();
    match same {
        true => Ok(()),
        false => Err(Error::Group {
            unit: prefix.to_owned(),
            expected: group.name().to_owned(),
            got: unit.group.name().to_owned(),
        }),
    }
}

/// Which parameters belong to which unit: the innermost module that a pattern matches.
struct Grouping {
    /// By unit path, in the order of first appearance; the root has the empty path.
    by_unit: Vec<(String, Vec<Found>)>,
}

impl Grouping {
    fn new(parameters: &[Found], policy: &ShardPolicy) -> Result<Self, Error> {
        let mut matched = vec![false; policy.patterns.len()];
        let mut by_unit: Vec<(String, Vec<Found>)> = vec![(String::new(), Vec::new())];
        let mut modules = BTreeMap::new();
        for found in parameters {
            let mut unit = String::new();
            for module in ancestors(&found.path) {
                modules.insert(module.to_owned(), ());
                for (pattern, matched) in policy.patterns.iter().zip(&mut matched) {
                    if matches(pattern, module) {
                        *matched = true;
                        unit = module.to_owned();
                    }
                }
            }
            match by_unit.iter_mut().find(|(path, _)| *path == unit) {
                Some((_, members)) => members.push(found.clone()),
                None => by_unit.push((unit, vec![found.clone()])),
            }
        }
        if let Some(index) = matched.iter().position(|matched| !matched) {
            let names: Vec<_> = modules.into_keys().take(12).collect();
            return Err(Error::UnmatchedPattern {
                pattern: policy.patterns[index].clone(),
                modules: names.join(", "),
            });
        }
        by_unit.retain(|(_, members)| !members.is_empty());
        Ok(Self { by_unit })
    }

    fn units(&self, group: &ProcessGroup, policy: &ShardPolicy) -> Result<Vec<Arc<Unit>>, Error> {
        let units = self.by_unit.iter().map(|(path, members)| {
            let slots: Result<Vec<_>, _> = members
                .iter()
                .map(|found| slot(found, group, policy))
                .collect();
            let keep = match policy.strategy {
                Strategy::FullShard if path.is_empty() && policy.keep_root => Keep::AsRoot,
                Strategy::FullShard => Keep::No,
                Strategy::ShardGradOp | Strategy::NoShard => Keep::Always,
            };
            let strategy = members[0].device.gradient_checkpointing_strategy();
            let unit = Unit::new(path.clone(), slots?, group.clone(), keep, strategy);
            Ok(Arc::new(unit))
        });
        units.collect()
    }
}

/// The modules that contain the parameter at `path`, outermost first.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('.').map(|(end, _)| &path[..end])
}

fn slot(found: &Found, group: &ProcessGroup, policy: &ShardPolicy) -> Result<Slot, Error> {
    let num_elements: usize = found.shape.iter().product();
    let element = transport::element_type(found.dtype).ok_or_else(|| Error::ElementType {
        path: found.path.clone(),
        got: format!("{:?}", found.dtype),
    })?;
    let stays_whole = found.shape.len() < 2 || num_elements < policy.whole_below;
    let holding = match policy.strategy {
        Strategy::NoShard => Holding::Replica,
        _ if stays_whole => Holding::Whole,
        _ => Holding::Shard,
    };
    let partition = match (holding, policy.layout) {
        (Holding::Shard, Layout::Flat) => Partition::flat(num_elements, group.size())?,
        (Holding::Shard, Layout::Rows) => Partition::rows(&found.shape, group.size())?,
        (Holding::Whole | Holding::Replica, _) => Partition::flat(num_elements, 1)?,
    };
    Ok(Slot {
        path: found.path.clone(),
        shape: found.shape.clone(),
        dtype: found.dtype,
        element,
        partition,
        holding,
        loaded: Default::default(),
        saving: Default::default(),
    })
}

/// Units that earlier calls made, in the order of the module, each with the path in `module` of the
/// module that the call was made on. `paths` are those of their parameters.
fn earlier_units<M: Module>(module: &M, paths: &[String]) -> Vec<(Arc<Unit>, String)> {
    let mut units: Vec<(Arc<Unit>, String)> = Vec::new();
    for (member, path) in inspect::members(module).iter().zip(paths) {
        let unit = &member.generation.unit;
        if units.iter().any(|(known, _)| Arc::ptr_eq(known, unit)) {
            continue;
        }
        let own = &member.slot().path;
        let prefix = path.strip_suffix(own.as_str()).unwrap_or_default();
        units.push((unit.clone(), prefix.trim_end_matches('.').to_owned()));
    }
    units
}

/// Puts the units' copies, which may come from several calls, under one history.
fn begin_history<M: Module>(module: &M) {
    let members = inspect::members(module);
    let mut hasher = DefaultHasher::new();
    for member in &members {
        member.generation.epoch().hash(&mut hasher);
    }
    let epoch = hasher.finish();
    for member in &members {
        member.generation.restart(epoch);
    }
}

/// Replaces each parameter by a stand-in with its value beside it.
struct Sharder {
    places: HashMap<String, (Arc<Generation>, usize)>,
}

impl Sharder {
    fn new(units: &[Arc<Unit>]) -> Self {
        let mut places = HashMap::new();
        for unit in units {
            let generation = Generation::first(unit.clone());
            for (index, slot) in unit.slots.iter().enumerate() {
                places.insert(slot.path.clone(), (generation.clone(), index));
            }
        }
        Self { places }
    }
}

impl Reparameterizer for Sharder {
    type Reparam = ShardedParam;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ShardedParam>) {
        let Some((generation, index)) = self.places.remove(path) else {
            return (param, None);
        };
        let unit = generation.unit.clone();
        let device = param.lazy_device();
        let id = param.id;
        let declared = Declared::of(&param);
        let value = initial::value(&unit, &unit.slots[index], &param);
        drop(param);
        let value = value.unwrap_or_else(|error| throw(error));
        let leaf = Param::initialized(id, value).set_require_grad(declared.is_trainable);
        let base = base(&declared, &device);
        let own = declared.mapper;
        let stand_in = stand_in(declared.shape, &device);
        let base = base
            .load_mapper(record::load(unit.clone(), index, own.clone(), stand_in))
            .save_mapper(record::save(unit, index, own));
        (base, Some(ShardedParam::new(leaf, index, generation)))
    }
}

/// The parameter itself: a stand-in, recorded in the shape in which it always was.
fn base<const D: usize>(declared: &Declared<D>, device: &Device) -> Param<Tensor<D>> {
    let shape = declared.shape;
    if shape == declared.recorded {
        return Param::initialized(ParamId::new(), stand_in(shape, device));
    }
    // Burn checks records against the declared shape of a lazy parameter.
    let make = move |device: &Device, _: bool| stand_in(shape, device);
    Param::uninitialized(
        ParamId::new(),
        make,
        device.clone(),
        false,
        declared.recorded.into(),
    )
}

/// Gives the module running states of its own. Clones share theirs, and ranks must not.
fn own_buffers<M: Module>(module: M, devices: HashMap<String, Device>) -> M {
    // Only `valid` makes new ones; it and `train` forget the checkpointing strategy, which the
    // sharded values restore by themselves and stand-ins and buffers get back here.
    module.valid().train().map(&mut Relocate {
        path: Vec::new(),
        devices,
    })
}

struct Relocate {
    path: Vec<String>,
    devices: HashMap<String, Device>,
}

impl ModuleMapper for Relocate {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.devices.get(&self.path.join(".")) {
            Some(device) => param.map(|tensor| relocate(tensor, device)),
            None => param,
        }
    }
}

fn relocate<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    if tensor.is_require_grad() {
        // A sharded value, which `train` has put where it belongs.
        return tensor;
    }
    let plain = tensor.inner();
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => plain
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => plain,
    }
}
