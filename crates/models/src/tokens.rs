//! Tokens, and the batches that they are cut into.

use std::hash::Hasher;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use siphasher::sip::SipHasher13;

/// A prime, so that the synthetic tokens visit the whole vocabulary.
const SYNTHETIC_STRIDE: usize = 7919;

/// An endless sequence of tokens.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum TokenStream {
    /// Token `i` is `i * 7919` modulo the vocabulary: enough to compare the
    /// arithmetic of two programs, nothing to learn from.
    Synthetic {
        /// Number of different tokens.
        vocab: usize,
    },
    /// Text, from the start again after its last token.
    Text(TokenRange),
    /// Text of which each row is a window, drawn at random. Which one depends on the seed and the number of the row alone, so
    /// that a run which goes on draws the windows that it would have drawn.
    Windows {
        /// The tokens.
        tokens: TokenRange,
        /// What the windows are drawn by.
        seed: u64,
    },
}

/// A part of some tokens that others may hold parts of too; it is never empty.
#[derive(Clone, Debug)]
pub struct TokenRange {
    tokens: SharedTokens,
    range: Range<usize>,
}

/// Tokens in as few bytes as they need.
#[derive(Clone, Debug)]
enum SharedTokens {
    Bytes(Arc<[u8]>),
    Ids(Arc<[u32]>),
}

impl TokenRange {
    /// Returns the range `range` of bytes, each of which is a token; `None` if it is empty or reaches too far.
    #[must_use]
    pub fn of_bytes(bytes: Arc<[u8]>, range: Range<usize>) -> Option<Self> {
        let is_valid = !range.is_empty() && range.end <= bytes.len();
        let tokens = SharedTokens::Bytes(bytes);
        is_valid.then_some(Self { tokens, range })
    }

    /// Returns all of the ids of a tokenizer; `None` if there are none.
    #[must_use]
    pub fn of_ids(ids: Arc<[u32]>) -> Option<Self> {
        let range = 0..ids.len();
        let tokens = SharedTokens::Ids(ids);
        (!range.is_empty()).then_some(Self { tokens, range })
    }

    /// Returns the number of tokens, at least one.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.range.len()
    }

    /// Returns the token at a position, from the start again after the last one.
    #[must_use]
    pub fn token(&self, index: usize) -> i64 {
        let index = self.range.start + index % self.num_tokens();
        match &self.tokens {
            SharedTokens::Bytes(bytes) => i64::from(bytes[index]),
            SharedTokens::Ids(ids) => i64::from(ids[index]),
        }
    }

    /// Returns the bytes themselves; `None` of ids.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match &self.tokens {
            SharedTokens::Bytes(bytes) => Some(&bytes[self.range.clone()]),
            SharedTokens::Ids(_) => None,
        }
    }
}

impl TokenStream {
    /// Returns the token at a position.
    #[must_use]
    pub fn token(&self, index: usize) -> i64 {
        match self {
            Self::Synthetic { vocab } => (index % vocab * SYNTHETIC_STRIDE % vocab) as i64,
            Self::Text(tokens) | Self::Windows { tokens, .. } => tokens.token(index),
        }
    }

    /// Returns the number of tokens before the stream repeats itself, if it does.
    #[must_use]
    pub fn period(&self) -> Option<usize> {
        match self {
            Self::Synthetic { .. } => None,
            Self::Text(tokens) | Self::Windows { tokens, .. } => Some(tokens.num_tokens()),
        }
    }

    /// Returns the position of the first of the `seq` tokens of a row, counted over all steps.
    fn start_of(&self, row: usize, seq: usize) -> usize {
        match self {
            Self::Synthetic { .. } | Self::Text(_) => row * seq,
            Self::Windows { tokens, seed } => {
                // Every window has a token after its last one.
                let windows = tokens.num_tokens().saturating_sub(seq).max(1);
                let mut drawn = SipHasher13::new_with_keys(*seed, 0);
                drawn.write(&(row as u64).to_le_bytes());
                (drawn.finish() % windows as u64) as usize
            }
        }
    }
}

/// A stream cut into batches of rows.
///
/// Row `r` of step `s` is the `seq` tokens from position `(s * batch + r) * seq`,
/// so that every token is an input once before the stream starts again; or it is the
/// window that [`TokenStream::Windows`] draws for that number `s * batch + r`.
#[derive(Clone, Debug)]
pub struct Batches {
    /// The stream that the tokens come from.
    pub stream: TokenStream,
    /// Rows of a step.
    pub batch: usize,
    /// Tokens of a row.
    pub seq: usize,
}

/// Some rows of a step, with the target of every token: the token after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    inputs: Vec<i64>,
    targets: Vec<i64>,
    num_rows: usize,
}

impl Batches {
    /// Returns the rows `rows` of the batch of a step.
    #[must_use]
    pub fn rows(&self, step: usize, rows: Range<usize>) -> Rows {
        let first = step * self.batch;
        let starts = rows.map(|row| self.stream.start_of(first + row, self.seq));
        self.rows_from(&starts.collect::<Vec<_>>(), self.seq)
    }

    /// Returns the number of rows of `seq` tokens in which no token is twice, and no target; `None` if the stream does not
    /// repeat itself.
    #[must_use]
    pub fn num_whole_rows(&self) -> Option<usize> {
        Some(self.num_targets()? / self.seq)
    }

    /// Returns the tokens behind the [whole rows](Self::num_whole_rows) as a shorter row; `None` if there are none.
    #[must_use]
    pub fn rest(&self) -> Option<Rows> {
        let targets = self.num_targets()?;
        let len = targets % self.seq;
        (len > 0).then(|| self.rows_from(&[targets - len], len))
    }

    /// Returns the number of tokens that follow another one.
    fn num_targets(&self) -> Option<usize> {
        Some(self.stream.period()?.saturating_sub(1))
    }

    /// Returns rows of `seq` tokens that begin at these positions.
    fn rows_from(&self, starts: &[usize], seq: usize) -> Rows {
        let tokens = |shift: usize| -> Vec<i64> {
            let rows = starts.iter().map(|start| start + shift);
            let positions = rows.flat_map(|start| start..start + seq);
            positions
                .map(|position| self.stream.token(position))
                .collect()
        };
        Rows {
            inputs: tokens(0),
            targets: tokens(1),
            num_rows: starts.len(),
        }
    }
}

impl Rows {
    /// Returns the input tokens, row after row.
    #[must_use]
    pub fn inputs(&self) -> &[i64] {
        &self.inputs
    }

    /// Returns the targets, row after row.
    #[must_use]
    pub fn targets(&self) -> &[i64] {
        &self.targets
    }

    /// Inputs and targets as tensors `[rows, seq]`.
    #[must_use]
    pub fn to_tensors(&self, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let tensor = |tokens: &[i64]| {
            let shape = [self.num_rows, tokens.len() / self.num_rows.max(1)];
            Tensor::from_data(TensorData::new(tokens.to_vec(), shape), device)
        };
        (tensor(&self.inputs), tensor(&self.targets))
    }
}
