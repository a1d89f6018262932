//! The sizes of a decoder, and the parameters, operations and activations that follow from them.

use serde::Serialize;

/// The sizes of a decoder with equal blocks, as far as the formulas need them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Transformer {
    /// Name of the model.
    pub name: String,
    /// Number of blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of query heads per block.
    pub heads: usize,
    /// Number of key and value heads per block.
    pub kv_heads: usize,
    /// Width of the MLP.
    pub hidden: usize,
    /// True if the MLP has a gate, which is a third matrix.
    pub is_gated: bool,
    /// True if linear layers and norms have a bias. The head never has one.
    pub has_bias: bool,
    /// Vocabulary size.
    pub vocab: usize,
    /// Number of learned position embeddings, or 0 for rotary embeddings.
    pub positions: usize,
}

impl Transformer {
    /// Returns the number of parameters in a block's matrices.
    fn block_weights(&self) -> u64 {
        let (dim, kv_dim, hidden) = (self.dim, self.kv_dim(), self.hidden);
        let attention = 2 * dim * (dim + kv_dim);
        let matrices = if self.is_gated { 3 } else { 2 };
        (attention + matrices * dim * hidden) as u64
    }

    /// Returns the number of parameters of a block, the unit that is gathered at once.
    pub fn block_params(&self) -> u64 {
        let norms = 2 * self.dim;
        let biases = if self.has_bias {
            // Biases of both norms, of queries, keys, values and output, and of the MLP.
            2 * self.dim + 2 * self.dim + 2 * self.kv_dim() + self.hidden + self.dim
        } else {
            0
        };
        self.block_weights() + (norms + biases) as u64
    }

    /// Returns the number of parameters outside the blocks: the root.
    pub fn root_params(&self) -> u64 {
        let norm = if self.has_bias { 2 } else { 1 };
        ((2 * self.vocab + self.positions + norm) * self.dim) as u64
    }

    /// Returns the number of parameters of the whole model.
    pub fn num_params(&self) -> u64 {
        self.layers as u64 * self.block_params() + self.root_params()
    }

    /// Returns the floating-point operations per token of a forward pass over the blocks, for sequences of `time`
    /// tokens: two for each weight, and `4 time dim` per block for attention's scores and weighted sums. The masked
    /// half is included, as in published numbers (arXiv 2104.04473, appendix).
    pub fn block_flops(&self, time: usize) -> f64 {
        let attention = 4 * time * self.dim;
        self.layers as f64 * (2 * self.block_weights() + attention as u64) as f64
    }

    /// Returns the floating-point operations per token of a forward pass over the head.
    pub fn head_flops(&self) -> f64 {
        2.0 * self.vocab as f64 * self.dim as f64
    }

    /// Returns the elements per token that a block keeps for backward if attention keeps no scores: the inputs of both
    /// norms, the matrices, attention and the MLP's activation.
    ///
    /// For GPT this is `16 dim`: the `34 dim` bytes of arXiv 2205.05198, equation 1 without scores, minus the dropout
    /// masks, which do not exist here.
    pub fn block_elements(&self) -> f64 {
        let norms = 4 * self.dim;
        let attention = 2 * self.dim + 2 * self.kv_dim();
        let perceptron = if self.is_gated { 4 } else { 2 } * self.hidden;
        (norms + attention + perceptron) as f64
    }

    /// Returns the elements per token that a block keeps if every second matrix product is recomputed, as in
    /// `torchtitan` by default: the block's input, the result of attention, and the results of every second matrix
    /// product.
    pub fn selective_elements(&self) -> f64 {
        let (dim, kv_dim, hidden) = (self.dim, self.kv_dim(), self.hidden);
        let kept = if self.is_gated {
            // Queries, values, gate and down projection are kept. Keys, output and up projection are recomputed.
            dim + kv_dim + hidden + dim
        } else {
            // The fused queries, keys and values, and the up projection are kept. Output and down projection are
            // recomputed.
            dim + 2 * kv_dim + hidden
        };
        (2 * dim + kept) as f64
    }

    fn kv_dim(&self) -> usize {
        self.dim / self.heads.max(1) * self.kv_heads
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Describes GPT-3 175B with an untied head.
    pub(crate) fn gpt_175b() -> Transformer {
        Transformer {
            name: "gpt 175b".to_owned(),
            layers: 96,
            dim: 12288,
            heads: 96,
            kv_heads: 96,
            hidden: 4 * 12288,
            is_gated: false,
            has_bias: true,
            vocab: 50_257,
            positions: 2048,
        }
    }

    #[test]
    fn a_gpt_has_twelve_squares_and_thirteen_vectors_a_block() {
        let model = gpt_175b();
        let dim = model.dim as u64;
        assert_eq!(model.block_params(), 12 * dim * dim + 13 * dim);
        assert_eq!(model.num_params(), 175_221_817_344);
    }

    #[test]
    fn a_gpt_keeps_sixteen_widths_a_token() {
        let model = gpt_175b();
        assert_eq!(model.block_elements(), 16.0 * 12288.0);
        // The usual estimate is 6 operations per parameter and token. Attention adds to it.
        let flops = 3.0 * (model.block_flops(2048) + model.head_flops());
        let ratio = flops / (6.0 * model.num_params() as f64);
        assert!((1.0..1.05).contains(&ratio), "{ratio}");
    }
}
