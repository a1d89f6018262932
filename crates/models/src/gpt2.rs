//! GPT-2 as published.

use std::ops::Range;

use burn::module::Module;
use burn::nn::{Embedding, Initializer, LayerNorm, Linear};
use burn::tensor::activation::gelu_approximate;
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::initial::InitialValues;
use crate::key_values::{Heads, KeyValues, Scores};
use crate::norm::{self, layer_norm};
use crate::positions::{Positions, Sequences};
use crate::{GptConfig, LanguageModel, ModelError};

/// Standard deviation of the initial weights, except for those that write to the residual stream.
const INIT_STD: f64 = 0.02;

/// Sizes of a [`Gpt2`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpt2Config {
    /// Number of transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of attention heads of a block. It divides `dim`.
    pub heads: usize,
    /// Width of the MLP.
    pub hidden: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Maximum sequence length in tokens.
    pub seq: usize,
}

/// GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners"), as Hugging Face's `GPT2LMHeadModel`
/// computes it without dropout. It has learned positions, pre-LN blocks, the `tanh` approximation of GELU, and a head
/// that is tied to the embedding.
///
/// [`Gpt`](crate::Gpt) is similar, with an untied head, the exact GELU, and parameter names that follow its fields.
///
/// Parameters are initialized lazily, so building even a large model costs nothing until they are used.
#[derive(Module, Debug)]
pub struct Gpt2 {
    wte: Embedding,
    wpe: Embedding,
    h: Vec<Gpt2Block>,
    ln_f: LayerNorm,
    #[module(skip)]
    heads: usize,
}

/// A transformer block: attention, then an MLP. Each follows a layer norm and is added to the residual stream.
#[derive(Module, Debug)]
pub struct Gpt2Block {
    ln_1: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    ln_2: LayerNorm,
    c_fc: Linear,
    /// The projection back to the residual stream.
    mlp_proj: Linear,
}

impl Gpt2Config {
    /// Checks that the configuration is valid.
    ///
    /// # Errors
    ///
    /// If a size is zero, if `heads` does not divide `dim`, or if the number of parameters overflows.
    pub fn validate(&self) -> Result<(), ModelError> {
        if self.hidden == 0 {
            return Err(ModelError::ZeroSize { name: "hidden" });
        }
        let gpt = GptConfig {
            layers: self.layers,
            dim: self.dim,
            heads: self.heads,
            vocab: self.vocab,
            seq: self.seq,
        };
        gpt.validate()?;
        let count = self.checked_num_params();
        count.map(|_| ()).ok_or(ModelError::TooManyParameters)
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

    fn checked_num_params(&self) -> Option<usize> {
        // Each block has four attention matrices, two MLP matrices, their biases, and two norms. A final norm and two
        // tables are added.
        let (dim, hidden) = (self.dim, self.hidden);
        let block = dim
            .checked_mul(4)?
            .checked_add(hidden.checked_mul(2)?)?
            .checked_add(4 + 1 + 4)?
            .checked_mul(dim)?
            .checked_add(hidden)?;
        let tables = self.vocab.checked_add(self.seq)?.checked_add(2)?;
        block
            .checked_mul(self.layers)?
            .checked_add(tables.checked_mul(dim)?)
    }

    /// Builds the model on a device.
    ///
    /// The same seed produces the same weights on every device, regardless of the order in which parameters are first
    /// used.
    ///
    /// # Errors
    ///
    /// If the configuration is not [valid](Self::validate).
    pub fn init(&self, device: &Device, seed: u64) -> Result<Gpt2, ModelError> {
        self.built(InitialValues::new(device, seed))
    }

    pub(crate) fn built(&self, mut values: InitialValues<'_>) -> Result<Gpt2, ModelError> {
        self.validate()?;
        let device = values.device();
        Ok(Gpt2 {
            wte: Embedding {
                weight: values.normal([self.vocab, self.dim], INIT_STD),
            },
            wpe: Embedding {
                weight: values.normal([self.seq, self.dim], INIT_STD),
            },
            h: (0..self.layers)
                .map(|_| Gpt2Block::new(self, &mut values, device))
                .collect(),
            ln_f: norm::init(self.dim, device),
            heads: self.heads,
        })
    }
}

impl Gpt2 {
    /// Returns the configuration of this model.
    pub(crate) fn config(&self) -> Gpt2Config {
        let [vocab, dim] = self.wte.weight.shape().dims();
        let [seq, _] = self.wpe.weight.shape().dims();
        let hidden = self.h.first().map(|block| block.c_fc.weight.shape().dims());
        Gpt2Config {
            layers: self.h.len(),
            dim,
            heads: self.heads,
            hidden: hidden.map_or(4 * dim, |[_, hidden]| hidden),
            vocab,
            seq,
        }
    }

    /// Returns the logits of the token after each position.
    ///
    /// # Shapes
    ///
    /// - tokens: `[batch, time]`, with `time` at most the model's `seq`
    /// - output: `[batch, time, vocab]`
    ///
    /// # Panics
    ///
    /// If the sequences are longer than `seq`, or a token is not below `vocab`.
    #[must_use]
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, time] = tokens.dims();
        let logits = self.logits_by(tokens, |block, x, shared| block.forward(x, shared, None));
        let [_, vocab] = logits.dims();
        logits.reshape([batch, time, vocab])
    }

    /// Returns the mean cross entropy of the targets, in nats.
    ///
    /// # Shapes
    ///
    /// - tokens, targets: `[batch, time]`
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward).
    #[must_use]
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        self.mean_loss(tokens, targets)
    }
}

/// The values that all blocks share in a forward.
#[derive(Debug, Clone)]
pub struct Gpt2Shared {
    heads: usize,
    sequences: Sequences,
}

impl LanguageModel for Gpt2 {
    type Block = Gpt2Block;
    type Shared = Gpt2Shared;

    fn blocks(&self) -> &[Gpt2Block] {
        &self.h
    }

    fn shared(&self, batch: usize, positions: Positions<'_>, _device: &Device) -> Gpt2Shared {
        Gpt2Shared {
            heads: self.heads,
            sequences: Sequences::new(batch, positions),
        }
    }

    fn embed(&self, tokens: Tensor<2, Int>, positions: Positions<'_>) -> Tensor<2> {
        embed_with_positions(&self.wte, &self.wpe, tokens, positions)
    }

    fn run_block(
        block: &Gpt2Block,
        x: Tensor<2>,
        shared: &Gpt2Shared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2> {
        block.forward(x, shared, cache)
    }

    fn head(&self, x: Tensor<2>) -> Tensor<2> {
        layer_norm(&self.ln_f, x).matmul(self.wte.weight.val().transpose())
    }
}

/// Returns the embeddings of tokens `[batch, time]` plus the embeddings of their positions, `[batch * time, dim]`.
pub(crate) fn embed_with_positions(
    of_tokens: &Embedding,
    of_positions: &Embedding,
    tokens: Tensor<2, Int>,
    positions: Positions<'_>,
) -> Tensor<2> {
    let device = tokens.device();
    let arange =
        |part: &Range<usize>| Tensor::<1, Int>::arange(part.start as i64..part.end as i64, &device);
    let positions = match positions {
        Positions::Runs(parts) => Tensor::cat(parts.iter().map(arange).collect(), 0).unsqueeze(),
        Positions::Documents(positions) | Positions::Cached(positions) => positions.clone(),
    };
    let x = of_tokens.forward(tokens) + of_positions.forward(positions);
    x.flatten(0, 1)
}

/// Returns the attention of packed queries to packed keys and values, `[batch * time, 3 * dim]`, and to the keys and
/// values in a cache, to which the packed ones are added.
pub(crate) fn attend_packed(
    packed: Tensor<2>,
    sequences: &Sequences,
    heads: usize,
    cache: Option<&mut KeyValues>,
) -> Tensor<2> {
    match cache {
        Some(cache) => {
            let new = Heads::of_packed(packed, sequences.batch(), heads);
            let scores = Scores::usual(new.queries.dims()[3]);
            cache.attend(new, scores)
        }
        None => sequences.attend(packed, heads),
    }
}

impl Gpt2Block {
    fn new(config: &Gpt2Config, values: &mut InitialValues<'_>, device: &Device) -> Self {
        let (dim, hidden) = (config.dim, config.hidden);
        // Each block writes to the residual stream twice.
        let residual_std = INIT_STD / (2.0 * config.layers as f64).sqrt();
        let mut linear = |shape: [usize; 2], std| Linear {
            weight: values.normal(shape, std),
            bias: Some(Initializer::Zeros.init([shape[1]], device)),
        };
        Self {
            ln_1: norm::init(dim, device),
            c_attn: linear([dim, 3 * dim], INIT_STD),
            c_proj: linear([dim, dim], residual_std),
            ln_2: norm::init(dim, device),
            c_fc: linear([dim, hidden], INIT_STD),
            mlp_proj: linear([hidden, dim], residual_std),
        }
    }

    /// Runs the block on the residual stream `[batch * time, dim]`.
    fn forward(
        &self,
        x: Tensor<2>,
        shared: &Gpt2Shared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2> {
        let qkv = self.c_attn.forward(layer_norm(&self.ln_1, x.clone()));
        let attended = attend_packed(qkv, &shared.sequences, shared.heads, cache);
        let x = x + self.c_proj.forward(attended);
        let wide = self.c_fc.forward(layer_norm(&self.ln_2, x.clone()));
        x + self.mlp_proj.forward(gelu_approximate(wide))
    }
}

#[cfg(test)]
mod tests {
    use super::Gpt2Config;

    #[test]
    fn the_smallest_has_the_published_number_of_parameters() {
        let config = Gpt2Config {
            layers: 12,
            dim: 768,
            heads: 12,
            hidden: 3072,
            vocab: 50_257,
            seq: 1024,
        };
        assert_eq!(config.num_params(), 124_439_808);
    }
}
