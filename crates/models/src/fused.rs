//! The operations with gradients written by hand that the models are made of: those of
//! [`burn_fsdp_kernels`].

pub use burn_fsdp_kernels::{FusedCost, FusedOperation, recorded};
