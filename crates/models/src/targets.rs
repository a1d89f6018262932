//! The tokens that a model is to predict.

use burn::tensor::{Int, Tensor};

/// The tokens that a model is to predict, `[batch, time]`, and how much each counts in the loss.
#[derive(Debug, Clone)]
pub struct Targets {
    pub(crate) tokens: Tensor<2, Int>,
    pub(crate) weights: Option<Tensor<2>>,
}

impl Targets {
    /// Returns targets with a weight for each, `[batch, time]`. The loss is the mean over all targets, including those
    /// with weight zero, of weight times cross entropy.
    #[must_use]
    pub fn weighted(tokens: Tensor<2, Int>, weights: Tensor<2>) -> Self {
        Self {
            tokens,
            weights: Some(weights),
        }
    }
}

impl From<Tensor<2, Int>> for Targets {
    fn from(tokens: Tensor<2, Int>) -> Self {
        Self {
            tokens,
            weights: None,
        }
    }
}

impl From<(Tensor<2, Int>, Option<Tensor<2>>)> for Targets {
    fn from((tokens, weights): (Tensor<2, Int>, Option<Tensor<2>>)) -> Self {
        Self { tokens, weights }
    }
}
