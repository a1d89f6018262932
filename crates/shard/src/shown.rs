//! A rank's part of a parameter, in the shape in which optimizers see it.

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, GradientCheckpointingStrategy, Shape, Tensor};

use crate::device;

/// A rank's part of a parameter, as a separate parameter. A shard is flat, and a whole parameter keeps its shape. If
/// another rank owns the parameter, the part keeps the number of dims, all of size 0.
#[derive(Debug, Clone)]
pub(crate) enum Shown {
    One(Param<Tensor<1>>),
    Two(Param<Tensor<2>>),
    Three(Param<Tensor<3>>),
    Four(Param<Tensor<4>>),
    Five(Param<Tensor<5>>),
    Six(Param<Tensor<6>>),
}

/// Evaluates an expression on the parameter, for any number of dims.
macro_rules! of_any {
    ($shown:expr, $param:ident => $body:expr) => {
        match $shown {
            Shown::One($param) => $body,
            Shown::Two($param) => $body,
            Shown::Three($param) => $body,
            Shown::Four($param) => $body,
            Shown::Five($param) => $body,
            Shown::Six($param) => $body,
        }
    };
}

/// Maps the parameter to one with the same number of dims.
macro_rules! map_any {
    ($shown:expr, $param:ident => $body:expr) => {
        match $shown {
            Shown::One($param) => Shown::One($body),
            Shown::Two($param) => Shown::Two($body),
            Shown::Three($param) => Shown::Three($body),
            Shown::Four($param) => Shown::Four($body),
            Shown::Five($param) => Shown::Five($body),
            Shown::Six($param) => Shown::Six($body),
        }
    };
}

pub(crate) use of_any;

impl Shown {
    /// Creates a parameter with the elements of `flat`, as a leaf of the shape `shape` with 1 to
    /// [`MAX_DIMS`](crate::slot::MAX_DIMS) dims.
    pub(crate) fn new(id: ParamId, flat: Tensor<1>, shape: &[usize], is_trainable: bool) -> Self {
        match shape.len() {
            1 => Self::One(leaf(id, flat, shape, is_trainable)),
            2 => Self::Two(leaf(id, flat, shape, is_trainable)),
            3 => Self::Three(leaf(id, flat, shape, is_trainable)),
            4 => Self::Four(leaf(id, flat, shape, is_trainable)),
            5 => Self::Five(leaf(id, flat, shape, is_trainable)),
            6 => Self::Six(leaf(id, flat, shape, is_trainable)),
            dims => unreachable!("a tensor of {dims} dims is shown flat"),
        }
    }

    /// Creates a frozen parameter of the shape `shape`, with 1 to [`MAX_DIMS`](crate::slot::MAX_DIMS) dims, on `device`.
    /// Its flat elements are made when they are read.
    pub(crate) fn lazy(
        id: ParamId,
        elements: impl FnOnce() -> Tensor<1> + Send + Sync + 'static,
        device: &Device,
        shape: &[usize],
    ) -> Self {
        match shape.len() {
            1 => Self::One(lazy(id, elements, device, shape)),
            2 => Self::Two(lazy(id, elements, device, shape)),
            3 => Self::Three(lazy(id, elements, device, shape)),
            4 => Self::Four(lazy(id, elements, device, shape)),
            5 => Self::Five(lazy(id, elements, device, shape)),
            6 => Self::Six(lazy(id, elements, device, shape)),
            dims => unreachable!("a tensor of {dims} dims is shown flat"),
        }
    }

    /// Returns true if the parameter is trained, or will be after `train`.
    pub(crate) fn is_trained(&self) -> bool {
        of_any!(self, param => {
            let value = param.base();
            let after = || param.clone().train().base();
            value.is_require_grad() || (!value.is_autodiff() && after().is_require_grad())
        })
    }

    /// Returns the parameter with its elements replaced by `flat`.
    pub(crate) fn with_elements(self, flat: Tensor<1>) -> Self {
        map_any!(self, param => param.map(|old| {
            let is_trainable = old.is_require_grad();
            shaped(flat, old.shape()).set_require_grad(is_trainable)
        }))
    }

    /// Returns the elements, flat and without autodiff.
    pub(crate) fn flat(&self) -> Tensor<1> {
        of_any!(self, param => {
            let value = plain(param.base());
            let len = value.shape().num_elements();
            value.reshape([len])
        })
    }

    /// Returns the id that optimizers see.
    pub(crate) fn id(&self) -> ParamId {
        of_any!(self, param => param.id)
    }

    pub(crate) fn device(&self) -> Device {
        of_any!(self, param => param.base().device())
    }

    pub(crate) fn with_id(self, id: ParamId) -> Self {
        map_any!(self, param => {
            let mut param = param;
            param.id = id;
            param
        })
    }

    pub(crate) fn shape(&self) -> Vec<usize> {
        of_any!(self, param => param.shape().to_vec())
    }

    /// Returns the default graph parent of the full parameter: the leaf itself if it is flat, otherwise a stand-in on
    /// the same device.
    pub(crate) fn parent(&self) -> Tensor<1> {
        match self {
            Self::One(param) => param.base(),
            shaped => Tensor::zeros([1], &of_any!(shaped, param => param.base().device())),
        }
    }

    /// Returns the parameter with a save mapper that calls `refuse`, so recording it fails.
    pub(crate) fn guarded(self, refuse: impl Fn() + Clone + Send + Sync + 'static) -> Self {
        map_any!(self, param => param.save_mapper(move |tensor| {
            refuse();
            tensor
        }))
    }

    /// Returns the parameter that `mapper` returns, with its elements in row-major order, so a flat view needs no copy.
    pub(crate) fn mapped<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        match self {
            Self::One(param) => Self::One(Module::map(param, mapper)),
            shaped => map_any!(shaped, param => in_rows(Module::map(param, mapper))),
        }
    }

    pub(crate) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        of_any!(self, param => param.visit(visitor));
    }

    pub(crate) fn collect_devices(&self, devices: Devices) -> Devices {
        of_any!(self, param => param.collect_devices(devices))
    }

    pub(crate) fn fork(self, device: &Device) -> Self {
        map_any!(self, param => param.fork(device))
    }

    pub(crate) fn moved_to(self, device: &Device) -> Self {
        map_any!(self, param => param.to_device(device))
    }

    pub(crate) fn valid(&self) -> Self {
        map_any!(self, param => param.valid())
    }

    /// Returns the parameter, trainable again after `valid`, with the module's original autodiff strategy.
    pub(crate) fn train(self, strategy: Option<GradientCheckpointingStrategy>) -> Self {
        map_any!(self, param => param.train().map(|leaf| match strategy {
            Some(strategy) => {
                let is_trainable = leaf.is_require_grad();
                leaf.inner()
                    .autodiff()
                    .with_gradient_checkpointing_strategy(strategy)
                    .set_require_grad(is_trainable)
            }
            None => leaf,
        }))
    }
}

/// Returns a parameter with the elements of `flat`, on its device and with its autodiff.
fn leaf<const D: usize>(
    id: ParamId,
    flat: Tensor<1>,
    shape: &[usize],
    is_trainable: bool,
) -> Param<Tensor<D>> {
    let value = shaped(flat, shape.to_vec().into());
    Param::initialized(id, value).set_require_grad(is_trainable)
}

/// Returns a frozen parameter whose flat elements are made when they are read.
fn lazy<const D: usize>(
    id: ParamId,
    elements: impl FnOnce() -> Tensor<1> + Send + Sync + 'static,
    device: &Device,
    shape: &[usize],
) -> Param<Tensor<D>> {
    let shape = Shape::from(shape.to_vec());
    let of = shape.clone();
    let make = move |device: &Device, is_trained: bool| {
        let flat = device::tracked(plain(elements()), device);
        shaped(flat, of)
            .to_device(device)
            .set_require_grad(is_trained)
    };
    Param::uninitialized(id, make, device.clone(), false, shape)
}

/// Returns the elements of `flat` in another shape, as a leaf instead of a view.
fn shaped<const D: usize>(flat: Tensor<1>, shape: Shape) -> Tensor<D> {
    let device = flat.device();
    device::tracked(reshaped(plain(flat), shape), &device)
}

/// Returns the elements of a tensor without autodiff in another shape. Burn's own reshape interprets a 0 in a shape as
/// the existing dim.
fn reshaped<const D: usize>(flat: Tensor<1>, shape: Shape) -> Tensor<D> {
    match shape.num_elements() {
        0 => Tensor::zeros(shape, (&flat.device(), flat.dtype())),
        _ => flat.reshape(shape),
    }
}

/// Returns the parameter with its elements in row-major order. An optimizer may return a transposed view, whose flat
/// tensor would be a second copy.
fn in_rows<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    param.map(|tensor| {
        let device = tensor.device();
        let (shape, is_trainable) = (tensor.shape(), tensor.is_require_grad());
        let flat: Tensor<1> = plain(tensor).reshape([shape.num_elements()]);
        device::tracked(reshaped(flat, shape), &device).set_require_grad(is_trainable)
    })
}

pub(crate) fn plain<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if tensor.is_autodiff() {
        tensor.inner()
    } else {
        tensor
    }
}
