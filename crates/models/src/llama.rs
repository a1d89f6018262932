//! The Llama.

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use burn::tensor::{Device, Int, Tensor};

use crate::initial::InitialValues;
use crate::key_values::{KeyValues, capped};
use crate::llama_block::{LlamaBlock, LlamaShared, linear};
use crate::llama_config::INIT_STD;
use crate::norm::Norm;
use crate::positions::Positions;
use crate::{LanguageModel, LlamaConfig, ModelError};

/// A decoder with rotary positions, pre-norm blocks with grouped key and value heads, and a head that is either
/// separate or tied to the embedding. Its [family](crate::Family) determines the rest: a Llama has RMS norms, gated
/// MLPs and no biases.
///
/// Parameters are initialized lazily, so building even a large model costs nothing until they are used.
#[derive(Module, Debug)]
pub struct Llama {
    tok_embeddings: Embedding,
    layers: Vec<LlamaBlock>,
    norm: Norm,
    /// The head, unless it is tied to the embedding.
    output: Option<Linear>,
    #[module(skip)]
    sizes: LlamaConfig,
}

impl LlamaConfig {
    /// Builds the model on a device.
    ///
    /// The same seed produces the same weights on every device, regardless of the order in which parameters are first
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
                .map(|layer| LlamaBlock::new(self, layer, &mut values))
                .collect(),
            norm: Norm::new(self, self.dim, device),
            output: if self.variant.has_tied_head {
                None
            } else {
                Some(linear(&mut values, self.dim, self.vocab, false))
            },
            sizes: *self,
        })
    }
}

impl Llama {
    /// Returns the configuration of this model.
    pub(crate) fn config(&self) -> LlamaConfig {
        let [vocab, dim] = self.tok_embeddings.weight.shape().dims();
        LlamaConfig {
            layers: self.layers.len(),
            dim,
            vocab,
            ..self.sizes
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

impl LanguageModel for Llama {
    type Block = LlamaBlock;
    type Shared = LlamaShared;

    fn blocks(&self) -> &[LlamaBlock] {
        &self.layers
    }

    fn shared(&self, batch: usize, positions: Positions<'_>, device: &Device) -> LlamaShared {
        LlamaShared::new(&self.sizes, batch, positions, device)
    }

    fn epoch(&self, length: usize) -> usize {
        let scaling = self.sizes.variant.rope_scaling;
        scaling.epoch([length, self.sizes.seq])
    }

    fn embed(&self, tokens: Tensor<2, Int>, _positions: Positions<'_>) -> Tensor<2> {
        let x = self.tok_embeddings.forward(tokens).flatten(0, 1);
        if self.sizes.variant.family.scales_embeddings() {
            x.mul_scalar((self.sizes.dim as f64).sqrt())
        } else {
            x
        }
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
        let logits = match &self.output {
            Some(head) => head.forward(x),
            None => x.matmul(self.tok_embeddings.weight.val().transpose()),
        };
        capped(logits, self.sizes.variant.logit_softcap)
    }
}
