//! The form in which Burn sees a sharded parameter: a reparameterization with the shard as its own parameter.
//!
//! - `sharded`: the parameter. `owned`: a module's reference to it, and the link to its root. `identity`: its id.
//! - `tied`: another field that shares it. `quantized`: a frozen base in fewer bits, as walks see it.
//! - `current`: the parameter that an optimizer works on. `part`: the parameters that its step reaches.
//! - `member`: the walk that finds parameters. `mailbox`: the message that a walk leaves for one.

pub(crate) mod current;
pub(crate) mod identity;
pub(crate) mod mailbox;
pub(crate) mod member;
pub(crate) mod owned;
pub(crate) mod part;
mod quantized;
mod sharded;
pub(crate) mod tied;

use burn::module::{
    Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization,
};
use burn::tensor::{Device, Tensor};

use crate::ambient::{Purpose, is_within};
use crate::path::NAME;
use crate::thrown::throw;

pub(crate) use sharded::ShardedParam;
use tied::TiedParam;

/// The engine's attachment to a stand-in.
#[derive(Debug, Clone)]
pub(crate) enum Attached {
    /// The parameter itself.
    Own(Box<ShardedParam>),
    /// A reference to another field's parameter.
    Tied(TiedParam),
}

/// Returns a parameter's id in optimizers, gradients and groups, whether it is sharded or not. The `id` field of a
/// sharded parameter is its stand-in's id, which records contain.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
/// use burn_fsdp_shard::param_id;
///
/// let layer: Linear = LinearConfig::new(2, 2).init(&Device::flex());
/// assert_eq!(param_id(&layer.weight), layer.weight.id);
/// ```
pub fn param_id<const D: usize>(param: &Param<Tensor<D>>) -> ParamId {
    match param.reparameterization::<Attached>() {
        Some(Attached::Own(sharded)) => sharded.settled_id(param.id),
        // The stand-in of a tied field has the same id in records as the first field's.
        Some(Attached::Tied(_)) => identity::counterpart(param.id),
        None => param.id,
    }
}

impl Reparameterization for Attached {
    const NAME: &'static str = NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if is_within(Purpose::KeepBase) {
            return base;
        }
        let full = match self {
            Self::Own(sharded) => sharded.full(),
            Self::Tied(tied) => tied.full(),
        };
        full.unwrap_or_else(|error| throw(error))
    }
}

/// Forwards to the sharded parameter; a tied field has no value to map or move.
impl Module for Attached {
    fn collect_devices(&self, devices: Devices) -> Devices {
        match self {
            Self::Own(sharded) => sharded.collect_devices(devices),
            Self::Tied(_) => devices,
        }
    }

    fn fork(self, device: &Device) -> Self {
        match self {
            Self::Own(sharded) => Self::Own(Box::new(sharded.fork(device))),
            Self::Tied(tied) => Self::Tied(tied),
        }
    }

    fn to_device(self, device: &Device) -> Self {
        match self {
            Self::Own(sharded) => Self::Own(Box::new(sharded.to_device(device))),
            Self::Tied(tied) => Self::Tied(tied),
        }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        match self {
            Self::Own(sharded) => sharded.visit(visitor),
            Self::Tied(tied) => tied.answer(),
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        match self {
            Self::Own(sharded) => Self::Own(Box::new(sharded.map(mapper))),
            Self::Tied(tied) => Self::Tied(tied.compared()),
        }
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        match self {
            Self::Own(sharded) => Self::Own(Box::new(sharded.valid())),
            Self::Tied(tied) => Self::Tied(tied.clone()),
        }
    }

    fn train(self) -> Self {
        match self {
            Self::Own(sharded) => Self::Own(Box::new(sharded.train())),
            Self::Tied(tied) => Self::Tied(tied),
        }
    }
}
