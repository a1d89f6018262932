//! Messages between ranks about the order of operations.

use super::operation::Operation;

/// The operation that a rank wants next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) operation: Operation,
    /// The place where the order lacks the operation; `None` if the order contains it, or at the end of backward.
    pub(crate) place: Option<usize>,
}

impl Wish {
    /// Size in bytes of an encoded wish.
    const LEN: usize = 3 * size_of::<u64>();

    /// Encodes the wish as a fixed number of bytes.
    pub(crate) fn encode(self) -> Vec<u8> {
        let (kind, unit) = match self.operation {
            Operation::UnshardForward(unit) => (0u64, unit),
            Operation::UnshardBackward(unit) => (1, unit),
            Operation::Reduce(unit) => (2, unit),
            Operation::Finish => (3, 0),
        };
        let place = self.place.map_or(u64::MAX, |place| place as u64);
        [kind, unit as u64, place].map(u64::to_le_bytes).concat()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let number = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * index..8 * (index + 1)]);
            u64::from_le_bytes(word)
        };
        let unit = number(1) as usize;
        Self {
            operation: match number(0) {
                0 => Operation::UnshardForward(unit),
                1 => Operation::UnshardBackward(unit),
                2 => Operation::Reduce(unit),
                _ => Operation::Finish,
            },
            place: (number(2) != u64::MAX).then(|| number(2) as usize),
        }
    }
}

/// A rank's message in the last exchange of a step.
pub(crate) struct Note {
    /// The encoded [`Wish`] of the rank.
    pub(crate) wish: Vec<u8>,
    /// The marks of the rank, one byte for each place in the order.
    pub(crate) marks: Vec<u8>,
    /// The flags of the parameters kept whole, one byte each: 1 if the rank has a gradient.
    pub(crate) used: Vec<u8>,
    /// The tags of the gradients of parameters kept whole; only in audited steps.
    pub(crate) tags: Vec<u8>,
    /// The numbers of the rank's gradients; only in audited steps.
    pub(crate) told: Vec<u8>,
}

/// The lengths of those parts of a note that have the same length on all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NoteLengths {
    /// The number of places in the order.
    pub(crate) places: usize,
    /// The number of parameters kept whole.
    pub(crate) whole: usize,
}

impl Note {
    /// Returns the lengths of the note's parts, equal on all ranks.
    pub(crate) fn lengths(&self) -> NoteLengths {
        NoteLengths {
            places: self.marks.len(),
            whole: self.used.len(),
        }
    }

    pub(crate) fn join(self) -> Vec<u8> {
        [self.wish, self.marks, self.used, self.tags, self.told].concat()
    }

    /// Returns the flags and the tags, which are the note of the reduction itself.
    pub(crate) fn of_reduction(&self) -> Vec<u8> {
        [&self.used[..], &self.tags].concat()
    }

    pub(crate) fn split_all(notes: Vec<Vec<u8>>, lengths: NoteLengths) -> Vec<Self> {
        let notes = notes.into_iter();
        notes.map(|note| Self::split(note, lengths)).collect()
    }

    fn split(mut bytes: Vec<u8>, NoteLengths { places, whole }: NoteLengths) -> Self {
        let after = |bytes: &mut Vec<u8>, len: usize| bytes.split_off(len.min(bytes.len()));
        let mut marks = after(&mut bytes, Wish::LEN);
        let mut used = after(&mut marks, places);
        let mut tags = after(&mut used, whole);
        let told = after(&mut tags, whole * size_of::<u64>());
        Self {
            wish: bytes,
            marks,
            used,
            tags,
            told,
        }
    }
}
