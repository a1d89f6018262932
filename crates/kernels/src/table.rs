//! The table of kernels.

use burn_flex::FlexTensor;
use burn_ir::CustomOpIr;

use crate::contract::{Composed, FusedCost, FusedKernel, KernelRecord};
use crate::form::{FormCall, Number};

macro_rules! table {
    ($($module:ident: $name:ident $(/ $gradient:ident)?, $doc:literal;)+) => {
        /// A fused operation in a captured graph. It is an [`OperationIr::Custom`](burn_ir::OperationIr::Custom) with
        /// this [name](Self::name). [`run`](Self::run) computes it.
        ///
        /// The module of each kernel lists its inputs, outputs and scalars. Floats are either all 32-bit or all halves
        /// (`bf16`), except in `models.cast` and where a module says so. Halves are widened when they are read, and
        /// results are rounded once. Functions of elements and rows accept tensors with any number of dims. A row is
        /// along the last dim.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum FusedOperation {
            $(
                #[doc = $doc]
                $name,
                $(
                    #[doc = concat!("The gradients of [`", stringify!($name), "`](Self::", stringify!($name), ").")]
                    $gradient,
                )?
            )+
        }

        impl FusedOperation {
            /// All fused operations, in the order in which their patterns are searched.
            pub const ALL: [Self; [$(Self::$name, $(Self::$gradient,)?)+].len()] =
                [$(Self::$name, $(Self::$gradient,)?)+];

            /// Returns the record of the kernel.
            pub fn record(self) -> &'static KernelRecord {
                match self {
                    $(
                        Self::$name => &crate::$module::$name::RECORD,
                        $(Self::$gradient => &crate::$module::$gradient::RECORD,)?
                    )+
                }
            }

            /// Evaluates the composed form of the kernel.
            ///
            /// # Errors
            ///
            /// What is wrong with the operands or the scalars.
            pub fn composed<N: Number>(self, call: &FormCall<'_, N>) -> Composed<N> {
                match self {
                    $(
                        Self::$name => crate::$module::$name::composed(call),
                        $(Self::$gradient => crate::$module::$gradient::composed(call),)?
                    )+
                }
            }
        }
    };
}

// A pattern that contains the kernel of another pattern follows it.
table! {
    softmax: Softmax / SoftmaxBackward, "The softmax of each row.";
    softmax: LogSoftmax / LogSoftmaxBackward, "The logarithm of each row's softmax.";
    attention: Attention / AttentionBackward, "Attention under any number of masks, with or without factors.";
    likelihood: LogLikelihood / LogLikelihoodBackward, "The log probability of one class of each row.";
    norm: LayerNorm / LayerNormBackward, "Rows with mean zero and variance one, scaled and shifted.";
    norm: RmsNorm / RmsNormBackward, "Rows divided by their root mean square, scaled.";
    silu: Silu / SiluBackward, "`x` times its sigmoid.";
    silu: SwiGlu / SwiGluBackward, "Values times the SiLU of a gate.";
    gelu: Gelu / GeluBackward, "`x` times the probability that a standard normal variable is below `x`.";
    attention: CausalAttention / CausalAttentionBackward, "Attention to a position and all before it.";
    cross_entropy: CrossEntropy / CrossEntropyBackward, "The mean negative log probability of targets.";
    matmul: Matmul, "The product of matrices, with 32-bit sums.";
    sum: SumDim, "The sums along a dim.";
    cast: Cast, "The same numbers in a different type.";
    pointwise: Pointwise, "A [program](crate::PointwiseProgram) of operations on the elements of tensors.";
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
