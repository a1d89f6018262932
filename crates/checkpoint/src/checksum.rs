//! CRC-32 of chunks, to verify parts of a tensor without reading all of it.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Size in bytes of a chunk in the files that this version writes.
///
/// Small enough to stay in a core's cache between checksum and copy. It also limits the excess bytes that a rank reads
/// at both ends of its range. Large enough that the index of a terabyte takes only 9 MB.
pub(crate) const CHUNK_BYTES: u64 = 1 << 20;

/// The chunk sizes that this version reads. The largest one bounds the memory of a read.
pub(crate) const CHUNK_LIMITS: std::ops::RangeInclusive<u64> = 1..=16 << 20;

/// The CRC-32 of each chunk of a part. The last chunk may be shorter.
///
/// Serialized as one string with 8 hexadecimal digits per chunk, which takes half the space of a list of numbers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checksums(pub Vec<u32>);

/// Size in bytes of a block that is checksummed and copied at a time. It fits the caches closest to a core.
///
/// A block that was just read is still cached for its checksum, and then for its write.
pub(crate) const BLOCK_BYTES: usize = 128 << 10;

/// Computes the CRC-32 (IEEE 802.3) of some bytes.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

impl Serialize for Checksums {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use std::fmt::Write;
        let mut text = String::with_capacity(8 * self.0.len());
        for crc in &self.0 {
            write!(text, "{crc:08x}").map_err(serde::ser::Error::custom)?;
        }
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Checksums {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let digits = text.as_bytes().chunks(8).map(|digits| {
            let is_hex = digits.len() == 8 && digits.iter().all(u8::is_ascii_hexdigit);
            let digits = std::str::from_utf8(digits).ok().filter(|_| is_hex)?;
            u32::from_str_radix(digits, 16).ok()
        });
        let crcs: Option<Vec<u32>> = digits.collect();
        crcs.map(Self)
            .ok_or_else(|| D::Error::custom("checksums are 8 hexadecimal digits each"))
    }
}
