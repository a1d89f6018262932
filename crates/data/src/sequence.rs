use std::ops::Range;

use crate::encoding::Encoded;

/// A sequence of input tokens with their targets. All vectors have one element per input.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sequence {
    /// The inputs.
    pub inputs: Vec<u32>,
    /// The successor of each input in its document.
    pub targets: Vec<u32>,
    /// Whether the loss includes the target. At least one is true, and those of padding are false.
    pub learned: Vec<bool>,
    /// The document of each input, numbered from 1 in this sequence; 0 for padding. An input should attend only to
    /// inputs with the same number.
    pub segments: Vec<u32>,
    /// The position of each input in its segment, from 0.
    pub positions: Vec<u32>,
}

impl Sequence {
    pub(crate) fn len(&self) -> usize {
        self.inputs.len()
    }

    /// Appends pairs of a document as a new segment.
    pub(crate) fn push(&mut self, document: &Encoded, pairs: Range<usize>) {
        let segment = self.segments.last().copied().unwrap_or(0) + 1;
        self.positions.extend(0..pairs.len() as u32);
        self.segments.resize(self.len() + pairs.len(), segment);
        self.inputs.extend(&document.tokens[pairs.clone()]);
        let next = pairs.start + 1..pairs.end + 1;
        self.targets.extend(&document.tokens[next.clone()]);
        self.learned.extend(&document.learned[next]);
    }

    /// Fills the sequence to its length.
    pub(crate) fn pad(&mut self, seq: usize, token: u32) {
        let missing = seq.saturating_sub(self.len());
        self.positions.extend(0..missing as u32);
        self.inputs.resize(seq, token);
        self.targets.resize(seq, token);
        self.learned.resize(seq, false);
        self.segments.resize(seq, 0);
    }

    pub(crate) fn is_useful(&self) -> bool {
        self.learned.contains(&true)
    }
}
