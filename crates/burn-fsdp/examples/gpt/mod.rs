//! What several examples train: a small GPT, on tokens that are computed.

use burn::tensor::Device;
use burn_fsdp_models::{Batches, Gpt, GptConfig, TokenStream};

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    dim: 32,
    heads: 2,
    vocab: 64,
    seq: 16,
};

pub(crate) const STEPS: usize = 8;
pub(crate) const RANKS: usize = 2;

/// Rows of a step on each rank.
pub(crate) const ROWS: usize = 3;

/// The same weights wherever they are drawn.
pub(crate) fn init(device: &Device) -> Gpt {
    CONFIG.init(device, 1).expect("the configuration is valid")
}

/// The batches of all ranks together.
pub(crate) fn batches() -> Batches {
    Batches {
        stream: TokenStream::Synthetic {
            vocab: CONFIG.vocab,
        },
        batch: RANKS * ROWS,
        seq: CONFIG.seq,
    }
}
