//! Reads, saves and changes the tensors of a sharded module between steps, whole or in this rank's parts.
//!
//! - `tensors`: the tensors, and where their elements are. `unpacked`: the elements of a base in fewer bits. `full`: whole
//!   parameters, all at once or one by one. `local`: this rank's parts, as bytes.
//! - `record`: Burn's records; `recorded`: a record tensor by tensor. `buffers`: running states. `stand_ins`: the
//!   stand-ins in the fields.
//! - `average`: moving averages. `agreement`: the check that all ranks hold the same values.

pub(crate) mod agreement;
pub(crate) mod average;
pub(crate) mod buffers;
pub(crate) mod full;
pub(crate) mod local;
pub(crate) mod record;
pub(crate) mod recorded;
pub(crate) mod stand_ins;
pub(crate) mod tensors;
mod unpacked;
