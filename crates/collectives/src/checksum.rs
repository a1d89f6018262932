//! The checksum by which ranks compare bytes.

/// Returns the CRC-32 of some bytes.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}
