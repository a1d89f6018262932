//! The choices that distinguish Llamas of the same size.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

/// The choices of a [`Llama`](crate::Llama) other than sizes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LlamaVariant {
    /// True if the head is tied to the embedding. Both are then one parameter.
    pub has_tied_head: bool,
    /// The number that the norms add to the mean square, which prevents a division by zero for rows of zeros.
    pub norm_epsilon: f64,
    /// The scaling of rotary positions for sequences longer than the original context length.
    pub rope_scaling: RopeScaling,
}

impl LlamaVariant {
    /// The choices of Llama 2 and 3: an untied head, an epsilon of 1e-5, and unscaled positions.
    pub const PLAIN: Self = Self {
        has_tied_head: false,
        norm_epsilon: 1e-5,
        rope_scaling: RopeScaling::None,
    };
}

impl Default for LlamaVariant {
    fn default() -> Self {
        Self::PLAIN
    }
}

/// The scaling of rotary positions, with Hugging Face's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Unscaled positions.
    #[default]
    None,
    /// All positions divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Slow rotations slowed down by a factor, and fast rotations unchanged: Llama 3.1 and later (transformers'
    /// `_compute_llama3_parameters`).
    Llama3 {
        /// The factor for slow rotations.
        factor: f64,
        /// A rotation is slow if a full turn takes more tokens than the original context length divided by this factor.
        low_freq_factor: f64,
        /// A rotation is fast if a full turn takes fewer tokens than the original context length divided by this
        /// factor.
        high_freq_factor: f64,
        /// The original context length, in tokens.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// Returns the scaled speed, in radians per token, of a plane whose unscaled speed is `speed`.
    pub(crate) fn scaled(self, speed: f64) -> f64 {
        match self {
            Self::None => speed,
            Self::Linear { factor } => speed / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let turns = original_max_position_embeddings as f64 * speed / TAU;
                if turns < low_freq_factor {
                    return speed / factor;
                }
                if turns > high_freq_factor {
                    return speed;
                }
                let share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - share) * speed / factor + share * speed
            }
        }
    }

    /// Returns true if all numbers are meaningful.
    pub(crate) fn is_valid(self) -> bool {
        let is_positive = |value: f64| value.is_finite() && value > 0.0;
        match self {
            Self::None => true,
            Self::Linear { factor } => is_positive(factor),
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                is_positive(factor)
                    && is_positive(low_freq_factor)
                    && high_freq_factor.is_finite()
                    && high_freq_factor > low_freq_factor
                    && original_max_position_embeddings > 0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::RopeScaling;

    #[test]
    fn low_frequencies_are_scaled_and_high_ones_kept() {
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        assert_eq!(scaling.scaled(1.0), 1.0);
        assert_eq!(scaling.scaled(1e-4), 1e-4 / 32.0);
        // Halfway between: 2.5 turns in the original context.
        let speed = 2.5 * std::f64::consts::TAU / 8192.0;
        let halfway = (speed / 32.0 + speed) / 2.0;
        assert!((scaling.scaled(speed) / halfway - 1.0).abs() < 1e-12);
        assert_eq!(RopeScaling::Linear { factor: 4.0 }.scaled(1.0), 0.25);
    }
}
