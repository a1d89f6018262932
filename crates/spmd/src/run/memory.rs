//! The executor's table of live tensor bytes.

use std::collections::HashMap;

use burn_backend::TensorMetadata;
use burn_fsdp_tensors::on_host;
use burn_ir::{BackendIr, HandleKind, TensorId, TensorIr};

/// The memory of each live tensor, and the total in bytes.
///
/// Memory is counted once, regardless of how many views share it. On Flex, the memory of each tensor is known exactly.
/// On other backends every tensor counts separately, with its own size.
#[derive(Debug, Clone, Default)]
pub struct MemoryTable {
    /// Number of values and bytes, by address of the memory.
    storages: HashMap<usize, (usize, usize)>,
    values: HashMap<TensorId, usize>,
    live_bytes: usize,
    peak_bytes: usize,
    peak_node: Option<usize>,
}

/// The address and size of a tensor's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    address: usize,
    num_bytes: usize,
}

impl Address {
    pub(super) fn of<B: BackendIr>(id: TensorId, tensor: &HandleKind<B>) -> Self {
        if let Some(tensor) = on_host(tensor) {
            let bytes = tensor.bytes();
            return Self {
                address: bytes.as_ptr() as usize,
                num_bytes: bytes.len(),
            };
        }
        Self {
            // Odd, to differ from any address of tensor memory.
            address: (id.value() as usize) << 1 | 1,
            num_bytes: match tensor {
                HandleKind::Float(tensor) => num_bytes(tensor),
                HandleKind::Int(tensor) => num_bytes(tensor),
                HandleKind::Bool(tensor) => num_bytes(tensor),
                HandleKind::Quantized(tensor) => num_bytes(tensor),
            },
        }
    }

    /// Returns an address for the memory that a collective in flight writes.
    pub(super) fn reserved(output: &TensorIr) -> Self {
        Self {
            address: (output.id.value() as usize) << 1 | 1,
            num_bytes: output.shape.num_elements() * output.dtype.size(),
        }
    }
}

fn num_bytes(tensor: &impl TensorMetadata) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

impl MemoryTable {
    /// Returns the bytes of all tensors now.
    pub fn live_bytes(&self) -> usize {
        self.live_bytes
    }

    /// Returns the peak number of bytes since the last [`reset_peak`](Self::reset_peak). An operation's results count
    /// in addition to its inputs, unless they are written in place.
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes
    }

    /// Returns the node at which the peak was reached, if a graph was running then.
    pub fn peak_node(&self) -> Option<usize> {
        self.peak_node
    }

    /// Begins a new measurement of the peak.
    pub fn reset_peak(&mut self) {
        self.peak_bytes = self.live_bytes;
        self.peak_node = None;
    }

    /// Counts a tensor that no node wrote.
    pub(super) fn insert(&mut self, id: TensorId, place: Address) {
        self.remove(id);
        self.add(id, place);
        if self.live_bytes > self.peak_bytes {
            self.peak_bytes = self.live_bytes;
            self.peak_node = None;
        }
    }

    /// Counts the values that a node wrote, and stops counting the values that it consumed. Both count towards the
    /// peak, unless a value was written into the memory of a consumed one.
    pub(super) fn write(
        &mut self,
        written: &[(TensorId, Address)],
        taken: impl Iterator<Item = TensorId>,
        node: usize,
    ) {
        let is_new = |place: &Address| {
            let known = self.storages.get(&place.address);
            known.is_none_or(|(_, num_bytes)| *num_bytes != place.num_bytes)
        };
        let new = written
            .iter()
            .map(|(_, place)| place)
            .filter(|place| is_new(place));
        let during = self.live_bytes + new.map(|place| place.num_bytes).sum::<usize>();
        if during > self.peak_bytes {
            self.peak_bytes = during;
            self.peak_node = Some(node);
        }
        for id in taken {
            self.remove(id);
        }
        for (id, place) in written {
            self.add(*id, *place);
        }
    }

    /// Counts the results of a collective in place of the memory that was reserved for them.
    pub(super) fn replace(
        &mut self,
        written: &[(TensorId, Address)],
        reserved: impl Iterator<Item = TensorId>,
    ) {
        for id in reserved {
            self.remove(id);
        }
        for (id, place) in written {
            self.add(*id, *place);
        }
    }

    fn add(&mut self, id: TensorId, place: Address) {
        if place.num_bytes == 0 {
            return;
        }
        let entry = self.storages.entry(place.address).or_insert((0, 0));
        if entry.0 == 0 {
            entry.1 = place.num_bytes;
            self.live_bytes += place.num_bytes;
        }
        entry.0 += 1;
        self.values.insert(id, place.address);
    }

    /// Stops counting a tensor.
    pub(super) fn remove(&mut self, id: TensorId) {
        let Some(address) = self.values.remove(&id) else {
            return;
        };
        if let Some(entry) = self.storages.get_mut(&address) {
            entry.0 -= 1;
            if entry.0 == 0 {
                self.live_bytes -= entry.1;
                self.storages.remove(&address);
            }
        }
    }

    /// Counts `into` as a second id of the memory of `from`, in place of any memory that `into` had.
    pub(super) fn rename(&mut self, from: TensorId, into: TensorId) {
        self.remove(into);
        if let Some(address) = self.values.get(&from).copied() {
            self.values.insert(into, address);
            if let Some(entry) = self.storages.get_mut(&address) {
                entry.0 += 1;
            }
        }
    }
}
