//! Seals of values in this rank's memory, which detect corruption.
//!
//! A seal is kept together with a reference to the value. Burn does not overwrite memory that has two references, so a
//! held value stays unchanged. Only host memory is sealed; a device's memory would have to be read back.

use std::collections::BTreeMap;

use burn::backend::Flex;
use burn::backend::autodiff::NodeId;
use burn::tensor::Tensor;
use burn_fsdp_collectives::{At, Label, ProcessGroup, Seal};
use burn_fsdp_tensors::{self as tensors, is_host};

use crate::error::Error;
use crate::op::Reduced;

/// Seals a flat tensor without autodiff. Returns `None` if ranks do not compare bytes, or the tensor is not on the
/// host.
pub(crate) fn seal(group: &ProcessGroup, tensor: &Tensor<1>) -> Option<Seal> {
    if !group.compares_bytes() || !is_host(&tensor.device()) {
        return None;
    }
    group.seal(tensors::source(tensor.clone(), None).as_bytes())
}

/// Checks that a flat tensor without autodiff still has the sealed bytes. `what` describes it in errors.
///
/// # Errors
///
/// [`burn_fsdp_collectives::Error::AlteredAtRest`].
pub(crate) fn check(
    group: &ProcessGroup,
    seal: Option<&Seal>,
    tensor: &Tensor<1>,
    what: impl FnOnce() -> String,
) -> Result<(), Error> {
    let Some(seal) = seal else {
        return Ok(());
    };
    let bytes = tensors::source(tensor.clone(), None);
    Ok(group.check_seal(seal, bytes.as_bytes(), what)?)
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

/// A value and its seal. Burn does not overwrite a value that is held here.
pub(crate) struct Held {
    value: Tensor<1>,
    seal: Seal,
    what: Label,
}

impl Held {
    pub(crate) fn new(group: &ProcessGroup, value: Tensor<1>, what: Label) -> Option<Self> {
        let seal = seal(group, &value)?;
        Some(Self { value, seal, what })
    }

    /// Checks that the value still has the sealed bytes.
    pub(crate) fn check(&self, group: &ProcessGroup) -> Result<(), Error> {
        let what = || self.what.as_str().to_owned();
        check(group, Some(&self.seal), &self.value, what)
    }

    /// Flips a bit of the value if fault injection requests it at `at`.
    pub(crate) fn flip_if_told(&mut self, group: &ProcessGroup, at: At) {
        flip_if_told(group, at, &mut self.value);
    }
}

/// Reduced gradients that wait for the optimizer, by leaf, and the running states of the last backward.
#[derive(Default)]
pub(crate) struct Waiting {
    /// The number of the backward that computed the gradients.
    backward: u64,
    gradients: BTreeMap<u64, Vec<Held>>,
    pub(crate) running: Vec<Held>,
}

impl Waiting {
    /// Holds a gradient of backward number `backward`. Checks and releases the gradients of earlier backwards, which
    /// have been used or discarded.
    pub(crate) fn add(
        &mut self,
        group: &ProcessGroup,
        backward: u64,
        reduced: &Reduced,
    ) -> Result<(), Error> {
        let Some((seal, what)) = reduced.seal.clone() else {
            return Ok(());
        };
        if self.backward != backward {
            self.backward = backward;
            self.release(group)?;
        }
        let value = reduced.gradient.clone();
        let of_leaf = self.gradients.entry(reduced.node.value).or_default();
        of_leaf.push(Held { value, seal, what });
        Ok(())
    }

    /// Checks all waiting gradients, and releases them.
    fn release(&mut self, group: &ProcessGroup) -> Result<(), Error> {
        let gradients = std::mem::take(&mut self.gradients);
        let mut held = gradients.values().flatten();
        held.try_for_each(|held| held.check(group))
    }

    /// Checks and releases the gradients of a leaf, which are about to be read or replaced.
    pub(crate) fn release_of(&mut self, group: &ProcessGroup, leaf: NodeId) -> Result<(), Error> {
        let held = self.gradients.remove(&leaf.value).unwrap_or_default();
        held.iter().try_for_each(|held| held.check(group))
    }

    /// Replaces the held gradients of a leaf by its new value.
    pub(crate) fn replace(&mut self, leaf: NodeId, held: Option<Held>) {
        self.gradients
            .insert(leaf.value, held.into_iter().collect());
    }
}
