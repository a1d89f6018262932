//! What a sharded parameter is to Burn: a reparameterization with the shard as its own parameter.

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, Reparameterization};
use burn::tensor::{Device, Tensor};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::checkpoint;
use crate::error::throw;
use crate::full;
use crate::generation::{Generation, Owned, Transition};
use crate::inspect;

/// Name of the reparameterization.
pub(crate) const NAME: &str = "fsdp";
/// What Burn calls the container of a reparameterization while visiting and mapping.
pub(crate) const CONTAINER: &str = "Reparameterization";

/// The value of one parameter on this rank: its shard, or the whole where it is kept whole.
///
/// Optimizers and gradients see it as a parameter of one dimension, under the path of the
/// parameter it stands for. The parameter itself is a stand-in of the full shape without memory.
#[derive(Clone)]
pub(crate) struct ShardedParam {
    value: Param<Tensor<1>>,
    generation: Owned,
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
    /// The parameter in `slot` of a unit's first generation.
    pub(crate) fn new(value: Param<Tensor<1>>, slot: usize, generation: Arc<Generation>) -> Self {
        generation.set(slot, value.base());
        Self {
            value,
            generation: Owned::new(generation, slot),
        }
    }

    fn descend(from: &Owned, transition: Transition, value: Param<Tensor<1>>) -> Self {
        let generation = from.descend(from.slot, transition, value.base());
        Self {
            value,
            generation: from.moved_to(generation, transition),
        }
    }
}

impl ShardedParam {
    /// With `value` in place of its own after a move of the module to `device`.
    fn moved(from: &Owned, value: Param<Tensor<1>>, device: &Device) -> Self {
        let moved = Self::descend(from, Transition::Device, value);
        moved.generation.compute_on(device);
        moved
    }
}

impl Reparameterization for ShardedParam {
    const NAME: &'static str = NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if full::keeps_base() {
            return base;
        }
        let root = self.generation.unit.root();
        root.expect("a sharded module has a root")
            .access(&self.generation, self.value.base())
            .unwrap_or_else(|error| throw(error))
    }
}

impl Module for ShardedParam {
    /// Those of inputs: offloaded shards are not where the module computes.
    fn collect_devices(&self, devices: Devices) -> Devices {
        match self.generation.unit.offload {
            None => self.value.collect_devices(devices),
            Some(_) => devices,
        }
    }

    fn fork(self, device: &Device) -> Self {
        let Self { value, generation } = self;
        let value = value.fork(&generation.unit.home(device));
        Self::moved(&generation, value, device)
    }

    fn to_device(self, device: &Device) -> Self {
        let Self { value, generation } = self;
        let value = value.to_device(&generation.unit.home(device));
        Self::moved(&generation, value, device)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        if inspect::answer(&self.generation, self.generation.slot, self.value.id) {
            return;
        }
        // A record has just taken the whole value under the parameter's own path.
        let slot = &self.generation.unit.slots[self.generation.slot];
        if slot.saving.swap(false, Ordering::Relaxed) {
            return;
        }
        // Under the path of the parameter it stands for, so that groups by path go on to work.
        visitor.exit_module(NAME, CONTAINER);
        self.value.visit(visitor);
        visitor.enter_module(NAME, CONTAINER);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        if checkpoint::is_preparing() {
            return self;
        }
        let Self { value, generation } = self;
        let slot = &generation.unit.slots[generation.slot];
        let loaded = slot.loaded.lock().take();
        let value = match loaded {
            Some(loaded) => value.map(|old| loaded.set_require_grad(old.is_require_grad())),
            None => {
                mapper.exit_module(NAME, CONTAINER);
                let value = value.map_module(mapper);
                mapper.enter_module(NAME, CONTAINER);
                value
            }
        };
        Self::descend(&generation, Transition::Map, value)
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        let value = self.value.valid();
        Self::descend(&self.generation, Transition::Valid, value)
    }

    fn train(self) -> Self {
        let Self { value, generation } = self;
        let strategy = generation.unit.strategy;
        let value = value.train().map(|leaf| match strategy {
            Some(strategy) => {
                let trainable = leaf.is_require_grad();
                leaf.inner()
                    .autodiff()
                    .with_gradient_checkpointing_strategy(strategy)
                    .set_require_grad(trainable)
            }
            None => leaf,
        });
        Self::descend(&generation, Transition::Train, value)
    }
}

/// `Module::map` under a name that `Param::map` does not hide.
trait MapModule: Module {
    fn map_module<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Module::map(self, mapper)
    }
}

impl MapModule for Param<Tensor<1>> {}
