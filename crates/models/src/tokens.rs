//! Tokens, and the batches into which they are divided.

use std::hash::Hasher;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use siphasher::sip::SipHasher13;

/// A prime, so the synthetic tokens visit the whole vocabulary unless its size is a multiple.
const SYNTHETIC_STRIDE: usize = 7919;

/// An endless sequence of tokens.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum TokenStream {
    /// Token `i` is `i * 7919` modulo the vocabulary size. This suffices to compare the arithmetic of two programs,
    /// but there is nothing to learn.
    Synthetic {
        /// Vocabulary size.
        vocab: usize,
    },
    /// Text that wraps around after its last token.
    Text(TokenRange),
    /// Text, with a random window for each row. The window depends only on the seed and the row number, so a resumed
    /// run draws the same windows.
    Windows {
        /// The tokens.
        tokens: TokenRange,
        /// The seed of the windows.
        seed: u64,
    },
}

/// A range of tokens that may be shared with other ranges. It is never empty.
#[derive(Clone, Debug)]
pub struct TokenRange {
    tokens: SharedTokens,
    range: Range<usize>,
}

/// Tokens in as few bytes as possible.
#[derive(Clone, Debug)]
enum SharedTokens {
    Bytes(Arc<[u8]>),
    Ids(Arc<[u32]>),
}

impl TokenRange {
    /// Returns a range of bytes, each of which is a token. Returns `None` if the range is empty or out of bounds.
    #[must_use]
    pub fn of_bytes(bytes: Arc<[u8]>, range: Range<usize>) -> Option<Self> {
        let is_valid = !range.is_empty() && range.end <= bytes.len();
        let tokens = SharedTokens::Bytes(bytes);
        is_valid.then_some(Self { tokens, range })
    }

    /// Returns the range of all `ids` of a tokenizer, or `None` if there are none.
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

    /// Returns the token at a position. Positions past the last token wrap around.
    #[must_use]
    pub fn token(&self, index: usize) -> i64 {
        let index = self.range.start + index % self.num_tokens();
        match &self.tokens {
            SharedTokens::Bytes(bytes) => i64::from(bytes[index]),
            SharedTokens::Ids(ids) => i64::from(ids[index]),
        }
    }

    /// Returns the bytes, or `None` if the tokens are ids.
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

    /// Returns the number of tokens of a text, after which the stream starts again. Returns `None` for synthetic
    /// tokens.
    #[must_use]
    pub fn period(&self) -> Option<usize> {
        match self {
            Self::Synthetic { .. } => None,
            Self::Text(tokens) | Self::Windows { tokens, .. } => Some(tokens.num_tokens()),
        }
    }

    /// Returns the position of the first of a row's `seq` tokens. Rows are counted over all steps.
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

/// A stream divided into batches of rows.
///
/// Row `r` of step `s` consists of the `seq` tokens from position `(s * batch + r) * seq`, so every token is an input
/// once before the stream starts again. With [`TokenStream::Windows`], it is the window for the number
/// `s * batch + r`.
#[derive(Clone, Debug)]
pub struct Batches {
    /// The stream that the tokens come from.
    pub stream: TokenStream,
    /// Number of rows of a step.
    pub batch: usize,
    /// Number of tokens of a row.
    pub seq: usize,
}

/// Some rows of a step. The target of every token is the next token.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    inputs: Vec<i64>,
    targets: Vec<i64>,
    /// A weight for each target, if they differ.
    weights: Option<Vec<f32>>,
    /// The position of each input in its document, if a row has several.
    positions: Option<Vec<i64>>,
    num_rows: usize,
}

impl Batches {
    /// Returns the given rows of a step's batch.
    #[must_use]
    pub fn rows(&self, step: usize, rows: Range<usize>) -> Rows {
        let first = step * self.batch;
        let starts = rows.map(|row| self.stream.start_of(first + row, self.seq));
        self.rows_from(&starts.collect::<Vec<_>>(), self.seq)
    }

    /// Returns the number of rows of `seq` tokens in one pass over the stream, in which no token and no target occurs
    /// twice. Returns `None` for synthetic tokens.
    #[must_use]
    pub fn num_whole_rows(&self) -> Option<usize> {
        Some(self.num_targets()? / self.seq)
    }

    /// Returns the tokens after the [whole rows](Self::num_whole_rows) as a shorter row. Returns `None` if there are
    /// none, and for synthetic tokens.
    #[must_use]
    pub fn rest(&self) -> Option<Rows> {
        let targets = self.num_targets()?;
        let len = targets % self.seq;
        (len > 0).then(|| self.rows_from(&[targets - len], len))
    }

    /// Returns the number of tokens in one pass that have a predecessor.
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
            weights: None,
            positions: None,
            num_rows: starts.len(),
        }
    }
}

impl Rows {
    /// Returns rows of inputs with their targets, row after row.
    #[must_use]
    pub fn new(inputs: Vec<i64>, targets: Vec<i64>, num_rows: usize) -> Self {
        Self {
            inputs,
            targets,
            weights: None,
            positions: None,
            num_rows,
        }
    }

    /// Sets the weight of each target in the loss, row after row. They must be as many as the targets.
    #[must_use]
    pub fn weighted(self, weights: Vec<f32>) -> Self {
        let weights = Some(weights);
        Self { weights, ..self }
    }

    /// Sets the position of each input in its document, row after row. They must be as many as the inputs. The documents
    /// of a row are then computed separately.
    #[must_use]
    pub fn in_documents(self, positions: Vec<i64>) -> Self {
        let positions = Some(positions);
        Self { positions, ..self }
    }

    /// Returns the number of targets that count in the loss: those whose weight is not zero.
    #[must_use]
    pub fn num_learned(&self) -> usize {
        let learned = |weights: &Vec<f32>| weights.iter().filter(|weight| **weight != 0.0).count();
        self.weights.as_ref().map_or(self.targets.len(), learned)
    }

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

    /// Returns inputs and targets as tensors `[rows, seq]`.
    #[must_use]
    pub fn to_tensors(&self, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let tensor = |tokens: &[i64]| {
            Tensor::from_data(TensorData::new(tokens.to_vec(), self.shape()), device)
        };
        (tensor(&self.inputs), tensor(&self.targets))
    }

    /// Returns the positions of the inputs in their documents as a tensor `[rows, seq]`, or `None` if a row is one
    /// document.
    #[must_use]
    pub fn positions_on(&self, device: &Device) -> Option<Tensor<2, Int>> {
        let positions = self.positions.clone()?;
        Some(Tensor::from_data(
            TensorData::new(positions, self.shape()),
            device,
        ))
    }

    /// Returns the weights of the targets as a tensor `[rows, seq]`, or `None` if all count alike.
    #[must_use]
    pub fn weights_on(&self, device: &Device) -> Option<Tensor<2>> {
        let weights = self.weights.clone()?;
        let data = TensorData::new(weights, self.shape());
        Some(Tensor::from_data(data, (device, DType::F32)))
    }

    fn shape(&self) -> [usize; 2] {
        [self.num_rows, self.inputs.len() / self.num_rows.max(1)]
    }
}
