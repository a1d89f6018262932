//! The configuration of a Llama.

use serde::{Deserialize, Serialize};

use crate::config::MAX_LAYERS;
use crate::family::{FusedOrder, NormForm};
use crate::{LlamaVariant, ModelError};

/// Standard deviation of all initial matrices.
pub(crate) const INIT_STD: f64 = 0.02;

/// Sizes of a [`Llama`](crate::Llama).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// Number of transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of query heads of a block. It divides `dim`, unless the variant sets the number of elements of a head.
    pub heads: usize,
    /// Number of key and value heads of a block. It divides `heads`.
    pub kv_heads: usize,
    /// Width of the MLP.
    pub hidden: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Maximum sequence length in tokens.
    pub seq: usize,
    /// Base of the rotary positions. The slowest rotation makes a full turn in about `2 pi` times this many tokens.
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
    /// If a size is zero, if `heads` does not divide `dim` and the variant does not set the size of a head, if the
    /// number of rotated elements of a head is odd, if `kv_heads` does not divide `heads`, if a number of the
    /// [variant](LlamaVariant) is not meaningful, or if the number of parameters overflows.
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
            ("head_dim", self.variant.head_dim.unwrap_or(1)),
            ("rotated_dim", self.variant.rotated_dim.unwrap_or(2)),
            ("local_rope_base", self.variant.local_rope_base.unwrap_or(1)),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ModelError::ZeroSize { name });
        }
        let (dim, heads, kv_heads) = (self.dim, self.heads, self.kv_heads);
        if self.variant.head_dim.is_none() && !dim.is_multiple_of(heads) {
            return Err(ModelError::HeadsDoNotDivideDim { heads, dim });
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(ModelError::HeadsNotGrouped { heads, kv_heads });
        }
        if !self.rotated_dim().is_multiple_of(2) {
            let head_dim = self.rotated_dim();
            return Err(ModelError::OddHeadDim { head_dim });
        }
        self.validate_variant()?;
        self.checked_num_params()
            .map(|_| ())
            .ok_or(ModelError::TooManyParameters)
    }

    fn validate_variant(&self) -> Result<(), ModelError> {
        let variant = &self.variant;
        let scores = &variant.scores;
        let is_positive = |value: f64| value.is_finite() && value > 0.0;
        let head_dim = self.head_dim() as f64;
        for (name, value) in [
            ("norm_epsilon", variant.norm_epsilon),
            ("query_scalar", scores.query_scalar.unwrap_or(head_dim)),
            ("softcap", scores.softcap.unwrap_or(1.0)),
            ("logit_softcap", variant.logit_softcap.unwrap_or(1.0)),
        ] {
            if !is_positive(value) {
                let found = value.to_string();
                return Err(ModelError::Nonsense { name, found });
            }
        }
        let has_one_head_size =
            variant.family.fused() != Some(FusedOrder::Heads) || self.kv_heads == self.heads;
        for (name, is_valid, found) in [
            (
                "rope_scaling",
                variant.rope_scaling.is_valid(self.rotated_dim() / 2),
                format!("{:?}", variant.rope_scaling),
            ),
            (
                "window",
                scores.window.is_valid(),
                format!("{:?}", scores.window),
            ),
            (
                "rotated_dim",
                self.rotated_dim() <= self.head_dim(),
                self.rotated_dim().to_string(),
            ),
            ("kv_heads", has_one_head_size, self.kv_heads.to_string()),
        ] {
            if !is_valid {
                return Err(ModelError::Nonsense { name, found });
            }
        }
        Ok(())
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
        self.variant.head_dim.unwrap_or(self.dim / self.heads)
    }

    /// Returns the number of elements of a head that are rotated.
    pub(crate) fn rotated_dim(&self) -> usize {
        self.variant.rotated_dim.unwrap_or(self.head_dim())
    }

    /// Returns the number of elements per token in all query heads.
    pub(crate) fn query_dim(&self) -> usize {
        self.heads * self.head_dim()
    }

    /// Returns the number of elements per token in all key heads, or in all value heads.
    #[must_use]
    pub fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim()
    }

    fn checked_num_params(&self) -> Option<usize> {
        if self.layers > MAX_LAYERS {
            return None;
        }
        let (dim, hidden) = (self.dim, self.hidden);
        let variant = &self.variant;
        let family = variant.family;
        let query_dim = self.heads.checked_mul(self.head_dim())?;
        let kv_dim = self.kv_heads.checked_mul(self.head_dim())?;
        let qkv = query_dim.checked_add(kv_dim.checked_mul(2)?)?;
        let num_wide = if family.is_gated() { 2 } else { 1 };
        let wide = hidden.checked_mul(num_wide)?;
        // Each norm has a scale, and a layer norm also an offset.
        let norm = match family.norm() {
            NormForm::Layer => 2,
            NormForm::RootMeanSquare | NormForm::OnePlusScale => 1,
        };
        let num_norms = if family.has_post_norms() { 4 } else { 2 };
        let width = qkv
            .checked_add(query_dim)?
            .checked_add(wide.checked_add(hidden)?)?
            .checked_add(norm * num_norms)?;
        let mut block = width.checked_mul(dim)?;
        if family.has_head_norms() {
            block = block.checked_add(self.head_dim().checked_mul(2)?)?;
        }
        if variant.has_qkv_bias() {
            block = block.checked_add(qkv)?;
        }
        if variant.biases.attention {
            block = block.checked_add(dim)?;
        }
        if variant.biases.mlp {
            block = block.checked_add(wide)?.checked_add(dim)?;
        }
        let num_tables = if variant.has_tied_head { 1 } else { 2 };
        let tables = self.vocab.checked_mul(num_tables)?.checked_add(norm)?;
        block
            .checked_mul(self.layers)?
            .checked_add(tables.checked_mul(dim)?)
    }
}
