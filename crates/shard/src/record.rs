//! Burn records of sharded modules.
//!
//! A record of a sharded module is the record that the unsharded module would give: whole
//! parameters under their own paths. It loads into a plain module, and into one sharded over any
//! number of ranks. Taking one is collective and makes every rank hold the whole record.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::LocalKey;

use burn::module::ParamMapper;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::BufferPool;

use crate::error::{Error, throw};
use crate::generation::Generation;
use crate::transport;
use crate::unit::Unit;

thread_local! {
    static PLAIN: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body` with the mappers of sharded parameters doing only what they did before sharding:
/// for a plain copy of the parameter, which is recorded as it would be without us.
pub(crate) fn plainly<T>(body: impl FnOnce() -> T) -> T {
    with_flag(&PLAIN, body)
}

/// Runs `body` with a flag of this thread set.
pub(crate) fn with_flag<T>(flag: &'static LocalKey<Cell<bool>>, body: impl FnOnce() -> T) -> T {
    struct Restore(&'static LocalKey<Cell<bool>>, bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(flag, flag.replace(true));
    body()
}

/// Narrows a whole parameter that is being loaded to this rank's part.
pub(crate) fn load<const D: usize>(
    unit: Arc<Unit>,
    index: usize,
    own: ParamMapper<Tensor<D>>,
    stand_in: Tensor<D>,
) -> impl Fn(Tensor<D>) -> Tensor<D> + Send + Sync + 'static {
    move |recorded| {
        let whole = own.on_load(recorded);
        if PLAIN.get() {
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
        narrow(&unit, index, whole, &device);
        stand_in.clone()
    }
}

/// Puts this rank's part of `whole`, of a module on `device`, where the nested parameter takes it
/// from when the visit that is under way comes to it.
pub(crate) fn narrow<const D: usize>(unit: &Unit, index: usize, whole: Tensor<D>, device: &Device) {
    let slot = &unit.slots[index];
    let range = slot.held_range(unit.group.rank());
    let flat: Tensor<1> = whole.inner().reshape([slot.partition.num_elements()]);
    // Read out, so that the shard does not keep the whole alive.
    let shard = flat.slice([range]).into_data();
    let home = unit.home(device);
    *slot.loaded.lock() = Some(Tensor::from_data(shard, (&home, slot.dtype)));
}

/// Gathers the whole parameter for a record.
pub(crate) fn save<const D: usize>(
    unit: Arc<Unit>,
    index: usize,
    own: ParamMapper<Tensor<D>>,
) -> impl Fn(Tensor<D>) -> Tensor<D> + Send + Sync + 'static {
    move |stand_in| {
        if PLAIN.get() {
            return own.on_save(stand_in);
        }
        let slot = &unit.slots[index];
        let whole = unit
            .current(index)
            .and_then(|generation| whole(&generation, index));
        let whole = whole.unwrap_or_else(|error| throw(error));
        // Not before the value is there: what follows must be the visit that it is meant for.
        slot.saving.store(true, Ordering::Relaxed);
        own.on_save(whole.reshape(slot.dims::<D>()))
    }
}

/// The whole value of one parameter, gathered from all ranks, plain and flat, on the device that
/// computes.
///
/// Collective.
pub(crate) fn whole(generation: &Generation, index: usize) -> Result<Tensor<1>, Error> {
    let unit = &generation.unit;
    let slot = &unit.slots[index];
    let value = generation.value(index).inner();
    let device = generation.device(index).without_autodiff();
    if !slot.is_gathered() {
        return Ok(value.to_device(&device));
    }
    let part = slot.part(transport::source(value, None), slot.element);
    let into = BufferPool::new().take(slot.full_bytes());
    let label = format!("{} whole value", slot.path);
    let received = unit
        .group
        .start_all_gather(label, Vec::new(), vec![part], vec![into])?
        .wait()?;
    let buffer = received.buffers.into_iter().next();
    let buffer = buffer.expect("one part was asked for");
    Ok(transport::tensor(buffer, slot.dtype, &device))
}
