//! What the decoders of this crate have in common: text in, blocks on one residual stream, logits out.

use std::ops::Range;

use burn::module::Module;
use burn::store::ModuleSnapshot;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fsdp_kernels::cross_entropy;

use crate::key_values::{KeyValueCache, KeyValues};

/// A decoder: an embedding, blocks that each add to one residual stream, and a head.
///
/// Each block is run by itself, so that a caller may do something around it: compute it again in the backward pass, say.
pub trait LanguageModel: ModuleSnapshot + Sync + 'static {
    /// A block.
    type Block: Module + Sync + 'static;
    /// What the blocks of one forward share beside the stream. No part of it is trained.
    type Shared: Clone + Send + Sync + 'static;

    /// Returns the blocks, in order.
    fn blocks(&self) -> &[Self::Block];

    /// Returns what the blocks share for `batch` sequences of tokens at these positions.
    fn shared(&self, batch: usize, positions: Range<usize>, device: &Device) -> Self::Shared;

    /// Returns the stream before the first block, `[batch * time, dim]`, of tokens `[batch, time]` from position `start` on.
    fn embed(&self, tokens: Tensor<2, Int>, start: usize) -> Tensor<2>;

    /// Returns the stream `[batch * time, dim]` after a block. With a cache it is that of new tokens, which see those that are
    /// in the cache, too.
    fn run_block(
        block: &Self::Block,
        x: Tensor<2>,
        shared: &Self::Shared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2>;

    /// Returns the logits `[rows, vocab]` of the stream `[rows, dim]` after the last block.
    fn head(&self, x: Tensor<2>) -> Tensor<2>;

    /// Returns the mean cross entropy of the targets, in nats, `[1]`, of tokens and targets `[batch, time]`, with each block run
    /// by `run`: by [`run_block`](Self::run_block), and with whatever the caller does around it.
    ///
    /// Logits of 16 bits become 32 bits before the logarithm is taken.
    ///
    /// # Panics
    ///
    /// If a token is not below the number of tokens of the model, or the sequences are longer than its positions.
    fn loss_by(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        run: impl Fn(&Self::Block, Tensor<2>, &Self::Shared) -> Tensor<2>,
    ) -> Tensor<1> {
        let [batch, time] = targets.dims();
        let logits = self.logits_by(tokens, run);
        let logits = match logits.dtype().size() < 4 {
            true => logits.cast(DType::F32),
            false => logits,
        };
        cross_entropy(logits, targets.reshape([batch * time]))
    }

    /// Returns the logits `[batch * time, vocab]` of the token after each of `[batch, time]`, with each block run by `run`.
    ///
    /// Sequences lie end to end in one matrix from the embedding to the head: a linear layer then multiplies with its weight
    /// as it is. On inputs of three dimensions Burn reshapes the weight first, and autodiff keeps that view, and with it the
    /// weight, until the backward pass.
    ///
    /// # Panics
    ///
    /// As [`loss_by`](Self::loss_by).
    fn logits_by(
        &self,
        tokens: Tensor<2, Int>,
        run: impl Fn(&Self::Block, Tensor<2>, &Self::Shared) -> Tensor<2>,
    ) -> Tensor<2> {
        let [batch, time] = tokens.dims();
        let shared = self.shared(batch, 0..time, &tokens.device());
        let mut x = self.embed(tokens, 0);
        for block in self.blocks() {
            x = run(block, x, &shared);
        }
        self.head(x)
    }

    /// Returns the mean cross entropy of the targets, in nats, `[1]`, of tokens and targets `[batch, time]`.
    ///
    /// # Panics
    ///
    /// As [`loss_by`](Self::loss_by).
    fn mean_loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        self.loss_by(tokens, targets, |block, x, shared| {
            Self::run_block(block, x, shared, None)
        })
    }

    /// Returns the logits `[batch, vocab]` of the token after the last of `[batch, time]`, which follow those that the cache has
    /// seen, and adds these to the cache. Equal to those of all tokens at once, but for rounding, and computed for the new
    /// ones alone.
    ///
    /// For models without autodiff: `model.valid()`. Of a model that is divided among ranks, all ranks call it alike.
    ///
    /// # Panics
    ///
    /// If there is no token, or the cache is of other sequences; as [`loss_by`](Self::loss_by).
    fn next_logits(&self, tokens: Tensor<2, Int>, cache: &mut KeyValueCache) -> Tensor<2> {
        let [batch, time] = tokens.dims();
        let start = cache.num_tokens();
        let shared = self.shared(batch, start..start + time, &tokens.device());
        let mut x = self.embed(tokens, start);
        let blocks = self.blocks();
        for (block, cache) in blocks.iter().zip(cache.blocks(blocks.len())) {
            x = Self::run_block(block, x, &shared, Some(cache));
        }
        cache.count(time);
        let [rows, dim] = x.dims();
        let x = x.reshape([batch, rows / batch, dim]);
        self.head(x.narrow(1, time - 1, 1).reshape([batch, dim]))
    }
}
