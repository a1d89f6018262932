//! The GPT.

use burn::module::Module;
use burn::nn::{Embedding, Initializer, LayerNorm, Linear};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_kernels::gelu;

use crate::gpt2::{attend_packed, embed_with_positions};
use crate::initial::InitialValues;
use crate::key_values::KeyValues;
use crate::norm::{self, layer_norm};
use crate::positions::{Positions, Sequences};
use crate::{GptConfig, LanguageModel, ModelError};

/// A GPT-2 style decoder: learned positions, pre-LN blocks and an untied head
/// without bias.
///
/// Parameters are initialized lazily, so building even a large model costs
/// nothing until they are used.
#[derive(Module, Debug)]
pub struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    lnf: LayerNorm,
    head: Linear,
}

/// A transformer block: attention, then an MLP four times as wide. Each follows a layer norm and is added to the
/// residual stream.
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
    /// The same seed produces the same weights on every device, regardless of the order in which parameters are first
    /// used.
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
    /// Returns the configuration of this model.
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
    /// - tokens: `[batch, time]`, with `time` at most the model's `seq`
    /// - output: `[batch, time, vocab]`
    ///
    /// # Panics
    ///
    /// If the sequences are longer than `seq`, or a token is not below `vocab`.
    #[must_use]
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, time] = tokens.dims();
        let logits = self.logits_by(tokens, |block, x, sequences| block.run(x, sequences, None));
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

    /// Returns the [`loss`](Self::loss), with each block run by `run`. `run` calls [`Block::forward`] and may add to
    /// it, for example to recompute the block in the backward pass.
    ///
    /// 16-bit logits are widened to 32 bits before the logarithm.
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
        self.loss_by(tokens, targets, |block, x, sequences| {
            run(block, x, sequences.batch())
        })
    }
}

impl LanguageModel for Gpt {
    type Block = Block;
    type Shared = Sequences;

    fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    fn shared(&self, batch: usize, positions: Positions<'_>, _device: &Device) -> Sequences {
        Sequences::new(batch, positions)
    }

    fn embed(&self, tokens: Tensor<2, Int>, positions: Positions<'_>) -> Tensor<2> {
        embed_with_positions(&self.wte, &self.wpe, tokens, positions)
    }

    fn run_block(
        block: &Block,
        x: Tensor<2>,
        sequences: &Sequences,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2> {
        block.run(x, sequences, cache)
    }

    fn head(&self, x: Tensor<2>) -> Tensor<2> {
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

    /// Runs the block on the residual stream of `batch` sequences.
    ///
    /// # Shapes
    ///
    /// - x and output: `[batch * time, dim]`, one sequence after the other
    #[must_use]
    pub fn forward(&self, x: Tensor<2>, batch: usize) -> Tensor<2> {
        self.run(x, &Sequences::whole(batch), None)
    }

    fn run(&self, x: Tensor<2>, sequences: &Sequences, cache: Option<&mut KeyValues>) -> Tensor<2> {
        let qkv = self.qkv.forward(layer_norm(&self.ln1, x.clone()));
        let attended = attend_packed(qkv, sequences, self.heads, cache);
        let x = x + self.proj.forward(attended);
        let wide = gelu(self.fc.forward(layer_norm(&self.ln2, x.clone())));
        x + self.out.forward(wide)
    }
}
