//! A language model made of Burn's own layers.

use std::ops::Range;

use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};

/// The sizes of an [`EncoderLm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderLmConfig {
    /// Number of encoder layers.
    pub layers: usize,
    /// Width of the residual stream. The MLPs are four times as wide.
    pub dim: usize,
    /// Number of attention heads of a layer. It divides `dim`.
    pub heads: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Number of tokens of a sequence.
    pub seq: usize,
}

impl Default for EncoderLmConfig {
    /// Returns six layers of width 384 with six heads, a vocabulary of 4096 tokens and sequences of 256 tokens.
    fn default() -> Self {
        Self {
            layers: 6,
            dim: 384,
            heads: 6,
            vocab: 4096,
            seq: 256,
        }
    }
}

/// A causal language model made of Burn's unmodified layers ([`TransformerEncoder`], [`Embedding`], [`Linear`]). None
/// of its operations is written for this project. It is pre-norm, position embeddings are learned and averaged with
/// token embeddings, and there is no dropout.
///
/// ```
/// use burn::tensor::Device;
/// use burn_fsdp_models::EncoderLmConfig;
///
/// let config = EncoderLmConfig { layers: 1, dim: 8, heads: 2, vocab: 16, seq: 4 };
/// let device = Device::flex();
/// let loss = config.init(&device).loss(config.batch(0, 0..2, &device));
/// assert_eq!(loss.dims(), [1]);
/// ```
#[derive(Module, Debug)]
pub struct EncoderLm {
    tokens: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    output: Linear,
}

impl EncoderLmConfig {
    /// Creates the model with Burn's own initial values.
    #[must_use]
    pub fn init(&self, device: &Device) -> EncoderLm {
        let Self { dim, layers, .. } = *self;
        let encoder = TransformerEncoderConfig::new(dim, 4 * dim, self.heads, layers);
        EncoderLm {
            tokens: EmbeddingConfig::new(self.vocab, dim).init(device),
            positions: EmbeddingConfig::new(self.seq, dim).init(device),
            encoder: encoder.with_norm_first(true).with_dropout(0.0).init(device),
            output: LinearConfig::new(dim, self.vocab).init(device),
        }
    }

    /// Returns some rows of a step's batch: inputs and targets, both `[rows, seq]`. The tokens are pseudorandom and
    /// depend only on the step and the row.
    #[must_use]
    pub fn batch(
        &self,
        step: usize,
        rows: Range<usize>,
        device: &Device,
    ) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let at = |row: usize, column: usize| {
            let mixed = step as u64 * 1_000_003 + row as u64 * 7919 + column as u64 + 1;
            let mixed = mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
            (mixed % self.vocab as u64) as i64
        };
        let make = |shift: usize| {
            let of_row = |row| (0..self.seq).map(move |column| at(row, column + shift));
            let values: Vec<i64> = rows.clone().flat_map(of_row).collect();
            Tensor::from_data(TensorData::new(values, [rows.len(), self.seq]), device)
        };
        (make(0), make(1))
    }
}

impl EncoderLm {
    /// Returns the mean cross entropy of the targets, `[1]`. Inputs and targets are `[batch, time]`.
    #[must_use]
    pub fn loss(&self, (tokens, targets): (Tensor<2, Int>, Tensor<2, Int>)) -> Tensor<1> {
        let [batch, time] = tokens.dims();
        let device = tokens.device();
        let positions = Tensor::<1, Int>::arange(0..time as i64, &device).unsqueeze();
        let x = (self.positions.forward(positions) + self.tokens.forward(tokens)) / 2;
        let mask = generate_autoregressive_mask(batch, time, &device);
        let input = TransformerEncoderInput::new(x).mask_attn(mask);
        let logits = self.output.forward(self.encoder.forward(input));
        let [_, _, vocab] = logits.dims();
        CrossEntropyLossConfig::new().init(&device).forward(
            logits.reshape([batch * time, vocab]),
            targets.reshape([batch * time]),
        )
    }
}
