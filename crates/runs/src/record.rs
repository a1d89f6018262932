//! TensorFlow's record format: a length, the data, and a checksum of each.

/// Returns the bytes of a record.
pub(crate) fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut bytes = Vec::with_capacity(data.len() + 16);
    bytes.extend(length);
    bytes.extend(masked_checksum(&length).to_le_bytes());
    bytes.extend(data);
    bytes.extend(masked_checksum(data).to_le_bytes());
    bytes
}

/// Returns a CRC-32C, rotated and shifted. The format masks checksums because a checksum of data that contains
/// checksums is weak.
fn masked_checksum(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
}
