//! `fully_shard` and `replicate`: from a plain module to a sharded one.
//!
//! - `factors`: the parameters of adapters that are attached while sharding. `magnitudes`: the initial values of some.
//!   `detached`: the adapters that the module already has. `base`: the adapted matrices in fewer bits.
//! - `ranks`: the ranks that take part. `grouping`: the parameters of each unit, and the owner of each undivided
//!   parameter.
//! - `placed`: units with their paths in the module, including those of earlier calls.
//! - `sharder`: replaces a parameter with a stand-in that has the shard next to it. `initial`: rank 0's values. `read`:
//!   values that each rank reads.
//! - `ties`: fields that share a parameter.
//! - `own_states`: running states that ranks must not share.

mod base;
mod detached;
mod factors;
mod grouping;
mod initial;
mod magnitudes;
mod own_states;
mod placed;
mod ranks;
mod read;
mod sharder;
mod ties;

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::DType;
use burn_fsdp_collectives::{AsMesh, Fingerprint};

use crate::copies::Generation;
use crate::device;
use crate::error::Error;
use crate::inspect;
use crate::inspect::memory;
use crate::policy::ShardPolicy;
use crate::root::{Known, Named, Root};
use crate::state::buffers::cast_states;
use crate::survey::{Found, Survey, survey};
use crate::thrown::catch;
use burn_fsdp_mesh::{Pattern, Strategy};

use grouping::{Grouping, Ignored};
pub(crate) use own_states::own as own_states;
use placed::{Placed, check_groups, earlier_units, split_off_replicas};
use ranks::Ranks;
pub use read::InitialPart;
use read::Read;
use sharder::Sharder;
use ties::Ties;

/// Shards `module` over the policy's axis of `mesh`. The returned module has the same type and is used in the same way.
///
/// Each unit is gathered when one of its parameters is first used, and freed after its forward and after its backward.
/// Its gradients are averaged over the ranks. All ranks start from rank 0's values. Uninitialized parameters are
/// initialized only on rank 0, one at a time in module order.
///
/// Burn's random numbers come from one generator for all threads of the process. For reproducible initial values, seed
/// the device on rank 0, directly before this call. If ranks are threads, the other ranks must neither seed it nor draw
/// from it meanwhile, and dropout is not reproducible. It is if each rank is a process.
///
/// Each shard has the id of its parameter, so existing groups by ids still match; see [`param_id`](crate::param_id).
///
/// Fields that are clones of one parameter (one id) stay one parameter. The first of them in module order is sharded,
/// under its path. All others return its value, in each copy of the module and after any later change to it.
///
/// If a child was sharded by an earlier call, its parent takes the remaining parameters and orders the operations of
/// both.
///
/// `mesh` is a [`ProcessMesh`](burn_fsdp_collectives::ProcessMesh), or a group, which is a one-dimensional mesh with
/// the policy's axis.
///
/// Collective: all ranks of the axis call it, with the same module structure and policy.
///
/// # Errors
///
/// A pattern that matches nothing, an axis that the mesh lacks, an invalid option, parameters that cannot be sharded or
/// reached, [`Error::Tied`] for fields with one id that cannot share a parameter, a child in the middle of a step, or a
/// failed collective.
pub fn fully_shard<M: Module>(
    module: M,
    mesh: &impl AsMesh,
    policy: ShardPolicy,
) -> Result<M, Error> {
    wrap(module, mesh, &policy, Form::Shard, None)
}

/// Shards `module` like [`fully_shard`], but with values that each rank reads itself. `read` receives a description of
/// this rank's part of each parameter, in module order, and returns its bytes, or `None` for a parameter that starts
/// from rank 0's value.
///
/// A parameter that is read is not initialized on any rank, and each rank holds only its part. The dtype is the
/// parameter's, or its device's default for an uninitialized parameter.
///
/// Collective like [`fully_shard`]: `read` must return `None` for the same parameters on all ranks.
///
/// # Errors
///
/// As [`fully_shard`]; errors of `read`; [`Error::LocalLength`] for a different number of bytes.
pub fn fully_shard_from<M: Module, E: From<Error>>(
    module: M,
    mesh: &impl AsMesh,
    policy: ShardPolicy,
    mut read: impl FnMut(&InitialPart<'_>) -> Result<Option<Vec<u8>>, E>,
) -> Result<M, E> {
    let mut failure = None;
    let mut read = |part: &InitialPart<'_>| {
        read(part).map_err(|error| {
            failure = Some(error);
            // This error is never seen, because `failure` is returned instead.
            Error::NotSharded
        })
    };
    let wrapped = wrap(module, mesh, &policy, Form::Shard, Some(&mut read));
    match failure {
        Some(failure) => Err(failure),
        None => Ok(wrapped?),
    }
}

/// Makes `module` data-parallel over the policy's axes of `mesh`: every rank holds all of it, starting from rank 0's
/// values, and gradients are averaged by one all-reduce per unit. The policy's strategy does not apply; its units
/// determine which gradients are reduced together.
///
/// Submodules that are already sharded stay sharded, each under its own root. A later [`fully_shard`] of a parent
/// leaves a replicated module and everything in it unchanged.
///
/// Collective: all ranks of the axes call it, with the same module structure and policy.
///
/// # Errors
///
/// As [`fully_shard`].
pub fn replicate<M: Module>(
    module: M,
    mesh: &impl AsMesh,
    policy: ShardPolicy,
) -> Result<M, Error> {
    wrap(
        module,
        mesh,
        &policy.strategy(Strategy::NoShard),
        Form::Replicate,
        None,
    )
}

/// Whether the module is sharded or replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Shard,
    Replicate,
}

fn wrap<M: Module>(
    module: M,
    mesh: &impl AsMesh,
    policy: &ShardPolicy,
    form: Form,
    read: Option<Read<'_>>,
) -> Result<M, Error> {
    expect_one_gather(policy)?;
    let mesh = mesh.as_mesh(&policy.axis)?;
    let ranks = Ranks::new(&mesh, policy)?;
    let (module, adapters) = detached::detached(module, &policy.adapters)?;
    base::expect_adapters(policy, &adapters)?;
    let (module, cast) = match policy.buffers {
        Some(dtype) => cast_states(module, dtype.into())?,
        None => (module, Vec::new()),
    };
    let survey = survey(&module)?;
    let earlier = earlier_units(&module);
    let (left_alone, adopted) = match form {
        Form::Replicate => (earlier, Vec::new()),
        Form::Shard => split_off_replicas(earlier),
    };
    if let (Some(group), Some(path)) = (policy.adapters.first(), survey.sharded.first()) {
        return Err(Error::Option {
            option: group.method.option(),
            expected: "set in one call for the whole module; use `units` instead of calls for its children",
            got: format!("set for a module in which `{path}` is already sharded"),
        });
    }
    let ignored = Ignored::new(&survey, policy)?;
    let ties = Ties::new(&module, &survey, &ignored, policy)?;
    expect_modules(&survey, policy)?;
    let parameters: Vec<_> = survey
        .parameters
        .iter()
        .filter(|found| !ignored.contains(&found.path))
        .filter(|found| !ties.contains(&found.path))
        // A parameter without elements has nothing to shard.
        .filter(|found| !found.shape.contains(&0))
        .cloned()
        .collect();
    let parameters = factors::with_factors(parameters, &policy.adapters, &adapters)?;
    check(&survey, &parameters, &adopted, &left_alone)?;
    for earlier in &adopted {
        check_groups(earlier, &ranks.groups)?;
        if let Some(root) = earlier.root_link.root() {
            root.expect_between_steps()?;
        }
    }
    let grouping = Grouping::new(&parameters, ties.paths(), policy)?;
    let factors: HashMap<_, _> = parameters
        .iter()
        .filter(|found| found.factor_of.is_some())
        .map(|factor| (factor.path.clone(), factor.clone()))
        .collect();
    let units = grouping.units(&ranks.groups, policy, form == Form::Replicate)?;
    let root = Root::new(ranks.all, policy, known(&survey, &ignored, cast, &adopted));

    let first = units.into_iter().map(Generation::first).collect();
    let (sharder, made) = Sharder::new(first, &survey, factors);
    let sharder = sharder.reading(read).tying(ties).adapted(adapters);
    let not_finite = sharder.not_finite();
    let module = catch(|| module.apply_reparameterization(sharder))?;
    if policy.base_bits.is_some() {
        not_finite.agree(&root.group)?;
    }
    for earlier in &adopted {
        earlier.copies.unit.demote(&earlier.prefix);
    }
    let all: Vec<_> = made.into_iter().chain(adopted).collect();
    all.iter().for_each(|placed| placed.root_link.join(&root));
    root.adopt(all.iter().map(|placed| &placed.copies));
    let module = own_states::separate(module, &survey, &root.group)?;
    begin_history(&module);
    memory::warn_at_wrap(&root);
    Ok(module)
}

/// Rejects a policy that selects two kinds of gathers.
fn expect_one_gather(policy: &ShardPolicy) -> Result<(), Error> {
    if policy.hooks.gather.is_some() && policy.gathers_in_8_bits {
        return Err(Error::Option {
            option: "gather_hook",
            expected: "set without it, because the hook chooses what is sent",
            got: "set together with `gather_in_8_bits`".to_owned(),
        });
    }
    Ok(())
}

/// Rejects patterns for modules, of the precision and of recomputed regions, that match no module.
fn expect_modules(survey: &Survey, policy: &ShardPolicy) -> Result<(), Error> {
    let found = survey.parameters.iter().map(|found| &found.path);
    let paths: Vec<_> = found.chain(&survey.sharded).map(String::as_str).collect();
    let selects_none = |pattern: &&Pattern| !paths.iter().any(|path| pattern.is_around(path));
    let mut recomputed = policy.recomputed.iter().flatten();
    let unmatched = policy.precision.unmatched(&paths);
    match unmatched.or_else(|| recomputed.find(selects_none).map(Pattern::as_str)) {
        Some(pattern) => Err(grouping::unmatched(pattern, paths.iter().copied())),
        None => Ok(()),
    }
}

/// Returns what the root must know of tensors that its units do not manage: the ignored parameters, and the running
/// states that were cast, here or by earlier calls.
fn known(
    survey: &Survey,
    ignored: &Ignored,
    cast: Vec<(Named, DType)>,
    adopted: &[Placed],
) -> Known {
    let parameters = survey.parameters.iter();
    let ignored = parameters.filter(|found| ignored.contains(&found.path));
    let ignored = ignored.map(|found| Named {
        path: found.path.clone(),
        id: found.id,
    });
    let mut known = Known::new(ignored.collect(), cast);
    for placed in adopted {
        if let Some(root) = placed.root_link.root() {
            known.adopt(root.known(), &placed.prefix);
        }
    }
    known
}

/// Rejects modules that cannot be sharded.
fn check(
    survey: &Survey,
    parameters: &[Found],
    adopted: &[Placed],
    left_alone: &[Placed],
) -> Result<(), Error> {
    if let Some((path, name)) = survey.foreign.first() {
        return Err(Error::Reparameterized {
            path: path.clone(),
            name: name.clone(),
        });
    }
    for found in parameters {
        let first = &parameters[0];
        if !device::is_same_backend(&first.device, &found.device) {
            return Err(Error::Backends {
                first: first.path.clone(),
                second: found.path.clone(),
                expected: format!("{:?}", first.device),
                got: format!("{:?}", found.device),
            });
        }
    }
    // A parent without remaining parameters still orders the operations of its children.
    let mut roots: Vec<_> = adopted
        .iter()
        .filter_map(|placed| placed.root_link.root())
        .collect();
    roots.dedup_by(|a, b| Arc::ptr_eq(a, b));
    if !parameters.is_empty() || roots.len() > 1 {
        return Ok(());
    }
    let mut known = adopted.iter().chain(left_alone);
    Err(match known.next() {
        Some(placed) => Error::AlreadySharded {
            unit: placed.copies.unit.label(),
        },
        None => Error::NothingToShard,
    })
}

/// Gives all units' copies a common history, since they may come from several calls.
fn begin_history<M: Module>(module: &M) {
    let members = inspect::members(module);
    let mut hasher = Fingerprint::new();
    for member in &members {
        member.generation.epoch().hash(&mut hasher);
    }
    let epoch = hasher.finish();
    for member in &members {
        member.generation.restart(epoch);
    }
}
