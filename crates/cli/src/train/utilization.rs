//! Number of operations in a training step.

use burn_fsdp::internals::plan::Transformer;
use burn_fsdp_models::ModelConfig;

use crate::plan::preset;

/// Returns the number of operations in a training step for each token of sequences of `seq` tokens: forward, and
/// backward without recomputation. If the weights are frozen under adapters, backward computes no gradients for them.
pub(crate) fn flops_per_token(model: &ModelConfig, seq: usize, is_frozen: bool) -> f64 {
    let sizes = match model {
        ModelConfig::Gpt(sizes) => preset::gpt(sizes, ""),
        ModelConfig::Llama(sizes) => preset::llama(sizes, ""),
        ModelConfig::Gpt2(sizes) => Transformer {
            name: String::new(),
            layers: sizes.layers,
            dim: sizes.dim,
            heads: sizes.heads,
            kv_heads: sizes.heads,
            hidden: sizes.hidden,
            is_gated: false,
            has_bias: true,
            vocab: sizes.vocab,
            positions: 0,
        },
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
    fn operations_count_matrices_and_attention() {
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
