//! Checksums by which the ranks of a group find bytes that have changed on their way.
//!
//! A rank that starts an operation tells the checksums of what it gives with its claim. Who gets it compares: what
//! is put side by side, the group does, in the buffers, or the engine while it copies it; what is combined, the engine does,
//! in the addends. The result of an all-reduce, which is the same on all ranks, is told with a later operation of the group.
//!
//! The checksum has 64 bits: that other bytes have the same is as likely as one in 2^64, however many bits have changed.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::checksum::{Checksums, Reading, checksum};
use crate::operation::Signature;
use crate::{Buffer, Label, Operation, Seal, Source};

/// What ranks compare of each other, beyond the labels and lengths that they always do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Check {
    /// The calls alone: kind, label, parts, reduction and root of each operation.
    #[default]
    Calls,
    /// And the bytes: what a rank gets is what the others gave, to the bit, what all ranks get of an all-reduce is the
    /// same, and what a rank holds from one operation to another stays as it was written. A difference is an
    /// [`Error::Altered`](crate::Error::Altered), an [`Error::Disagreement`](crate::Error::Disagreement), an
    /// [`Error::AlteredAtRest`](crate::Error::AlteredAtRest) or an [`Error::Diverged`](crate::Error::Diverged).
    ///
    /// Costs a checksum of what travels, on both sides, and two of what lies. All ranks of a launch must ask for it.
    Agreement,
}

/// The number of results that wait for other ranks' at most: those that a rank has discarded never come.
const MOST_OPEN: usize = 4096;

/// The bit of a number that says that it is a value's: no group comes to so many operations.
const VALUE: u64 = 1 << 63;

/// The checksums that a rank tells all others with a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Checks {
    /// Of each part that the rank gives, for rank 0 of the group, then for rank 1, and so on. Empty without
    /// [`Check::Agreement`].
    pub(crate) given: Vec<u64>,
    /// Of results that the rank has got since its last claim, and of values that all ranks hold: the number of the
    /// operation or of the value, and the checksum.
    pub(crate) results: Vec<(u64, u64)>,
}

/// A part whose bytes are not those that a rank gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AlteredPart {
    /// The rank of the group that gave it.
    pub(crate) from: usize,
    /// Its index among the parts.
    pub(crate) part: usize,
    /// The seal that it was given with and what it is, if it was no longer that in the giver's memory when it was read.
    pub(crate) at_rest: Option<Arc<(Seal, Label)>>,
}

impl AlteredPart {
    /// Returns a part that has changed after it was given.
    pub(crate) fn on_its_way(from: usize, part: usize) -> Self {
        Self {
            from,
            part,
            at_rest: None,
        }
    }
}

impl Checks {
    /// Returns the checksums of what a rank gives each rank of a group. Of a source that is given whole, that of its seal
    /// `if trusts_seals`; otherwise all is read.
    pub(crate) fn of_given(
        signature: &Signature,
        (rank, size): (usize, usize),
        sources: &[Source],
        trusts_seals: bool,
    ) -> Vec<u64> {
        // Most operations give all ranks the same: that is read once.
        let mut last: Vec<Option<(Range<usize>, u64)>> = vec![None; sources.len()];
        let mut given = Vec::with_capacity(size * sources.len());
        for to in 0..size {
            let routes = signature.routes(rank, to);
            for (part, source) in sources.iter().enumerate() {
                let range = routes.get(part).map_or(0..0, |route| route.given.clone());
                let known = last[part].take().filter(|(known, _)| *known == range);
                let (range, checksum) = known.unwrap_or_else(|| {
                    let is_whole = range == (0..source.len());
                    let sealed = source.seal().filter(|_| trusts_seals && is_whole);
                    let told = sealed.and_then(|sealed| sealed.0.checksums.whole());
                    let read = || checksum(&source.as_bytes()[range.clone()]);
                    let told = told.unwrap_or_else(read);
                    (range, told)
                });
                given.push(checksum);
                last[part] = Some((range, checksum));
            }
        }
        given
    }

    /// Returns the checksums of what rank `to` of the group has of part `part` of `num_parts`, which the ranks have told in
    /// pieces; `None` if they have not.
    pub(crate) fn joined<'a>(
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

    /// Returns the checksums that the rank has told of what it gives rank `to`, one for each of its parts; `None` if it has
    /// told none.
    pub(crate) fn told_to(&self, to: usize, num_parts: usize) -> Option<&[u64]> {
        let start = to * num_parts;
        self.given.get(start..start + num_parts)
    }

    /// Compares what rank `to` of the group has of a rank, part by part, with what that rank has told. Returns the
    /// first part that differs.
    pub(crate) fn first_altered<'a>(
        &self,
        to: usize,
        parts: impl ExactSizeIterator<Item = &'a [u8]>,
    ) -> Option<usize> {
        let told = self.told_to(to, parts.len())?;
        let mut pairs = told.iter().zip(parts);
        pairs.position(|(told, bytes)| *told != checksum(bytes))
    }

    /// Compares what lies in the buffers of rank `to` with what rank `from` has told.
    pub(crate) fn first_misplaced(
        &self,
        signature: &Signature,
        (from, to): (usize, usize),
        buffers: &[Buffer],
    ) -> Option<AlteredPart> {
        let routes = signature.routes(from, to);
        if buffers.is_empty() || routes.is_empty() {
            return None;
        }
        let placed = buffers.iter().zip(routes);
        let placed = placed.map(|(buffer, route)| &buffer.as_ref()[route.placed]);
        let part = self.first_altered(to, placed)?;
        Some(AlteredPart::on_its_way(from, part))
    }
}

/// The results of a group that are the same on all its ranks, and other values that must be, as one rank knows them.
#[derive(Debug, Default)]
pub(crate) struct Replicas {
    /// What this rank has yet to tell.
    untold: Vec<(u64, u64)>,
    /// What not all ranks have told, by the number of the operation or of the value.
    open: BTreeMap<u64, Open>,
}

#[derive(Debug)]
struct Open {
    held: Option<Held>,
    /// What each rank has told and others have not yet, the earliest first: a value may be told again before all have.
    checksums: Vec<VecDeque<u64>>,
}

impl Open {
    /// Returns what all ranks have told, if the last of them has.
    fn take(&mut self) -> Option<Vec<u64>> {
        let is_there = self.checksums.iter().all(|told| !told.is_empty());
        let mut told = self.checksums.iter_mut();
        is_there.then(|| told.by_ref().filter_map(VecDeque::pop_front).collect())
    }
}

/// What all ranks of a group must hold alike.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Held {
    /// The result of an operation.
    Result(Operation),
    /// Another value, in words.
    Value(Label),
}

/// The ranks of a group that hold something else than most.
#[derive(Debug, PartialEq)]
pub(crate) struct Difference {
    /// What they hold, if this rank knows.
    pub(crate) held: Option<Held>,
    pub(crate) ranks: Vec<usize>,
}

impl Replicas {
    /// Keeps the checksums of the result of an operation, one for each part, to be told as one.
    pub(crate) fn hold(&mut self, operation: &Operation, size: usize, checksums: &[Checksums]) {
        let mut together = Reading::default();
        let parts = checksums.iter().map(Checksums::together);
        parts.for_each(|part| together.update(&part.to_le_bytes()));
        let held = Held::Result(operation.clone());
        self.keep((operation.sequence, together.finalize()), size, held);
    }

    /// Keeps the checksum of a value, to be told. Ranks tell of one value under one number, which is that of no operation.
    pub(crate) fn hold_value(&mut self, told: (u64, u64), size: usize, what: Label) {
        let (number, checksum) = told;
        self.keep((number | VALUE, checksum), size, Held::Value(what));
    }

    fn keep(&mut self, told: (u64, u64), size: usize, held: Held) {
        self.untold.push(told);
        self.open(told.0, size).held = Some(held);
    }

    /// Returns what this rank has yet to tell.
    pub(crate) fn take_untold(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.untold)
    }

    /// Hears what a rank has told; returns the first difference.
    pub(crate) fn hear(
        &mut self,
        from: usize,
        size: usize,
        results: &[(u64, u64)],
    ) -> Option<Difference> {
        let mut found = None;
        for (sequence, checksum) in results {
            let open = self.open(*sequence, size);
            open.checksums[from].push_back(*checksum);
            let Some(told) = open.take() else { continue };
            let held = match open.checksums.iter().all(VecDeque::is_empty) {
                true => self.open.remove(sequence).and_then(|closed| closed.held),
                false => open.held.clone(),
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

/// Returns the ranks that say something else than most: all of them, if no more than half say the same.
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
    use super::*;
    use crate::OperationKind;

    fn operation(sequence: u64) -> Operation {
        Operation {
            kind: OperationKind::AllReduce,
            label: "x".into(),
            group: "world".into(),
            sequence,
        }
    }

    #[test]
    fn the_rank_that_holds_another_result_is_named_when_all_have_told() {
        let mut replicas = Replicas::default();
        replicas.hold(&operation(3), 3, &[Checksums::of(&[5])]);
        let told = replicas.take_untold();
        assert_eq!(replicas.hear(0, 3, &told), None);
        // Another operation between, which all agree on.
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

    /// What was told last before a pause is heard with what comes after it.
    #[test]
    fn values_of_one_number_are_compared_in_the_order_in_which_they_are_told() {
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
    fn results_that_a_rank_never_tells_take_no_more_room_in_time() {
        let mut replicas = Replicas::default();
        for sequence in 0..2 * MOST_OPEN as u64 {
            replicas.hold(&operation(sequence), 2, &[]);
            let told = replicas.take_untold();
            assert_eq!(replicas.hear(0, 2, &told), None);
        }
        assert_eq!(replicas.open.len(), MOST_OPEN);
    }
}
