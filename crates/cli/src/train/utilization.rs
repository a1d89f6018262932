//! The arithmetic of a run, and what part of the machine's it is.

use burn_fsdp::plan::Transformer;
use burn_fsdp_models::ModelConfig;

/// Returns the operations that a step of a model needs for each token of sequences of `seq` tokens: forward, and backward without what
/// is computed again. Of a model whose weights are frozen under adapters, backward has no gradients of these.
pub(crate) fn flops_per_token(model: &ModelConfig, seq: usize, is_frozen: bool) -> f64 {
    let (is_gated, kv_heads, hidden) = match model {
        ModelConfig::Gpt(sizes) => (false, sizes.heads, 4 * sizes.dim),
        ModelConfig::Llama(sizes) => (true, sizes.kv_heads, sizes.hidden),
        ModelConfig::Gpt2(sizes) => (false, sizes.heads, sizes.hidden),
    };
    let sizes = Transformer {
        name: String::new(),
        layers: model.num_layers(),
        dim: model.dim(),
        heads: model.heads(),
        kv_heads,
        hidden,
        is_gated,
        has_bias: !is_gated,
        vocab: model.vocab(),
        positions: 0,
    };
    let passes = if is_frozen { 2.0 } else { 3.0 };
    passes * (sizes.block_flops(seq) + sizes.head_flops())
}

#[cfg(test)]
mod tests {
    use burn_fsdp_models::{GptConfig, ModelConfig};

    use super::flops_per_token;

    /// Counted by hand: a block has 12 matrices of `dim` by `dim`, and two products of `seq` by `dim` in attention.
    #[test]
    fn operations_are_those_of_matrices_and_attention() {
        let (layers, dim, vocab, seq) = (2, 16, 256, 8);
        let model = ModelConfig::Gpt(GptConfig {
            layers,
            heads: 2,
            dim,
            vocab,
            seq,
        });
        let block = 2 * 12 * dim * dim + 2 * 2 * seq * dim;
        let forward = (layers * block + 2 * dim * vocab) as f64;
        assert_eq!(flops_per_token(&model, seq, false), 3.0 * forward);
        assert_eq!(flops_per_token(&model, seq, true), 2.0 * forward);
    }
}
