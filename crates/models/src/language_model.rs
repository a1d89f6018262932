//! The common interface of this crate's decoders: tokens in, blocks on one residual stream, logits out.

use std::{iter, slice};

use burn::module::Module;
use burn::store::ModuleSnapshot;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fsdp_kernels::cross_entropy;

use crate::key_values::{Continuation, KeyValueCache, KeyValues};
use crate::positions::{InputTokens, Positions};
use crate::targets::Targets;

/// A decoder: an embedding, blocks that each add to one residual stream, and a head.
///
/// Each block runs separately, so a caller can wrap it, for example to recompute it in the backward pass.
pub trait LanguageModel: ModuleSnapshot + Sync + 'static {
    /// A block.
    type Block: Module + Sync + 'static;
    /// Untrained values that blocks share in addition to the residual stream.
    type Shared: Clone + Send + Sync + 'static;

    /// Returns the blocks, in order.
    fn blocks(&self) -> &[Self::Block];

    /// Returns the shared values for tokens `[batch, time]` at these positions.
    fn shared(&self, batch: usize, positions: Positions<'_>, device: &Device) -> Self::Shared;

    /// Returns the stream before the first block, `[batch * time, dim]`, for tokens `[batch, time]` at these positions.
    fn embed(&self, tokens: Tensor<2, Int>, positions: Positions<'_>) -> Tensor<2>;

    /// Returns the residual stream `[batch * time, dim]` after a block. With a cache, `x` is the stream of new tokens,
    /// which also attend to cached tokens.
    fn run_block(
        block: &Self::Block,
        x: Tensor<2>,
        shared: &Self::Shared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2>;

    /// Returns the logits `[rows, vocab]` of the stream `[rows, dim]` after the last block.
    fn head(&self, x: Tensor<2>) -> Tensor<2>;

    /// Returns a number for sequences of this length. If the number differs between two lengths, so do the keys and
    /// values of the same tokens, and a cache for one length cannot be continued to the other.
    fn epoch(&self, _length: usize) -> usize {
        0
    }

    /// Returns the mean cross entropy of the targets, in nats, `[1]`. Tokens and targets are `[batch, time]`. If the
    /// targets have [weights](Targets::weighted), each cross entropy is multiplied by its weight first. If the tokens have
    /// [positions](InputTokens::in_documents), documents that share a sequence are computed separately. `run` runs each
    /// block: it calls [`run_block`](Self::run_block) and may add to it.
    ///
    /// 16-bit logits are widened to 32 bits before the logarithm.
    ///
    /// # Panics
    ///
    /// If a token is not below the vocabulary size, or the sequences are longer than the model's maximum.
    fn loss_by(
        &self,
        tokens: impl Into<InputTokens>,
        targets: impl Into<Targets>,
        run: impl Fn(&Self::Block, Tensor<2>, &Self::Shared) -> Tensor<2>,
    ) -> Tensor<1> {
        let Targets {
            tokens: targets,
            weights,
        } = targets.into();
        let [batch, time] = targets.dims();
        let targets = targets.reshape([batch * time]);
        let logits = self.logits_by(tokens, run);
        let logits = if logits.dtype().size() < 4 {
            logits.cast(DType::F32)
        } else {
            logits
        };
        let Some(weights) = weights else {
            return cross_entropy(logits, targets);
        };
        let likelihood = log_softmax(logits, 1).gather(1, targets.unsqueeze_dim(1));
        (likelihood * weights.reshape([batch * time, 1]))
            .mean()
            .neg()
    }

    /// Returns the logits `[batch * time, vocab]` of the token after each of `tokens`, `[batch, time]`. `run` runs each
    /// block.
    ///
    /// The sequences form one matrix from the embedding to the head, so a linear layer multiplies it by its weight
    /// directly. For inputs with three dimensions, Burn first reshapes the weight. Autodiff then keeps that view, and
    /// with it the weight, until the backward pass.
    ///
    /// # Panics
    ///
    /// As [`loss_by`](Self::loss_by).
    fn logits_by(
        &self,
        tokens: impl Into<InputTokens>,
        run: impl Fn(&Self::Block, Tensor<2>, &Self::Shared) -> Tensor<2>,
    ) -> Tensor<2> {
        let InputTokens { tokens, positions } = tokens.into();
        let [batch, time] = tokens.dims();
        let whole = 0..time;
        let positions = match &positions {
            Some(positions) => Positions::Documents(positions),
            None => Positions::Runs(slice::from_ref(&whole)),
        };
        let shared = self.shared(batch, positions, &tokens.device());
        let mut x = self.embed(tokens, positions);
        for block in self.blocks() {
            x = run(block, x, &shared);
        }
        self.head(x)
    }

    /// Returns the mean cross entropy of the targets, in nats, `[1]`, multiplied by their weights if they have any.
    /// Tokens and targets are `[batch, time]`.
    ///
    /// # Panics
    ///
    /// As [`loss_by`](Self::loss_by).
    fn mean_loss(&self, tokens: impl Into<InputTokens>, targets: impl Into<Targets>) -> Tensor<1> {
        self.loss_by(tokens, targets, |block, x, shared| {
            Self::run_block(block, x, shared, None)
        })
    }

    /// Returns the logits `[batch, vocab]` of the token that follows `tokens`, `[batch, time]`. The tokens continue the
    /// sequences in the cache and are added to it.
    ///
    /// The logits equal those of all tokens at once, except for rounding. Only the new tokens are computed, unless
    /// their number changes the [`epoch`](Self::epoch). Call it on a model without autodiff: `model.valid()`. If the
    /// model is sharded among ranks, all ranks must make the same call.
    ///
    /// # Panics
    ///
    /// If there is no token, if the cache belongs to other sequences, or as [`loss_by`](Self::loss_by).
    fn next_logits(&self, tokens: Tensor<2, Int>, cache: &mut KeyValueCache) -> Tensor<2> {
        self.next_logits_of_each(vec![Continuation { tokens, cache }])
    }

    /// Returns the logits `[sequences, vocab]` of the token that follows each sequence, as
    /// [`next_logits`](Self::next_logits) of each continuation would. The sequences may have any lengths, and any
    /// numbers of new tokens. Each weight is used once for all of them.
    ///
    /// # Panics
    ///
    /// If there is no continuation, if one has no token, or as [`next_logits`](Self::next_logits).
    fn next_logits_of_each(&self, mut continuations: Vec<Continuation<'_>>) -> Tensor<2> {
        let (mut rows, mut positions, mut last) = (Vec::new(), Vec::new(), Vec::new());
        let (mut all_tokens, mut num_rows) = (Vec::new(), 0);
        for Continuation { tokens, cache } in &mut continuations {
            let start = cache.num_tokens();
            let all = cache.with(tokens.clone());
            let [batch, end] = all.dims();
            let start = if self.epoch(start) == self.epoch(end) {
                start
            } else {
                **cache = KeyValueCache::new();
                *tokens = all.clone();
                0
            };
            all_tokens.push(all);
            let time = end - start;
            rows.push(tokens.clone().reshape([1, batch * time]));
            positions.extend(iter::repeat_n(start..end, batch));
            last.extend((0..batch).map(|row| (num_rows + (row + 1) * time - 1) as i64));
            num_rows += batch * time;
        }
        let tokens = Tensor::cat(rows, 1);
        let device = tokens.device();
        let positions = Positions::Runs(&positions);
        let shared = self.shared(1, positions, &device);
        let mut x = self.embed(tokens, positions);
        for (index, block) in self.blocks().iter().enumerate() {
            let mut cached = KeyValues::take(index, &mut continuations);
            x = Self::run_block(block, x, &shared, Some(&mut cached));
            cached.put(index, &mut continuations);
        }
        for (continuation, tokens) in continuations.iter_mut().zip(all_tokens) {
            continuation.cache.note(tokens);
        }
        // Only the last token of each sequence has a successor to choose.
        let last = Tensor::<1, Int>::from_data(TensorData::from(&last[..]), &device);
        self.head(x.select(0, last))
    }
}
