//! Finds the float parameters and the other float tensors of a module before it is sharded.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Module, Param, ParamId, ParamMapper, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Device, Tensor};

use crate::adapter::Origin;
use crate::device;
use crate::error::Error;
use crate::layer::{self, Layer};
use crate::parameter::member::visit;
use crate::path::{self, CONTAINER, Location, NAME};
use crate::policy::ShardPolicy;

/// A float parameter that the walk found.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// True if the parameter is configured to be trained.
    pub(crate) is_trainable: bool,
    /// The adapter of a factor that is about to be created.
    pub(crate) factor_of: Option<NewAdapter>,
    /// The layer around the parameter, if the layer computes in only one type.
    pub(crate) layer: Option<Arc<Layer>>,
}

/// An adapter of a parameter, before it has slots.
#[derive(Debug, Clone)]
pub(crate) struct NewAdapter {
    /// The path of the parameter that it adapts.
    pub(crate) path: String,
    /// The factor by which the product of both factors is multiplied.
    pub(crate) scale: f64,
    pub(crate) origin: Origin,
}

impl Found {
    pub(crate) fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the type in which the parameter computes.
    pub(crate) fn compute_type(&self, policy: &ShardPolicy) -> DType {
        match &self.layer {
            Some(layer) if policy.stateful_in_full => layer.dtype,
            _ => policy.precision.compute_of(&self.path, self.dtype),
        }
    }
}

/// The float tensors of a module, by kind.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    /// Parameters to shard, trainable or frozen, in module order.
    pub(crate) parameters: Vec<Found>,
    /// Paths of parameters that earlier calls sharded.
    pub(crate) sharded: Vec<String>,
    /// The devices of running states, such as BatchNorm's, and of the parameters, by path.
    pub(crate) devices: HashMap<String, Device>,
    /// Paths of running states, in module order.
    pub(crate) buffers: Vec<String>,
    /// Ids of running states, in the same order. A clone has the same ids as its original.
    pub(crate) buffer_ids: Vec<ParamId>,
    /// Path of each parameter that has another reparameterization, and that reparameterization's name.
    pub(crate) foreign: Vec<(String, String)>,
}

/// The kind of a float tensor in a module.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Parameter,
    Buffer,
    /// A parameter that an earlier call sharded.
    Sharded,
    /// A parameter with another reparameterization, by name.
    Foreign(String),
}

/// Finds the float tensors of `module`, without initializing any lazy parameter.
///
/// Burn shows mappers buffers and parameters in the same way, but only a parameter keeps a mapper's attachment. So a
/// marker attached to a clone distinguishes them.
///
/// # Errors
///
/// [`Error::Backend`], before anything is computed on that backend; [`Error::Unreached`]; [`Error::SamePath`].
pub(crate) fn survey<M: Module>(module: &M) -> Result<Survey, Error> {
    let mut kinds = Kinds::default();
    let mut reached = HashSet::new();
    let marked = module.clone().apply_reparameterization(Attach {
        reached: &mut reached,
    });
    visit(&marked, &mut kinds);
    drop(marked);
    let mut seen = HashSet::new();
    for (path, shape, device) in &kinds.places {
        device::check_backend(path, device)?;
        if !seen.insert(path) {
            return Err(Error::SamePath { path: path.clone() });
        }
        if !reached.contains(path) {
            return Err(Error::Unreached {
                path: path.clone(),
                shape: shape.clone(),
            });
        }
    }
    let mut details = Details {
        kinds: kinds.found.into_iter().collect(),
        containers: Vec::new(),
        states: HashMap::new(),
        survey: Survey::default(),
    };
    visit(module, &mut details);
    let Details {
        mut survey, states, ..
    } = details;
    for found in &mut survey.parameters {
        found.layer = found.layer.take().and_then(|layer| layer.settled(&states));
    }
    Ok(survey)
}

/// The properties of a parameter that are known without initializing it.
pub(crate) struct Declared<const D: usize> {
    /// Shape of the value.
    pub(crate) shape: [usize; D],
    /// Shape of the recorded value: a column-layout weight is recorded transposed.
    pub(crate) recorded: [usize; D],
    /// True if the parameter is configured to be trained.
    pub(crate) is_trainable: bool,
    pub(crate) mapper: ParamMapper<Tensor<D>>,
}

impl<const D: usize> Declared<D> {
    /// Reads the properties through Burn's own loading, which needs no value. The declared shape of a lazy parameter is
    /// the recorded one.
    pub(crate) fn of(param: &Param<Tensor<D>>) -> Self {
        let device = param.lazy_device();
        let declared = param.lazy_shape().dims();
        let probe = param.clone();
        let probe = probe.transform_for_load(stand_in(declared, &device), param.id);
        // If there is a value, its properties count. Burn's `Param::map` may leave a value without gradients in a
        // parameter that is configured to have them, and Burn does not train it. On a plain device Burn does not record
        // whether a value has gradients, so every parameter there counts as trainable.
        let has_gradients = !param.is_initialized() || param.is_require_grad();
        let is_trainable = probe.is_require_grad() && has_gradients || !device.is_autodiff();
        let loaded = probe.dims();
        let (_, _, mapper) = probe.consume();
        let (shape, recorded) = if param.is_initialized() {
            let saved = mapper.on_save(stand_in(declared, &device));
            (declared, saved.dims())
        } else {
            (loaded, declared)
        };
        Self {
            shape,
            recorded,
            is_trainable,
            mapper,
        }
    }
}

/// Returns a tensor of the full shape with the memory of one element. The element is NaN, so accidental computations
/// with it are noticed.
pub(crate) fn stand_in<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    if shape.contains(&0) {
        return Tensor::zeros(shape, device).set_require_grad(false);
    }
    let one = Tensor::<D>::full([1; D], f32::NAN, device);
    one.expand(shape).set_require_grad(false)
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

struct Attach<'a> {
    /// Paths of the parameters that the module's `map` reaches.
    reached: &'a mut HashSet<String>,
}

impl Reparameterizer for Attach<'_> {
    type Reparam = Marker;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Marker>) {
        self.reached.insert(path.to_owned());
        (param, Some(Marker { nothing: () }))
    }
}

/// A visitor that determines the kind of each tensor without initializing it.
#[derive(Default)]
struct Kinds {
    found: Vec<(String, Kind)>,
    /// Path, shape and device of each tensor.
    places: Vec<(String, Vec<usize>, Device)>,
}

impl path::Visitor for Kinds {
    fn enter(&mut self, place: &Location, name: &str, container: &str) {
        if container == CONTAINER
            && !place.is_nested()
            && let Some((_, kind)) = self.found.last_mut()
        {
            *kind = match name {
                Marker::NAME => Kind::Parameter,
                NAME => Kind::Sharded,
                other => Kind::Foreign(other.to_owned()),
            };
        }
    }

    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        if !place.is_nested() {
            let path = place.path();
            let shape = param.lazy_shape().to_vec();
            self.places.push((path.clone(), shape, param.lazy_device()));
            self.found.push((path, Kind::Buffer));
        }
    }
}

/// A visitor that collects the details of each tensor, given its kind.
struct Details {
    kinds: HashMap<String, Kind>,
    /// Burn's names for the kinds of the enclosing modules.
    containers: Vec<String>,
    /// The types of running states, by path.
    states: HashMap<String, DType>,
    survey: Survey,
}

impl path::Visitor for Details {
    fn enter(&mut self, _place: &Location, _name: &str, container: &str) {
        self.containers.push(container.to_owned());
    }

    fn exit(&mut self, _place: &Location) {
        self.containers.pop();
    }

    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        let Some(kind) = self.kinds.get(&path).filter(|_| !place.is_nested()) else {
            return;
        };
        let device = param.lazy_device();
        self.survey.devices.insert(path.clone(), device.clone());
        match kind {
            Kind::Sharded => self.survey.sharded.push(path),
            Kind::Buffer => {
                self.states.insert(path.clone(), param.base().dtype());
                self.survey.buffers.push(path);
                self.survey.buffer_ids.push(param.id);
            }
            Kind::Foreign(name) => self.survey.foreign.push((path, name.clone())),
            Kind::Parameter => {
                let declared = Declared::of(param);
                self.survey.parameters.push(Found {
                    path,
                    id: param.id,
                    shape: declared.shape.to_vec(),
                    dtype: if param.is_initialized() {
                        param.base().dtype()
                    } else {
                        device.settings().float_dtype.into()
                    },
                    is_trainable: declared.is_trainable,
                    layer: layer::around(place, &self.containers, &device),
                    device,
                    factor_of: None,
                });
            }
        }
    }
}
