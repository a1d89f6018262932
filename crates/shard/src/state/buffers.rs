//! Running states, such as BatchNorm's, which each rank updates itself.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use burn_fsdp_collectives::{Buffer, BufferPool, FullPart, Label, ProcessGroup, Reduction};
use burn_fsdp_tensors as tensors;

use crate::convert;
use crate::error::Error;
use crate::inspect;
use crate::path::{self, Location};
use crate::root::{Known, Named, Root};
use crate::survey::survey;

const LABEL: &str = "running states";

/// How running states are synchronized across ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BufferSync {
    /// Each rank keeps its own states. Nothing is communicated.
    Local,
    /// All ranks get rank 0's states, as if only one rank had trained. Do this before saving.
    #[default]
    Broadcast,
    /// All ranks get the mean of the ranks' states.
    Average,
}

/// Makes the running states of `module` (any float tensor that is not a parameter, such as BatchNorm's) the same on all
/// ranks, and returns the module.
///
/// In Burn, all clones of a module share a running state, so clones on this rank also see the new value. Parameters are
/// unchanged.
///
/// Collective over all ranks of the module: one broadcast or all-reduce of all running states together. Nothing is sent
/// without running states, or with [`BufferSync::Local`].
///
/// # Errors
///
/// [`Error::NotSharded`]; [`Error::ElementType`] for a running state that is not `f32`, `f64`, `f16`
/// or `bf16`; a failed collective.
pub fn sync_buffers<M: Module>(module: M, sync: BufferSync) -> Result<M, Error> {
    let root = inspect::root_of(&module)?;
    let group = root.group.clone();
    check_running_states(&root)?;
    if sync == BufferSync::Local {
        return Ok(module);
    }
    let buffers = buffers(&module)?;
    if buffers.is_empty() {
        return Ok(module);
    }
    let received = match sync {
        BufferSync::Local | BufferSync::Average => average(&group, &buffers)?,
        BufferSync::Broadcast => broadcast(&group, &buffers)?,
    };
    let places = buffers.into_iter().map(|buffer| buffer.path);
    // This also runs if nothing is replaced, because all ranks must run the same passes over the module.
    let values = places.zip(received).collect();
    Ok(path::map(module, &mut Replace { values }))
}

/// Returns `module` with its running states in `dtype`. Call this on each rank before sharding.
///
/// Burn's BatchNorm computes only in the type of its running states. If they have the type passed to
/// [`Precision::new`](crate::Precision), the layer trains in 16 bits unchanged. Its averages then also have 16 bits,
/// and lose updates below their resolution.
///
/// ```
/// use burn::nn::BatchNormConfig;
/// use burn::tensor::{DType, Device};
/// use burn_fsdp_shard::cast_buffers;
///
/// let norm = BatchNormConfig::new(4).init(&Device::flex().autodiff());
/// let norm = cast_buffers(norm, DType::BF16)?;
/// assert_eq!(norm.running_mean.value().dtype(), DType::BF16);
/// assert_eq!(norm.gamma.val().dtype(), DType::F32);
/// # Ok::<(), burn_fsdp_shard::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Backend`], [`Error::Unreached`] and [`Error::SamePath`], as in [`fully_shard`](crate::fully_shard).
pub fn cast_buffers<M: Module>(module: M, dtype: impl Into<DType>) -> Result<M, Error> {
    Ok(cast_states(module, dtype.into())?.0)
}

/// Returns `module` with its running states in `dtype`, and the states that had a wider type before, with that type.
/// Casting them to the wider type and back changes no bit.
pub(crate) fn cast_states<M: Module>(
    module: M,
    dtype: DType,
) -> Result<(M, Vec<(Named, DType)>), Error> {
    let paths = survey(&module)?.buffers;
    let mut lazy = Lazy(false);
    inspect::visit(&module, &mut lazy);
    // A module without lazy parameters may have run already. Mappers see its last update only after a synchronization.
    if !paths.is_empty() && !lazy.0 {
        drop(module.valid());
    }
    let mut cast = Cast {
        paths,
        dtype,
        changed: Vec::new(),
    };
    let module = path::map(module, &mut cast);
    Ok((module, cast.changed))
}

/// A visitor that looks for a parameter without a value yet.
struct Lazy(bool);

impl path::Visitor for Lazy {
    fn float<const D: usize>(&mut self, _: &Location, param: &Param<Tensor<D>>) {
        self.0 |= !param.is_initialized();
    }
}

/// A mapper that casts running states.
struct Cast {
    paths: Vec<String>,
    dtype: DType,
    /// The states that had a wider type, with that type.
    changed: Vec<(Named, DType)>,
}

impl path::Mapper for Cast {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let path = place.path();
        if !self.paths.contains(&path) {
            return param;
        }
        let id = param.id;
        param.map(|state| {
            if state.dtype().size() > self.dtype.size() {
                self.changed.push((Named { path, id }, state.dtype()));
            }
            convert::cast(state, self.dtype)
        })
    }
}

/// Runs `body`, in which the running states of `module` that its policy cast have their original types. Casting to a
/// wider type and back changes no bit.
pub(super) fn in_original_types<M: Module, T>(
    module: &M,
    root: &Root,
    body: impl FnOnce() -> T,
) -> T {
    if root.known().has_no_cast() {
        return body();
    }
    let mut widen = Widen {
        known: root.known(),
        cast: HashMap::new(),
    };
    // In Burn, all clones of a module share a running state, so mapping a clone changes the module's own states.
    drop(path::map(module.clone(), &mut widen));
    let result = body();
    let mut narrow = Narrow(widen.cast);
    drop(path::map(module.clone(), &mut narrow));
    result
}

/// A mapper that gives running states their original types, and notes the types that they had.
struct Widen<'a> {
    known: &'a Known,
    cast: HashMap<String, DType>,
}

impl path::Mapper for Widen<'_> {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let path = place.path();
        let Some(dtype) = self.known.type_before_cast(&path, param.id) else {
            return param;
        };
        param.map(|state| {
            self.cast.insert(path, state.dtype());
            convert::cast(state, dtype)
        })
    }
}

/// A mapper that gives running states the types that [`Widen`] found.
struct Narrow(HashMap<String, DType>);

impl path::Mapper for Narrow {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        match self.0.remove(&place.path()) {
            Some(dtype) => param.map(|state| convert::cast(state, dtype)),
            None => param,
        }
    }
}

/// If ranks compare bytes, checks that the running states of the last backward are unchanged.
fn check_running_states(root: &Root) -> Result<(), Error> {
    root.with_waiting(|waiting| waiting.check_running())
}

/// If ranks compare bytes, checks that the running states of the last backward still have the same bytes, and seals the
/// forward's new ones.
pub(crate) fn seal_running_states<M: Module>(module: &M, root: &Root) -> Result<(), Error> {
    let group = &root.group;
    root.with_waiting(|waiting| waiting.flip_running_if_told(group));
    if !group.compares_bytes() {
        return Ok(());
    }
    check_running_states(root)?;
    let states = buffers(module)?.into_iter().map(|state| {
        let what = format!("the running state `{}`", state.path);
        (state.flat, Label::from(what))
    });
    let states = states.collect();
    root.with_waiting(|waiting| waiting.set_running(group, states));
    Ok(())
}

/// Receives rank 0's running states. Returns nothing on rank 0, which already has them.
fn broadcast(group: &ProcessGroup, buffers: &[Running]) -> Result<Vec<Buffer>, Error> {
    let is_root = group.rank() == 0;
    let part = |buffer: &Running| {
        let part = buffer.part()?;
        Ok::<_, Error>(if is_root {
            part
        } else {
            FullPart::absent(part.num_elements, part.element)
        })
    };
    let parts = buffers.iter().map(part).collect::<Result<_, _>>()?;
    let into = if is_root {
        Vec::new()
    } else {
        buffers.iter().map(Running::room).collect()
    };
    let received = group.broadcast(LABEL, Vec::new(), 0, parts, into)?;
    Ok(received.buffers)
}

fn average(group: &ProcessGroup, buffers: &[Running]) -> Result<Vec<Buffer>, Error> {
    let parts = buffers.iter().map(Running::part);
    let parts = parts.collect::<Result<_, _>>()?;
    let into = buffers.iter().map(Running::room).collect();
    let mean = Reduction::mean(group.size());
    let received = group.all_reduce(LABEL, Vec::new(), mean, parts, into)?;
    Ok(received.buffers)
}

struct Running {
    path: String,
    /// Flat elements of the running state, without autodiff.
    flat: Tensor<1>,
}

impl Running {
    fn part(&self) -> Result<FullPart, Error> {
        let element = tensors::reduced_type(self.flat.dtype());
        let element = element.ok_or_else(|| Error::ElementType {
            path: self.path.clone(),
            got: format!("{:?}", self.flat.dtype()),
        })?;
        let source = tensors::source(self.flat.clone(), None);
        Ok(FullPart::new(source, element))
    }

    fn room(&self) -> Buffer {
        let len = self.flat.shape().num_elements() * self.flat.dtype().size();
        BufferPool::new().take(len)
    }
}

/// Makes the last updates of the running states of `module` visible, and returns their paths.
pub(super) fn settle<M: Module>(module: &M) -> Result<Vec<String>, Error> {
    let paths = survey(module)?.buffers;
    if !paths.is_empty() {
        // A state shows its last update only after a synchronization. Of Burn's functions for whole modules,
        // only `valid` synchronizes.
        drop(module.valid());
    }
    Ok(paths)
}

/// Returns the current running states of `module`, in module order.
fn buffers<M: Module>(module: &M) -> Result<Vec<Running>, Error> {
    let paths = settle(module)?;
    if paths.is_empty() {
        return Ok(Vec::new());
    }
    let mut read = Read {
        wanted: paths,
        found: Vec::new(),
    };
    inspect::visit(module, &mut read);
    Ok(read.found)
}

struct Read {
    wanted: Vec<String>,
    found: Vec<Running>,
}

impl path::Visitor for Read {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        if self.wanted.contains(&path) {
            let value = param.base().inner();
            let len = value.shape().num_elements();
            let flat = value.reshape::<1, _>([len]);
            self.found.push(Running { path, flat });
        }
    }
}

/// A mapper that replaces running states with received ones.
struct Replace {
    values: HashMap<String, Buffer>,
}

impl path::Mapper for Replace {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        match self.values.remove(&place.path()) {
            Some(buffer) => param.map(|old| {
                let data = tensors::data(buffer, old.shape(), old.dtype());
                convert::in_place_of(&old, data)
            }),
            None => param,
        }
    }
}
