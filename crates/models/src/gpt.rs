//! The GPT.

use burn::module::Module;
use burn::nn::{Embedding, Initializer, LayerNorm, Linear};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fsdp_kernels::{causal_attention, cross_entropy, gelu};

use crate::initial::InitialValues;
use crate::norm::{self, layer_norm};
use crate::{GptConfig, ModelError};

/// A GPT-2 style decoder: learned positions, pre-LN blocks and an untied head
/// without bias.
///
/// Parameters are initialised lazily, so building even a large model costs
/// nothing until they are used.
#[derive(Module, Debug)]
pub struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    lnf: LayerNorm,
    head: Linear,
}

/// A transformer block: attention, then a perceptron four times as wide, each
/// behind a layer norm and added to the residual stream.
#[derive(Module, Debug)]
pub struct Block {
    ln1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    ln2: LayerNorm,
    fc: Linear,
    out: Linear,
    #[module(skip)]
    heads: usize,
}

impl GptConfig {
    /// Builds the model on a device.
    ///
    /// The same seed gives the same weights on every device and however the
    /// parameters are first used.
    ///
    /// # Errors
    ///
    /// If the configuration is not [valid](Self::validate).
    pub fn init(&self, device: &Device, seed: u64) -> Result<Gpt, ModelError> {
        self.built(InitialValues::new(device, seed))
    }

    pub(crate) fn built(&self, mut values: InitialValues<'_>) -> Result<Gpt, ModelError> {
        self.validate()?;
        let device = values.device();
        let std = self.init_std();
        Ok(Gpt {
            wte: Embedding {
                weight: values.normal([self.vocab, self.dim], std),
            },
            wpe: Embedding {
                weight: values.normal([self.seq, self.dim], std),
            },
            blocks: (0..self.layers)
                .map(|_| Block::new(self, &mut values, device))
                .collect(),
            lnf: norm::init(self.dim, device),
            head: Linear {
                weight: values.normal([self.dim, self.vocab], std),
                bias: None,
            },
        })
    }
}

impl Gpt {
    /// Returns the sizes of this very model.
    pub(crate) fn config(&self) -> GptConfig {
        let [vocab, dim] = self.wte.weight.shape().dims();
        let [seq, _] = self.wpe.weight.shape().dims();
        GptConfig {
            layers: self.blocks.len(),
            dim,
            heads: self.blocks.first().map_or(1, |block| block.heads),
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
        let logits = self.flat_logits(tokens, Block::forward);
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
        self.loss_with(tokens, targets, Block::forward)
    }

    /// Returns the [`loss`](Self::loss), with each block run by `run`: by [`Block::forward`], and
    /// with whatever the caller does around it, such as computing it again in the backward pass.
    ///
    /// Logits of 16 bits become 32 bits before the logarithm is taken.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward).
    #[must_use]
    pub fn loss_with(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        run: impl Fn(&Block, Tensor<2>, usize) -> Tensor<2>,
    ) -> Tensor<1> {
        let [batch, time] = targets.dims();
        let logits = self.flat_logits(tokens, run);
        let logits = match logits.dtype().size() < 4 {
            true => logits.cast(DType::F32),
            false => logits,
        };
        cross_entropy(logits, targets.reshape([batch * time]))
    }

    /// Returns the logits as `[batch * time, vocab]`.
    ///
    /// Sequences lie end to end in one matrix from the embedding to the head: a
    /// linear layer then multiplies with its weight as it is. On inputs of three
    /// dimensions Burn reshapes the weight first, and autodiff keeps that view,
    /// and with it the weight, until the backward pass.
    fn flat_logits(
        &self,
        tokens: Tensor<2, Int>,
        run: impl Fn(&Block, Tensor<2>, usize) -> Tensor<2>,
    ) -> Tensor<2> {
        let [batch, time] = tokens.dims();
        let positions = Tensor::<1, Int>::arange(0..time as i64, &tokens.device());
        let x = self.wte.forward(tokens) + self.wpe.forward(positions.unsqueeze());
        let mut x = x.flatten(0, 1);
        for block in &self.blocks {
            x = run(block, x, batch);
        }
        self.head.forward(layer_norm(&self.lnf, x))
    }
}

impl Block {
    fn new(config: &GptConfig, values: &mut InitialValues<'_>, device: &Device) -> Self {
        let (dim, wide) = (config.dim, 4 * config.dim);
        let (std, residual_std) = (config.init_std(), config.residual_init_std());
        let mut linear = |shape: [usize; 2], std| Linear {
            weight: values.normal(shape, std),
            bias: Some(Initializer::Zeros.init([shape[1]], device)),
        };
        Self {
            ln1: norm::init(dim, device),
            qkv: linear([dim, 3 * dim], std),
            proj: linear([dim, dim], residual_std),
            ln2: norm::init(dim, device),
            fc: linear([dim, wide], std),
            out: linear([wide, dim], residual_std),
            heads: config.heads,
        }
    }

    /// Runs one step of the residual stream.
    ///
    /// # Shapes
    ///
    /// - x and output: `[batch * time, dim]`, sequences end to end
    #[must_use]
    pub fn forward(&self, x: Tensor<2>, batch: usize) -> Tensor<2> {
        let qkv = self.qkv.forward(layer_norm(&self.ln1, x.clone()));
        let x = x + self.proj.forward(causal_attention(qkv, batch, self.heads));
        let wide = gelu(self.fc.forward(layer_norm(&self.ln2, x.clone())));
        x + self.out.forward(wide)
    }
}
