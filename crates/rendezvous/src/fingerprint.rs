//! Hashes that ranks compare.

use std::hash::{Hash, Hasher};

use siphasher::sip::SipHasher13;

/// A hash that ranks exchange: SipHash-1-3 with a key of zeros.
///
/// The algorithm of the standard library's hasher may change with its version, and ranks may come from different
/// builds. Here numbers are hashed as little-endian bytes, and `usize` as a `u64`. Slices of numbers wider than a byte
/// are hashed in the machine's representation.
///
/// ```
/// use burn_fsdp_rendezvous::Fingerprint;
///
/// assert_eq!(Fingerprint::of(&("a step", 3usize)), Fingerprint::of(&("a step", 3u64)));
/// assert_ne!(Fingerprint::of(&("a step", 3usize)), Fingerprint::of(&("a step", 4usize)));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Fingerprint(SipHasher13);

impl Fingerprint {
    /// Returns the fingerprint of no values.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the fingerprint of one value.
    pub fn of(value: &(impl Hash + ?Sized)) -> u64 {
        let mut fingerprint = Self::new();
        value.hash(&mut fingerprint);
        fingerprint.finish()
    }
}

impl Hasher for Fingerprint {
    fn finish(&self) -> u64 {
        self.0.finish()
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    fn write_u16(&mut self, number: u16) {
        self.write(&number.to_le_bytes());
    }

    fn write_u32(&mut self, number: u32) {
        self.write(&number.to_le_bytes());
    }

    fn write_u64(&mut self, number: u64) {
        self.write(&number.to_le_bytes());
    }

    fn write_u128(&mut self, number: u128) {
        self.write(&number.to_le_bytes());
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every version of this crate must return these hashes.
    #[test]
    fn the_algorithm_is_fixed() {
        assert_eq!(Fingerprint::new().finish(), 0xd1fb_a762_150c_532c);
        assert_eq!(Fingerprint::of("gather"), 0xe7ac_9025_9d6e_a80b);
        assert_eq!(Fingerprint::of(&[1u8, 2, 3][..]), 0x7038_a626_8d64_a5c1);
        assert_eq!(
            Fingerprint::of(&(7usize, -1i32, true)),
            0xb498_019e_f9ae_301a
        );
    }

    #[test]
    fn parts_make_the_fingerprint_of_the_whole() {
        let mut parts = Fingerprint::new();
        for part in [&b"all-"[..], b"gather"] {
            parts.write(part);
        }
        let mut whole = Fingerprint::new();
        whole.write(b"all-gather");
        assert_eq!(parts.finish(), whole.finish());
    }
}
