//! Generation with tensors of fixed shapes, so that one compiled graph runs many steps.

use burn::tensor::{Bool, Int, Tensor};

use crate::key_values::{FixedRows, KeyValues};
use crate::language_model::LanguageModel;
use crate::positions::Positions;

/// New tokens of `batch` sequences, and the keys and values of earlier tokens, for [`decode`].
///
/// Earlier keys are in `room` columns of a sequence, in any order. A mask says which of them a new token sees, so columns
/// may be empty, and sequences of unequal lengths share one batch.
#[derive(Debug, Clone)]
pub struct DecodeInputs {
    /// The new tokens, `[batch, time]`.
    pub tokens: Tensor<2, Int>,
    /// The position of each new token in its sequence, counted from 0, `[batch, time]`.
    pub positions: Tensor<2, Int>,
    /// The index among all `batch * time` new tokens of the last one of each sequence, `[batch]`.
    pub last: Tensor<1, Int>,
    /// The keys that a new token does not see, `[batch, 1, time, room + time]`: earlier ones, then new ones. Each token
    /// must see at least its own key.
    pub hidden: Tensor<4, Bool>,
    /// The same mask for layers with a sliding window, if the model has such layers.
    pub hidden_in_window: Option<Tensor<4, Bool>>,
    /// The keys and the values of earlier tokens, for each block, each `[batch, kv_heads, room, head_dim]`. Values in
    /// empty columns must be finite.
    pub kept: Vec<[Tensor<4>; 2]>,
}

/// The result of [`decode`].
#[derive(Debug, Clone)]
pub struct Decoded {
    /// The logits of the token after the last one of each sequence, `[batch, vocab]`.
    pub logits: Tensor<2>,
    /// The keys and the values of the new tokens, for each block, each `[batch, kv_heads, time, head_dim]`.
    pub new: Vec<[Tensor<4>; 2]>,
}

/// Returns the logits of the token after each sequence, as [`LanguageModel::next_logits_of_each`] does, except for
/// rounding. It has no state, and its operations depend only on the shapes of its inputs.
///
/// The rotations of positions must not depend on the length of a sequence, see
/// [`ModelConfig::depends_on_length`](crate::ModelConfig::depends_on_length).
///
/// # Panics
///
/// If a shape is not the one stated, a token is not below the vocabulary size, or a position is not below the model's
/// maximum.
pub fn decode<M: LanguageModel>(model: &M, inputs: DecodeInputs) -> Decoded {
    let [batch, _] = inputs.tokens.dims();
    let device = inputs.tokens.device();
    let positions = Positions::Cached(&inputs.positions);
    let shared = model.shared(batch, positions, &device);
    let mut x = model.embed(inputs.tokens, positions);
    let mut new = Vec::new();
    for (block, kept) in model.blocks().iter().zip(inputs.kept) {
        let mut rows = KeyValues::fixed(FixedRows {
            kept,
            hidden: inputs.hidden.clone(),
            hidden_in_window: inputs.hidden_in_window.clone(),
            new: None,
        });
        x = M::run_block(block, x, &shared, Some(&mut rows));
        new.extend(rows.into_new());
    }
    let logits = model.head(x.select(0, inputs.last));
    Decoded { logits, new }
}
