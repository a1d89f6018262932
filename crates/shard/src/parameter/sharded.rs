//! A sharded parameter, as the engine attaches it to its stand-in.

use burn::module::{
    Devices, LoraAdapter, Module, ModuleMapper, ModuleVisitor, ParamId, Reparameterization,
};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{At, ProcessGroup};
use std::sync::Arc;

use super::current::{self, Current};
use super::identity::Identity;
use super::owned::{Clones, Owned, RootLink};
use super::{mailbox, member, part, quantized};
use crate::adapter::AdapterParams;
use crate::ambient::{self, Purpose, is_within};
use crate::copies::{Generation, Transition};
use crate::device;
use crate::error::Error;
use crate::files;
use crate::path::{CONTAINER, NAME};
use crate::root::Root;
use crate::seal;
use crate::shown::Shown;
use crate::thrown::throw;

/// The container name under which an adapter's factors are visited. They are parameters of the module, not part of the
/// engine's attachment.
const ADAPTER: &str = "LoraAdapter";

/// The value of one parameter on this rank: its shard, or the whole value if it is kept whole.
///
/// For optimizers and gradients, a shard is a one-dimensional parameter, and a whole parameter has its own shape. They
/// use the path and id that the parameter had before sharding. The module's field has a stand-in, with the full shape
/// and the memory of one element.
#[derive(Clone)]
pub(crate) struct ShardedParam {
    value: Shown,
    /// The id, which takes precedence over the id in `value`: a record cannot change that one in time.
    identity: Identity,
    generation: Owned,
    /// The factors of the parameter's adapter, for optimizers and records; the engine reads them from their slots.
    adapter: Option<Box<AdapterParams>>,
}

impl std::fmt::Debug for ShardedParam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let slot = &self.generation.unit.slots[self.generation.slot];
        f.debug_struct("ShardedParam")
            .field("path", &slot.path)
            .field("shape", &slot.shape)
            .field("shard", &self.value.shape())
            .finish_non_exhaustive()
    }
}

impl ShardedParam {
    /// Returns the parameter in `slot` of a unit's first generation.
    pub(crate) fn new(
        value: Shown,
        adapter: Option<AdapterParams>,
        slot: usize,
        generation: Arc<Generation>,
        root_link: Arc<RootLink>,
    ) -> Self {
        generation.set(slot, &value);
        Self {
            identity: Identity::new(value.id()),
            value: guarded(value, &generation, slot),
            generation: Owned::new(generation, slot, root_link),
            adapter: adapter.map(Box::new),
        }
    }

    /// Returns the full parameter in the form that the model's code sees. Collective.
    pub(crate) fn full<const D: usize>(&self) -> Result<Tensor<D>, Error> {
        self.generation.full(self.value.parent())
    }

    /// Returns the copies made of the parameter, which the fields that share it follow.
    pub(crate) fn clones(&self) -> &Arc<Clones> {
        self.generation.clones()
    }

    /// Returns the id of the parameter whose stand-in has the id `stand_in`.
    pub(crate) fn settled_id(&self, stand_in: ParamId) -> ParamId {
        self.identity.settle(stand_in)
    }

    /// Returns the parameter without its adapter, with `value` instead of its own value.
    fn descend(from: &Owned, transition: Transition, identity: Identity, value: Shown) -> Self {
        let value = in_file(from, value).unwrap_or_else(|error| throw(error));
        let generation = from.descend(from.slot, transition, &value);
        Self {
            value,
            identity,
            generation: from.moved_to(generation, transition),
            adapter: None,
        }
    }

    /// Returns the parameter without its adapter, with `value` instead of its own value, after a move of the module to
    /// `device`.
    fn moved(from: &Owned, identity: Identity, value: Shown, device: &Device) -> Self {
        let moved = Self::descend(from, Transition::Device, identity, value);
        moved.generation.compute_on(device);
        moved
    }

    /// Returns the parameter with its adapter's factors changed by `change`.
    fn with_adapter(
        self,
        adapter: Option<Box<AdapterParams>>,
        change: impl FnOnce(AdapterParams) -> AdapterParams,
    ) -> Self {
        Self {
            adapter: adapter.map(|adapter| Box::new(change(*adapter))),
            ..self
        }
    }

    /// Maps the parameter without its adapter.
    fn mapped<M: ModuleMapper>(
        value: Shown,
        identity: Identity,
        generation: Owned,
        mapper: &mut M,
    ) -> Self {
        let (value, identity) = match mailbox::take_value(&generation.unit, generation.slot) {
            Some((loaded, keeps_id)) => {
                let loaded = generation.unit.held_form(generation.slot, loaded);
                let value = value.with_elements(loaded.unwrap_or_else(|error| throw(error)));
                let identity = if keeps_id {
                    identity
                } else {
                    identity.unsettled()
                };
                (value, identity)
            }
            None => {
                let slot = &generation.unit.slots[generation.slot];
                let before = identity.shown(&slot.path);
                mapper.exit_module(NAME, CONTAINER);
                let value = match slot.quantized() {
                    None => mapped(&generation, value.with_id(before), &slot.path, mapper),
                    Some(_) => quantized::mapped(&generation, value.with_id(before), |shown| {
                        mapped(&generation, shown, &slot.path, mapper)
                    }),
                };
                mapper.enter_module(NAME, CONTAINER);
                // The mapper has read the file. Most maps leave most parameters unchanged and need no check.
                if is_unwritten(&generation, &value) {
                    let checked = generation.check_file(generation.slot);
                    checked.unwrap_or_else(|error| throw(error));
                }
                let identity = if value.id() == before {
                    identity
                } else {
                    Identity::new(value.id())
                };
                (guarded(value, &generation, generation.slot), identity)
            }
        };
        let mapped = Self::descend(&generation, Transition::Map, identity, value);
        if part::is_in_backward() {
            let (replaced, slot) = (Arc::clone(&generation), generation.slot);
            drop(generation);
            replaced.free_replaced(slot);
        }
        mapped
    }

    /// Returns the value under its settled id, as visitors see it.
    fn shown(&self) -> Shown {
        let generation = &self.generation;
        let slot = &generation.unit.slots[generation.slot];
        let value = self.value.clone().with_id(self.identity.shown(&slot.path));
        match slot.quantized() {
            None => value,
            Some(_) => guarded(
                quantized::shown(generation, &value),
                generation,
                generation.slot,
            ),
        }
    }
}

/// Returns `value` with a mapper that rejects recording it. Burn records a shard only if the stand-in did not respond,
/// because a mapper dropped its recording behavior or a group left it out. The record would then contain a shard
/// instead of the parameter.
fn guarded(value: Shown, generation: &Arc<Generation>, slot: usize) -> Shown {
    let unit = generation.unit.clone();
    value.guarded(move || {
        throw(Error::Unrecordable {
            path: unit.slots[slot].path.clone(),
        })
    })
}

/// If ranks compare bytes, checks that the value that a user's mapper is about to read is unchanged since it was
/// written. Returns the parameter.
fn checked(generation: &Owned) -> Result<Current, Error> {
    let root = generation.root_link().root();
    let looks = |group: &ProcessGroup| group.compares_bytes() || group.awaits_flip(At::State);
    let root = root.filter(|root| looks(&root.group) && !ambient::is_engine());
    if let Some(root) = &root {
        root.check_before_update(generation, generation.slot)?;
    }
    let sealed_in = root.map(|root| root.group.clone());
    Ok(Current::new(
        generation.unit.clone(),
        generation.slot,
        sealed_in,
    ))
}

/// Returns true if the policy keeps the parameter in a file, and `value` is not yet there.
fn is_unwritten(from: &Owned, value: &Shown) -> bool {
    let is_in_file = from.unit.slots[from.slot].folder.is_some();
    is_in_file && !seal::is_same_memory(&from.raw(from.slot), &value.flat())
}

/// Returns `value` with its elements in a file, if the policy keeps the parameter there.
fn in_file(from: &Owned, value: Shown) -> Result<Shown, Error> {
    if !is_unwritten(from, &value) {
        return Ok(value);
    }
    let flat = device::tracked(value.flat(), &value.device());
    let flat = from.unit.in_file(from.slot, files::SHARD, flat)?;
    Ok(value.with_elements(flat))
}

/// Maps over the optimizer's view of a parameter. If `mapper` may be an untried optimizer, tries it first.
fn mapped<M: ModuleMapper>(generation: &Owned, shown: Shown, path: &str, mapper: &mut M) -> Shown {
    let root = generation.root_link().root();
    let slot = &generation.unit.slots[generation.slot];
    let may_step = slot.is_flattened() && !ambient::is_engine();
    // An optimizer may step in the first backward, before it has finished.
    let has_gradients = |root: &Arc<Root>| root.num_finished() > 0 || part::is_in_backward();
    let root = root.filter(|root| may_step && has_gradients(root));
    // The optimizer sees a whole parameter in its own shape, as before sharding.
    let unknown = match (&root, &shown) {
        (Some(root), Shown::One(shown)) => current::trying(|| root.trial.show(shown, path, mapper)),
        _ => None,
    };
    let current = checked(generation).unwrap_or_else(|error| throw(error));
    let map = || current::at(Some(current), || shown.mapped(mapper));
    match root {
        Some(root) => root.trial.watched(unknown, path, map),
        None => map(),
    }
}

impl Module for ShardedParam {
    /// Collects the devices for inputs. An offloaded shard adds none, because it is not on the computing device.
    fn collect_devices(&self, devices: Devices) -> Devices {
        match self.generation.unit.offload {
            None => self.value.collect_devices(devices),
            Some(_) => devices,
        }
    }

    fn fork(self, device: &Device) -> Self {
        let Self {
            value,
            identity,
            generation,
            adapter,
        } = self;
        let value = value.fork(&generation.unit.home(device));
        Self::moved(&generation, identity, value, device)
            .with_adapter(adapter, |adapter| adapter.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        let Self {
            value,
            identity,
            generation,
            adapter,
        } = self;
        let value = value.moved_to(&generation.unit.home(device));
        Self::moved(&generation, identity, value, device)
            .with_adapter(adapter, |adapter| adapter.to_device(device))
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let slot = self.generation.slot;
        let is_seen = member::answer(&self.generation, &self.value, &self.identity)
            // The whole value has just been recorded under the parameter's own path.
            || mailbox::take_recorded(&self.generation.unit, slot);
        if is_seen && self.adapter.is_none() {
            return;
        }
        // The shard is visited under the path of the parameter that it represents, so groups by path still work.
        visitor.exit_module(NAME, CONTAINER);
        if !is_seen {
            self.shown().visit(visitor);
        }
        if let Some(adapter) = &self.adapter {
            visitor.enter_module(LoraAdapter::NAME, ADAPTER);
            adapter.visit(visitor);
            visitor.exit_module(LoraAdapter::NAME, ADAPTER);
        }
        visitor.enter_module(NAME, CONTAINER);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        if is_within(Purpose::Prepare) {
            return self;
        }
        let Self {
            value,
            identity,
            generation,
            adapter,
        } = self;
        let mapped = if part::leaves_out(&generation.unit, generation.slot) {
            Self {
                value,
                identity,
                generation,
                adapter: None,
            }
        } else {
            Self::mapped(value, identity, generation, mapper)
        };
        if adapter.is_none() {
            return mapped;
        }
        mapper.exit_module(NAME, CONTAINER);
        mapper.enter_module(LoraAdapter::NAME, ADAPTER);
        let mapped = mapped.with_adapter(adapter, |adapter| adapter.map(mapper));
        mapper.exit_module(LoraAdapter::NAME, ADAPTER);
        mapper.enter_module(NAME, CONTAINER);
        mapped
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        if is_within(Purpose::OwnStates) {
            return self.clone();
        }
        let value = self.value.valid();
        let identity = self.identity.clone();
        Self::descend(&self.generation, Transition::Valid, identity, value)
            .with_adapter(self.adapter.clone(), |adapter| adapter.valid())
    }

    fn train(self) -> Self {
        if is_within(Purpose::OwnStates) {
            return self;
        }
        let Self {
            value,
            identity,
            generation,
            adapter,
        } = self;
        let strategy = generation.unit.strategy;
        let value = value.train(strategy);
        Self::descend(&generation, Transition::Train, identity, value)
            .with_adapter(adapter, Module::train)
    }
}
