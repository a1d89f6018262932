//! The Llama.

use std::ops::Range;

use burn::module::Module;
use burn::nn::{Embedding, Linear, RmsNorm, RmsNormConfig};
use burn::tensor::activation::silu;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_kernels::causal_attention;

use crate::initial::InitialValues;
use crate::key_values::{Heads, KeyValues};
use crate::llama_config::INIT_STD;
use crate::rotary::Rotary;
use crate::{LanguageModel, LlamaConfig, LlamaVariant, ModelError};

/// A Llama style decoder: rotary positions, pre-norm blocks with grouped key and value heads and gated MLPs, no
/// biases, and a head that is either separate or tied to the embedding.
///
/// Parameters are initialized lazily, so building even a large model costs nothing until they are used.
#[derive(Module, Debug)]
pub struct Llama {
    tok_embeddings: Embedding,
    layers: Vec<LlamaBlock>,
    norm: RmsNorm,
    /// The head, unless it is tied to the embedding.
    output: Option<Linear>,
    #[module(skip)]
    head_dim: usize,
    #[module(skip)]
    rope_base: usize,
    #[module(skip)]
    seq: usize,
    #[module(skip)]
    variant: LlamaVariant,
}

/// A transformer block: attention, then a gated MLP. Each follows an RMS norm and is added to the residual stream.
#[derive(Module, Debug)]
pub struct LlamaBlock {
    attention_norm: RmsNorm,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    ffn_norm: RmsNorm,
    /// The gate.
    w1: Linear,
    /// The projection back to the residual stream.
    w2: Linear,
    /// The projection that the gate multiplies.
    w3: Linear,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    kv_heads: usize,
}

impl LlamaConfig {
    /// Builds the model on a device.
    ///
    /// The same seed gives the same weights on every device, regardless of the order in which parameters are first
    /// used.
    ///
    /// # Errors
    ///
    /// If the configuration is not [valid](Self::validate).
    pub fn init(&self, device: &Device, seed: u64) -> Result<Llama, ModelError> {
        self.built(InitialValues::new(device, seed))
    }

    pub(crate) fn built(&self, mut values: InitialValues<'_>) -> Result<Llama, ModelError> {
        self.validate()?;
        let device = values.device();
        Ok(Llama {
            tok_embeddings: Embedding {
                weight: values.normal([self.vocab, self.dim], INIT_STD),
            },
            layers: (0..self.layers)
                .map(|_| LlamaBlock::new(self, &mut values, device))
                .collect(),
            norm: norm(self, device),
            output: match self.variant.has_tied_head {
                true => None,
                false => Some(linear(&mut values, self.dim, self.vocab)),
            },
            head_dim: self.head_dim(),
            rope_base: self.rope_base,
            seq: self.seq,
            variant: self.variant,
        })
    }
}

impl Llama {
    /// Returns the configuration of this model.
    pub(crate) fn config(&self) -> LlamaConfig {
        let [vocab, dim] = self.tok_embeddings.weight.shape().dims();
        let heads = dim / self.head_dim;
        let block = self.layers.first();
        LlamaConfig {
            layers: self.layers.len(),
            dim,
            heads,
            kv_heads: block.map_or(heads, |block| block.kv_heads),
            hidden: block.map_or(dim, |block| block.w1.weight.shape().dims::<2>()[1]),
            vocab,
            seq: self.seq,
            rope_base: self.rope_base,
            variant: self.variant,
        }
    }

    /// Returns the logits of the token after each position.
    ///
    /// # Shapes
    ///
    /// - tokens: `[batch, time]`
    /// - output: `[batch, time, vocab]`
    ///
    /// # Panics
    ///
    /// If a token is not below `vocab`.
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
pub struct LlamaShared {
    batch: usize,
    rotary: Rotary,
}

impl LanguageModel for Llama {
    type Block = LlamaBlock;
    type Shared = LlamaShared;

    fn blocks(&self) -> &[LlamaBlock] {
        &self.layers
    }

    fn shared(&self, batch: usize, positions: Range<usize>, device: &Device) -> LlamaShared {
        let scaling = self.variant.rope_scaling;
        let rotary = Rotary::new(positions, self.head_dim, self.rope_base, scaling, device);
        LlamaShared { batch, rotary }
    }

    fn embed(&self, tokens: Tensor<2, Int>, _start: usize) -> Tensor<2> {
        self.tok_embeddings.forward(tokens).flatten(0, 1)
    }

    fn run_block(
        block: &LlamaBlock,
        x: Tensor<2>,
        shared: &LlamaShared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2> {
        block.forward(x, shared, cache)
    }

    fn head(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(x);
        match &self.output {
            Some(head) => head.forward(x),
            None => x.matmul(self.tok_embeddings.weight.val().transpose()),
        }
    }
}

impl LlamaBlock {
    fn new(config: &LlamaConfig, values: &mut InitialValues<'_>, device: &Device) -> Self {
        let (dim, kv_dim, hidden) = (config.dim, config.kv_dim(), config.hidden);
        Self {
            attention_norm: norm(config, device),
            wq: linear(values, dim, dim),
            wk: linear(values, dim, kv_dim),
            wv: linear(values, dim, kv_dim),
            wo: linear(values, dim, dim),
            ffn_norm: norm(config, device),
            w1: linear(values, dim, hidden),
            w2: linear(values, hidden, dim),
            w3: linear(values, dim, hidden),
            heads: config.heads,
            kv_heads: config.kv_heads,
        }
    }

    /// Runs the block on the residual stream `[batch * time, dim]`.
    fn forward(
        &self,
        x: Tensor<2>,
        shared: &LlamaShared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2> {
        let x = x.clone() + self.attend(self.attention_norm.forward(x), shared, cache);
        let wide = self.ffn_norm.forward(x.clone());
        let gated = silu(self.w1.forward(wide.clone())) * self.w3.forward(wide);
        x + self.w2.forward(gated)
    }

    fn attend(
        &self,
        x: Tensor<2>,
        shared: &LlamaShared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2> {
        let LlamaShared { batch, rotary } = shared;
        let heads = Heads {
            queries: rotary.apply(split(self.wq.forward(x.clone()), *batch, self.heads)),
            keys: rotary.apply(split(self.wk.forward(x.clone()), *batch, self.kv_heads)),
            values: split(self.wv.forward(x), *batch, self.kv_heads),
        };
        let attended = match cache {
            Some(cache) => cache.attend(heads),
            None => self.attend_all(heads, *batch),
        };
        self.wo.forward(attended)
    }

    /// Computes the attention over whole sequences.
    fn attend_all(&self, new: Heads, batch: usize) -> Tensor<2> {
        let group = self.heads / self.kv_heads;
        let (keys, values) = (repeat(new.keys, group), repeat(new.values, group));
        let parts = [new.queries, keys, values].map(merge);
        causal_attention(Tensor::cat(parts.to_vec(), 1), batch, self.heads)
    }
}

fn norm(config: &LlamaConfig, device: &Device) -> RmsNorm {
    let norm = RmsNormConfig::new(config.dim);
    norm.with_epsilon(config.variant.norm_epsilon).init(device)
}

fn linear(values: &mut InitialValues<'_>, from: usize, into: usize) -> Linear {
    Linear {
        weight: values.normal([from, into], INIT_STD),
        bias: None,
    }
}

/// Turns `[batch * time, heads * head_dim]` into `[batch, time, heads, head_dim]`.
fn split(x: Tensor<2>, batch: usize, heads: usize) -> Tensor<4> {
    let [rows, width] = x.dims();
    x.reshape([batch, rows / batch, heads, width / heads])
}

/// Undoes [`split`].
fn merge(x: Tensor<4>) -> Tensor<2> {
    let [batch, time, heads, head_dim] = x.dims();
    x.reshape([batch * time, heads * head_dim])
}

/// Repeats every head, side by side, once for each query head that shares it.
fn repeat(x: Tensor<4>, times: usize) -> Tensor<4> {
    let [batch, time, heads, head_dim] = x.dims();
    if times == 1 {
        return x;
    }
    x.unsqueeze_dim::<5>(3)
        .expand([batch, time, heads, times, head_dim])
        .reshape([batch, time, heads * times, head_dim])
}
