//! A cache of keys and values, so that generation computes only new tokens.

use std::mem::take;

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Int, Tensor};

/// The least room, in tokens, that is added to a cache without room.
const MIN_ROOM: usize = 16;

/// The keys and values of all tokens so far, for each block.
/// [`LanguageModel::next_logits`](crate::LanguageModel::next_logits) continues from them.
///
/// A cache belongs to one model and one batch of sequences of equal length. Each token adds
/// `2 * blocks * batch * kv_heads * head_dim` elements. There is room for up to a quarter more tokens, or for 16.
/// Sequences of unequal lengths have a cache each, and
/// [`LanguageModel::next_logits_of_each`](crate::LanguageModel::next_logits_of_each) runs them together.
#[derive(Debug, Clone, Default)]
pub struct KeyValueCache {
    blocks: Vec<Kept>,
    /// The tokens of each sequence, `[batch, time]`, from which everything can be computed again.
    tokens: Option<Tensor<2, Int>>,
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
        self.tokens.as_ref().map_or(0, |tokens| tokens.dims()[1])
    }

    /// Returns the number of bytes of all keys and values, with the room for later ones.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let rows = self.blocks.iter().flatten();
        let tensors = rows.filter_map(|rows| rows.tensor.as_ref());
        let bytes = tensors.map(|tensor| tensor.shape().num_elements() * tensor.dtype().size());
        bytes.sum()
    }

    /// Returns the cached tokens, followed by new ones.
    pub(crate) fn with(&self, new: Tensor<2, Int>) -> Tensor<2, Int> {
        match &self.tokens {
            None => new,
            Some(tokens) => Tensor::cat(vec![tokens.clone(), new], 1),
        }
    }

    /// Records all tokens, after their keys and values were added.
    pub(crate) fn note(&mut self, tokens: Tensor<2, Int>) {
        self.tokens = Some(tokens);
    }
}

/// The keys and the values of one batch in one block.
type Kept = [GrowingRows; 2];

/// Rows that grow in place along `time`, so a new token does not copy all earlier ones.
#[derive(Debug, Clone, Default)]
struct GrowingRows {
    /// `[batch, kv_heads, time, head_dim]`, followed by room for more along `time`. `None` before the first token.
    tensor: Option<Tensor<4>>,
    time: usize,
}

impl GrowingRows {
    /// Adds new rows, and returns all of them.
    fn add(&mut self, new: Tensor<4>) -> Tensor<4> {
        let [batch, heads, added, width] = new.dims();
        let before = self.time;
        self.time += added;
        let tensor = match self.tensor.take() {
            None => new,
            Some(tensor) if self.time <= tensor.dims()[2] => {
                let place = [0..batch, 0..heads, before..self.time, 0..width];
                tensor.slice_assign(place, new)
            }
            Some(tensor) => {
                let room = new.clone().narrow(2, 0, 1).zeros_like();
                let room = room.repeat_dim(2, (self.time / 4).max(MIN_ROOM));
                Tensor::cat(vec![tensor.narrow(2, 0, before), new, room], 2)
            }
        };
        // The clone must be dropped before the next token: rows are only written in place if nothing else has them.
        self.tensor = Some(tensor.clone());
        tensor.narrow(2, 0, self.time)
    }
}

/// Sequences of equal length, and the new tokens of each.
///
/// The stream of a forward has one row for each new token of each sequence, one sequence after the other. All
/// operations on the stream except attention treat rows separately, so unequal lengths need no padding.
#[derive(Debug)]
pub struct Continuation<'a> {
    /// The new tokens, `[batch, time]`.
    pub tokens: Tensor<2, Int>,
    /// The cache of the sequences.
    pub cache: &'a mut KeyValueCache,
}

/// The keys and values of one block, for all sequences of a forward.
#[derive(Debug, Clone)]
pub struct KeyValues(Form);

/// Where the keys and values of one block are.
#[derive(Debug, Clone)]
enum Form {
    /// In caches that grow.
    Growing(Vec<Group>),
    /// In tensors of fixed shapes.
    Fixed(Box<FixedRows>),
}

/// Earlier keys and values of one block in tensors of fixed shapes, and the new ones.
#[derive(Debug, Clone)]
pub(crate) struct FixedRows {
    /// Earlier keys and values, each `[batch, kv_heads, room, head_dim]`.
    pub(crate) kept: [Tensor<4>; 2],
    /// The keys that a query does not see, `[batch, 1, time, room + time]`.
    pub(crate) hidden: Tensor<4, Bool>,
    /// The same in a layer with a window.
    pub(crate) hidden_in_window: Option<Tensor<4, Bool>>,
    /// The keys and values of the new tokens, each `[batch, kv_heads, time, head_dim]`, once they are computed.
    pub(crate) new: Option<[Tensor<4>; 2]>,
}

/// The sequences of one cache in one block.
#[derive(Debug, Clone)]
struct Group {
    kept: Kept,
    batch: usize,
    /// The number of new tokens of each sequence.
    time: usize,
}

impl KeyValues {
    /// Returns the keys and values of a block in tensors of fixed shapes.
    pub(crate) fn fixed(rows: FixedRows) -> Self {
        Self(Form::Fixed(Box::new(rows)))
    }

    /// Returns the keys and values of the new tokens, if the rows are in tensors of fixed shapes and the block has run.
    pub(crate) fn into_new(self) -> Option<[Tensor<4>; 2]> {
        match self.0 {
            Form::Fixed(rows) => rows.new,
            Form::Growing(_) => None,
        }
    }

    /// Takes the keys and values of block `index` out of the caches.
    pub(crate) fn take(index: usize, continuations: &mut [Continuation<'_>]) -> Self {
        let group = |Continuation { tokens, cache }: &mut Continuation<'_>| {
            let [batch, time] = tokens.dims();
            if cache.blocks.len() <= index {
                cache.blocks.resize(index + 1, Kept::default());
            }
            let kept = take(&mut cache.blocks[index]);
            Group { kept, batch, time }
        };
        Self(Form::Growing(continuations.iter_mut().map(group).collect()))
    }

    /// Puts the keys and values of block `index` back.
    pub(crate) fn put(self, index: usize, continuations: &mut [Continuation<'_>]) {
        let Form::Growing(groups) = self.0 else {
            return;
        };
        for (group, continuation) in groups.into_iter().zip(continuations) {
            continuation.cache.blocks[index] = group.kept;
        }
    }
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

    /// Returns the part for `batch` sequences of `time` tokens, of which `start` is the first row.
    fn rows(&self, start: usize, batch: usize, time: usize) -> Self {
        let part = |x: &Tensor<4>| {
            let [outer, inner, heads, head_dim] = x.dims();
            let rows = x.clone().reshape([outer * inner, heads, head_dim]);
            let rows = rows.narrow(0, start, batch * time);
            rows.reshape([batch, time, heads, head_dim])
        };
        Self {
            queries: part(&self.queries),
            keys: part(&self.keys),
            values: part(&self.values),
        }
    }
}

/// How attention scores are computed from queries and keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scores {
    /// The factor on the product of query and key.
    pub(crate) scale: f64,
    /// The soft cap `c`, which changes a score `x` to `c tanh(x / c)`.
    pub(crate) softcap: Option<f64>,
    /// The number of tokens that a query sees, including its own. `None` for all.
    pub(crate) window: Option<usize>,
}

impl Scores {
    /// Returns the default: scores divided by the square root of `head_dim`, without a cap or a window.
    pub(crate) fn usual(head_dim: usize) -> Self {
        Self {
            scale: 1.0 / (head_dim as f64).sqrt(),
            softcap: None,
            window: None,
        }
    }
}

/// Bounds numbers to `cap tanh(x / cap)`, if there is a cap.
pub(crate) fn capped<const D: usize>(x: Tensor<D>, cap: Option<f64>) -> Tensor<D> {
    match cap {
        Some(cap) => x.div_scalar(cap).tanh().mul_scalar(cap),
        None => x,
    }
}

impl KeyValues {
    /// Adds new keys and values, and returns the attention of the new queries to them and to earlier ones,
    /// `[batch * time, dim]`. A query sees the keys of its own sequence up to its own position.
    pub(crate) fn attend(&mut self, new: Heads, scores: Scores) -> Tensor<2> {
        let groups = match &mut self.0 {
            Form::Growing(groups) => groups,
            Form::Fixed(rows) => return rows.attend(new, scores),
        };
        let mut start = 0;
        let attended = groups.iter_mut().map(|group| {
            let own = new.rows(start, group.batch, group.time);
            start += group.batch * group.time;
            attend_to(&mut group.kept, own, scores, None)
        });
        Tensor::cat(attended.collect(), 0)
    }
}

impl FixedRows {
    /// Returns the attention of new queries to the keys that they see, `[batch * time, dim]`, and keeps the new keys and
    /// values. Earlier and new keys are multiplied separately, so the earlier ones are not copied.
    fn attend(&mut self, new: Heads, scores: Scores) -> Tensor<2> {
        let [batch, time, heads, head_dim] = new.queries.dims();
        let [keys, values] = [new.keys.swap_dims(1, 2), new.values.swap_dims(1, 2)];
        let [kept_keys, kept_values] = self.kept.clone();
        let [_, kv_heads, room, _] = kept_keys.dims();
        let group = heads / kv_heads;
        let queries = new.queries.swap_dims(1, 2);
        let queries = queries.reshape([batch, kv_heads, group * time, head_dim]);
        let products = Tensor::cat(
            vec![
                queries.clone().matmul(kept_keys.transpose()),
                queries.matmul(keys.clone().transpose()),
            ],
            3,
        );
        let products = capped(products.mul_scalar(scores.scale), scores.softcap);
        let hidden = match (&self.hidden_in_window, scores.window) {
            (Some(hidden), Some(_)) => hidden.clone(),
            _ => self.hidden.clone(),
        };
        let hidden = hidden.repeat_dim(2, group);
        let hidden = hidden.expand([batch, kv_heads, group * time, room + time]);
        let products = products.mask_fill(hidden, f32::NEG_INFINITY);
        let weights = softmax(products, 3);
        let seen = weights.clone().narrow(3, 0, room).matmul(kept_values)
            + weights.narrow(3, room, time).matmul(values.clone());
        self.new = Some([keys, values]);
        seen.reshape([batch, heads, time, head_dim])
            .swap_dims(1, 2)
            .reshape([batch * time, heads * head_dim])
    }
}

/// Returns the attention of queries to the keys of whole sequences up to their own positions, `[batch * time, dim]`.
pub(crate) fn attend_before(new: Heads, scores: Scores) -> Tensor<2> {
    attend_to(&mut Kept::default(), new, scores, None)
}

/// Returns the attention of queries to the keys of whole sequences, `[batch * time, dim]`. `others` is a mask of keys that
/// a query does not see in addition to those after it, `[batch, 1, time, time]`.
pub(crate) fn attend_within(new: Heads, scores: Scores, others: Tensor<4, Bool>) -> Tensor<2> {
    // The mask includes the window.
    let scores = Scores {
        window: None,
        ..scores
    };
    attend_to(&mut Kept::default(), new, scores, Some(others))
}

/// Adds new keys and values to those of the same sequences, and returns the attention of the new queries to them all,
/// `[batch * time, dim]`. `others` is a mask of more keys that the queries do not see.
fn attend_to(
    kept: &mut Kept,
    new: Heads,
    scores: Scores,
    others: Option<Tensor<4, Bool>>,
) -> Tensor<2> {
    let [batch, time, heads, head_dim] = new.queries.dims();
    let [kept_keys, kept_values] = kept;
    let keys = kept_keys.add(new.keys.swap_dims(1, 2));
    let values = kept_values.add(new.values.swap_dims(1, 2));
    let [_, kv_heads, all, _] = keys.dims();
    let group = heads / kv_heads;
    // The queries of one key head are rows of one matrix, so keys are not repeated.
    let queries = new.queries.swap_dims(1, 2);
    let queries = queries.reshape([batch, kv_heads, group * time, head_dim]);
    let products = queries.matmul(keys.transpose()).mul_scalar(scores.scale);
    let mut products = capped(products, scores.softcap);
    let window = scores.window.filter(|window| *window < all);
    if time > 1 || window.is_some() {
        let hidden = hidden(time, all, window, &products);
        for hidden in hidden.into_iter().chain(others) {
            let hidden = hidden.repeat_dim(2, group);
            let hidden = hidden.expand([batch, kv_heads, group * time, all]);
            products = products.mask_fill(hidden, f32::NEG_INFINITY);
        }
    }
    let seen = softmax(products, 3).matmul(values);
    seen.reshape([batch, heads, time, head_dim])
        .swap_dims(1, 2)
        .reshape([batch * time, heads * head_dim])
}

/// Returns masks of the keys that a query does not see, for the last `time` queries and `all` keys, each
/// `[1, 1, time, all]`: the keys that come after the query, and those before its window.
fn hidden(
    time: usize,
    all: usize,
    window: Option<usize>,
    like: &Tensor<4>,
) -> Vec<Tensor<4, Bool>> {
    let device = like.device();
    let keys = Tensor::<1, Int>::arange(0..all as i64, &device).reshape([1, 1, 1, all]);
    let keys = keys.expand([1, 1, time, all]);
    let own = |start: i64| {
        let own = Tensor::<1, Int>::arange(start..start + time as i64, &device);
        own.reshape([1, 1, time, 1]).expand([1, 1, time, all])
    };
    let first = (all - time) as i64;
    let mut masks = vec![keys.clone().greater(own(first))];
    if let Some(window) = window {
        masks.push(keys.lower_equal(own(first - window as i64)));
    }
    masks
}
