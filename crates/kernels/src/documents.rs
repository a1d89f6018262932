//! The sizes of attention within documents.

/// The heads of an attention within documents.
#[derive(Clone, Copy, Debug)]
pub struct DocumentHeads {
    /// The number of heads of queries, of keys, and of values.
    pub heads: usize,
    /// The number of tokens that a query attends to at most, including its own; `None` for all of its document.
    pub reach: Option<usize>,
}
