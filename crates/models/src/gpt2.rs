//! GPT-2 as it was published.

use burn::module::Module;
use burn::nn::{Embedding, Initializer, LayerNorm, Linear};
use burn::tensor::activation::gelu_approximate;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_kernels::{causal_attention, cross_entropy};
use serde::{Deserialize, Serialize};

use crate::initial::InitialValues;
use crate::norm::{self, layer_norm};
use crate::{GptConfig, ModelError};

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
    /// Attention heads of a block; they divide `dim`.
    pub heads: usize,
    /// Width of the perceptron.
    pub hidden: usize,
    /// Number of different tokens.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub seq: usize,
}

/// GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners"), as Hugging Face's `GPT2LMHeadModel` computes
/// it without dropout: learned positions, blocks behind layer norms, the activation by `tanh`, and a head that is the table of the
/// embedding.
///
/// [`Gpt`](crate::Gpt) is like it with a head of its own, the exact activation, and the names of the usual PyTorch program.
///
/// Parameters are initialised lazily, so building even a large model costs nothing until they are used.
#[derive(Module, Debug)]
pub struct Gpt2 {
    wte: Embedding,
    wpe: Embedding,
    h: Vec<Gpt2Block>,
    ln_f: LayerNorm,
    #[module(skip)]
    heads: usize,
}

/// A transformer block: attention, then a perceptron, each behind a layer norm and added to the residual stream.
#[derive(Module, Debug)]
pub struct Gpt2Block {
    ln_1: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    ln_2: LayerNorm,
    c_fc: Linear,
    /// Back to the residual stream.
    mlp_proj: Linear,
}

impl Gpt2Config {
    /// Checks that such a model can exist.
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
    /// If the number overflows, which [`validate`](Self::validate) finds first.
    #[must_use]
    pub fn num_params(&self) -> usize {
        self.checked_num_params()
            .expect("a validated configuration has a countable number of parameters")
    }

    fn checked_num_params(&self) -> Option<usize> {
        // Four matrices of the attention and two of the perceptron, their biases, and two norms a block; a norm at the
        // end, and two tables.
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
    /// The same seed gives the same weights on every device and however the parameters are first used.
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
    /// Returns the sizes of this very model.
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
    /// - tokens: `[batch, time]`, time no longer than the model's `seq`
    /// - output: `[batch, time, vocab]`
    ///
    /// # Panics
    ///
    /// If the sequences are longer than `seq`, or a token is not below `vocab`.
    #[must_use]
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, time] = tokens.dims();
        let logits = self.flat_logits(tokens);
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
        let [batch, time] = targets.dims();
        cross_entropy(self.flat_logits(tokens), targets.reshape([batch * time]))
    }

    /// Returns the logits as `[batch * time, vocab]`: one matrix all the way, for the reason that [`Gpt`](crate::Gpt) has.
    fn flat_logits(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [batch, time] = tokens.dims();
        let positions = Tensor::<1, Int>::arange(0..time as i64, &tokens.device());
        let x = self.wte.forward(tokens) + self.wpe.forward(positions.unsqueeze());
        let mut x = x.flatten(0, 1);
        for block in &self.h {
            x = block.forward(x, batch, self.heads);
        }
        layer_norm(&self.ln_f, x).matmul(self.wte.weight.val().transpose())
    }
}

impl Gpt2Block {
    fn new(config: &Gpt2Config, values: &mut InitialValues<'_>, device: &Device) -> Self {
        let (dim, hidden) = (config.dim, config.hidden);
        // Each of two writes to the residual stream in each block.
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

    /// Runs one step of the residual stream `[batch * time, dim]`.
    fn forward(&self, x: Tensor<2>, batch: usize, heads: usize) -> Tensor<2> {
        let qkv = self.c_attn.forward(layer_norm(&self.ln_1, x.clone()));
        let x = x + self.c_proj.forward(causal_attention(qkv, batch, heads));
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
