//! The scaling of rotary positions for long sequences.

use std::f64::consts::TAU;

use parking_lot::Mutex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The scaling of rotary positions, with Hugging Face's names. A plane is a pair of elements of a head that are rotated
/// together.
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
    /// A base that grows with sequences longer than the model's maximum.
    Dynamic {
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
    /// YaRN (arXiv 2309.00071): slow rotations slowed down, and scores scaled up.
    Yarn {
        /// The factor for slow rotations.
        factor: f64,
        /// The factor on rotated queries and keys.
        attention_factor: f64,
        /// The number of turns in the original context above which a rotation is fast.
        beta_fast: f64,
        /// The number of turns in the original context below which a rotation is slow.
        beta_slow: f64,
        /// True if the bounds between slow and fast rotations are rounded outwards to whole planes.
        truncate: bool,
        /// The original context length, in tokens.
        original_max_position_embeddings: usize,
    },
    /// LongRoPE (arXiv 2402.13753): a factor for each plane. Sequences longer than the original context length have
    /// other factors.
    #[serde(rename = "longrope")]
    LongRope {
        /// The factors for sequences within the original context length.
        short_factor: RopeFactors,
        /// The factors for longer sequences.
        long_factor: RopeFactors,
        /// The factor on rotated queries and keys.
        attention_factor: f64,
        /// The original context length, in tokens.
        original_max_position_embeddings: usize,
    },
}

/// A list of factors, one for each plane.
///
/// A configuration is `Copy`, so equal lists share one allocation that lives as long as the process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeFactors(&'static [f64]);

/// All lists so far.
static LISTS: Mutex<Vec<&'static [f64]>> = Mutex::new(Vec::new());

impl RopeFactors {
    /// Returns the list of these factors.
    #[must_use]
    pub fn new(factors: &[f64]) -> Self {
        let mut lists = LISTS.lock();
        if let Some(known) = lists.iter().find(|known| **known == factors) {
            return Self(known);
        }
        let list: &'static [f64] = factors.to_vec().leak();
        lists.push(list);
        Self(list)
    }

    /// Returns the factors.
    #[must_use]
    pub fn values(self) -> &'static [f64] {
        self.0
    }
}

impl Serialize for RopeFactors {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RopeFactors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(|factors| Self::new(&factors))
    }
}

impl RopeScaling {
    /// Returns a number for sequences of `length` tokens. It differs between lengths with different rotations.
    /// `longest` is the model's maximum length.
    pub(crate) fn epoch(self, [length, longest]: [usize; 2]) -> usize {
        match self {
            Self::Dynamic { .. } => length.max(longest),
            Self::LongRope {
                original_max_position_embeddings,
                ..
            } => usize::from(length > original_max_position_embeddings),
            _ => 0,
        }
    }

    /// Returns the factor on rotated queries and keys.
    pub(crate) fn amplitude(self) -> f64 {
        match self {
            Self::Yarn {
                attention_factor, ..
            }
            | Self::LongRope {
                attention_factor, ..
            } => attention_factor,
            _ => 1.0,
        }
    }

    /// Returns the speeds of `planes` planes, in radians per token, for sequences of `length` tokens. Without
    /// scaling, plane `i` of `n` has the speed `base^(-i / n)`. `longest` is the model's maximum length.
    pub(crate) fn speeds(
        self,
        base: f64,
        planes: usize,
        [length, longest]: [usize; 2],
    ) -> Vec<f64> {
        let base = match self {
            Self::Dynamic { factor } if length > longest => {
                let longer = length as f64 / longest as f64;
                let exponent = planes as f64 / (planes as f64 - 1.0);
                base * (factor * longer - (factor - 1.0)).powf(exponent)
            }
            _ => base,
        };
        let plain = (0..planes).map(|plane| base.powf(-(plane as f64) / planes as f64));
        match self {
            Self::Yarn { factor, .. } => {
                let (low, high) = self.bounds(base, planes);
                let slowed = |(plane, speed): (usize, f64)| {
                    let share = ((plane as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    share * speed / factor + (1.0 - share) * speed
                };
                plain.enumerate().map(slowed).collect()
            }
            Self::LongRope {
                short_factor,
                long_factor,
                original_max_position_embeddings,
                ..
            } => {
                let factors = if length > original_max_position_embeddings {
                    long_factor
                } else {
                    short_factor
                };
                let factors = factors.values().iter();
                plain
                    .zip(factors)
                    .map(|(speed, factor)| speed / factor)
                    .collect()
            }
            _ => plain.map(|speed| self.scaled(speed)).collect(),
        }
    }

    /// Returns the speed of a plane whose unscaled speed is `speed`, if the scaling depends only on the speed.
    fn scaled(self, speed: f64) -> f64 {
        match self {
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
            _ => speed,
        }
    }

    /// Returns the planes of YaRN between which rotations change from fast to slow.
    fn bounds(self, base: f64, planes: usize) -> (f64, f64) {
        let Self::Yarn {
            beta_fast,
            beta_slow,
            truncate,
            original_max_position_embeddings,
            ..
        } = self
        else {
            return (0.0, planes as f64);
        };
        let original = original_max_position_embeddings as f64;
        let plane = |turns: f64| planes as f64 * (original / (turns * TAU)).ln() / base.ln();
        let (mut low, mut high) = (plane(beta_fast), plane(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(2.0 * planes as f64 - 1.0));
        // As in transformers: equal bounds would divide by zero.
        if low == high {
            (low, high + 0.001)
        } else {
            (low, high)
        }
    }

    /// Returns true if all numbers are meaningful for heads with `planes` rotated planes.
    pub(crate) fn is_valid(self, planes: usize) -> bool {
        let is_positive = |value: f64| value.is_finite() && value > 0.0;
        match self {
            Self::None => true,
            Self::Linear { factor } => is_positive(factor),
            Self::Dynamic { factor } => is_positive(factor) && planes > 1,
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
            Self::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings,
                ..
            } => {
                is_positive(factor)
                    && is_positive(attention_factor)
                    && is_positive(beta_slow)
                    && beta_fast.is_finite()
                    && beta_fast >= beta_slow
                    && original_max_position_embeddings > 0
            }
            Self::LongRope {
                short_factor,
                long_factor,
                attention_factor,
                original_max_position_embeddings,
            } => {
                let is_list = |factors: RopeFactors| {
                    let factors = factors.values();
                    factors.len() == planes && factors.iter().all(|factor| is_positive(*factor))
                };
                is_list(short_factor)
                    && is_list(long_factor)
                    && is_positive(attention_factor)
                    && original_max_position_embeddings > 0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{RopeFactors, RopeScaling};

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

    #[test]
    fn lists_of_factors_survive_as_json() {
        let scaling = RopeScaling::LongRope {
            short_factor: RopeFactors::new(&[1.0, 1.5]),
            long_factor: RopeFactors::new(&[2.0, 40.25]),
            attention_factor: 1.19,
            original_max_position_embeddings: 16,
        };
        let json = serde_json::to_string(&scaling).expect("numbers");
        let read: RopeScaling = serde_json::from_str(&json).expect("the same numbers");
        assert_eq!(read, scaling, "{json}");
        assert!(scaling.is_valid(2) && !scaling.is_valid(3));
        assert!(scaling.epoch([16, 32]) != scaling.epoch([17, 32]));
        let short = scaling.speeds(100.0, 2, [16, 32]);
        let long = scaling.speeds(100.0, 2, [17, 32]);
        assert_eq!((short[0], long[0]), (1.0, 0.5));
    }
}
