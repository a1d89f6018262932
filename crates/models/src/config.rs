//! The configuration of a GPT.

use crate::ModelError;
use serde::{Deserialize, Serialize};

/// Standard deviation of the initial weights, except for those that write to
/// the residual stream.
const INIT_STD: f64 = 0.02;
/// Maximum number of layers. Every layer is built, even if a file of a few bytes requests it.
pub(crate) const MAX_LAYERS: usize = 1 << 16;

/// Sizes of a [`Gpt`](crate::Gpt).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// Number of transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of attention heads of a block. It divides `dim`.
    pub heads: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Maximum sequence length in tokens.
    pub seq: usize,
}

impl GptConfig {
    /// Checks that the configuration is valid.
    ///
    /// # Errors
    ///
    /// If a size is zero, if `heads` does not divide `dim`, or if the number of parameters overflows.
    pub fn validate(&self) -> Result<(), ModelError> {
        let sizes = [
            ("layers", self.layers),
            ("dim", self.dim),
            ("heads", self.heads),
            ("vocab", self.vocab),
            ("seq", self.seq),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ModelError::ZeroSize { name });
        }
        if !self.dim.is_multiple_of(self.heads) {
            return Err(ModelError::HeadsDoNotDivideDim {
                heads: self.heads,
                dim: self.dim,
            });
        }
        self.checked_num_params()
            .map(|_| ())
            .ok_or(ModelError::TooManyParameters)
    }

    /// Returns the number of parameters of the whole model.
    ///
    /// # Panics
    ///
    /// If the number overflows, which [`validate`](Self::validate) reports as an error.
    #[must_use]
    pub fn num_params(&self) -> usize {
        self.checked_num_params()
            .expect("a validated configuration has a countable number of parameters")
    }

    /// Returns the standard deviation of weights that do not write to the residual stream.
    pub(crate) fn init_std(&self) -> f64 {
        INIT_STD
    }

    /// Returns the standard deviation of weights that write to the residual stream.
    ///
    /// It is smaller, because each of the `layers` blocks adds to the stream twice, and the variance must not grow with
    /// the depth.
    pub(crate) fn residual_init_std(&self) -> f64 {
        INIT_STD / (2.0 * self.layers as f64).sqrt()
    }

    fn checked_num_params(&self) -> Option<usize> {
        if self.layers > MAX_LAYERS {
            return None;
        }
        // A block has weights of 12 dim^2 elements and vectors of 13 dim elements. The final norm has vectors of 2
        // dim elements.
        let dim = self.dim;
        let block = dim
            .checked_mul(dim)?
            .checked_mul(12)?
            .checked_add(dim.checked_mul(13)?)?;
        let tables = self.vocab.checked_mul(2)?.checked_add(self.seq)?;
        block
            .checked_mul(self.layers)?
            .checked_add(dim.checked_mul(tables)?)?
            .checked_add(dim.checked_mul(2)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> GptConfig {
        GptConfig {
            layers: 3,
            dim: 8,
            heads: 2,
            vocab: 16,
            seq: 4,
        }
    }

    #[test]
    fn number_of_parameters_is_the_sum_of_their_sizes() {
        let sum: usize = config()
            .parameters()
            .iter()
            .map(|p| p.shape.iter().product::<usize>())
            .sum();
        assert_eq!(config().num_params(), sum);
    }

    #[test]
    fn the_default_benchmark_model_has_the_known_size() {
        let config = GptConfig {
            layers: 6,
            dim: 384,
            heads: 6,
            vocab: 4096,
            seq: 256,
        };
        assert_eq!(config.num_params(), 13_891_584);
    }

    #[test]
    fn a_zero_size_is_named() {
        let error = GptConfig {
            vocab: 0,
            ..config()
        }
        .validate()
        .unwrap_err();
        assert!(matches!(error, ModelError::ZeroSize { name: "vocab" }));
    }

    #[test]
    fn heads_must_divide_dim() {
        let error = GptConfig {
            heads: 3,
            ..config()
        }
        .validate()
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "3 heads do not divide dim 8; choose a dim that is a multiple of heads"
        );
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let huge = GptConfig {
            dim: usize::MAX / 2,
            heads: 1,
            ..config()
        };
        assert!(matches!(
            huge.validate(),
            Err(ModelError::TooManyParameters)
        ));
    }
}
