//! The operations with handwritten gradients that the models use, from [`burn_fsdp_kernels`].

pub use burn_fsdp_kernels::{FusedCost, FusedOperation, recorded};
