//! The engines of this crate. None of them knows another, or the groups above.

pub(crate) mod fake;
pub(crate) mod local;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
