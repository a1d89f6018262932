//! `fully_shard`: from a plain module to a sharded one.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use burn::module::{Module, Param, ParamId, Reparameterizer};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};

use crate::error::{Error, catch, throw};
use crate::generation::Generation;
use crate::gradients;
use crate::grouping::{self, Grouping, Ignored};
use crate::identity::counterpart;
use crate::initial;
use crate::inspect;
use crate::memory;
use crate::op;
use crate::own_states;
use crate::parameter::ShardedParam;
use crate::policy::{ReduceGroup, ShardPolicy, Strategy};
use crate::record;
use crate::root::Root;
use crate::survey::{Declared, Found, Survey, stand_in, survey};
use crate::transport;
use crate::unit::{Groups, Unit};

/// Shards `module` over the policy's axis of `mesh` and returns it, with the same type and to be
/// used in the same way.
///
/// Each unit is gathered when one of its parameters is first touched, freed after its forward
/// and after its backward, and its gradients are averaged over the ranks. All ranks start from
/// rank 0's values: parameters that are not initialized yet are initialized there, one at a
/// time in the order of the module, and the other ranks initialize nothing.
///
/// Burn's random numbers come from one generator for all threads of the process. For the same initial
/// values in every run, seed the device on rank 0 alone, right before this call, and draw nothing on
/// other ranks meanwhile; `device.seed` on every rank would begin the sequence again in the middle.
/// Dropout on ranks that are threads cannot be repeated at all.
///
/// Each shard has the id of its parameter, so that groups of ids made before go on to match; see
/// [`param_id`](crate::param_id).
///
/// Applied to a child first and to its parent later, the parent takes the parameters that are
/// left and orders the operations of both.
///
/// Collective: all ranks of the axis call it, with the same module structure and policy.
///
/// # Errors
///
/// A pattern without a module, parameters that cannot be sharded or are not reached, a child in the
/// middle of a step, or a failed collective.
pub fn fully_shard<M: Module>(
    module: M,
    mesh: &ProcessMesh,
    policy: ShardPolicy,
) -> Result<M, Error> {
    wrap(module, mesh, &policy, Form::Shard)
}

/// Makes `module` data-parallel over the policy's axes of `mesh`: every rank holds all of it, from
/// rank 0's values, and gradients are averaged by one all-reduce a unit. The policy's strategy
/// does not apply; its units say what is reduced together.
///
/// Submodules that are sharded already stay so, each under a root of its own. A parent's
/// [`fully_shard`] leaves a replicated module alone, with everything in it.
///
/// Collective: all ranks of the axes call it, with the same module structure and policy.
///
/// # Errors
///
/// As [`fully_shard`].
pub fn replicate<M: Module>(
    module: M,
    mesh: &ProcessMesh,
    policy: ShardPolicy,
) -> Result<M, Error> {
    wrap(
        module,
        mesh,
        &policy.strategy(Strategy::NoShard),
        Form::Replicate,
    )
}

/// Which verb a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Shard,
    Replicate,
}

fn wrap<M: Module>(
    module: M,
    mesh: &ProcessMesh,
    policy: &ShardPolicy,
    form: Form,
) -> Result<M, Error> {
    let ranks = Ranks::new(mesh, policy)?;
    let survey = survey(&module)?;
    let earlier = earlier_units(&module, &survey.sharded);
    let (left_alone, adopted) = match form {
        Form::Replicate => (earlier, Vec::new()),
        Form::Shard => split_off_replicas(earlier),
    };
    let ignored = Ignored::new(&survey, policy)?;
    let found = survey.parameters.iter().map(|found| &found.path);
    let paths: Vec<_> = found.chain(&survey.sharded).map(String::as_str).collect();
    if let Some(pattern) = policy.precision.unmatched(&paths) {
        return Err(grouping::unmatched(pattern, paths.iter().copied()));
    }
    let parameters: Vec<_> = survey
        .parameters
        .iter()
        .filter(|found| !ignored.contains(&found.path))
        // Of a parameter without elements there is nothing to share.
        .filter(|found| !found.shape.contains(&0))
        .cloned()
        .collect();
    check_ids(&module, &survey)?;
    check(&survey, &parameters, &adopted, &left_alone)?;
    for (unit, prefix) in &adopted {
        check_group(unit, prefix, &ranks.groups.shard)?;
        if let Some(root) = unit.root() {
            root.expect_between_steps()?;
        }
    }
    let grouping = Grouping::new(&parameters, policy)?;
    let units = grouping.units(&ranks.groups, policy, form == Form::Replicate)?;
    let left_alone = survey.parameters.iter();
    let left_alone = left_alone.filter(|found| ignored.contains(&found.path));
    let left_alone = left_alone.map(|found| (found.path.clone(), found.id));
    let root = Root::new(ranks.all, policy, left_alone.collect());

    let sharder = Sharder::new(&units, &survey);
    let module = catch(|| module.apply_reparameterization(sharder))?;
    for (unit, prefix) in &adopted {
        unit.demote(prefix);
    }
    let adopted = adopted.into_iter().map(|(unit, _)| unit);
    let all: Vec<_> = units.into_iter().chain(adopted).collect();
    root.adopt(&all);
    let module = own_states::separate(module, &survey, &root.group)?;
    begin_history(&module);
    memory::warn_at_wrap(&root);
    Ok(module)
}

/// The groups of ranks that a call is about.
struct Ranks {
    /// All that train the module together.
    all: ProcessGroup,
    groups: Groups,
}

impl Ranks {
    fn new(mesh: &ProcessMesh, policy: &ShardPolicy) -> Result<Self, Error> {
        let along = |axis: &str, method| {
            let known = mesh.layout().axes().iter().map(|axis| axis.name.as_str());
            match mesh.along(axis) {
                Ok(group) => Ok(group.clone()),
                Err(_) => Err(Error::Axis {
                    axis: axis.to_owned(),
                    known: known.collect::<Vec<_>>().join("`, `"),
                    method,
                }),
            }
        };
        let shard = along(&policy.axis, "axis")?;
        let replicas = match &policy.replicate_axis {
            Some(axis) => Some(along(axis, "replicate_axis")?),
            None => None,
        };
        let all = match &replicas {
            None => shard.clone(),
            Some(replicas) if replicas.size() * shard.size() == mesh.world().size() => {
                mesh.world().clone()
            }
            Some(_) => {
                // What the other axes say is the same for all ranks that train together.
                let axes = mesh.layout().axes().iter().zip(mesh.coordinate());
                let ours = |name: &str| {
                    name == policy.axis || Some(name) == policy.replicate_axis.as_deref()
                };
                let others = axes.filter(|(axis, _)| !ours(&axis.name));
                let color = others.fold(0, |color, (axis, index)| color * axis.size + index);
                let world = mesh.world();
                world.split(color, world.rank(), "replicate and shard")?
            }
        };
        if policy.strategy == Strategy::NoShard {
            // One all-reduce over all of them.
            return Ok(Self {
                groups: Groups {
                    shard: all.clone(),
                    reduce: all.clone(),
                    replicas: None,
                    neighbours: None,
                },
                all,
            });
        }
        let reduce = match policy.reduce_group {
            ReduceGroup::Shared => shard.clone(),
            ReduceGroup::Own => shard.split(0, shard.rank(), "reductions")?,
        };
        let neighbours = match policy.reshard_to {
            None => None,
            Some(ranks) => neighbours(&shard, ranks)?,
        };
        Ok(Self {
            all,
            groups: Groups {
                shard,
                reduce,
                replicas,
                neighbours,
            },
        })
    }
}

/// The group of this rank's `ranks` neighbours; `None` if that is nobody or everybody.
fn neighbours(shard: &ProcessGroup, ranks: usize) -> Result<Option<ProcessGroup>, Error> {
    if ranks == 0 || !shard.size().is_multiple_of(ranks) {
        return Err(Error::ReshardTo {
            got: ranks,
            ranks: shard.size(),
        });
    }
    if ranks == 1 || ranks == shard.size() {
        return Ok(None);
    }
    let group = shard.split(shard.rank() / ranks, shard.rank(), "neighbours")?;
    Ok(Some(group))
}

/// Units with the paths of the modules that they were made on.
type Placed = Vec<(Arc<Unit>, String)>;

/// Separates replicated modules, and whatever lies in them, from units that a parent adopts.
fn split_off_replicas(earlier: Placed) -> (Placed, Placed) {
    let roots = earlier.iter().filter(|(unit, _)| unit.is_replica);
    let roots: Vec<String> = roots.map(|(_, prefix)| prefix.clone()).collect();
    let is_inside = |prefix: &str| {
        let mut roots = roots.iter();
        roots.any(|root| {
            let rest = prefix.strip_prefix(root.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    earlier
        .into_iter()
        .partition(|(_, prefix)| is_inside(prefix))
}

/// Refuses parameters of one id, sharded by now or by an earlier call, or to be left alone: of two leaves
/// with one id the optimizer would train one, with the gradient of the other.
fn check_ids<M: Module>(module: &M, survey: &Survey) -> Result<(), Error> {
    let sharded = inspect::places(module).into_iter();
    let mut seen: HashMap<_, _> = sharded.map(|(path, member)| (member.id, path)).collect();
    for found in &survey.parameters {
        if let Some(first) = seen.insert(found.id, found.path.clone()) {
            return Err(Error::Tied {
                first,
                second: found.path.clone(),
            });
        }
    }
    Ok(())
}

/// Refuses what cannot be sharded.
fn check(
    survey: &Survey,
    parameters: &[Found],
    adopted: &Placed,
    left_alone: &Placed,
) -> Result<(), Error> {
    if let Some((path, name)) = survey.foreign.first() {
        return Err(Error::Reparameterized {
            path: path.clone(),
            name: name.clone(),
        });
    }
    for found in parameters {
        let first = &parameters[0];
        if !op::is_same_backend(&first.device, &found.device) {
            return Err(Error::Backends {
                first: first.path.clone(),
                second: found.path.clone(),
                expected: format!("{:?}", first.device),
                got: format!("{:?}", found.device),
            });
        }
    }
    // A parent without parameters of its own still orders the operations of its children.
    let mut roots: Vec<_> = adopted.iter().filter_map(|(unit, _)| unit.root()).collect();
    roots.dedup_by(|a, b| Arc::ptr_eq(a, b));
    if !parameters.is_empty() || roots.len() > 1 {
        return Ok(());
    }
    let mut known = adopted.iter().chain(left_alone);
    Err(match known.next() {
        Some((unit, _)) => Error::AlreadySharded { unit: unit.label() },
        None => Error::NothingToShard,
    })
}

fn check_group(unit: &Unit, prefix: &str, group: &ProcessGroup) -> Result<(), Error> {
    match gradients::is_same(&unit.group, group) {
        true => Ok(()),
        false => Err(Error::Group {
            unit: prefix.to_owned(),
            expected: group.name().to_owned(),
            got: unit.group.name().to_owned(),
        }),
    }
}

/// Units that earlier calls made, in the order of the module, each with the path in `module` of the
/// module that the call was made on. `paths` are those of their parameters.
fn earlier_units<M: Module>(module: &M, paths: &[String]) -> Placed {
    let mut units = Placed::new();
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
    /// Paths of parameters that no unit manages.
    others: HashSet<String>,
}

impl Sharder {
    fn new(units: &[Arc<Unit>], survey: &Survey) -> Self {
        let mut places = HashMap::new();
        for unit in units {
            let generation = Generation::first(unit.clone());
            for (index, slot) in unit.slots.iter().enumerate() {
                places.insert(slot.path.clone(), (generation.clone(), index));
            }
        }
        let found = survey.parameters.iter().map(|found| &found.path);
        let others = found.filter(|path| !places.contains_key(*path)).cloned();
        Self {
            others: others.collect(),
            places,
        }
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
            let param = match self.others.contains(path) {
                true => own_leaf(param),
                false => param,
            };
            return (param, None);
        };
        let unit = generation.unit.clone();
        let device = param.lazy_device();
        let declared = Declared::of(&param);
        let id = param.id;
        let value = initial::value(&unit, &unit.slots[index], &param);
        drop(param);
        let value = value.unwrap_or_else(|error| throw(error));
        let leaf = Param::initialized(id, value);
        let leaf = leaf.set_require_grad(declared.is_trainable);
        let base = base(&declared, &device, counterpart(id));
        let own = declared.mapper;
        let stand_in = stand_in(declared.shape, &device);
        let base = base
            .load_mapper(record::load(unit.clone(), index, own.clone(), stand_in))
            .save_mapper(record::save(unit, index, own));
        (base, Some(ShardedParam::new(leaf, index, generation)))
    }
}

/// The parameter with a leaf of this rank's own, lazy if it was: ranks that share a leaf share a
/// graph, and would wait for each other's backward. What is a clone here may have others there.
fn own_leaf<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    param.init_mapper(|tensor| transport::in_place_of(&tensor, tensor.clone().inner().into_data()))
}

/// The parameter itself: a stand-in, recorded in the shape in which it always was.
fn base<const D: usize>(declared: &Declared<D>, device: &Device, id: ParamId) -> Param<Tensor<D>> {
    let shape = declared.shape;
    if shape == declared.recorded {
        return Param::initialized(id, stand_in(shape, device));
    }
    // Burn checks records against the declared shape of a lazy parameter.
    let make = move |device: &Device, _: bool| stand_in(shape, device);
    Param::uninitialized(id, make, device.clone(), false, declared.recorded.into())
}
