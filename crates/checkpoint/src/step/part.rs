//! Reading one part's bytes, verified or not.

use std::ops::Range;
use std::sync::Arc;

use crc32fast::Hasher;

use super::files::Files;
use crate::checksum::BLOCK_BYTES;
use crate::index::PartEntry;
use crate::overlap::{Overlap, Runs, overlaps};
use crate::storage::ReadFile;
use crate::{Error, Region, TensorEntry};

/// The most recently read chunk, kept because the next piece may also need it.
#[derive(Default)]
pub(super) struct Chunk {
    pub(super) index: Option<usize>,
    bytes: Vec<u8>,
}

/// Reads the bytes of one part.
pub(super) struct PartReader<'a> {
    pub(super) files: &'a Files,
    pub(super) file: Arc<dyn ReadFile>,
    pub(super) tensor: &'a TensorEntry,
    pub(super) part: &'a PartEntry,
}

impl PartReader<'_> {
    /// Fills the buffer with the part's bytes, from byte `from` of the part.
    pub(super) fn read(&self, from: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let read = self
            .file
            .read_exact_at(buffer, self.part.bytes.start + from);
        read.map_err(|source| Error::Io {
            operation: "read",
            path: self.files.file_path(self.part.file),
            source,
        })
    }

    /// Fills the buffer like [`read`](Self::read), but reads and verifies whole chunks.
    ///
    /// A chunk that is needed completely is read directly into the buffer.
    pub(super) fn read_verified(
        &self,
        from: u64,
        mut buffer: &mut [u8],
        chunk: &mut Chunk,
    ) -> Result<(), Error> {
        let chunk_bytes = self.files.index.chunk_bytes;
        let part_bytes = self.part.bytes.end - self.part.bytes.start;
        let mut from = from;
        while !buffer.is_empty() {
            let index = (from / chunk_bytes) as usize;
            let start = index as u64 * chunk_bytes;
            let end = (start + chunk_bytes).min(part_bytes);
            let len = buffer.len().min((end - from) as usize);
            let (now, later) = std::mem::take(&mut buffer).split_at_mut(len);
            let in_file = self.part.bytes.start + start..self.part.bytes.start + end;
            // Validation has ensured that every chunk has a checksum.
            let expected = self.part.crc32.0[index];
            if len as u64 == end - start {
                self.read_chunk(in_file, expected, now)?;
            } else {
                if chunk.index != Some(index) {
                    chunk.index = None;
                    chunk.bytes.resize((end - start) as usize, 0);
                    self.read_chunk(in_file, expected, &mut chunk.bytes)?;
                    chunk.index = Some(index);
                }
                let offset = (from - start) as usize;
                now.copy_from_slice(&chunk.bytes[offset..offset + len]);
            }
            from += len as u64;
            buffer = later;
        }
        Ok(())
    }

    pub(super) fn read_chunk(
        &self,
        bytes: Range<u64>,
        expected: u32,
        buffer: &mut [u8],
    ) -> Result<(), Error> {
        let mut from = bytes.start - self.part.bytes.start;
        let mut hasher = Hasher::new();
        for block in buffer.chunks_mut(BLOCK_BYTES) {
            self.read(from, block)?;
            hasher.update(block);
            from += block.len() as u64;
        }
        let got = hasher.finalize();
        if got == expected {
            return Ok(());
        }
        Err(Error::Checksum {
            path: self.files.file_path(self.part.file),
            tensor: Some(self.tensor.name.clone()),
            bytes,
            expected,
            got,
        })
    }
}

/// Lists the overlaps of a region with a part.
pub(super) fn overlap(
    part: &PartEntry,
    tensor: &TensorEntry,
    region: &Region,
) -> impl Iterator<Item = Overlap> {
    let from = Runs::new(&part.region, &tensor.shape);
    overlaps(from, Runs::new(region, &tensor.shape))
}
