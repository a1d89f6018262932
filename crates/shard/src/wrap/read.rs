//! Initial values that each rank reads itself.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_tensors as tensors;

use crate::error::Error;
use crate::slot::Slot;
use crate::unit::Unit;

/// One rank's part of a parameter, which [`fully_shard_from`](crate::fully_shard_from) asks its caller to read.
#[derive(Debug)]
#[non_exhaustive]
pub struct InitialPart<'a> {
    /// Path in the module, such as `blocks.3.fc.weight`.
    pub path: &'a str,
    /// Shape of the whole parameter.
    pub shape: &'a [usize],
    /// Element type of the bytes.
    pub dtype: DType,
    /// The range of flat elements of the whole parameter, in row-major order; empty if other ranks hold all of it.
    pub range: Range<usize>,
}

/// A function that returns the bytes of a part, or `None` for a parameter that starts from rank 0's value.
pub(super) type Read<'a> = &'a mut dyn FnMut(&InitialPart<'_>) -> Result<Option<Vec<u8>>, Error>;

/// Returns this rank's value of a parameter, if `read` returns one for the field at `path`.
pub(super) fn value(
    read: Read<'_>,
    unit: &Unit,
    slot: &Slot,
    path: &str,
    device: &Device,
) -> Result<Option<Tensor<1>>, Error> {
    let dtype = slot.elements.stored.dtype;
    let part = InitialPart {
        path,
        shape: &slot.shape,
        dtype,
        range: slot.held_range(unit.groups.shard.rank()),
    };
    let Some(bytes) = read(&part)? else {
        return Ok(None);
    };
    let expected = part.range.len() * dtype.size();
    if bytes.len() != expected {
        return Err(Error::LocalLength {
            path: path.to_owned(),
            expected,
            got: bytes.len(),
        });
    }
    Ok(Some(tensors::owned(bytes, dtype, &unit.home(device))))
}
