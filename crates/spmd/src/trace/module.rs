//! The parameters and buffers of a module, as the capture device sees them.

use std::sync::Arc;

use burn::backend::autodiff::grads::Gradients;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_capture::CaptureBackend;

use super::capture::{Captured, Tape, bool_id, float_id, int_id};

/// A tensor of the module.
#[derive(Debug, Clone)]
pub(crate) struct Leaf {
    pub(super) path: Arc<str>,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) captured: Option<Captured>,
    pub(super) gradient: Option<Captured>,
    pub(super) is_float: bool,
    /// A float parameter that requires a gradient.
    pub(super) is_trained: bool,
}

/// Replaces every tensor of a module by a fake one: of the same shape, and of no memory. Lazy
/// parameters stay uninitialised, so that no weight is ever computed.
pub(super) fn with_fakes<M: Module>(module: M, device: &Device, tracked: &Device) -> M {
    module.map(&mut Fakes { device, tracked })
}

struct Fakes<'a> {
    device: &'a Device,
    tracked: &'a Device,
}

impl ModuleMapper for Fakes<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.lazy_shape();
        let dtype = match param.is_initialized() {
            true => param.base().dtype(),
            // The capture device computes lazy parameters in its default type.
            false => DType::F32,
        };
        let id = param.id;
        // Loading a fake is the way to learn whether a lazy parameter is trained.
        let fake = Tensor::<D>::empty(shape.clone(), (self.tracked, dtype));
        let loaded = match param.lazy_device().is_autodiff() {
            true => param
                .load_mapper(|tensor| tensor)
                .transform_for_load(fake, id),
            false => Param::initialized(id, fake.set_require_grad(false)),
        };
        if loaded.base().is_require_grad() {
            return loaded;
        }
        // Off the tape: Burn does not move untracked tensors between capture devices.
        Param::initialized(id, Tensor::<D>::empty(shape, (self.device, dtype)))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let fake = Tensor::empty(param.lazy_shape(), (self.device, param.base().dtype()));
        Param::initialized(param.id, fake)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let fake = Tensor::empty(param.lazy_shape(), self.device);
        Param::initialized(param.id, fake)
    }
}

/// The tensors of a module in the order in which it is visited, with their gradients if any.
pub(super) fn leaves<M: Module>(module: &M, gradients: Option<&mut Gradients>) -> Vec<Leaf> {
    let mut visitor = Leaves {
        path: Vec::new(),
        gradients,
        found: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}

struct Leaves<'a> {
    path: Vec<String>,
    gradients: Option<&'a mut Gradients>,
    found: Vec<Leaf>,
}

impl Leaves<'_> {
    fn add(&mut self, captured: Option<Captured>, gradient: Option<Captured>, is_float: bool) {
        let (shape, dtype) = match &captured {
            Some(captured) => (captured.shape.clone(), captured.dtype),
            None => (Vec::new(), DType::F32),
        };
        self.found.push(Leaf {
            path: self.path.join(".").into(),
            shape,
            dtype,
            captured,
            gradient,
            is_float,
            is_trained: false,
        });
    }
}

impl ModuleVisitor for Leaves<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        let gradient = match (
            &mut self.gradients,
            tensor.clone().try_into_primitive::<Tape>(),
        ) {
            (Some(gradients), Ok(tracked)) => tracked.grad_remove(gradients),
            _ => None,
        };
        let gradient = gradient.map(|gradient| {
            let gradient = Tensor::<D>::from_primitive::<CaptureBackend>(gradient);
            float_id(&gradient)
        });
        self.add(float_id(&tensor), gradient.flatten(), true);
        if let Some(leaf) = self.found.last_mut() {
            leaf.is_trained = tensor.is_require_grad();
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(int_id(&param.base()), None, false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(bool_id(&param.base()), None, false);
    }

    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}

/// For every tensor of the module, whether it requires a gradient.
pub(super) fn trained<M: Module>(module: &M) -> Vec<bool> {
    struct Trained(Vec<bool>);
    impl ModuleVisitor for Trained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.base().is_require_grad());
        }
        fn visit_int<const D: usize>(&mut self, _: &Param<Tensor<D, Int>>) {
            self.0.push(false);
        }
        fn visit_bool<const D: usize>(&mut self, _: &Param<Tensor<D, Bool>>) {
            self.0.push(false);
        }
    }
    let mut visitor = Trained(Vec::new());
    module.visit(&mut visitor);
    visitor.0
}
