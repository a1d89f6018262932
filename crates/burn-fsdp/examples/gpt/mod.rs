//! The model and the data of several examples: a small GPT, and synthetic tokens.

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

/// Rows in a step on each rank.
pub(crate) const ROWS: usize = 3;

/// Creates the model. The weights are the same on every rank.
pub(crate) fn init(device: &Device) -> Gpt {
    CONFIG.init(device, 1).expect("the configuration is valid")
}

/// Returns the batches of all ranks together.
pub(crate) fn batches() -> Batches {
    Batches {
        stream: TokenStream::Synthetic {
            vocab: CONFIG.vocab,
        },
        batch: RANKS * ROWS,
        seq: CONFIG.seq,
    }
}
