//! A cache of keys and values, with which only the newest token must be computed.

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Int, Tensor};

/// The keys and values of all tokens so far, for each block.
/// [`LanguageModel::next_logits`](crate::LanguageModel::next_logits) continues from them.
///
/// A cache belongs to one model and one batch of sequences of equal length. Each token adds
/// `2 * blocks * batch * kv_heads * head_dim` elements.
#[derive(Debug, Clone, Default)]
pub struct KeyValueCache {
    blocks: Vec<KeyValues>,
    num_tokens: usize,
}

impl KeyValueCache {
    /// Creates an empty cache.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of tokens of each sequence in the cache.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Returns the number of bytes of all keys and values.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let kept = self.blocks.iter().flat_map(|block| &block.kept);
        let tensors = kept.flat_map(|(keys, values)| [keys, values]);
        let bytes = tensors.map(|tensor| tensor.shape().num_elements() * tensor.dtype().size());
        bytes.sum()
    }

    /// Returns the keys and values of every block.
    pub(crate) fn blocks(&mut self, num_blocks: usize) -> &mut [KeyValues] {
        self.blocks.resize_with(num_blocks, KeyValues::default);
        &mut self.blocks
    }

    /// Advances the token count after keys and values were added.
    pub(crate) fn count(&mut self, num_tokens: usize) {
        self.num_tokens += num_tokens;
    }
}

/// The keys and values of one block, each `[batch, kv_heads, time, head_dim]`.
#[derive(Debug, Clone, Default)]
pub struct KeyValues {
    kept: Option<(Tensor<4>, Tensor<4>)>,
}

/// New queries, keys and values, each `[batch, time, heads, head_dim]`. Several adjacent query heads may share a key
/// and value head.
pub(crate) struct Heads {
    pub(crate) queries: Tensor<4>,
    pub(crate) keys: Tensor<4>,
    pub(crate) values: Tensor<4>,
}

impl Heads {
    /// Splits packed queries, keys and values of `[batch * time, 3 * dim]`.
    pub(crate) fn of_packed(packed: Tensor<2>, batch: usize, heads: usize) -> Self {
        let [rows, width] = packed.dims();
        let part = |index: usize| {
            let dim = width / 3;
            let part = packed.clone().narrow(1, index * dim, dim);
            part.reshape([batch, rows / batch, heads, dim / heads])
        };
        Self {
            queries: part(0),
            keys: part(1),
            values: part(2),
        }
    }
}

impl KeyValues {
    /// Adds new keys and values, and returns the attention of the new queries to them and to earlier ones,
    /// `[batch * time, dim]`. A query sees the keys up to its own position.
    pub(crate) fn attend(&mut self, new: Heads) -> Tensor<2> {
        let [batch, time, heads, head_dim] = new.queries.dims();
        let (keys, values) = (new.keys.swap_dims(1, 2), new.values.swap_dims(1, 2));
        let (keys, values) = match self.kept.take() {
            None => (keys, values),
            Some((before, values_before)) => (
                Tensor::cat(vec![before, keys], 2),
                Tensor::cat(vec![values_before, values], 2),
            ),
        };
        self.kept = Some((keys.clone(), values.clone()));
        let [_, kv_heads, all, _] = keys.dims();
        let group = heads / kv_heads;
        // The queries of one key head are rows of one matrix, so keys are not repeated.
        let queries = new.queries.swap_dims(1, 2);
        let queries = queries.reshape([batch, kv_heads, group * time, head_dim]);
        let scale = 1.0 / (head_dim as f64).sqrt();
        let mut scores = queries.matmul(keys.transpose()).mul_scalar(scale);
        if time > 1 {
            let hidden = hidden(time, all, &scores);
            let hidden = hidden.repeat_dim(2, group);
            scores = scores.mask_fill(
                hidden.expand([batch, kv_heads, group * time, all]),
                f32::NEG_INFINITY,
            );
        }
        let seen = softmax(scores, 3).matmul(values);
        seen.reshape([batch, heads, time, head_dim])
            .swap_dims(1, 2)
            .reshape([batch * time, heads * head_dim])
    }
}

/// Returns a mask of the keys after each query, for the last `time` queries and `all` keys: `[1, 1, time, all]`.
fn hidden(time: usize, all: usize, like: &Tensor<4>) -> Tensor<4, Bool> {
    let device = like.device();
    let keys = Tensor::<1, Int>::arange(0..all as i64, &device).reshape([1, 1, 1, all]);
    let own = Tensor::<1, Int>::arange((all - time) as i64..all as i64, &device);
    let own = own.reshape([1, 1, time, 1]).expand([1, 1, time, all]);
    keys.expand([1, 1, time, all]).greater(own)
}
