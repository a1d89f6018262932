//! Checksums with which the ranks of a group detect bytes that have changed in transit.
//!
//! A rank that starts an operation announces the checksums of its data with its claim, and the receivers compare. The
//! group compares moved bytes in the buffers, unless the engine compares them while it copies. The engine compares the
//! addends of reductions. The result of an all-reduce, which is the same on all ranks, is announced with a later
//! operation of the group.
//!
//! The checksum has 64 bits. Different bytes have the same checksum with a probability of 2^-64, however many bits have
//! changed.

use std::collections::{BTreeMap, VecDeque};

use super::checksum::{Checksums, Reading, checksum};
use super::label::Label;
use super::operation::Operation;

/// What ranks compare with each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Check {
    /// Compares only the calls: kind, label, parts, reduction and root of each operation.
    #[default]
    Calls,
    /// Compares the calls and the bytes. A rank must receive exactly the bytes that the others sent. All ranks must get
    /// the same result of an all-reduce. A value that a rank holds between operations must not change. A difference is
    /// reported as an [`Error::Altered`](crate::Error::Altered), an
    /// [`Error::Disagreement`](crate::Error::Disagreement), an [`Error::AlteredAtRest`](crate::Error::AlteredAtRest) or
    /// an [`Error::Diverged`](crate::Error::Diverged).
    ///
    /// Costs one checksum of exchanged data on each side, and two of stored data. All ranks of a launch must request
    /// it.
    Agreement,
}

/// Maximum number of results and values that wait for announcements. A rank that discards a result never announces it.
const MOST_OPEN: usize = 4096;

/// The bit that marks the number of a value. Numbers of operations never get this large.
const VALUE: u64 = 1 << 63;

/// The checksums that a rank sends to all others with a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checks {
    /// The checksum of each part that the rank sends: all parts for rank 0 of the group, then for rank 1, and so on.
    /// Empty without [`Check::Agreement`].
    pub given: Vec<u64>,
    /// The checksums of the results that the rank has received since its last claim, and of values that all ranks hold.
    /// Each comes with the number of its operation or value.
    pub results: Vec<(u64, u64)>,
}

impl Checks {
    /// Joins the checksums that the ranks have announced for their pieces of part `part` of `num_parts` on rank `to` of
    /// the group. Returns `None` if any rank has announced none.
    pub fn joined<'a>(
        told: impl Iterator<Item = (&'a Self, usize)>,
        (to, num_parts): (usize, usize),
        part: usize,
    ) -> Option<Checksums> {
        let pieces = told.map(|(checks, len)| {
            let piece = *checks.given.get(to * num_parts + part)?;
            Some((len, piece))
        });
        let pieces: Option<Vec<_>> = pieces.collect();
        pieces.map(Checksums::of_pieces)
    }

    /// Returns the checksums that the rank has announced for rank `to`, one for each of its parts; `None` if it has
    /// announced none.
    pub fn told_to(&self, to: usize, num_parts: usize) -> Option<&[u64]> {
        let start = to * num_parts;
        self.given.get(start..start + num_parts)
    }

    /// Compares the parts that rank `to` of the group has received from a rank with that rank's announced checksums.
    /// Returns the index of the first part that differs; `None` if none differs or the rank has announced no checksums.
    pub fn first_altered<'a>(
        &self,
        to: usize,
        parts: impl ExactSizeIterator<Item = &'a [u8]>,
    ) -> Option<usize> {
        let told = self.told_to(to, parts.len())?;
        let mut pairs = told.iter().zip(parts);
        pairs.position(|(told, bytes)| *told != checksum(bytes))
    }
}

/// One rank's view of the results and values that must be the same on all ranks of a group.
#[derive(Debug, Default)]
pub struct Replicas {
    /// Checksums that this rank has yet to announce.
    untold: Vec<(u64, u64)>,
    /// Checksums that some ranks have yet to announce, by the number of the operation or value.
    open: BTreeMap<u64, Open>,
}

#[derive(Debug)]
struct Open {
    held: Option<Held>,
    /// For each rank, its announced checksums that have yet to be compared, oldest first. A value may be announced
    /// again before all ranks have announced it.
    checksums: Vec<VecDeque<u64>>,
}

impl Open {
    /// Removes and returns the oldest checksum of each rank, once every rank has announced one.
    fn take(&mut self) -> Option<Vec<u64>> {
        let is_there = self.checksums.iter().all(|told| !told.is_empty());
        let mut told = self.checksums.iter_mut();
        is_there.then(|| told.by_ref().filter_map(VecDeque::pop_front).collect())
    }
}

/// Something that must be the same on all ranks of a group.
#[derive(Debug, Clone, PartialEq)]
pub enum Held {
    /// The result of an operation.
    Result(Operation),
    /// Another value, with its description.
    Value(Label),
}

/// A disagreement among the ranks of a group.
#[derive(Debug, PartialEq)]
pub struct Difference {
    /// The result or value that differs; `None` if this rank does not hold it.
    pub held: Option<Held>,
    /// The ranks of the group that differ; all if no majority agrees.
    pub ranks: Vec<usize>,
}

impl Replicas {
    /// Keeps the checksums of the result of an operation, one for each part, to be announced as one checksum.
    pub fn hold(&mut self, operation: &Operation, size: usize, checksums: &[Checksums]) {
        let mut together = Reading::default();
        let parts = checksums.iter().map(Checksums::together);
        parts.for_each(|part| together.update(&part.to_le_bytes()));
        let held = Held::Result(operation.clone());
        self.keep((operation.sequence, together.finalize()), size, held);
    }

    /// Keeps the checksum of a value, to be announced. `told` has the value's number, which must be the same on all
    /// ranks, and the checksum. A value and an operation may have the same number.
    pub fn hold_value(&mut self, told: (u64, u64), size: usize, what: Label) {
        let (number, checksum) = told;
        self.keep((number | VALUE, checksum), size, Held::Value(what));
    }

    fn keep(&mut self, told: (u64, u64), size: usize, held: Held) {
        self.untold.push(told);
        self.open(told.0, size).held = Some(held);
    }

    /// Takes the checksums that this rank has yet to announce.
    pub fn take_untold(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.untold)
    }

    /// Processes the checksums that a rank has announced and returns the first difference.
    pub fn hear(&mut self, from: usize, size: usize, results: &[(u64, u64)]) -> Option<Difference> {
        let mut found = None;
        for (sequence, checksum) in results {
            let open = self.open(*sequence, size);
            open.checksums[from].push_back(*checksum);
            let Some(told) = open.take() else { continue };
            let held = if open.checksums.iter().all(VecDeque::is_empty) {
                self.open.remove(sequence).and_then(|closed| closed.held)
            } else {
                open.held.clone()
            };
            let ranks = minority(&told);
            if !ranks.is_empty() {
                found = found.or(Some(Difference { held, ranks }));
            }
        }
        found
    }

    fn open(&mut self, sequence: u64, size: usize) -> &mut Open {
        if !self.open.contains_key(&sequence) && self.open.len() == MOST_OPEN {
            self.open.pop_first();
        }
        self.open.entry(sequence).or_insert_with(|| Open {
            held: None,
            checksums: vec![VecDeque::new(); size],
        })
    }
}

/// Returns the ranks that differ from the majority; all ranks if no majority agrees.
fn minority(told: &[u64]) -> Vec<usize> {
    let count = |one: u64| told.iter().filter(|other| **other == one).count();
    let most = told
        .iter()
        .copied()
        .find(|one| 2 * count(*one) > told.len());
    let ranks = told.iter().enumerate();
    let ranks = ranks.filter(|(_, checksum)| Some(**checksum) != most);
    ranks.map(|(rank, _)| rank).collect()
}

#[cfg(test)]
mod tests {
    use super::super::operation::OperationKind;
    use super::*;

    fn operation(sequence: u64) -> Operation {
        Operation {
            kind: OperationKind::AllReduce,
            label: "x".into(),
            group: "world".into(),
            sequence,
        }
    }

    #[test]
    fn a_rank_with_a_differing_result_is_named_once_all_have_reported() {
        let mut replicas = Replicas::default();
        replicas.hold(&operation(3), 3, &[Checksums::of(&[5])]);
        let told = replicas.take_untold();
        assert_eq!(replicas.hear(0, 3, &told), None);
        // Another operation in between, on which all agree.
        for rank in 0..3 {
            assert_eq!(replicas.hear(rank, 3, &[(4, 9)]), None);
        }
        assert_eq!(replicas.hear(1, 3, &[(3, told[0].1 ^ 1)]), None);
        let difference = replicas.hear(2, 3, &told).unwrap();
        assert_eq!(difference.held, Some(Held::Result(operation(3))));
        assert_eq!(difference.ranks, [1]);
        assert!(replicas.open.is_empty() && replicas.take_untold().is_empty());
    }

    #[test]
    fn a_value_and_an_operation_of_one_number_are_not_compared() {
        let mut replicas = Replicas::default();
        replicas.hold_value((3, 8), 2, "a.bias".into());
        let told = replicas.take_untold();
        assert_eq!(replicas.hear(0, 2, &told), None);
        assert_eq!(replicas.hear(1, 2, &[(3, 9)]), None);
        let difference = replicas.hear(1, 2, &[(told[0].0, 9)]).unwrap();
        assert_eq!(difference.held, Some(Held::Value("a.bias".into())));
        assert_eq!(difference.ranks, [0, 1]);
    }

    #[test]
    fn pieces_have_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..100).collect();
        let told = |piece: &[u8]| Checks {
            given: vec![0, 0, 0, checksum(piece)],
            results: vec![],
        };
        let pieces = [told(&bytes[..41]), told(&[]), told(&bytes[41..])];
        let pieces = pieces.iter().zip([41, 0, 59]);
        let joined = Checks::joined(pieces, (1, 2), 1).unwrap();
        assert!(joined.are_of(&bytes) && joined.whole().is_none());
    }

    /// The last announcement before a pause is processed together with those after the pause.
    #[test]
    fn values_with_one_number_are_compared_in_the_order_reported() {
        let mut replicas = Replicas::default();
        let told = [(7, 1), (7, 2)];
        assert_eq!(replicas.hear(0, 2, &told), None);
        assert_eq!(replicas.hear(1, 2, &told), None);
        assert!(replicas.open.is_empty());
        assert_eq!(replicas.hear(0, 2, &told), None);
        assert!(replicas.hear(1, 2, &[(7, 1), (7, 3)]).is_some());
    }

    #[test]
    fn of_two_ranks_that_differ_both_are_named() {
        assert_eq!(minority(&[1, 2]), [0, 1]);
        assert_eq!(minority(&[1, 1, 2, 2]), [0, 1, 2, 3]);
        assert_eq!(minority(&[2, 1, 2]), [1]);
        assert!(minority(&[7]).is_empty());
    }

    #[test]
    fn unreported_results_take_bounded_memory() {
        let mut replicas = Replicas::default();
        for sequence in 0..2 * MOST_OPEN as u64 {
            replicas.hold(&operation(sequence), 2, &[]);
            let told = replicas.take_untold();
            assert_eq!(replicas.hear(0, 2, &told), None);
        }
        assert_eq!(replicas.open.len(), MOST_OPEN);
    }
}
