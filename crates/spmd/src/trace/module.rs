//! The parameters and buffers of a module on the capture device.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::autodiff::grads::Gradients;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor};
use burn_capture::CaptureBackend;
use burn_ir::TensorId;

use crate::Precision;

use super::capture::{Captured, Tape, bool_id, float_id, int_id};

/// A tensor of the module.
#[derive(Debug, Clone)]
pub(crate) struct Leaf {
    pub(super) path: Arc<str>,
    /// Burn's id of the parameter, which its clones share.
    pub(super) id: ParamId,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) captured: Option<Captured>,
    pub(super) gradient: Option<Captured>,
    pub(super) is_float: bool,
    /// True for a float parameter that requires a gradient.
    pub(super) is_trained: bool,
}

/// Burn's name of the layer that gets a copy of its running statistics.
const LAYER: &str = "Struct:BatchNorm";

/// The stored types of a module's tensors by path, if they differ from the device's defaults.
pub(crate) type Stored = BTreeMap<Arc<str>, DType>;

/// Replaces every tensor of a module with a fake one of the same shape and type, which has no memory. Lazy parameters
/// are not initialized, so no weight is ever computed.
pub(super) fn with_fakes<M: Module>(
    module: M,
    device: &Device,
    tracked: &Device,
    stored: &Stored,
) -> M {
    module.map(&mut Fakes {
        device,
        tracked,
        stored,
        path: Vec::new(),
        trained: BTreeMap::new(),
    })
}

struct Fakes<'a> {
    device: &'a Device,
    tracked: &'a Device,
    stored: &'a Stored,
    path: Vec<String>,
    /// The fakes of trained parameters, with any number of dims. Fields that share a parameter share its fake.
    trained: BTreeMap<ParamId, Box<dyn Any>>,
}

impl ModuleMapper for Fakes<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        let fake = |shape: Shape, dtype: DType| Tensor::<D>::empty(shape, (self.tracked, dtype));
        // A lazy parameter is not initialized, because that may compute on the host. A fake is loaded as if from a
        // record, to find out whether the parameter is trained and its shape in memory. That shape may differ from the
        // shape in records, for example in linear layers by columns.
        let default: DType = self.device.settings().float_dtype.into();
        let is_made = param.is_initialized();
        let (known, stored) = if is_made {
            (Some(param.base()), param.base().shape())
        } else {
            (None, param.lazy_shape())
        };
        let is_tracked = param.lazy_device().is_autodiff();
        let loaded = is_tracked.then(|| {
            let asked = if is_made {
                param.clone().load_mapper(|tensor| tensor)
            } else {
                param.clone()
            };
            asked
                .transform_for_load(fake(stored.clone(), default), id)
                .base()
        });
        // Burn's `Param::map` can leave a value without gradients in a parameter that is configured to have them, and
        // Burn does not train it.
        let has_gradients = |tensor: &Tensor<D>| tensor.is_require_grad();
        let is_trained =
            loaded.as_ref().is_some_and(has_gradients) && known.as_ref().is_none_or(has_gradients);
        let (shape, dtype) = match known.or(loaded) {
            Some(tensor) => (tensor.shape(), tensor.dtype()),
            None => (stored, default),
        };
        let said = (!self.stored.is_empty()).then(|| self.stored.get(self.path.join(".").as_str()));
        let dtype = said.flatten().copied().unwrap_or(dtype);
        if is_trained {
            let known = self.trained.get(&id);
            let known = known.and_then(|known| known.downcast_ref::<Tensor<D>>());
            if let Some(known) = known.filter(|known| known.shape() == shape) {
                return Param::initialized(id, known.clone());
            }
        }
        if is_trained {
            let leaf = fake(shape, dtype).require_grad();
            self.trained
                .entry(id)
                .or_insert_with(|| Box::new(leaf.clone()));
            Param::initialized(id, leaf)
        } else {
            // Created without autodiff, because Burn does not move untracked tensors between capture devices.
            Param::initialized(id, Tensor::<D>::empty(shape, (self.device, dtype)))
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let tensor = param.base();
        let fake = Tensor::empty(tensor.shape(), (self.device, tensor.dtype()));
        Param::initialized(param.id, fake)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let tensor = param.base();
        let fake = Tensor::empty(tensor.shape(), (self.device, tensor.dtype()));
        Param::initialized(param.id, fake)
    }
}

/// Returns the tensors of a module in visiting order, with their gradients if there are any.
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
    fn add(
        &mut self,
        id: ParamId,
        captured: Option<Captured>,
        gradient: Option<Captured>,
        is_float: bool,
    ) {
        let (shape, dtype) = match &captured {
            Some(captured) => (captured.shape.clone(), captured.dtype),
            None => (Vec::new(), DType::F32),
        };
        self.found.push(Leaf {
            path: self.path.join(".").into(),
            id,
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
        self.add(param.id, float_id(&tensor), gradient.flatten(), true);
        if let Some(leaf) = self.found.last_mut() {
            leaf.is_trained = tensor.is_require_grad();
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param.id, int_id(&param.base()), None, false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param.id, bool_id(&param.base()), None, false);
    }

    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}

/// Returns, for each tensor of the module, whether it requires a gradient.
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

/// Replaces every float tensor with one that requires a gradient, if possible. It is not possible for running
/// statistics, which distinguishes them from frozen parameters.
pub(super) fn with_marks<M: Module>(module: M, tracked: &Device) -> M {
    struct Marks<'a>(&'a Device);
    impl ModuleMapper for Marks<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let tensor = param.base();
            let mark = Tensor::<D>::empty(tensor.shape(), (self.0, tensor.dtype()));
            Param::initialized(param.id, mark.require_grad())
        }
    }
    module.map(&mut Marks(tracked))
}

/// Returns, for each tensor of a module with [marks](with_marks), whether it is a running statistic.
pub(super) fn running<M: Module>(marked: &M) -> Vec<bool> {
    trained(marked)
        .into_iter()
        .zip(leaves(marked, None))
        .map(|(is_marked, leaf)| leaf.is_float && !is_marked)
        .collect()
}

/// Returns a module of fakes, and whether each of its tensors is a running statistic. The given module must already
/// consist of fakes. With the default precision, it is returned unchanged, with an empty list.
pub(super) fn with_running<M: Module>(
    module: M,
    precision: &Precision,
    device: &Device,
    tracked: &Device,
    stored: &Stored,
) -> (M, Vec<bool>) {
    if *precision == Precision::default() {
        return (module, Vec::new());
    }
    let running = running(&with_marks(module.clone(), tracked));
    // Copies of a module share running statistics, which are now marks.
    (with_fakes(module, device, tracked, stored), running)
}

/// Returns the module with its parameters cast to their compute types. Running statistics keep their types, except in
/// Burn's BatchNorm, which gets a copy.
pub(super) fn computing<M: Module>(module: M, precision: &Precision, running: &[bool]) -> M {
    if *precision == Precision::default() {
        return module;
    }
    module.map(&mut Casts {
        precision,
        path: Vec::new(),
        containers: Vec::new(),
        running: running.iter(),
        cast: BTreeMap::new(),
    })
}

/// Replaces every tensor of a module that was created without autodiff with a fake. `shapes` comes from the same module
/// with autodiff, because the in-memory shapes of lazy parameters are unknown.
pub(super) fn off_tape<M: Module>(module: M, device: &Device, shapes: &[Leaf]) -> M {
    /// The fakes by parameter. Fields that share a parameter share its fake.
    struct OffTape<'a>(
        &'a Device,
        std::slice::Iter<'a, Leaf>,
        BTreeMap<TensorId, Box<dyn Any>>,
    );
    impl ModuleMapper for OffTape<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let Some(leaf) = self.1.next() else {
                return param;
            };
            let (shape, dtype) = (Shape::from(leaf.shape.clone()), leaf.dtype);
            let fake = || Tensor::<D>::empty(shape, (self.0, dtype));
            let fake = match &leaf.captured {
                Some(captured) if leaf.is_trained => {
                    let known = self.2.entry(captured.id);
                    let known = known.or_insert_with(|| Box::new(fake()));
                    let known = known.downcast_ref::<Tensor<D>>();
                    known.expect("a shared value has one shape").clone()
                }
                _ => fake(),
            };
            Param::initialized(param.id, fake)
        }

        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Int>>,
        ) -> Param<Tensor<D, Int>> {
            self.1.next();
            let tensor = param.base();
            let fake = Tensor::empty(tensor.shape(), (self.0, tensor.dtype()));
            Param::initialized(param.id, fake)
        }

        fn map_bool<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Bool>>,
        ) -> Param<Tensor<D, Bool>> {
            self.1.next();
            let tensor = param.base();
            let fake = Tensor::empty(tensor.shape(), (self.0, tensor.dtype()));
            Param::initialized(param.id, fake)
        }
    }
    module.map(&mut OffTape(device, shapes.iter(), BTreeMap::new()))
}

struct Casts<'a> {
    precision: &'a Precision,
    path: Vec<String>,
    /// Burn's type names of the enclosing modules.
    containers: Vec<String>,
    /// For each remaining tensor, true if it is a running statistic.
    running: std::slice::Iter<'a, bool>,
    /// The cast tensors by their originals. Fields that share a parameter share its cast.
    cast: BTreeMap<TensorId, Box<dyn Any>>,
}

impl ModuleMapper for Casts<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let tensor = param.base();
        let compute = self
            .precision
            .compute_of(&self.path.join("."), tensor.dtype());
        let is_own = self.containers.last().is_none_or(|last| last != LAYER);
        let is_kept = self.running.next() == Some(&true) && is_own;
        if is_kept || compute == tensor.dtype() {
            param
        } else {
            let cast = match float_id(&tensor) {
                Some(captured) => {
                    let known = self.cast.entry(captured.id);
                    let known = known.or_insert_with(|| Box::new(tensor.cast(compute)));
                    let known = known.downcast_ref::<Tensor<D>>();
                    known.expect("a shared value has one shape").clone()
                }
                None => tensor.cast(compute),
            };
            Param::initialized(param.id, cast)
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.running.next();
        param
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.running.next();
        param
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.containers.pop();
    }
}

/// Returns which tensors of a module are running statistics, and the new values of the updated ones; `None` for all
/// other tensors. It consumes the module.
///
/// Burn keeps an update separate until the mode of the module changes, and offers no other access to it. Parameters
/// without autodiff do not support that change, so they are replaced with marks. A statistic that the change leaves
/// unchanged had no update.
pub(super) fn updates<M: Module>(
    module: M,
    tracked: &Device,
) -> (Vec<bool>, Vec<Option<Captured>>) {
    let marked = with_marks(module, tracked);
    let running = running(&marked);
    let marks = leaves(&marked, None);
    let after = if running.contains(&true) {
        leaves(&marked.train(), None)
    } else {
        marks.clone()
    };
    let updates = marks.into_iter().zip(after).zip(&running);
    let updates = updates.map(|((mark, after), is_running)| {
        let is_updated = *is_running && mark.captured != after.captured;
        after.captured.filter(|_| is_updated)
    });
    let updates = updates.collect();
    (running, updates)
}
