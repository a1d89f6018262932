//! The bytes of a parameter's elements, unpacked only if they are read.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use burn::tensor::Tensor;
use burn_fsdp_collectives::Source;
use burn_fsdp_collectives::engine::{Payload, Space};
use burn_fsdp_tensors as tensors;

use crate::copies::Generation;
use crate::unit::Unit;

/// Returns the elements of a parameter on this rank. A base in fewer bits is unpacked when its bytes are first read.
pub(super) fn source(generation: &Generation, slot: usize) -> Source {
    let unit = &generation.unit;
    let of = &unit.slots[slot];
    if of.quantized().is_none() {
        return tensors::source(generation.plain(slot), None);
    }
    let num_elements = of.held_elements(unit.groups.shard.rank());
    Source::of(Arc::new(Unpacked {
        num_bytes: num_elements * of.elements.stored.size(),
        unit: unit.clone(),
        slot,
        held: generation.raw(slot),
        elements: OnceLock::new(),
    }))
}

/// A base in fewer bits, and its elements once they were read.
struct Unpacked {
    unit: Arc<Unit>,
    slot: usize,
    held: Tensor<1>,
    num_bytes: usize,
    elements: OnceLock<Source>,
}

impl Payload for Unpacked {
    fn len(&self) -> usize {
        self.num_bytes
    }

    fn space(&self) -> Space {
        Space::Host
    }

    fn host(&self) -> Option<&[u8]> {
        let elements = self.elements.get_or_init(|| {
            let elements = self.unit.elements_of(self.slot, self.held.clone());
            tensors::source(elements, None)
        });
        Some(elements.as_bytes())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
