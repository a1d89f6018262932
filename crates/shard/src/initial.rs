//! Initial values: rank 0's, cut on the way.

use burn::module::Param;
use burn::tensor::{Bytes, Device, Tensor, TensorData};
use burn_fsdp_collectives::{BufferPool, Source};

use crate::error::Error;
use crate::slot::{Holding, Slot};
use crate::transport;
use crate::unit::Unit;

/// This rank's value of `param`, from rank 0's. No other rank initializes the parameter, and no
/// rank holds more than one whole parameter on its account.
pub(crate) fn value<const D: usize>(
    unit: &Unit,
    slot: &Slot,
    param: &Param<Tensor<D>>,
) -> Result<Tensor<1>, Error> {
    let group = &unit.group;
    let device = param.lazy_device();
    let source = match group.rank() {
        0 => source_of(param, slot),
        _ => Source::empty(),
    };
    let label = format!("{} initial value", slot.path);
    let receive = |elements: usize| vec![BufferPool::new().take(elements * slot.element.size())];
    let received = match slot.holding {
        Holding::Shard => {
            let into = receive(slot.partition.len(group.rank()));
            group.start_scatter(label, Vec::new(), 0, vec![slot.part(source)], into)?
        }
        Holding::Whole | Holding::Replica => {
            let own = source.clone();
            // The source of a broadcast receives nothing: it has it.
            let into = match group.rank() {
                0 => Vec::new(),
                _ => receive(slot.partition.num_elements()),
            };
            let part = slot.full_part(source);
            let sent = group.start_broadcast(label, Vec::new(), 0, vec![part], into)?;
            if group.rank() == 0 {
                sent.wait_released()?;
                return Ok(leaf(own.as_bytes(), slot, &device));
            }
            sent
        }
    };
    let received = received.wait_released()?;
    let buffer = received.buffers.into_iter().next();
    let buffer = buffer.expect("one part was asked for");
    Ok(transport::tensor(buffer, slot.dtype, &device))
}

fn source_of<const D: usize>(param: &Param<Tensor<D>>, slot: &Slot) -> Source {
    let value = param.val().inner();
    let flat: Tensor<1> = value.reshape([slot.partition.num_elements()]);
    let flat = match flat.dtype() == slot.dtype {
        true => flat,
        false => flat.cast(slot.dtype),
    };
    transport::source(flat, None)
}

/// A leaf with memory of its own: what rank 0 sends may be a view of something larger.
fn leaf(bytes: &[u8], slot: &Slot, device: &Device) -> Tensor<1> {
    let bytes = Bytes::from_bytes_vec(bytes.to_vec());
    let len = bytes.len() / slot.element.size();
    let data = TensorData::from_bytes(bytes, [len], slot.dtype);
    Tensor::from_data(data, (device, slot.dtype))
}
