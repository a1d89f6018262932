//! Operations of models with a gradient written by hand, for 32-bit floats and halves (`bf16`) on Burn's CPU
//! backend.
//!
//! Composed of Burn's elementary operations, attention or a layer norm makes a
//! dozen passes over memory and saves as many tensors for the backward pass. Here
//! each of them is one node of the graph that saves its input alone, computes
//! whole rows while they are in the cache, and uses vector instructions for `exp`
//! and `erf`. They count as expensive, so that a gradient checkpointing device keeps
//! their outputs: nothing but gathered weights is left to recompute.
//!
//! The mathematics is that of the composed operations, which every other backend
//! and type uses, and which the tests compare with.
//!
//! On Burn's capture device, which records graphs for others to run, they are recorded as
//! [`FusedOperation`]s inside of [`recorded`], and composed outside: whoever runs the graph must
//! know them.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_fsdp_kernels::{causal_attention, gelu};
//!
//! // Two sequences of three positions, of width 4 in two heads.
//! let device = Device::flex().autodiff();
//! let qkv = Tensor::<2>::ones([6, 12], &device).require_grad();
//! let output = gelu(causal_attention(qkv.clone(), 2, 2));
//! assert_eq!(output.dims(), [6, 4]);
//! let gradients = output.sum().backward();
//! assert!(qkv.grad(&gradients).is_some());
//! ```
// `product.rs` and `fresh.rs` write to memory which holds nothing yet. Nothing else is unsafe.

mod attention;
mod backend;
mod capture;
mod composed;
mod cross_entropy;
mod exp;
mod flex;
mod fresh;
mod gelu;
mod halves;
mod likelihood;
mod matmul;
mod matrix;
mod norm;
mod operation;
mod ops;
mod pointwise;
mod product;
mod route;
mod rows;
mod silu;
mod softmax;
mod sum;
#[cfg(test)]
mod tests;
mod threads;
mod turned;
mod vectors;

pub use halves::takes;
pub use operation::{FusedCost, FusedOperation};
pub use ops::{causal_attention, cross_entropy, gelu, layer_norm};
pub use pointwise::{PointwiseOperand, PointwiseOperation, PointwiseProgram};
pub use route::{recorded, supports};
pub use turned::copied_columns;
