//! Tags that represent gradients, and their encoding in notes.

use burn_fsdp_collectives::{Fingerprint, ReduceOp, Reduction};
use burn_fsdp_mesh::field::{self, Element};

/// Size in bytes of an encoded tag.
const LEN: usize = size_of::<u64>();
/// The encoding of the unknown tag, which no element has.
const UNKNOWN: u64 = u64::MAX;

/// The tag of a gradient: the sum of the tags of all gradients in it; unknown for a gradient that was not tracked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag(Option<Element>);

impl Tag {
    /// The tag of a gradient that was not tracked.
    pub(crate) const UNKNOWN: Self = Self(None);

    /// Returns the tag of gradient `number` of `parameter` on `rank`. Every rank can compute it.
    pub(crate) fn draw(rank: usize, parameter: usize, number: u64) -> Self {
        let drawn = Fingerprint::of(&(rank, parameter, number));
        Self(Some(field::reduce(u128::from(drawn))))
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self(
            self.0
                .zip(other.0)
                .map(|(one, other)| field::add(one, other)),
        )
    }

    pub(crate) fn times(self, scale: Self) -> Self {
        Self(
            self.0
                .zip(scale.0)
                .map(|(tag, scale)| field::mul(tag, scale)),
        )
    }

    pub(crate) fn element(self) -> Option<Element> {
        self.0
    }

    fn encode(self) -> [u8; LEN] {
        self.0.unwrap_or(UNKNOWN).to_le_bytes()
    }

    fn decode(bytes: &[u8]) -> Self {
        let word = bytes.try_into().map_or(UNKNOWN, u64::from_le_bytes);
        Self((word < field::MODULUS).then_some(word))
    }
}

impl From<Element> for Tag {
    fn from(element: Element) -> Self {
        Self(Some(element))
    }
}

/// Returns the factor that `reduction`, over `ranks` ranks, applies to the sum of gradients.
pub(crate) fn scale_of(reduction: &Reduction, ranks: usize) -> Tag {
    let scales = field::mul(
        field::of_number(reduction.pre_scale),
        field::of_number(reduction.post_scale),
    );
    match reduction.op {
        ReduceOp::Sum => Tag::from(scales),
        ReduceOp::Mean => Tag::from(field::div(scales, ranks as u64)),
        _ => Tag::UNKNOWN,
    }
}

/// Returns the first part of a reduction's note: one byte per gradient, 1 if this rank has the gradient.
pub(crate) fn flags(given: impl Iterator<Item = Option<Tag>>) -> Vec<u8> {
    given.map(|tag| u8::from(tag.is_some())).collect()
}

/// Returns true if `notes`, from several ranks, flag gradient `index` on any rank.
pub(crate) fn is_flagged(notes: &[Vec<u8>], index: usize) -> bool {
    let has = |note: &Vec<u8>| note.get(index).is_some_and(|flag| flag & 1 != 0);
    notes.iter().any(has)
}

/// The bit of a note's first flag that announces another reduction of the same unit. It adds no byte to the note.
const MORE: u8 = 2;

/// Announces in the note of a unit's reduction that this rank will need another one in the same backward.
pub(crate) fn announce_more(note: &mut [u8]) {
    if let Some(first) = note.first_mut() {
        *first |= MORE;
    }
}

/// Returns true if any rank's note announces another reduction of the same unit.
pub(crate) fn announces_more(notes: &[Vec<u8>]) -> bool {
    let announces = |note: &Vec<u8>| note.first().is_some_and(|first| first & MORE != 0);
    notes.iter().any(announces)
}

/// Returns the second part of an audited step's note: the tag of each gradient, or zero if there is none.
pub(crate) fn tags(given: impl Iterator<Item = Option<Tag>>) -> Vec<u8> {
    let tags = given.map(|tag| tag.unwrap_or(Tag::from(0)));
    tags.flat_map(Tag::encode).collect()
}

/// Returns the tag of gradient `index` (of `number`), summed over the ranks, from their notes; unknown if a note has no
/// tag.
pub(crate) fn tag_of_sum(notes: &[Vec<u8>], index: usize, number: usize) -> Tag {
    let start = number + index * LEN;
    let told = notes
        .iter()
        .map(|note| Tag::decode(note.get(start..start + LEN).unwrap_or_default()));
    told.fold(Tag::from(0), Tag::plus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_bring_the_sum_of_the_tags() {
        let drawn = |rank| Tag::draw(rank, 5, 0);
        let given = |rank| [Some(drawn(rank)), (rank == 1).then(|| drawn(7))];
        let note = |rank| {
            [
                flags(given(rank).into_iter()),
                tags(given(rank).into_iter()),
            ]
            .concat()
        };
        let notes: Vec<_> = (0..3).map(note).collect();
        assert_eq!(
            tag_of_sum(&notes, 0, 2),
            drawn(0).plus(drawn(1)).plus(drawn(2))
        );
        assert_eq!(tag_of_sum(&notes, 1, 2), drawn(7));
        assert!(is_flagged(&notes, 1) && !is_flagged(&notes[..1], 1));
    }

    #[test]
    fn an_announcement_leaves_flags_and_tags_alone() {
        let given = || [None, Some(Tag::draw(0, 5, 0))].into_iter();
        let plain = [flags(given()), tags(given())].concat();
        let mut announcing = plain.clone();
        announce_more(&mut announcing);
        assert_eq!(announcing.len(), plain.len());
        assert!(announces_more(&[plain.clone(), announcing.clone()]));
        assert!(!announces_more(std::slice::from_ref(&plain)));
        for index in 0..2 {
            let of = |note: &Vec<u8>| is_flagged(std::slice::from_ref(note), index);
            assert_eq!(of(&announcing), of(&plain));
        }
        assert_eq!(tag_of_sum(&[announcing], 1, 2), tag_of_sum(&[plain], 1, 2));
    }

    #[test]
    fn missing_tags_make_the_sum_unknown() {
        let given = || [Some(Tag::draw(0, 0, 0))].into_iter();
        let whole = [flags(given()), tags(given())].concat();
        let short = flags(given());
        assert_eq!(tag_of_sum(&[whole.clone(), short], 0, 1), Tag::UNKNOWN);
        let unknown = [flags(given()), tags([Some(Tag::UNKNOWN)].into_iter())].concat();
        assert_eq!(tag_of_sum(&[unknown, whole], 0, 1), Tag::UNKNOWN);
    }

    #[test]
    fn scales_match_the_reduction() {
        let tag = Tag::from(21);
        let third = scale_of(&Reduction::mean(3), 3);
        assert_eq!(tag.times(third), Tag::from(7));
        let split = Reduction::sum()
            .pre_scaled(1.0 / 2.0)
            .post_scaled(1.0 / 1.5);
        let scaled = tag.times(scale_of(&split, 3)).element();
        // The double nearest to 1 / 1.5 is not exact.
        assert_ne!(scaled, Some(7));
        assert_eq!(scale_of(&Reduction::max(), 3), Tag::UNKNOWN);
    }
}
