//! Seals of values in this rank's memory, which detect corruption.
//!
//! A seal is kept together with a reference to the value. Burn does not overwrite memory that has two references, so a
//! held value stays unchanged. Only host memory is sealed; a device's memory would have to be read back.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::autodiff::NodeId;
use burn::tensor::Tensor;
use burn_fsdp_collectives::{At, Keeper, Label, ProcessGroup, RestKind, Seal, Sealed, VaultSlot};
use burn_fsdp_tensors::{self as tensors, is_host};

use crate::error::Error;

/// Seals a flat tensor without autodiff. Returns `None` if ranks do not compare bytes, or the tensor is not on the
/// host.
pub(crate) fn seal(group: &ProcessGroup, tensor: &Tensor<1>) -> Option<Seal> {
    if !group.compares_bytes() || !is_host(&tensor.device()) {
        return None;
    }
    group.seal(tensors::source(tensor.clone(), None).as_bytes())
}

/// Returns the place, among the values of an owner, of a value that belongs to parameter `slot` of a unit.
pub(crate) fn place(slot: usize, kind: RestKind) -> VaultSlot {
    (slot as u64, kind)
}

/// Checks that the value in `place`, a flat tensor without autodiff, still has the bytes that were sealed, if any were.
///
/// # Errors
///
/// [`burn_fsdp_collectives::Error::AlteredAtRest`].
pub(crate) fn check(seals: &Keeper, place: VaultSlot, tensor: &Tensor<1>) -> Result<(), Error> {
    let Some(sealed) = seals.get(place) else {
        return Ok(());
    };
    let bytes = tensors::source(tensor.clone(), None);
    Ok(seals.group().check_sealed(&sealed, bytes.as_bytes())?)
}

/// Returns true if two flat tensors without autodiff share the same host memory.
pub(crate) fn is_same_memory(one: &Tensor<1>, other: &Tensor<1>) -> bool {
    let of = |tensor: &Tensor<1>| {
        let primitive = tensor.clone().try_into_primitive::<Flex>().ok()?;
        let (start, end) = primitive.layout().contiguous_offsets()?;
        Some((primitive.bytes().as_ptr() as usize, start..end))
    };
    one.dtype() == other.dtype() && of(one).is_some() && of(one) == of(other)
}

/// Flips a bit of a flat tensor without autodiff if fault injection requests it at `at`.
pub(crate) fn flip_if_told(group: &ProcessGroup, at: At, tensor: &mut Tensor<1>) {
    let (dtype, device) = (tensor.dtype(), tensor.device());
    let num_bytes = tensor.shape().num_elements() * dtype.size();
    if let Some(bit) = group.flips(at, num_bytes) {
        let mut bytes = tensors::source(tensor.clone(), None).as_bytes().to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        *tensor = tensors::owned(bytes, dtype, &device);
    }
}

/// Values outside of the engine's units that are checked before their next use: reduced gradients that wait for the
/// optimizer, by leaf, and the running states of the last backward. Burn does not overwrite a value that is held here.
#[derive(Default)]
pub(crate) struct Waiting {
    /// The number of the backward that computed the gradients.
    backward: u64,
    gradients: BTreeMap<u64, Vec<Tensor<1>>>,
    running: Vec<Tensor<1>>,
    seals: Option<Keeper>,
}

impl Waiting {
    fn seals(&mut self, group: &ProcessGroup) -> &Keeper {
        self.seals.get_or_insert_with(|| group.keeper())
    }

    /// Holds a gradient of backward number `backward`. Checks and releases the gradients of earlier backwards, which
    /// have been used or discarded.
    pub(crate) fn add(
        &mut self,
        group: &ProcessGroup,
        (backward, leaf): (u64, NodeId),
        gradient: &Tensor<1>,
        sealed: Option<Arc<Sealed>>,
    ) -> Result<(), Error> {
        let Some(sealed) = sealed else {
            return Ok(());
        };
        if self.backward != backward {
            self.backward = backward;
            let leaves: Vec<u64> = self.gradients.keys().copied().collect();
            for value in leaves {
                self.release_of(NodeId { value })?;
            }
        }
        self.hold(group, leaf, gradient.clone(), sealed);
        Ok(())
    }

    fn hold(
        &mut self,
        group: &ProcessGroup,
        leaf: NodeId,
        gradient: Tensor<1>,
        sealed: Arc<Sealed>,
    ) {
        let of_leaf = self.gradients.entry(leaf.value).or_default();
        of_leaf.push(gradient);
        let place = (leaf.value, RestKind::Reduced(of_leaf.len() - 1));
        self.seals(group).set(place, Some(sealed));
    }

    /// Checks and releases the gradients of a leaf, which are about to be read or replaced.
    pub(crate) fn release_of(&mut self, leaf: NodeId) -> Result<(), Error> {
        let held = self.gradients.remove(&leaf.value).unwrap_or_default();
        let Some(seals) = &self.seals else {
            return Ok(());
        };
        for (number, gradient) in held.iter().enumerate() {
            let place = (leaf.value, RestKind::Reduced(number));
            check(seals, place, gradient)?;
            seals.set(place, None);
        }
        Ok(())
    }

    /// Holds the new gradient of a leaf whose gradients were released.
    pub(crate) fn replace(
        &mut self,
        group: &ProcessGroup,
        leaf: NodeId,
        gradient: Tensor<1>,
        what: Label,
    ) {
        if let Some(seal) = seal(group, &gradient) {
            self.hold(group, leaf, gradient, Arc::new(Sealed { seal, what }));
        }
    }

    /// Flips a bit of a running state if fault injection requests it.
    pub(crate) fn flip_running_if_told(&mut self, group: &ProcessGroup) {
        let running = self.running.iter_mut();
        running.for_each(|state| flip_if_told(group, At::Running, state));
    }

    /// Checks that the running states still have the same bytes.
    pub(crate) fn check_running(&self) -> Result<(), Error> {
        let mut running = self.running.iter().enumerate();
        let Some(seals) = &self.seals else {
            return Ok(());
        };
        running.try_for_each(|(slot, state)| check(seals, place(slot, RestKind::Running), state))
    }

    /// Seals and holds the running states that a forward has written.
    pub(crate) fn set_running(&mut self, group: &ProcessGroup, states: Vec<(Tensor<1>, Label)>) {
        self.running.clear();
        for (state, what) in states {
            if let Some(seal) = seal(group, &state) {
                let place = place(self.running.len(), RestKind::Running);
                self.seals(group).keep(place, Some(seal), || what);
                self.running.push(state);
            }
        }
    }
}
