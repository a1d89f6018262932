//! Fused operations in captured graphs.

use burn_flex::FlexTensor;
use burn_ir::{CustomOpIr, ScalarIr};

use crate::attention::{Factors, Fill, Weighting};
use crate::documents::DocumentHeads;
use crate::pointwise::{self, PointwiseProgram};
use crate::rows::contiguous;
use crate::softmax::{self, Form};
use crate::{attention, cross_entropy, gelu, halves, likelihood, matmul, norm, silu, sum};

/// A fused operation in a captured graph. It is an [`OperationIr::Custom`](burn_ir::OperationIr::Custom) with this
/// [name](Self::name). [`run`](Self::run) computes it.
///
/// Floats are either all 32-bit or all halves (`bf16`), except in `models.cast`. Halves are widened when they are read,
/// and results are rounded once. The loss, the factor of `models.cross_entropy_backward` and the numbers that
/// `models.log_likelihood` keeps always have 32 bits.
///
/// | name | inputs | outputs | scalars |
/// |---|---|---|---|
/// | `models.gelu` | x | y | |
/// | `models.gelu_backward` | x, gradient of y | gradient of x | |
/// | `models.silu` | x | y | |
/// | `models.silu_backward` | x, gradient of y | gradient of x | |
/// | `models.swiglu` | gate, values | values times the SiLU of the gate | |
/// | `models.swiglu_backward` | gate, values, gradient of the result | gradients of gate, values | |
/// | `models.layer_norm` | x, gamma, beta | y | epsilon |
/// | `models.layer_norm_backward` | x, gamma, gradient of y | gradients of x, gamma, beta | epsilon |
/// | `models.rms_norm` | x, gamma | y | epsilon |
/// | `models.rms_norm_backward` | x, gamma, gradient of y | gradients of x, gamma | epsilon |
/// | `models.causal_attention` | qkv, positions | y | batch, heads, reach |
/// | `models.causal_attention_backward` | qkv, gradient of y, positions | gradient of qkv | batch, heads, reach |
/// | `models.attention` | queries, keys, values, masks, factors | the result | factor on the scores, number for each mask, factor on all probabilities |
/// | `models.attention_backward` | queries, keys, values, gradient of the result, masks, factors | gradients of queries, keys, values | as above |
/// | `models.cross_entropy` | logits, targets | gradient of the logits, loss | |
/// | `models.cross_entropy_backward` | gradient of the logits, factor `[1]` | their product | |
/// | `models.softmax` | x | y | |
/// | `models.softmax_backward` | y, gradient of y | gradient of x | |
/// | `models.log_softmax` | x | y | |
/// | `models.log_softmax_backward` | y, gradient of y | gradient of x | |
/// | `models.log_likelihood` | logits, classes | log probabilities of the classes, 32-bit numbers kept for each row | |
/// | `models.log_likelihood_backward` | logits, classes, kept numbers, gradient of the log probabilities | gradient of the logits | |
/// | `models.matmul` | lhs, rhs | product | |
/// | `models.sum_dim` | x | its sums, computed in 32 bits | dim |
/// | `models.cast` | x of either type | x of the other type | |
/// | `models.pointwise` | the program's inputs, which broadcast to y | y | the [program](PointwiseProgram::to_scalars) |
///
/// Positions, `[batch, time]`, are integers: those of tokens in their documents. A query of `models.causal_attention` sees
/// as many tokens before its own as its position says, and its reach at most, including its own. A reach of 0 is none. If
/// all tokens of a sequence are one document, both the positions and the reach are absent.
///
/// Queries, keys, values and the result of `models.attention` are `[batch, time, heads, width]`. A mask contains
/// bools, `[batch or 1, heads or 1, queries or 1, keys or 1]`. The mask's number replaces the scaled score wherever
/// the mask is set. Factors, `[batch, heads, queries, keys]`, multiply the probabilities, as in dropout. If there are
/// no factors, both the input and the common factor are absent.
///
/// Classes are integers, `[.., 1]`, and the log probabilities have the same shape. The numbers kept for the rows are
/// `[.., 2]`.
///
/// GELU, SiLU, both norms and both kinds of softmax accept tensors with any number of dims. A row is along the last
/// dim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FusedOperation {
    /// `x` times the probability that a standard normal variable is below `x`.
    Gelu,
    /// The gradient of [`Gelu`](Self::Gelu).
    GeluBackward,
    /// `x` times its sigmoid.
    Silu,
    /// The gradient of [`Silu`](Self::Silu).
    SiluBackward,
    /// Values times the SiLU of a gate.
    SwiGlu,
    /// The gradients of [`SwiGlu`](Self::SwiGlu).
    SwiGluBackward,
    /// Rows with mean zero and variance one, scaled and shifted.
    LayerNorm,
    /// The gradients of [`LayerNorm`](Self::LayerNorm).
    LayerNormBackward,
    /// Rows divided by their root mean square, scaled.
    RmsNorm,
    /// The gradients of [`RmsNorm`](Self::RmsNorm).
    RmsNormBackward,
    /// Attention from every position to itself and all earlier positions.
    CausalAttention,
    /// The gradient of [`CausalAttention`](Self::CausalAttention).
    CausalAttentionBackward,
    /// Attention from queries to keys, under any number of masks, with or without factors on the probabilities.
    Attention,
    /// The gradients of [`Attention`](Self::Attention).
    AttentionBackward,
    /// The mean negative log probability of the targets, with its gradient.
    CrossEntropy,
    /// The gradient of the logits times the gradient of the loss.
    CrossEntropyBackward,
    /// The softmax of each row.
    Softmax,
    /// The gradient of [`Softmax`](Self::Softmax).
    SoftmaxBackward,
    /// The logarithm of each row's softmax.
    LogSoftmax,
    /// The gradient of [`LogSoftmax`](Self::LogSoftmax).
    LogSoftmaxBackward,
    /// The log probability of one class of each row.
    LogLikelihood,
    /// The gradient of [`LogLikelihood`](Self::LogLikelihood).
    LogLikelihoodBackward,
    /// The product of matrices, with 32-bit sums.
    Matmul,
    /// The sums along a dim.
    SumDim,
    /// The same numbers in a different type.
    Cast,
    /// A [program](PointwiseProgram) of operations on the elements of tensors.
    Pointwise,
}

/// The work of a fused operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FusedCost {
    /// Floating-point operations in matrix products. A multiplication and an addition count as two.
    pub matmul: u64,
    /// Other floating-point operations: one per element of the largest tensor, times the steps of a program; none for
    /// [`Matmul`](FusedOperation::Matmul).
    pub pointwise: u64,
}

impl FusedOperation {
    /// All fused operations.
    pub const ALL: [Self; 26] = [
        Self::Gelu,
        Self::GeluBackward,
        Self::Silu,
        Self::SiluBackward,
        Self::SwiGlu,
        Self::SwiGluBackward,
        Self::LayerNorm,
        Self::LayerNormBackward,
        Self::RmsNorm,
        Self::RmsNormBackward,
        Self::CausalAttention,
        Self::CausalAttentionBackward,
        Self::Attention,
        Self::AttentionBackward,
        Self::CrossEntropy,
        Self::CrossEntropyBackward,
        Self::Softmax,
        Self::SoftmaxBackward,
        Self::LogSoftmax,
        Self::LogSoftmaxBackward,
        Self::LogLikelihood,
        Self::LogLikelihoodBackward,
        Self::Matmul,
        Self::SumDim,
        Self::Cast,
        Self::Pointwise,
    ];

    /// Returns the operation's name in captured graphs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gelu => "models.gelu",
            Self::GeluBackward => "models.gelu_backward",
            Self::Silu => "models.silu",
            Self::SiluBackward => "models.silu_backward",
            Self::SwiGlu => "models.swiglu",
            Self::SwiGluBackward => "models.swiglu_backward",
            Self::LayerNorm => "models.layer_norm",
            Self::LayerNormBackward => "models.layer_norm_backward",
            Self::RmsNorm => "models.rms_norm",
            Self::RmsNormBackward => "models.rms_norm_backward",
            Self::CausalAttention => "models.causal_attention",
            Self::CausalAttentionBackward => "models.causal_attention_backward",
            Self::Attention => "models.attention",
            Self::AttentionBackward => "models.attention_backward",
            Self::CrossEntropy => "models.cross_entropy",
            Self::CrossEntropyBackward => "models.cross_entropy_backward",
            Self::Softmax => "models.softmax",
            Self::SoftmaxBackward => "models.softmax_backward",
            Self::LogSoftmax => "models.log_softmax",
            Self::LogSoftmaxBackward => "models.log_softmax_backward",
            Self::LogLikelihood => "models.log_likelihood",
            Self::LogLikelihoodBackward => "models.log_likelihood_backward",
            Self::Matmul => "models.matmul",
            Self::SumDim => "models.sum_dim",
            Self::Cast => "models.cast",
            Self::Pointwise => "models.pointwise",
        }
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
        if self == Self::Pointwise {
            return vec![pointwise::run(
                &program(call),
                inputs,
                &call.outputs[0].shape,
            )];
        }
        let mut inputs = inputs.into_iter();
        let mut next = || {
            inputs
                .by_ref()
                .next()
                .expect("a captured call has all its inputs")
        };
        let size = |index: usize| call.scalars[index].elem::<u64>() as usize;
        let epsilon = || call.scalars[0].elem::<f32>();
        match self {
            Self::Gelu => vec![gelu::forward(next())],
            Self::GeluBackward => vec![gelu::backward(next(), next())],
            Self::Silu => vec![silu::forward(next())],
            Self::SiluBackward => vec![silu::backward(next(), next())],
            Self::SwiGlu => vec![silu::gated(next(), next())],
            Self::SwiGluBackward => silu::gated_gradients(next(), next(), next()).into(),
            Self::LayerNorm => vec![norm::forward(next(), next(), next(), epsilon())],
            Self::LayerNormBackward => norm::backward(next(), next(), next(), epsilon()).into(),
            Self::RmsNorm => vec![norm::root_mean_square(next(), next(), epsilon())],
            Self::RmsNormBackward => {
                norm::root_mean_square_gradients(next(), next(), next(), epsilon()).into()
            }
            Self::CausalAttention => {
                let qkv = next();
                vec![match inputs.next() {
                    Some(positions) => attention::in_documents(qkv, &positions, documents(call)),
                    None => attention::causal(qkv, size(0), size(1)),
                }]
            }
            Self::CausalAttentionBackward => {
                let (qkv, grad) = (next(), next());
                vec![match inputs.next() {
                    Some(positions) => {
                        attention::in_documents_gradient(qkv, grad, &positions, documents(call))
                    }
                    None => attention::causal_gradient(qkv, grad, size(0), size(1)),
                }]
            }
            Self::Attention => {
                let operands = [next(), next(), next()];
                vec![attention::weighted(operands, weighting(call, inputs))]
            }
            Self::AttentionBackward => {
                let (operands, grad) = ([next(), next(), next()], next());
                attention::weighted_gradients(operands, &grad, weighting(call, inputs)).into()
            }
            Self::CrossEntropy => {
                let logits = next();
                cross_entropy::forward(logits, &next()).into()
            }
            Self::CrossEntropyBackward => vec![cross_entropy::backward(next(), next())],
            Self::Softmax => vec![softmax::forward(next(), Form::Plain)],
            Self::SoftmaxBackward => vec![softmax::backward(next(), next(), Form::Plain)],
            Self::LogSoftmax => vec![softmax::forward(next(), Form::Log)],
            Self::LogSoftmaxBackward => vec![softmax::backward(next(), next(), Form::Log)],
            Self::LogLikelihood => likelihood::forward(&next(), &next()).into(),
            Self::LogLikelihoodBackward => {
                let (logits, classes) = (next(), next());
                vec![likelihood::backward(logits, &classes, next(), next())]
            }
            Self::Matmul => vec![matmul::matmul(next(), next())],
            Self::SumDim => vec![sum::sum_dim(next(), size(0))],
            Self::Cast => vec![halves::cast(contiguous(next()), call.outputs[0].dtype)],
            Self::Pointwise => Vec::new(),
        }
    }

    /// Returns the input that a call's first output overwrites if it is contiguous and not shared. All other outputs
    /// are in new memory.
    pub fn written_over(self, call: &CustomOpIr) -> Option<usize> {
        match self {
            Self::Pointwise => program(call).written_over(),
            Self::CausalAttention
            | Self::CausalAttentionBackward
            | Self::Attention
            | Self::AttentionBackward
            | Self::LogLikelihood
            | Self::Matmul
            | Self::SumDim
            | Self::Cast => None,
            Self::Gelu
            | Self::Silu
            | Self::SwiGlu
            | Self::LayerNorm
            | Self::RmsNorm
            | Self::CrossEntropy
            | Self::CrossEntropyBackward
            | Self::Softmax
            | Self::LogSoftmax
            | Self::LogLikelihoodBackward => Some(0),
            Self::GeluBackward
            | Self::SiluBackward
            | Self::SoftmaxBackward
            | Self::LogSoftmaxBackward => Some(1),
            Self::SwiGluBackward | Self::LayerNormBackward | Self::RmsNormBackward => Some(2),
        }
    }

    /// Returns true if the operation costs little more than reading and writing its operands. Recomputing it to save
    /// memory is then worthwhile.
    pub fn is_cheap(self) -> bool {
        matches!(
            self,
            Self::Gelu
                | Self::Silu
                | Self::SwiGlu
                | Self::LayerNorm
                | Self::RmsNorm
                | Self::Cast
                | Self::Pointwise
        )
    }

    /// Returns the work of a call.
    pub fn cost(self, call: &CustomOpIr) -> FusedCost {
        let tensors = call.inputs.iter().chain(&call.outputs);
        let largest = tensors.map(|tensor| tensor.shape.num_elements()).max();
        let pointwise = largest.unwrap_or(0) as u64;
        let products = match self {
            Self::Pointwise => {
                return FusedCost {
                    matmul: 0,
                    pointwise: program(call).len() as u64 * pointwise,
                };
            }
            Self::CausalAttention | Self::Attention => 2,
            Self::CausalAttentionBackward | Self::AttentionBackward => 5,
            Self::Matmul => return product_cost(call),
            _ => {
                return FusedCost {
                    matmul: 0,
                    pointwise,
                };
            }
        };
        let shape = &call.inputs[0].shape;
        let (pairs, width) = match self {
            Self::Attention | Self::AttentionBackward => {
                let keys = &call.inputs[1].shape;
                (shape[0] * shape[1] * keys[1], shape[2] * shape[3])
            }
            _ => {
                let [batch, heads] =
                    [0, 1].map(|index: usize| call.scalars[index].elem::<u64>() as usize);
                let time = shape[0] / batch.max(1);
                // On average, a query attends to half of the keys.
                let width = heads * (shape[1] / 3 / heads.max(1));
                (shape[0] * (time + 1) / 2, width)
            }
        };
        FusedCost {
            matmul: products * (pairs * width) as u64 * 2,
            pointwise,
        }
    }
}

/// Returns the work of a product.
fn product_cost(call: &CustomOpIr) -> FusedCost {
    let (lhs, out) = (&call.inputs[0], &call.outputs[0]);
    let addends = match lhs.shape.as_slice() {
        [.., _, addends] => *addends,
        _ => 1,
    };
    let products = (out.shape.num_elements() as u64).saturating_mul(addends as u64);
    FusedCost {
        matmul: products.saturating_mul(2),
        pointwise: 0,
    }
}

/// Returns the heads of a call of causal attention within documents.
fn documents(call: &CustomOpIr) -> DocumentHeads {
    let [heads, reach] = [1, 2].map(|index: usize| call.scalars[index].elem::<u64>() as usize);
    DocumentHeads {
        heads,
        reach: (reach > 0).then_some(reach),
    }
}

/// Returns the program of a call.
fn program(call: &CustomOpIr) -> PointwiseProgram {
    let program = PointwiseProgram::from_scalars(&call.scalars);
    program.expect("a call of pointwise operations has the scalars of a program")
}

/// Returns the index of an attention's input that holds its factors: the last input, if it is neither a mask nor an
/// input that every attention has.
fn factors_of(call: &CustomOpIr) -> Option<usize> {
    let is_backward = call.id == FusedOperation::AttentionBackward.name();
    let given = if is_backward { 4 } else { 3 };
    let last = call.inputs.len().checked_sub(1)?;
    (last >= given && call.inputs[last].dtype.is_float()).then_some(last)
}

/// Returns the weighting of a call from its scalars and the inputs that follow the operands.
fn weighting(call: &CustomOpIr, inputs: impl Iterator<Item = FlexTensor>) -> Weighting {
    let mut inputs: Vec<FlexTensor> = inputs.collect();
    let number = |scalar: &ScalarIr| scalar.elem::<f32>();
    let factors = factors_of(call).and_then(|_| inputs.pop());
    let last = call.scalars.last().map_or(1.0, number);
    let fill = |(mask, value): (FlexTensor, &ScalarIr)| Fill {
        mask,
        value: number(value),
    };
    Weighting {
        scale: number(&call.scalars[0]),
        fills: inputs
            .into_iter()
            .zip(&call.scalars[1..])
            .map(fill)
            .collect(),
        factors: factors.map(|factors| Factors::new(factors, last)),
    }
}
