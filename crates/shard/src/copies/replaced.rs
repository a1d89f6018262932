//! Values that the optimizer has replaced before backward ended.

use burn_fsdp_collectives::RestKind;

use super::generation::Generation;
use crate::error::Error;
use crate::seal;

impl Generation {
    /// Frees the value of `slot`, which an optimizer has replaced while a backward graph still refers to this
    /// generation. Does nothing if a module holds the value.
    pub(crate) fn free_replaced(&self, slot: usize) {
        if !self.holders.owns(slot)
            && let Some(value) = self.values.lock().own[slot].as_mut()
        {
            value.free();
            self.seals.set(seal::place(slot, RestKind::Value), None);
        }
    }

    /// Checks that the value of `slot` still exists.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if it was [freed](Self::free_replaced).
    pub(crate) fn expect_held(&self, slot: usize) -> Result<(), Error> {
        if self
            .values
            .lock()
            .known(slot)
            .is_none_or(|value| !value.is_freed)
        {
            return Ok(());
        }
        Err(Error::State {
            unit: self.unit.label(),
            expected: format!("holding the values of `{}`", self.unit.slots[slot].path),
            got: "freed, because `backward_and_step` has replaced them".to_owned(),
            advice: "run the forward again with the module that `backward_and_step` returned",
        })
    }
}
