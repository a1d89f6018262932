//! The check that a process has the memory that its ranks need.

use crate::error::InputError;

/// Checks that `available` bytes are enough for the `needed` ones of a model of `params` parameters on `ranks` ranks.
pub(crate) fn memory(
    params: usize,
    ranks: usize,
    needed: u128,
    available: u64,
) -> Result<(), InputError> {
    const GIB: f64 = (1_u64 << 30) as f64;
    let available = u128::from(available);
    if needed > available {
        Err(InputError::TooLittleMemory {
            params,
            ranks,
            needed: needed as f64 / GIB,
            available: available as f64 / GIB,
        })
    } else {
        Ok(())
    }
}
