//! Number of operations in a training step.

use burn_fsdp::internals::plan::Transformer;
use burn_fsdp_models::{Architecture, LlamaConfig, ModelConfig};

use crate::plan::preset;

/// Returns the number of operations in a training step for each token of sequences of `seq` tokens: forward, and
/// backward without recomputation. If the weights are frozen under adapters, backward computes no gradients for them.
pub(crate) fn flops_per_token(model: &ModelConfig, seq: usize, is_frozen: bool) -> f64 {
    let passes = if is_frozen { 2.0 } else { 3.0 };
    let sizes = match model {
        ModelConfig::Gpt(sizes) => preset::gpt(sizes, ""),
        ModelConfig::Llama(sizes) => return passes * decoder_flops(sizes, seq),
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
    passes * (sizes.block_flops(seq) + sizes.head_flops())
}

/// Returns the operations per token of a forward pass over a decoder of any family: two for each element of a matrix,
/// and two products of attention.
fn decoder_flops(sizes: &LlamaConfig, seq: usize) -> f64 {
    let blocks = LlamaConfig::BLOCKS.trim_end_matches('*');
    let table = sizes.parameters();
    let matrices = table
        .iter()
        .filter(|spec| spec.path.starts_with(blocks) && spec.shape.len() == 2);
    let weights: usize = matrices
        .map(|spec| spec.shape.iter().product::<usize>())
        .sum();
    let attention = 4 * seq * sizes.heads * sizes.head_dim() * sizes.layers;
    (2 * (weights + sizes.vocab * sizes.dim) + attention) as f64
}

#[cfg(test)]
mod tests {
    use burn_fsdp_models::{GptConfig, LlamaConfig, ModelConfig};

    use super::{decoder_flops, flops_per_token};
    use crate::plan::preset;

    #[test]
    fn a_llama_has_the_operations_of_the_formulas() {
        let llama = LlamaConfig::preset("8b").expect("a preset");
        let sizes = preset::llama(&llama, "");
        let expected = sizes.block_flops(512) + sizes.head_flops();
        assert_eq!(decoder_flops(&llama, 512), expected);
    }

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
