//! The checksum with which ranks compare bytes: 64-bit XXH3. It reads data in a core's cache several times faster than
//! memory delivers it, so comparing costs little more than reading.

use std::fmt;
use std::hash::Hasher;

use twox_hash::XxHash3_64;

/// Returns the checksum of some bytes.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// Computes the checksum of bytes that are read in consecutive stretches.
#[derive(Default)]
pub struct Reading(XxHash3_64);

impl Reading {
    /// Adds the next stretch of bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// Returns the checksum of all stretches.
    pub fn finalize(self) -> u64 {
        self.0.finish()
    }
}

impl fmt::Debug for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reading")
    }
}

/// The checksums of consecutive pieces of some bytes. The checksums that several ranks have announced for their pieces
/// can be joined into the checksums of the whole, without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksums(Vec<Piece>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    len: usize,
    checksum: u64,
}

impl Checksums {
    /// Computes the checksums of bytes that form one piece.
    pub fn of(bytes: &[u8]) -> Self {
        Self::of_pieces([(bytes.len(), checksum(bytes))])
    }

    /// Returns the checksums of pieces, each given as its length and checksum.
    pub fn of_pieces(pieces: impl IntoIterator<Item = (usize, u64)>) -> Self {
        let pieces = pieces.into_iter().filter(|(len, _)| *len > 0);
        let piece = |(len, checksum)| Piece { len, checksum };
        Self(pieces.map(piece).collect())
    }

    /// Returns true if the bytes have the pieces' total length and each piece has its checksum.
    pub fn are_of(&self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        let mut is_of = |piece: &Piece| {
            let Some((bytes, after)) = rest.split_at_checked(piece.len) else {
                return false;
            };
            rest = after;
            checksum(bytes) == piece.checksum
        };
        self.0.iter().all(&mut is_of) && rest.is_empty()
    }

    /// Returns the checksum of all bytes; `None` if they form several pieces.
    pub fn whole(&self) -> Option<u64> {
        match &self.0[..] {
            [] => Some(checksum(&[])),
            [only] => Some(only.checksum),
            _ => None,
        }
    }

    /// Combines the checksums into one number, which is equal for equal bytes in equal pieces.
    pub fn together(&self) -> u64 {
        self.whole().unwrap_or_else(|| {
            let mut all = Reading::default();
            let pieces = self.0.iter().map(|piece| piece.checksum.to_le_bytes());
            pieces.for_each(|bytes| all.update(&bytes));
            all.finalize()
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn stretches_have_the_checksum_of_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..2_000),
            stretch in 1..700_usize,
        ) {
            let mut read = Reading::default();
            bytes.chunks(stretch).for_each(|bytes| read.update(bytes));
            prop_assert_eq!(read.finalize(), checksum(&bytes));
        }

        #[test]
        fn a_bit_that_flips_in_any_piece_is_seen(
            mut bytes in proptest::collection::vec(any::<u8>(), 1..2_000),
            stretch in 1..700_usize,
            place in any::<prop::sample::Index>(),
        ) {
            let pieces = bytes.chunks(stretch).map(|piece| (piece.len(), checksum(piece)));
            let checksums = Checksums::of_pieces(pieces.collect::<Vec<_>>());
            prop_assert!(checksums.are_of(&bytes));
            prop_assert!(!checksums.are_of(&bytes[1..]));
            let bit = place.index(8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!checksums.are_of(&bytes));
        }
    }

    #[test]
    fn empty_pieces_do_not_change_the_checksum() {
        let (one, none) = (checksum(&[7, 8]), checksum(&[]));
        let checksums = Checksums::of_pieces([(0, none), (2, one), (0, none)]);
        assert_eq!(checksums, Checksums::of(&[7, 8]));
        assert_eq!(checksums.whole(), Some(one));
        assert!(Checksums::of(&[]).are_of(&[]) && !Checksums::of(&[]).are_of(&[0]));
    }
}
