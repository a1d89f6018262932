//! The table of kernels.

use burn_flex::FlexTensor;
use burn_ir::CustomOpIr;

use crate::contract::{Composed, FusedCost, FusedKernel, KernelRecord};
use crate::form::{FormCall, Number};
use crate::{
    attention, cast, cross_entropy, gelu, likelihood, matmul, norm, pointwise, silu, softmax, sum,
};

macro_rules! table {
    ($($name:ident = $kernel:ty, $doc:literal;)+) => {
        /// A fused operation in a captured graph. It is an [`OperationIr::Custom`](burn_ir::OperationIr::Custom) with
        /// this [name](Self::name). [`run`](Self::run) computes it.
        ///
        /// The module of each kernel lists its inputs, outputs and scalars. Floats are either all 32-bit or all halves
        /// (`bf16`), except in `models.cast` and where a module says so. Halves are widened when they are read, and
        /// results are rounded once. Functions of elements and rows accept tensors with any number of dims. A row is
        /// along the last dim.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum FusedOperation { $(#[doc = $doc] $name),+ }

        impl FusedOperation {
            /// All fused operations, in the order in which their patterns are searched.
            pub const ALL: [Self; [$(Self::$name),+].len()] = [$(Self::$name),+];

            /// Returns the record of the kernel.
            pub fn record(self) -> &'static KernelRecord {
                match self { $(Self::$name => &<$kernel as FusedKernel>::RECORD),+ }
            }

            /// Evaluates the composed form of the kernel.
            ///
            /// # Errors
            ///
            /// What is wrong with the operands or the scalars.
            pub fn composed<N: Number>(self, call: &FormCall<'_, N>) -> Composed<N> {
                match self { $(Self::$name => <$kernel as FusedKernel>::composed(call)),+ }
            }
        }
    };
}

// A pattern that contains the kernel of another pattern follows it.
table! {
    Softmax = softmax::Softmax, "The softmax of each row.";
    SoftmaxBackward = softmax::SoftmaxBackward, "The gradient of [`Softmax`](Self::Softmax).";
    LogSoftmax = softmax::LogSoftmax, "The logarithm of each row's softmax.";
    LogSoftmaxBackward = softmax::LogSoftmaxBackward, "The gradient of [`LogSoftmax`](Self::LogSoftmax).";
    Attention = attention::Attention, "Attention under any number of masks, with or without factors.";
    AttentionBackward = attention::AttentionBackward, "The gradients of [`Attention`](Self::Attention).";
    LogLikelihood = likelihood::LogLikelihood, "The log probability of one class of each row.";
    LogLikelihoodBackward = likelihood::LogLikelihoodBackward, "The gradient of [`LogLikelihood`](Self::LogLikelihood).";
    LayerNorm = norm::LayerNorm, "Rows with mean zero and variance one, scaled and shifted.";
    LayerNormBackward = norm::LayerNormBackward, "The gradients of [`LayerNorm`](Self::LayerNorm).";
    RmsNorm = norm::RmsNorm, "Rows divided by their root mean square, scaled.";
    RmsNormBackward = norm::RmsNormBackward, "The gradients of [`RmsNorm`](Self::RmsNorm).";
    Silu = silu::Silu, "`x` times its sigmoid.";
    SiluBackward = silu::SiluBackward, "The gradient of [`Silu`](Self::Silu).";
    SwiGlu = silu::SwiGlu, "Values times the SiLU of a gate.";
    SwiGluBackward = silu::SwiGluBackward, "The gradients of [`SwiGlu`](Self::SwiGlu).";
    Gelu = gelu::Gelu, "`x` times the probability that a standard normal variable is below `x`.";
    GeluBackward = gelu::GeluBackward, "The gradient of [`Gelu`](Self::Gelu).";
    CausalAttention = attention::CausalAttention, "Attention from every position to itself and all earlier ones.";
    CausalAttentionBackward = attention::CausalAttentionBackward, "The gradient of [`CausalAttention`](Self::CausalAttention).";
    CrossEntropy = cross_entropy::CrossEntropy, "The mean negative log probability of the targets, with its gradient.";
    CrossEntropyBackward = cross_entropy::CrossEntropyBackward, "The gradient of the logits times the gradient of the loss.";
    Matmul = matmul::Matmul, "The product of matrices, with 32-bit sums.";
    SumDim = sum::SumDim, "The sums along a dim.";
    Cast = cast::Cast, "The same numbers in a different type.";
    Pointwise = pointwise::Pointwise, "A [program](crate::PointwiseProgram) of operations on the elements of tensors.";
}

impl FusedOperation {
    /// Returns the operation's name in captured graphs.
    pub fn name(self) -> &'static str {
        self.record().name
    }

    /// Returns the operation with this name, or `None` for an unknown name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// Computes the operation on Burn's CPU backend, and returns its outputs. Inputs that are not shared may be
    /// overwritten.
    ///
    /// # Panics
    ///
    /// If the inputs do not match the captured call, or a class or target is out of range.
    pub fn run(self, call: &CustomOpIr, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        (self.record().run)(call, inputs)
    }

    /// Returns the input that a call's first output overwrites if it is contiguous and not shared. All other outputs
    /// are in new memory.
    pub fn written_over(self, call: &CustomOpIr) -> Option<usize> {
        (self.record().written_over)(call)
    }

    /// Returns true if the operation costs little more than reading and writing its operands. Recomputing it to save
    /// memory is then worthwhile.
    pub fn is_cheap(self) -> bool {
        self.record().is_cheap
    }

    /// Returns the work of a call.
    pub fn cost(self, call: &CustomOpIr) -> FusedCost {
        (self.record().cost)(call)
    }
}
