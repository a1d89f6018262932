//! Limits on the memory that is allocated for an untrusted file.

/// Sizes above which a file is rejected before anything is allocated for it.
///
/// Apart from the caller's buffers, no allocation exceeds a small multiple of these sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of `index.json`. The default of 64 MiB indexes about 7 TB of tensors.
    pub index_bytes: u64,
    /// Bytes of the header of a rank's file. The default of 100 MB is safetensors' own limit.
    pub header_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            index_bytes: 64 << 20,
            header_bytes: 100_000_000,
        }
    }
}
