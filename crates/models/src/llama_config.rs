//! The configuration of a Llama.

use serde::{Deserialize, Serialize};

use crate::config::MAX_LAYERS;
use crate::{LlamaVariant, ModelError};

/// Standard deviation of all initial weights.
pub(crate) const INIT_STD: f64 = 0.02;

/// Sizes of a [`Llama`](crate::Llama).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// Number of transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of query heads of a block. It divides `dim`.
    pub heads: usize,
    /// Number of key and value heads of a block. It divides `heads`.
    pub kv_heads: usize,
    /// Width of the gated MLP.
    pub hidden: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Maximum sequence length in tokens.
    pub seq: usize,
    /// Base of the rotary positions. The slowest one makes a full turn in about `2 pi` times this many tokens.
    pub rope_base: usize,
    /// Choices other than sizes.
    #[serde(default)]
    pub variant: LlamaVariant,
}

impl LlamaConfig {
    /// Checks that the configuration is valid.
    ///
    /// # Errors
    ///
    /// If a size is zero, if `heads` does not divide `dim` into heads of an even number of elements, if `kv_heads`
    /// does not divide `heads`, if a number of the [variant](LlamaVariant) is not meaningful, or if the number of
    /// parameters overflows.
    pub fn validate(&self) -> Result<(), ModelError> {
        let sizes = [
            ("layers", self.layers),
            ("dim", self.dim),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("hidden", self.hidden),
            ("vocab", self.vocab),
            ("seq", self.seq),
            ("rope_base", self.rope_base),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ModelError::ZeroSize { name });
        }
        let (dim, heads, kv_heads) = (self.dim, self.heads, self.kv_heads);
        if !dim.is_multiple_of(heads) {
            return Err(ModelError::HeadsDoNotDivideDim { heads, dim });
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(ModelError::HeadsNotGrouped { heads, kv_heads });
        }
        if !self.head_dim().is_multiple_of(2) {
            let head_dim = self.head_dim();
            return Err(ModelError::OddHeadDim { head_dim });
        }
        let epsilon = self.variant.norm_epsilon;
        if !(epsilon.is_finite() && epsilon > 0.0) {
            return Err(ModelError::Nonsense {
                name: "norm_epsilon",
                found: epsilon.to_string(),
            });
        }
        if !self.variant.rope_scaling.is_valid() {
            return Err(ModelError::Nonsense {
                name: "rope_scaling",
                found: format!("{:?}", self.variant.rope_scaling),
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

    /// Returns the number of elements of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.dim / self.heads
    }

    /// Returns the number of elements per token in all key heads, or in all value heads.
    #[must_use]
    pub fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim()
    }

    fn checked_num_params(&self) -> Option<usize> {
        // In each block, queries and output have dim^2 elements each, keys and values dim * kv_dim each, the MLP 3
        // dim * hidden, and there are two norms. A final norm and two tables are added, or one table if the head is
        // tied.
        if self.layers > MAX_LAYERS {
            return None;
        }
        let dim = self.dim;
        let width = dim
            .checked_add(self.kv_dim())?
            .checked_mul(2)?
            .checked_add(self.hidden.checked_mul(3)?)?
            .checked_add(2)?;
        let num_tables = if self.variant.has_tied_head { 1 } else { 2 };
        let tables = self.vocab.checked_mul(num_tables)?.checked_add(1)?;
        width
            .checked_mul(self.layers)?
            .checked_add(tables)?
            .checked_mul(dim)
    }
}
