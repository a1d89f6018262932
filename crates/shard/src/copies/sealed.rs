//! The seals of a generation's values, full parameters and pieces, and the checks against them.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_fsdp_collectives::{At, Label, RestKind, Seal, Sealed};

use super::generation::Generation;
use crate::error::Error;
use crate::files;
use crate::seal;
use crate::slot::Slots;

impl Generation {
    /// Returns the seal of the value of `slot`, taken when the value was written, if ranks compare bytes.
    pub(crate) fn sealed(&self, slot: usize) -> Option<Arc<Sealed>> {
        self.seals.get(seal::place(slot, RestKind::Value))
    }

    /// Keeps the seal of a value of this generation.
    pub(crate) fn keep(&self, kind: RestKind, slot: usize, seal: Option<Seal>) {
        let what = || Label::from(self.named_kind(kind, slot));
        self.seals.keep(seal::place(slot, kind), seal, what);
    }

    /// Keeps the seal that `from` has for the value of `slot`, which is in both.
    pub(super) fn keep_seal(&self, slot: usize, from: &Self) {
        let place = seal::place(slot, RestKind::Value);
        self.seals.set(place, from.seals.get(place));
    }

    fn named_kind(&self, kind: RestKind, slot: usize) -> String {
        let kind = match kind {
            RestKind::Full => "the full parameter",
            RestKind::Piece => "the piece",
            _ if self.unit.slots[slot].is_gathered() => "the shard",
            _ => "the parameter",
        };
        self.named_as(kind, slot)
    }

    pub(crate) fn named_as(&self, kind: &str, slot: usize) -> String {
        let path = &self.unit.slots[slot].path;
        format!("{kind} of `{path}` (unit {})", self.unit.label())
    }

    /// Checks that the value of `slot` is unchanged since it was written, if ranks compare bytes or it is in a file.
    pub(crate) fn check(&self, slot: usize) -> Result<(), Error> {
        let place = seal::place(slot, RestKind::Value);
        seal::check(&self.seals, place, &self.raw(slot))?;
        self.check_file(slot)
    }

    /// Checks that the value of `slot` is unchanged since it was written, if it is in a file.
    pub(crate) fn check_file(&self, slot: usize) -> Result<(), Error> {
        let held = self.held(slot);
        match held.checksum {
            Some(written) if files::checksum(&held.plain) != written => {
                let num_bytes = held.plain.shape().num_elements() * held.plain.dtype().size();
                let what = (files::SHARD, num_bytes);
                let reason = files::CHANGED.to_owned();
                Err(self
                    .unit
                    .file_error(slot, what, reason, files::DAMAGED)
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// Flips a bit of the value of `slot` if fault injection requests it.
    pub(crate) fn flip_if_told(&self, slot: usize) {
        let mut held = self.held(slot);
        let before = held.plain.clone();
        seal::flip_if_told(self.holders_group(), At::Shard, &mut held.plain);
        if !seal::is_same_memory(&before, &held.plain) {
            self.values.lock().own[slot] = Some(held);
        }
    }

    /// Describes the seals of the values again, because the unit may have another name.
    pub(super) fn describe_seals(&self) {
        for slot in 0..self.unit.slots.len() {
            if let Some(sealed) = self.sealed(slot) {
                self.keep(RestKind::Value, slot, Some(sealed.seal.clone()));
            }
        }
    }

    /// Checks that full parameters still equal the gathered values.
    pub(super) fn check_full(&self, full: &Slots<Tensor<1>>) -> Result<(), Error> {
        for (slot, tensor) in full.iter().enumerate() {
            if let Some(tensor) = tensor {
                seal::check(&self.seals, seal::place(slot, RestKind::Full), tensor)?;
            }
        }
        Ok(())
    }
}
