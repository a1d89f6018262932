//! The tokens of a forward, and their positions.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::tensor::{Bool, Int, Tensor};
use burn_fsdp_kernels::{DocumentHeads, causal_attention, document_attention, other_documents};

/// The tokens from which a model predicts, `[batch, time]`.
///
/// A sequence is one document, unless the tokens have [positions](Self::in_documents).
#[derive(Debug, Clone)]
pub struct InputTokens {
    pub(crate) tokens: Tensor<2, Int>,
    pub(crate) positions: Option<Tensor<2, Int>>,
}

impl InputTokens {
    /// Returns tokens of several documents that share sequences. `positions` are those of the tokens in their documents,
    /// counted from 0, `[batch, time]`. Every document is computed as if it were alone in a sequence of `time` tokens: a
    /// token attends only to its own document.
    ///
    /// A position is the number of tokens of the same document before a token. Positions that are larger than the number
    /// of tokens before them in the sequence are those of other documents, and the results are not defined.
    #[must_use]
    pub fn in_documents(tokens: Tensor<2, Int>, positions: Tensor<2, Int>) -> Self {
        Self {
            tokens,
            positions: Some(positions),
        }
    }
}

impl From<Tensor<2, Int>> for InputTokens {
    fn from(tokens: Tensor<2, Int>) -> Self {
        Self {
            tokens,
            positions: None,
        }
    }
}

impl From<(Tensor<2, Int>, Option<Tensor<2, Int>>)> for InputTokens {
    fn from((tokens, positions): (Tensor<2, Int>, Option<Tensor<2, Int>>)) -> Self {
        Self { tokens, positions }
    }
}

/// The positions of tokens `[batch, time]`.
#[derive(Debug, Clone, Copy)]
pub enum Positions<'a> {
    /// Those along `time` in every sequence, in parts that each end at the end of a sequence.
    Runs(&'a [Range<usize>]),
    /// Those of each token in its document, `[batch, time]`. Sequences have several documents.
    Documents(&'a Tensor<2, Int>),
    /// Those of each token in its sequence, `[batch, time]`. Earlier tokens of the sequences are in a cache. Rotations
    /// are those of short sequences.
    Cached(&'a Tensor<2, Int>),
}

/// The documents of sequences, for attention.
#[derive(Debug, Clone)]
pub(crate) struct DocumentParts {
    positions: Tensor<2, Int>,
    /// Masks of the keys before those that a query sees, without and with a window. The first layer that needs one makes
    /// it for all.
    hidden: Arc<[OnceLock<Tensor<4, Bool>>; 2]>,
}

impl DocumentParts {
    /// Returns the documents, if sequences have several.
    pub(crate) fn of(positions: Positions<'_>) -> Option<Self> {
        match positions {
            Positions::Runs(_) | Positions::Cached(_) => None,
            Positions::Documents(positions) => Some(Self {
                positions: positions.clone(),
                hidden: Arc::default(),
            }),
        }
    }

    /// Returns the attention of packed queries, keys and values, `[batch * time, 3 * dim]`, within documents. A query
    /// sees at most `window` tokens, including its own.
    pub(crate) fn attend(
        &self,
        packed: Tensor<2>,
        heads: usize,
        window: Option<usize>,
    ) -> Tensor<2> {
        let heads = DocumentHeads {
            heads,
            reach: window,
        };
        document_attention(packed, self.positions.clone(), heads)
    }

    /// Returns a mask of the keys before those that a query sees, `[batch, 1, time, time]`. All calls with a window must
    /// have the same one.
    pub(crate) fn hidden(&self, window: Option<usize>) -> Tensor<4, Bool> {
        let known = &self.hidden[usize::from(window.is_some())];
        let made = known.get_or_init(|| other_documents(self.positions.clone(), window));
        made.clone()
    }
}

/// The sequences of a forward.
#[derive(Debug, Clone)]
pub struct Sequences {
    batch: usize,
    /// Their documents, if they have several.
    documents: Option<DocumentParts>,
}

impl Sequences {
    /// Returns `batch` sequences of one document each.
    pub(crate) fn whole(batch: usize) -> Self {
        Self {
            batch,
            documents: None,
        }
    }

    pub(crate) fn new(batch: usize, positions: Positions<'_>) -> Self {
        Self {
            batch,
            documents: DocumentParts::of(positions),
        }
    }

    pub(crate) fn batch(&self) -> usize {
        self.batch
    }

    /// Returns the attention of packed queries, keys and values, `[batch * time, 3 * dim]`.
    pub(crate) fn attend(&self, packed: Tensor<2>, heads: usize) -> Tensor<2> {
        match &self.documents {
            Some(documents) => documents.attend(packed, heads, None),
            None => causal_attention(packed, self.batch, heads),
        }
    }
}
