//! Replaces parameters with stand-ins that have the shard next to them.

use std::collections::{HashMap, HashSet};
use std::iter;
use std::sync::Arc;

use burn::module::{LoraAdapter, Module, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Distribution, Shape, Tensor, TensorData};

use super::base::Unquantizable;
use super::detached::Adapters;
use super::initial;
use super::magnitudes;
use super::placed::Placed;
use super::read::{self, Read};
use super::ties::{self, Field, Ties};
use crate::adapter::{AdapterParams, Origin};
use crate::convert;
use crate::copies::{Copies, Generation};
use crate::error::Error;
use crate::files;
use crate::parameter::identity::counterpart;
use crate::parameter::owned::{Clones, RootLink};
use crate::parameter::tied::{Tie, TiedParam};
use crate::parameter::{Attached, ShardedParam};
use crate::path::{FACTOR_A, FACTOR_B, MAGNITUDE};
use crate::shown::Shown;
use crate::slot::Slot;
use crate::state::record;
use crate::survey::{Declared, Found, Survey, stand_in};
use crate::thrown::throw;
use crate::unit::Unit;

/// The error message for tied fields that are read with different values.
const READ_TWICE: &str =
    "but the values read for them differ; read only one name, or the same values for both";

/// A reparameterizer that replaces each parameter with a stand-in, with this rank's value next to it.
pub(super) struct Sharder<'a> {
    places: HashMap<String, (Arc<Generation>, usize, Arc<RootLink>)>,
    /// Paths of parameters that no unit manages.
    others: HashSet<String>,
    /// The factors of the adapters to attach, by path.
    factors: HashMap<String, Found>,
    /// The adapters that the module already has. If there are others to attach, all parameters but their factors are
    /// frozen.
    adapters: Adapters,
    /// The function that reads initial values; `None` if all are rank 0's.
    read: Option<Read<'a>>,
    /// The fields that share a parameter with an earlier one.
    ties: Ties,
    /// The parameters that later fields may share, by path.
    firsts: HashMap<String, First>,
    not_finite: Unquantizable,
}

/// A sharded parameter, which later fields may share.
struct First {
    generation: Arc<Generation>,
    slot: usize,
    root_link: Arc<RootLink>,
    clones: Arc<Clones>,
}

impl<'a> Sharder<'a> {
    /// Creates a sharder for the parameters of these generations, whose units this call creates.
    pub(super) fn new(
        first: Vec<Arc<Generation>>,
        survey: &Survey,
        factors: HashMap<String, Found>,
    ) -> (Self, Vec<Placed>) {
        let mut places = HashMap::new();
        let mut made = Vec::with_capacity(first.len());
        for generation in first {
            let root_link = Arc::<RootLink>::default();
            for (index, slot) in generation.unit.slots.iter().enumerate() {
                let place = (generation.clone(), index, root_link.clone());
                places.insert(slot.path.clone(), place);
            }
            made.push(Placed {
                copies: Copies::of(&generation),
                root_link,
                prefix: String::new(),
            });
        }
        let found = survey.parameters.iter().map(|found| &found.path);
        let others = found.filter(|path| !places.contains_key(*path)).cloned();
        let sharder = Self {
            others: others.collect(),
            places,
            factors,
            adapters: Adapters::new(),
            read: None,
            ties: Ties::default(),
            firsts: HashMap::new(),
            not_finite: Unquantizable::default(),
        };
        (sharder, made)
    }

    pub(super) fn reading(self, read: Option<Read<'a>>) -> Self {
        Self { read, ..self }
    }

    pub(super) fn tying(self, ties: Ties) -> Self {
        Self { ties, ..self }
    }

    pub(super) fn adapted(self, adapters: Adapters) -> Self {
        Self { adapters, ..self }
    }

    /// Returns true if the parameter at `path` is frozen, because only adapters that sharding attaches are trained.
    fn freezes(&self, path: &str) -> bool {
        let attaches = |factor: &Found| {
            let adapter = factor.factor_of.as_ref();
            adapter.is_some_and(|adapter| adapter.origin != Origin::Module)
        };
        !self.factors.contains_key(path) && self.factors.values().any(attaches)
    }

    /// Returns the note of a base that cannot be quantized.
    pub(super) fn not_finite(&self) -> Unquantizable {
        self.not_finite.clone()
    }

    /// Returns this rank's value of a parameter: the first value that is read for any of its fields, or rank 0's.
    fn value<const D: usize>(
        &mut self,
        unit: &Unit,
        slot: &Slot,
        param: &Param<Tensor<D>>,
    ) -> Result<Tensor<1>, Error> {
        let Some(read) = self.read.as_deref_mut() else {
            return initial::value(unit, slot, param);
        };
        let others = self.ties.of(&slot.path);
        let others = others.map(|field| field.found.path.as_str());
        let mut known: Option<(&str, Tensor<1>)> = None;
        for path in iter::once(slot.path.as_str()).chain(others) {
            let value = read::value(read, unit, slot, path, &param.lazy_device())?;
            match (&known, value) {
                (Some((first, one)), Some(other)) => {
                    if one.clone().into_data() != other.into_data() {
                        return Err(ties::tied(first, path, READ_TWICE));
                    }
                }
                (None, Some(value)) => known = Some((path, value)),
                (_, None) => {}
            }
        }
        match known {
            Some((_, value)) => Ok(value),
            None => initial::value(unit, slot, param),
        }
    }

    /// Returns the stand-in of a field that shares an earlier field's parameter.
    fn tied<const D: usize>(
        &self,
        field: &Field,
        param: &Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Attached>) {
        let first = &self.firsts[&field.first];
        let unit = &first.generation.unit;
        let compute = unit.slots[first.slot].elements.compute.dtype;
        let layer = field.found.layer.clone();
        let tie = Tie {
            copies: Copies::of(&first.generation),
            slot: first.slot,
            field: field.number,
            path: field.found.path.clone(),
            unfit: layer.filter(|layer| layer.dtype != compute),
            root_link: first.root_link.clone(),
        };
        let base = stand_in_of(param, &first.generation, first.slot);
        let tied = TiedParam::new(tie, first.clones.clone());
        (base, Some(Attached::Tied(tied)))
    }
}

impl Reparameterizer for Sharder<'_> {
    type Reparam = Attached;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Attached>) {
        if let Some(field) = self.ties.at(path) {
            return self.tied(field, &param);
        }
        let Some((generation, index, root_link)) = self.places.remove(path) else {
            let param = if self.others.contains(path) {
                own_leaf(param)
            } else {
                param
            };
            return if self.freezes(path) {
                (param.set_require_grad(false), None)
            } else {
                (param, None)
            };
        };
        let unit = generation.unit.clone();
        let is_trainable = Declared::of(&param).is_trainable;
        let id = param.id;
        let base = stand_in_of(&param, &generation, index);
        let value = self.value(&unit, &unit.slots[index], &param);
        drop(param);
        let value = value.unwrap_or_else(|error| throw(error));
        let adapter = unit.slots[index].adapter.as_ref();
        let norms = adapter.filter(|adapter| adapter.magnitude.is_some());
        let value = self.not_finite.held(&unit, index, value);
        let norms = norms.map(|adapter| {
            let elements = unit.elements_of(index, value.clone());
            magnitudes::norms(&unit, index, adapter.columns, &elements)
        });
        let norms = norms.transpose().unwrap_or_else(|error| throw(error));
        let value = unit.in_file(index, files::SHARD, value);
        let value = value.unwrap_or_else(|error| throw(error.into()));
        let slot = &unit.slots[index];
        let shape = match slot.quantized() {
            None => slot.shown_shape(unit.groups.shard.rank()),
            Some(_) => value.dims().to_vec(),
        };
        let shown = Shown::new(id, value, &shape, is_trainable && !self.freezes(path));
        let adapter = adapter.map(|_| sharded_factors(self, path, norms));
        let sharded =
            ShardedParam::new(shown, adapter, index, generation.clone(), root_link.clone());
        let first = First {
            generation,
            slot: index,
            root_link,
            clones: sharded.clones().clone(),
        };
        self.firsts.insert(path.to_owned(), first);
        (base, Some(Attached::Own(Box::new(sharded))))
    }
}

/// Returns the stand-in of a parameter, with mappers that load and record the parameter in `slot` of `generation`.
fn stand_in_of<const D: usize>(
    param: &Param<Tensor<D>>,
    generation: &Arc<Generation>,
    slot: usize,
) -> Param<Tensor<D>> {
    let device = param.lazy_device();
    let declared = Declared::of(param);
    let base = base(&declared, &device, counterpart(param.id));
    let own = declared.mapper;
    let stand_in = stand_in(declared.shape, &device);
    let unit = generation.unit.clone();
    base.load_mapper(record::load(unit, slot, own.clone(), stand_in))
        .save_mapper(record::save(Copies::of(generation), slot, own))
}

/// Returns the sharded parameters of the adapter at `path`, which optimizers and records see. `norms` are the initial
/// magnitudes, if it has any.
fn sharded_factors(
    sharder: &mut Sharder<'_>,
    path: &str,
    norms: Option<TensorData>,
) -> AdapterParams {
    let plain = match sharder.adapters.remove(path) {
        Some(adapter) => AdapterParams {
            a: adapter.a,
            b: adapter.b,
            magnitude: None,
        },
        None => {
            let found = |name: &str| &sharder.factors[&format!("{path}.{name}")];
            let a = found(FACTOR_A);
            let fill = match a.factor_of.as_ref().map(|adapter| adapter.origin) {
                Some(Origin::Policy { std }) => Fill::Normal { std },
                _ => Fill::Zeros,
            };
            AdapterParams {
                a: lazy(a, fill),
                b: lazy(found(FACTOR_B), Fill::Zeros),
                magnitude: norms.map(|norms| lazy(found(MAGNITUDE), Fill::Values(norms))),
            }
        }
    };
    let prefix = path.to_owned();
    plain.apply_reparameterization(Below { prefix, sharder })
}

/// The initial values of a factor, as in Burn's `Lora`: a new adapter adds zero.
#[derive(Debug)]
enum Fill {
    Normal {
        std: f64,
    },
    Zeros,
    /// Those of magnitudes.
    Values(TensorData),
}

/// Returns the parameter of a factor, initialized on demand.
fn lazy<const D: usize>(factor: &Found, fill: Fill) -> Param<Tensor<D>> {
    let mut shape = [0; D];
    shape.copy_from_slice(&factor.shape);
    let dtype = factor.dtype;
    let make = move |device: &Device, is_trained: bool| {
        let values: Tensor<D> = match fill {
            Fill::Normal { std } => Tensor::random(shape, Distribution::Normal(0.0, std), device),
            Fill::Zeros => Tensor::zeros(shape, device),
            Fill::Values(values) => Tensor::from_data(values, device),
        };
        values.cast(dtype).set_require_grad(is_trained)
    };
    let device = factor.device.clone();
    Param::uninitialized(factor.id, make, device, true, Shape::from(shape))
}

/// A sharder for the factors of the parameter at `prefix`.
struct Below<'a, 'b> {
    prefix: String,
    sharder: &'a mut Sharder<'b>,
}

impl Reparameterizer for Below<'_, '_> {
    type Reparam = Attached;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Attached>) {
        let path = format!("{}.{}.{path}", self.prefix, LoraAdapter::NAME);
        self.sharder.reparameterize(&path, param)
    }
}

/// Returns the parameter with this rank's own leaf; a lazy parameter stays lazy. Other ranks may hold clones of the
/// same parameter, and ranks that share a leaf share a graph and would wait for each other's backward.
fn own_leaf<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    param.init_mapper(|tensor| convert::in_place_of(&tensor, tensor.clone().inner().into_data()))
}

/// Returns the stand-in for a parameter, with the parameter's original shape in records.
fn base<const D: usize>(declared: &Declared<D>, device: &Device, id: ParamId) -> Param<Tensor<D>> {
    let shape = declared.shape;
    if shape == declared.recorded {
        return Param::initialized(id, stand_in(shape, device));
    }
    // Burn checks records against the declared shape of a lazy parameter.
    let make = move |device: &Device, _: bool| stand_in(shape, device);
    Param::uninitialized(id, make, device.clone(), false, declared.recorded.into())
}
