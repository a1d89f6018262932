//! The sizes of a decoder, with the parameters, operations and activations that follow from them.

use serde::Serialize;

/// A decoder of equal blocks, with all that the formulas need to know of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Transformer {
    /// Name.
    pub name: String,
    /// Number of blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Query heads of a block.
    pub heads: usize,
    /// Key and value heads of a block.
    pub kv_heads: usize,
    /// Width of the perceptron.
    pub hidden: usize,
    /// True if the perceptron has a gate, which is a third matrix.
    pub is_gated: bool,
    /// True if linear layers and norms have a bias; the head has none.
    pub has_bias: bool,
    /// Number of different tokens.
    pub vocab: usize,
    /// Number of learned positions; 0 for rotary ones.
    pub positions: usize,
}

impl Transformer {
    /// Returns the parameters of the matrices of a block.
    fn block_weights(&self) -> u64 {
        let (dim, kv_dim, hidden) = (self.dim, self.kv_dim(), self.hidden);
        let attention = 2 * dim * (dim + kv_dim);
        let matrices = if self.is_gated { 3 } else { 2 };
        (attention + matrices * dim * hidden) as u64
    }

    /// Returns the parameters of a block: the unit that is gathered at once.
    pub fn block_params(&self) -> u64 {
        let norms = 2 * self.dim;
        let biases = match self.has_bias {
            // Of both norms, of queries, keys, values and output, and of the perceptron.
            true => 2 * self.dim + 2 * self.dim + 2 * self.kv_dim() + self.hidden + self.dim,
            false => 0,
        };
        self.block_weights() + (norms + biases) as u64
    }

    /// Returns the parameters outside the blocks: the root.
    pub fn root_params(&self) -> u64 {
        let norm = if self.has_bias { 2 } else { 1 };
        ((2 * self.vocab + self.positions + norm) * self.dim) as u64
    }

    /// Returns the parameters of the whole model.
    pub fn num_params(&self) -> u64 {
        self.layers as u64 * self.block_params() + self.root_params()
    }

    /// Returns the operations of a forward pass over the blocks, for sequences of that many tokens,
    /// per
    /// token: two for each weight, and in attention `4 time dim` of scores and sums, the masked half
    /// included, as published numbers count them (arXiv 2104.04473, appendix).
    pub fn block_flops(&self, time: usize) -> f64 {
        let attention = 4 * time * self.dim;
        self.layers as f64 * (2 * self.block_weights() + attention as u64) as f64
    }

    /// Returns the operations of a forward pass over the head, per token.
    pub fn head_flops(&self) -> f64 {
        2.0 * self.vocab as f64 * self.dim as f64
    }

    /// Returns the elements that a block keeps for backward, per token, with attention and norms
    /// that keep their
    /// inputs and no scores: the arguments of both norms, of the matrices, of attention and of the
    /// perceptron's activation. For GPT that is `16 dim`: the `34 dim` bytes of arXiv 2205.05198,
    /// equation 1 without scores, less the dropout masks that are not here.
    pub fn block_elements(&self) -> f64 {
        let norms = 4 * self.dim;
        let attention = 2 * self.dim + 2 * self.kv_dim();
        let perceptron = if self.is_gated { 4 } else { 2 } * self.hidden;
        (norms + attention + perceptron) as f64
    }

    /// Returns the elements that a block keeps, per token, when every second matrix product is
    /// computed again, as `torchtitan` does by default: its input, the result of attention, and
    /// every second of the matrices' results.
    pub fn selective_elements(&self) -> f64 {
        let (dim, kv_dim, hidden) = (self.dim, self.kv_dim(), self.hidden);
        let kept = match self.is_gated {
            // Of queries, keys, values, output, gate, gated and back.
            true => dim + kv_dim + hidden + dim,
            // Of queries with keys and values, output, perceptron and back.
            false => dim + 2 * kv_dim + hidden,
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
        // 6 operations per parameter and token are the usual estimate; attention adds to them.
        let flops = 3.0 * (model.block_flops(2048) + model.head_flops());
        let ratio = flops / (6.0 * model.num_params() as f64);
        assert!((1.0..1.05).contains(&ratio), "{ratio}");
    }
}
