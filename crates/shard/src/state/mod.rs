//! What a sharded module holds between steps, whole or in this rank's parts: read, saved, changed.
//!
//! - `full`: whole parameters, for a moment or one by one. `local`: this rank's parts, as bytes.
//! - `record`: Burn's records. `buffers`: running states. `stand_ins`: what stands in the fields.
//! - `agreement`: whether all ranks hold the same.

pub(crate) mod agreement;
pub(crate) mod buffers;
pub(crate) mod full;
pub(crate) mod local;
pub(crate) mod record;
pub(crate) mod stand_ins;
