//! The engines of this crate. They do not depend on each other or on the groups above.

pub(crate) mod fake;
pub(crate) mod local;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
