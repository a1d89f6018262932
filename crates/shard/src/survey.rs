//! A walk over a module before it is sharded: its float parameters, and what is none.

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Device, Tensor};

use crate::parameter::NAME;

/// What the walk found at one path.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    pub(crate) kind: Kind,
}

/// Kinds of float tensors in a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A parameter, trainable or frozen.
    Parameter,
    /// A running state, such as BatchNorm's.
    Buffer,
    /// Sharded by an earlier call.
    Sharded,
    /// Carries another reparameterization, by name.
    Foreign(String),
}

/// Walks `module` without initializing any lazy parameter.
///
/// Burn shows buffers and parameters alike to mappers, but only a parameter keeps what a mapper
/// attaches: a marker, put on a clone, tells them apart.
pub(crate) fn survey<M: Module>(module: &M) -> Vec<Found> {
    let marked = module.clone().apply_reparameterization(Attach);
    let mut walk = Walk::default();
    marked.visit(&mut walk);
    walk.found
}

#[derive(Module, Debug)]
struct Marker {
    #[module(skip)]
    nothing: (),
}

impl Reparameterization for Marker {
    const NAME: &'static str = "fsdp_survey";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

struct Attach;

impl Reparameterizer for Attach {
    type Reparam = Marker;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Marker>) {
        (param, Some(Marker { nothing: () }))
    }
}

#[derive(Default)]
struct Walk {
    path: Vec<String>,
    /// How deep inside reparameterizations the walk is.
    nested: usize,
    found: Vec<Found>,
}

const CONTAINER: &str = "Reparameterization";

impl ModuleVisitor for Walk {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == CONTAINER {
            if self.nested == 0
                && let Some(last) = self.found.last_mut()
            {
                last.kind = match name {
                    Marker::NAME => Kind::Parameter,
                    NAME => Kind::Sharded,
                    other => Kind::Foreign(other.to_owned()),
                };
            }
            self.nested += 1;
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        if container == CONTAINER {
            self.nested -= 1;
        }
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.nested > 0 {
            return;
        }
        let device = param.lazy_device();
        let dtype = if param.is_initialized() {
            param.base().dtype()
        } else {
            device.settings().float_dtype.into()
        };
        self.found.push(Found {
            path: self.path.join("."),
            id: param.id,
            shape: param.lazy_shape().to_vec(),
            dtype,
            device,
            kind: Kind::Buffer,
        });
    }
}
