//! The check that a process has the memory that its ranks need.

use crate::error::InputError;

/// Checks that `available` bytes are enough for the `needed` ones of a model of `params` parameters on `ranks` ranks.
pub(crate) fn memory(
    params: usize,
    ranks: usize,
    needed: u128,
    available: u64,
) -> Result<(), InputError> {
    const MIB: u128 = 1 << 20;
    let available = u128::from(available);
    if needed > available {
        Err(InputError::TooLittleMemory {
            params,
            ranks,
            needed: needed.div_ceil(MIB),
            available: available / MIB,
        })
    } else {
        Ok(())
    }
}
