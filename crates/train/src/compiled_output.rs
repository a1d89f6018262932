//! Step outputs that a compiled step computes.

use burn::tensor::{Int, Tensor};
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};
use burn_fsdp_tensors::Batch;

/// A step's output for the metrics of Burn's loop, as a loss and other tensors, which a compiled step computes.
///
/// Burn's outputs of classification, regression and sequences implement it. For a custom type:
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_fsdp::internals::train::CompiledOutput;
///
/// struct Reconstruction {
///     loss: Tensor<1>,
///     picture: Tensor<4>,
/// }
///
/// impl CompiledOutput for Reconstruction {
///     type Tensors = Tensor<4>;
///
///     fn into_tensors(self) -> (Tensor<1>, Tensor<4>) {
///         (self.loss, self.picture)
///     }
///
///     fn from_tensors(loss: Tensor<1>, picture: Tensor<4>) -> Self {
///         Self { loss, picture }
///     }
/// }
/// ```
pub trait CompiledOutput: Sized + 'static {
    /// All tensors but the loss.
    type Tensors: Batch + Send;

    /// Splits the output into the loss, which is one number, and all other tensors.
    fn into_tensors(self) -> (Tensor<1>, Self::Tensors);

    /// Joins them again.
    fn from_tensors(loss: Tensor<1>, tensors: Self::Tensors) -> Self;
}

impl CompiledOutput for ClassificationOutput {
    type Tensors = (Tensor<2>, Tensor<1, Int>);

    fn into_tensors(self) -> (Tensor<1>, Self::Tensors) {
        (self.loss, (self.output, self.targets))
    }

    fn from_tensors(loss: Tensor<1>, (output, targets): Self::Tensors) -> Self {
        Self {
            loss,
            output,
            targets,
        }
    }
}

impl CompiledOutput for MultiLabelClassificationOutput {
    type Tensors = (Tensor<2>, Tensor<2, Int>);

    fn into_tensors(self) -> (Tensor<1>, Self::Tensors) {
        (self.loss, (self.output, self.targets))
    }

    fn from_tensors(loss: Tensor<1>, (output, targets): Self::Tensors) -> Self {
        Self {
            loss,
            output,
            targets,
        }
    }
}

impl CompiledOutput for RegressionOutput {
    type Tensors = (Tensor<2>, Tensor<2>);

    fn into_tensors(self) -> (Tensor<1>, Self::Tensors) {
        (self.loss, (self.output, self.targets))
    }

    fn from_tensors(loss: Tensor<1>, (output, targets): Self::Tensors) -> Self {
        Self {
            loss,
            output,
            targets,
        }
    }
}

impl CompiledOutput for SequenceOutput {
    type Tensors = (Tensor<3>, Option<Tensor<2, Int>>, Tensor<2, Int>);

    fn into_tensors(self) -> (Tensor<1>, Self::Tensors) {
        (self.loss, (self.logits, self.predictions, self.targets))
    }

    fn from_tensors(loss: Tensor<1>, (logits, predictions, targets): Self::Tensors) -> Self {
        Self {
            loss,
            logits,
            predictions,
            targets,
        }
    }
}
