//! Burn records of sharded modules.
//!
//! A record of a sharded module equals the record of the unsharded module: whole parameters under their own paths. It
//! loads into a plain module, and into one sharded over any number of ranks. Creating one is collective, and every rank
//! then holds the whole record.

use std::cell::RefCell;
use std::sync::Arc;

use burn::module::{Module, ParamMapper};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::BufferPool;
use burn_fsdp_tensors as tensors;

use crate::ambient::{Purpose, is_within, within};
use crate::copies::{Copies, Generation};
use crate::error::Error;
use crate::inspect::{self, Member};
use crate::parameter::mailbox::{Handed, hand};
use crate::state::buffers;
use crate::thrown::{catch, throw};
use crate::unit::Unit;

thread_local! {
    /// The sharded parameters of the module that is being recorded, in module order; empty if the module is not known.
    static RECORDED: RefCell<Vec<Member>> = const { RefCell::new(Vec::new()) };
}

/// Runs `body` with the mappers of sharded parameters acting only as they did before sharding, to record a plain copy
/// of a parameter.
pub(crate) fn plainly<T>(body: impl FnOnce() -> T) -> T {
    within(Purpose::PlainMappers, body)
}

/// Returns the record of a sharded module like [`Module::into_record`], but with errors as values. It also works while
/// other copies of the module with different values are alive (the best so far, a moving average). Burn's own method
/// cannot distinguish such copies and fails. The record includes the last update of this rank's running states, which
/// Burn's own method leaves out.
///
/// Collective: one all-gather for each sharded parameter. Every rank gets the whole record.
///
/// # Errors
///
/// [`Error::NotSharded`]; a failed collective.
pub fn into_record<M: Module>(module: M) -> Result<ModuleRecord, Error> {
    let root = inspect::root_of(&module)?;
    buffers::settle(&module)?;
    let record = || catch(|| within_record(&module, || module.clone().into_record()));
    buffers::in_original_types(&module, &root, record)
}

/// Runs `body`, which records `module`, and gives its save mappers access to the module's sharded parameters.
pub(crate) fn within_record<M: Module, T>(module: &M, body: impl FnOnce() -> T) -> T {
    struct Forget;
    impl Drop for Forget {
        fn drop(&mut self) {
            drop(RECORDED.take());
        }
    }
    let fields = inspect::fields(module).into_iter();
    RECORDED.set(fields.map(|(_, member)| member).collect());
    let _forget = Forget;
    body()
}

/// Returns the values of the unit in the copy that is being recorded.
fn copy_of(copies: &Copies, index: usize) -> Result<Arc<Generation>, Error> {
    let known = RECORDED.with_borrow_mut(|members| {
        let is_it = |member: &Member| {
            member.index == index && Arc::ptr_eq(&member.generation.unit, &copies.unit)
        };
        // A module may contain several copies of a parameter, so each member is used once.
        let at = members.iter().position(is_it)?;
        Some(members.remove(at).generation)
    });
    match known {
        Some(generation) => Ok(generation),
        None => copies.current(index),
    }
}

/// Returns a function that narrows a loaded whole parameter to this rank's part.
pub(crate) fn load<const D: usize>(
    unit: Arc<Unit>,
    index: usize,
    own: ParamMapper<Tensor<D>>,
    stand_in: Tensor<D>,
) -> impl Fn(Tensor<D>) -> Tensor<D> + Send + Sync + 'static {
    move |recorded| {
        let whole = own.on_load(recorded);
        if is_within(Purpose::PlainMappers) {
            return whole;
        }
        let slot = &unit.slots[index];
        if whole.dims()[..] != slot.shape[..] {
            throw(Error::RecordShape {
                path: slot.path.clone(),
                expected: slot.shape.clone(),
                got: whole.dims().to_vec(),
            });
        }
        let device = whole.device();
        let value = narrow(&unit, index, whole, &device);
        let keeps_id = false;
        let value = Box::new(value);
        hand(&unit, index, Handed::Value { value, keeps_id });
        stand_in.clone()
    }
}

/// Returns this rank's part of `whole`, for a module on `device`.
pub(crate) fn narrow<const D: usize>(
    unit: &Unit,
    index: usize,
    whole: Tensor<D>,
    device: &Device,
) -> Tensor<1> {
    let slot = &unit.slots[index];
    let range = slot.held_range(unit.groups.shard.rank());
    let flat: Tensor<1> = whole.inner().reshape([slot.partition.num_elements()]);
    // The data is copied, because a slice would keep the whole parameter alive.
    let shard = flat.slice([range]).into_data();
    Tensor::from_data(shard, (&unit.home(device), slot.elements.stored.dtype))
}

/// Returns a function that gathers the whole parameter for a record.
pub(crate) fn save<const D: usize>(
    copies: Copies,
    index: usize,
    own: ParamMapper<Tensor<D>>,
) -> impl Fn(Tensor<D>) -> Tensor<D> + Send + Sync + 'static {
    move |stand_in| {
        if is_within(Purpose::PlainMappers) {
            return own.on_save(stand_in);
        }
        let unit = &copies.unit;
        let slot = &unit.slots[index];
        let whole = copy_of(&copies, index).and_then(|generation| whole(&generation, index));
        let whole = whole.unwrap_or_else(|error| throw(error));
        let saved = own.on_save(whole.reshape(slot.dims::<D>()));
        // This comes last, because the next visit takes the message.
        hand(unit, index, Handed::Recorded);
        saved
    }
}

/// Returns the whole value of one parameter, gathered from all ranks, flat, without autodiff, on the computing device.
///
/// Collective.
pub(crate) fn whole(generation: &Generation, index: usize) -> Result<Tensor<1>, Error> {
    joined(
        generation,
        index,
        "whole value",
        generation.value(index).inner(),
    )
}

/// Returns a whole tensor of the parameter's shape and stored type, of which each rank passes the elements that it
/// holds of the parameter, flat and without autodiff. `what` describes the tensor in errors.
///
/// Collective.
pub(crate) fn joined(
    generation: &Generation,
    index: usize,
    what: &str,
    part: Tensor<1>,
) -> Result<Tensor<1>, Error> {
    let unit = &generation.unit;
    let slot = &unit.slots[index];
    let device = generation.device(index).without_autodiff();
    if !slot.is_gathered() {
        return Ok(part.to_device(&device));
    }
    let part = slot.part(tensors::source(part, None), slot.elements.stored);
    let into = BufferPool::new().take(slot.full_bytes());
    let label = format!("{} {what}", slot.path);
    let group = &unit.groups.shard;
    let received = group
        .start_all_gather(label, Vec::new(), vec![part], vec![into])?
        .wait()?;
    let buffer = received.buffers.into_iter().next();
    let buffer = buffer.expect("one part was asked for");
    Ok(tensors::tensor(buffer, slot.elements.stored.dtype, &device))
}
