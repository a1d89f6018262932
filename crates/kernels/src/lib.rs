//! Model operations with handwritten gradients, for 32-bit floats and halves (`bf16`) on Burn's CPU backend.
//!
//! Composed of Burn's elementary operations, attention or a layer norm makes a dozen passes over memory, and saves a
//! dozen tensors for backward. Here each operation is a single graph node that saves only its inputs or, for the cross
//! entropy, only its gradient. It processes whole rows while they are in the cache, with vector instructions for `exp`
//! and `erf`. The operations count as expensive. With gradient checkpointing, a device therefore keeps their outputs
//! and recomputes only gathered weights.
//!
//! The mathematics is the same as in the composed operations, which all other backends and types use. Tests compare the
//! two.
//!
//! Burn's capture device records graphs for later execution. Inside [`recorded`], it records each operation as one
//! [`FusedOperation`]; elsewhere, as its elementary operations. The executor of such a graph must support fused
//! operations.
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
// `product.rs` and `fresh.rs` write to uninitialized memory. Nothing else is unsafe.

mod attention;
mod backend;
mod capture;
mod cast;
mod composed;
mod contract;
mod cross_entropy;
mod documents;
mod exp;
mod flex;
mod form;
mod fresh;
mod gelu;
mod halves;
mod likelihood;
mod matmul;
mod matrix;
mod method;
mod norm;
mod ops;
mod packed;
mod pattern;
mod pointwise;
mod product;
mod route;
mod rows;
mod silu;
mod softmax;
mod sum;
mod table;
#[cfg(test)]
mod tests;
mod threads;
mod tracked;
mod turned;
mod vectors;
mod widened;

pub use composed::other_documents;
pub use contract::{
    Composed, FusedCost, FusedKernel, KernelCheck, KernelDims, KernelPattern, KernelPlacement,
    KernelRecord, Letters, Replaced,
};
pub use documents::DocumentHeads;
pub use form::{Array, FormCall, FormScalar, Logarithms, Number};
pub use halves::{are_alike, takes};
pub use method::HalfProducts;
pub use ops::{
    causal_attention, cross_entropy, document_attention, gelu, layer_norm, layer_norm_of,
};
pub use pattern::{
    Inserted, Kind, PatternChange, PatternKernel, PatternNode, PatternPhase, PatternStep, Patterns,
    StepKind, Steps, kind_of,
};
pub use pointwise::{PointwiseOperand, PointwiseOperation, PointwiseProgram};
pub use route::{recorded, supports};
pub use table::FusedOperation;
pub use threads::LARGE;
