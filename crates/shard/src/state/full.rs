//! Reads, changes, exports and evaluates whole parameters outside of training.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{LoraAdapter, Module, Param, Reparameterizer};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use burn_fsdp_collectives::{Buffer, BufferPool, Source};
use burn_fsdp_tensors as tensors;

use crate::adapter::{Adapter, Origin};
use crate::ambient::{Purpose, within};
use crate::convert;
use crate::error::Error;
use crate::inspect::{self, Key, Member};
use crate::parameter::identity::counterpart;
use crate::parameter::mailbox;
use crate::path::{self, FACTOR_A, FACTOR_B, Location, MAGNITUDE};
use crate::root::Known;
use crate::state::record;
use crate::state::tensors::{Held, all};
use crate::thrown::{catch, throw};

/// Whether changes to summoned parameters are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteBack {
    /// The changes are kept: each rank takes its shards from the values that its closure returns.
    Keep,
    /// The changes are discarded.
    Discard,
}

/// Passes a plain copy of a sharded module, with whole parameters, to `body` on every rank. Returns the sharded module,
/// either with shards taken from the result of `body` or unchanged.
///
/// The copy equals [`Module::valid`] of the unsharded module: same type, same paths, values in their stored precision,
/// no autodiff. `body` owns it, and may run it, record it, pass it to other code, or even keep it. The copy's forward
/// communicates nothing, so ranks may use the copy differently. With [`WriteBack::Keep`] all ranks must return the same
/// values; otherwise shards of different modules would be combined. Parameters that no unit manages and running states
/// are also copied and written back. With [`WriteBack::Discard`] the result of `body` is dropped. The copy of a module
/// that had adapters before it was sharded has them, too. Adapters that the policy attached are merged into the weights
/// of the copy, so it cannot be written back.
///
/// During the call every rank holds the whole model. For a model that does not fit on any rank, use [`full_state`].
///
/// Collective over all ranks of the module, between steps: one all-gather for each sharded parameter.
///
/// # Errors
///
/// [`Error::NotSharded`]; [`Error::Option`] for adapters that would be written back; [`Error::Returned`] if the result
/// of `body` has other parameters or shapes than the module; [`Error::Tied`] if it has different values for fields that
/// share a parameter; a failed collective.
pub fn summon_full_params<M: Module>(
    module: M,
    write_back: WriteBack,
    body: impl FnOnce(M) -> M,
) -> Result<M, Error> {
    let fields = inspect::fields(&module);
    let is_merged = |(_, member): &(String, Member)| {
        let adapter = member.slot().adapter.as_ref();
        adapter.is_some_and(|adapter| adapter.origin != Origin::Module)
    };
    if write_back == WriteBack::Keep && fields.iter().any(is_merged) {
        return Err(Error::Option {
            option: "write_back",
            expected: "`WriteBack::Discard`, because the adapters are merged into the full weights",
            got: "`WriteBack::Keep` for a module to which the policy attaches adapters".to_owned(),
        });
    }
    let full = plain(&module, &fields, true)?;
    let returned = body(full);
    match write_back {
        WriteBack::Discard => Ok(module),
        WriteBack::Keep => take_back(module, fields, &returned),
    }
}

/// Returns the plain copy of a sharded module, as in [`summon_full_params`], on ranks that set `keep`, and `None` on
/// the others. These send their shards, and hold at most one whole parameter at a time.
///
/// Collective over all ranks of the module, between steps: one all-gather for each sharded parameter.
///
/// # Errors
///
/// [`Error::NotSharded`]; a failed collective.
pub fn unsharded<M: Module>(module: &M, keep: bool) -> Result<Option<M>, Error> {
    let full = plain(module, &inspect::fields(module), keep)?;
    Ok(keep.then_some(full))
}

/// Returns the module without autodiff and shards, with whole values if `keep` is set.
fn plain<M: Module>(module: &M, fields: &[(String, Member)], keep: bool) -> Result<M, Error> {
    let root = inspect::root_of(module)?;
    let mut members: HashMap<_, _> = fields.iter().cloned().collect();
    let mut factors = HashMap::new();
    for (path, _) in fields {
        // The factors are read together with the adapted parameter, and `materialize` removes them from the module.
        for part in [FACTOR_A, FACTOR_B, MAGNITUDE] {
            factors.extend(members.remove_entry(&format!("{path}.{part}")));
        }
    }
    // `valid` also gives the copy separate running states.
    let mut fill = Fill {
        members,
        factors,
        known: root.known(),
        keep,
        adapters: HashMap::new(),
        tied: fields
            .iter()
            .filter(|(_, member)| member.is_tied)
            .map(|(_, member)| member.key())
            .collect(),
        shared: HashMap::new(),
    };
    let filled = catch(|| path::map(module.valid(), &mut fill))?;
    // `materialize` is Burn's only way to remove a reparameterization.
    let plain = within(Purpose::KeepBase, || filled.materialize());
    let adapters = fill.adapters;
    if adapters.is_empty() {
        return Ok(plain);
    }
    Ok(plain.apply_reparameterization(Attach { adapters }))
}

/// A reparameterizer that attaches to each weight its own adapter.
struct Attach {
    adapters: HashMap<String, LoraAdapter>,
}

impl Reparameterizer for Attach {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        (param, self.adapters.remove(path))
    }
}

/// A mapper that replaces each stand-in with the whole value.
struct Fill<'a> {
    members: HashMap<String, Member>,
    /// The parameters of adapters, by path.
    factors: HashMap<String, Member>,
    known: &'a Known,
    /// If false, each value is dropped as soon as it is gathered.
    keep: bool,
    /// The adapters that the module had before it was sharded, by the path of the weight.
    adapters: HashMap<String, LoraAdapter>,
    tied: HashSet<Key>,
    /// The whole values of the parameters in `tied` that have been gathered.
    shared: HashMap<Key, Tensor<1>>,
}

impl Fill<'_> {
    /// Gathers the factors of the adapter of the weight at `path`, which the copy has again.
    fn gather_adapter(&mut self, path: &str, adapter: &Adapter) {
        let mut factor = |name: &str| {
            let member = self.factors.remove(&format!("{path}.{name}"));
            let member = member.expect("an adapter has two factors");
            let whole = record::whole(&member.generation, member.index);
            let whole = whole.unwrap_or_else(|error| throw(error));
            let whole = whole.reshape(member.slot().dims::<2>());
            // As for weights, the copy's id is the one in records.
            let factor = Param::initialized(counterpart(member.id), whole);
            factor.set_require_grad(member.generation.is_trainable(member.index))
        };
        let attached = LoraAdapter {
            a: factor(FACTOR_A),
            b: factor(FACTOR_B),
            scale: adapter.scale,
        };
        if self.keep {
            self.adapters.insert(path.to_owned(), attached);
        }
    }
}

impl path::Mapper for Fill<'_> {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        // The shard follows its stand-in under the same path, and is skipped.
        let path = place.path();
        let Some(member) = self.members.remove(&path) else {
            return match self.known.type_before_cast(&path, param.id) {
                Some(dtype) => param.map(|state| convert::cast(state, dtype)),
                None => param,
            };
        };
        let own = member.slot().adapter;
        let own = own.filter(|adapter| adapter.origin == Origin::Module);
        if let Some(adapter) = own {
            self.gather_adapter(&path, &adapter);
        }
        let whole = |slot| record::whole(&member.generation, slot);
        let whole = match (self.shared.get(&member.key()), &member.slot().adapter) {
            (Some(shared), _) => shared.clone(),
            // Every rank already gathered it for the first field.
            (None, _) if member.is_tied => return param,
            (None, Some(adapter)) if own.is_none() => {
                let weight = whole(member.index).and_then(|base| adapter.applied(base, whole));
                weight.unwrap_or_else(|error| throw(error))
            }
            (None, _) => whole(member.index).unwrap_or_else(|error| throw(error)),
        };
        if !self.keep {
            return param;
        }
        if self.tied.contains(&member.key()) {
            self.shared.insert(member.key(), whole.clone());
        }
        let mut shape = [0; D];
        shape.copy_from_slice(&member.slot().shape);
        // The parameter keeps the stand-in's id, so a record of the copy loads into the sharded module.
        let (id, _, mapper) = param.consume();
        let on_load = Arc::new(mapper);
        let on_save = on_load.clone();
        Param::initialized(id, whole.reshape::<D, _>(shape))
            .set_require_grad(member.generation.is_trainable(member.index))
            .load_mapper(move |value| record::plainly(|| on_load.on_load(value)))
            .save_mapper(move |value| record::plainly(|| on_save.on_save(value)))
    }
}

/// Returns the sharded module with the values of `full`.
fn take_back<M: Module>(module: M, fields: Vec<(String, Member)>, full: &M) -> Result<M, Error> {
    // Running states show their last update only after `valid`.
    let mut values = Values::default();
    path::visit(&full.valid(), &mut values);
    let mut narrow = Narrow {
        members: fields.into_iter().collect(),
        values: values.found,
    };
    narrow.check(&module)?;
    catch(|| path::map(module, &mut narrow))
}

/// A visitor that collects the elements of all tensors, by path.
#[derive(Default)]
struct Values {
    found: HashMap<String, TensorData>,
}

impl path::Visitor for Values {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        self.found.insert(place.path(), param.val().into_data());
    }

    fn int<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Int>>) {
        self.found.insert(place.path(), param.val().into_data());
    }

    fn bool<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Bool>>) {
        self.found.insert(place.path(), param.val().into_data());
    }
}

/// A mapper that narrows each value to this rank's part, or takes it whole if it is not sharded.
struct Narrow {
    members: HashMap<String, Member>,
    values: HashMap<String, TensorData>,
}

impl Narrow {
    /// Checks, before anything is replaced, that every parameter of `module` has a value of its shape, and that no
    /// value remains.
    fn check<M: Module>(&self, module: &M) -> Result<(), Error> {
        let mut wanted = Shapes {
            members: &self.members,
            found: Vec::new(),
        };
        inspect::visit(module, &mut wanted);
        for (path, shape) in &wanted.found {
            let value = self.values.get(path);
            if value.is_some_and(|value| value.shape()[..] == shape[..]) {
                continue;
            }
            return Err(Error::Returned {
                path: path.clone(),
                expected: format!("shape {shape:?}"),
                got: value.map_or("nothing".to_owned(), |value| {
                    format!("shape {:?}", value.shape().to_vec())
                }),
            });
        }
        self.check_ties(wanted.found.iter().map(|(path, _)| path))?;
        let is_extra = |path: &&String| wanted.found.iter().all(|(known, _)| known != *path);
        match self.values.keys().filter(is_extra).min() {
            None => Ok(()),
            Some(path) => Err(Error::Returned {
                path: path.clone(),
                expected: "none".to_owned(),
                got: "a parameter".to_owned(),
            }),
        }
    }

    /// Checks that fields with a shared parameter have equal values; `paths` lists the module's paths in order.
    fn check_ties<'a>(&self, paths: impl Iterator<Item = &'a String>) -> Result<(), Error> {
        let mut firsts = HashMap::new();
        for path in paths {
            let Some(member) = self.members.get(path) else {
                continue;
            };
            let first = *firsts.entry(member.key()).or_insert(path);
            if self.values.get(first) != self.values.get(path) {
                return Err(Error::Tied {
                    first: first.clone(),
                    second: path.clone(),
                    problem: "but were returned with different values; change both in the same way",
                });
            }
        }
        Ok(())
    }

    fn take(&mut self, place: &Location) -> Option<TensorData> {
        self.values.remove(&place.path())
    }
}

/// A visitor that collects the shapes of whole tensors, by path.
struct Shapes<'a> {
    members: &'a HashMap<String, Member>,
    found: Vec<(String, Vec<usize>)>,
}

impl path::Visitor for Shapes<'_> {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        let shape = match self.members.get(&path) {
            Some(member) => member.slot().shape.clone(),
            None => param.lazy_shape().to_vec(),
        };
        self.found.push((path, shape));
    }

    fn int<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Int>>) {
        self.found.push((place.path(), param.lazy_shape().to_vec()));
    }

    fn bool<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Bool>>) {
        self.found.push((place.path(), param.lazy_shape().to_vec()));
    }
}

impl path::Mapper for Narrow {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let Some(value) = self.take(place) else {
            return param;
        };
        match self.members.remove(&place.path()) {
            Some(member) if member.is_tied => param,
            Some(member) => {
                let device = param.lazy_device();
                let plain = device.clone().without_autodiff();
                let whole =
                    Tensor::<D>::from_data(value, (&plain, member.slot().elements.stored.dtype));
                let unit = &member.generation.unit;
                let shard = record::narrow(unit, member.index, whole, &device);
                mailbox::replace(unit, member.index, shard);
                param
            }
            None => param.map(|old| convert::in_place_of(&old, value)),
        }
    }

    fn int<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        match self.take(place) {
            Some(value) => param.map(|old| convert::int_in_place_of(&old, value)),
            None => param,
        }
    }

    fn bool<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.take(place) {
            Some(value) => param.map(|old| convert::bool_in_place_of(&old, value)),
            None => param,
        }
    }
}

/// A whole tensor of a module, passed by [`full_state`].
#[derive(Debug)]
#[non_exhaustive]
pub struct FullTensor<'a> {
    /// Path in the module, such as `blocks.3.fc.weight`.
    pub path: &'a str,
    /// Shape of the value, as returned by `Param::val`.
    pub shape: &'a [usize],
    /// Element type.
    pub dtype: DType,
    /// The elements in row-major order and native byte order.
    pub bytes: &'a [u8],
}

/// Calls `visit` on rank 0 with each whole tensor of a sharded module, in module order. This includes all parameters,
/// sharded or not, float, integer or boolean, and running states. The running states are rank 0's own; call
/// [`sync_buffers`](crate::sync_buffers) first to average them over the ranks.
///
/// Only rank 0 of each shard group holds whole parameters, at most one at a time. The other ranks only send, and
/// `visit` is not called on them. `visit` cannot stop early, because the other ranks would not know.
///
/// Collective over all ranks of the module, between steps: one gather for each sharded parameter.
///
/// # Errors
///
/// [`Error::NotSharded`]; a failed collective.
pub fn full_state<M: Module>(
    module: &M,
    mut visit: impl FnMut(FullTensor<'_>),
) -> Result<(), Error> {
    let root = inspect::root_of(module)?;
    let is_first = root.group.rank() == 0;
    for tensor in all(module, &root) {
        let source = match &tensor.held {
            Held::Sharded(member) => match gather(member)? {
                Some(buffer) => Source::new(buffer),
                None => continue,
            },
            Held::Here(flat) => tensors::source((**flat).clone(), None),
            Held::Read(source) => source.clone(),
        };
        if is_first {
            visit(FullTensor {
                path: &tensor.path,
                shape: &tensor.shape,
                dtype: tensor.dtype,
                bytes: source.as_bytes(),
            });
        }
    }
    Ok(())
}

/// Gathers the whole parameter on rank 0 of its group; returns `None` on other ranks.
pub(super) fn gather(member: &Member) -> Result<Option<Buffer>, Error> {
    let (slot, group) = (member.slot(), &member.generation.unit.groups.shard);
    let value = member.generation.value(member.index).inner();
    let generation = &member.generation;
    let sealed = match slot.quantized() {
        None => generation.sealed(member.index),
        // The seal is that of the held bytes, not of the unpacked elements.
        Some(_) => {
            generation.check(member.index)?;
            None
        }
    };
    let source = tensors::source(value, None).noted(sealed);
    let part = slot.part(source, slot.elements.stored);
    let into = match group.rank() {
        0 => vec![BufferPool::new().take(slot.full_bytes())],
        _ => Vec::new(),
    };
    let label = format!("{} whole value", slot.path);
    let received = group.gather(label, Vec::new(), 0, vec![part], into)?;
    for (seal, buffer) in received.seals.iter().zip(&received.buffers) {
        let what = || generation.named_as("the full parameter", member.index);
        group.check_seal(seal, buffer.as_ref(), what)?;
    }
    Ok(received.buffers.into_iter().next())
}
