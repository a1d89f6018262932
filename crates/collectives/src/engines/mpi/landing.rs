//! Buffers that transfers fill.

#![allow(
    unsafe_code,
    reason = "MPI writes to different places of a buffer at once"
)]

use std::ops::Range;

use burn_fsdp_transport::{Buffer, copy};
use parking_lot::Mutex;

/// Buffers that belong to the transfers into them until they are taken.
#[derive(Debug)]
pub(super) struct Landing {
    buffers: Mutex<Option<Vec<Buffer>>>,
    /// The address and the length in bytes of each buffer.
    places: Vec<(*mut u8, usize)>,
}

// SAFETY: only `Wire`, on MPI's thread, and `put` use the pointers, and neither does after the buffers are taken. The
// buffers themselves are behind a lock.
unsafe impl Send for Landing {}
// SAFETY: as above; `place` returns a pointer, and neither reads nor writes.
unsafe impl Sync for Landing {}

impl Landing {
    pub(super) fn new(mut buffers: Vec<Buffer>) -> Self {
        // The bytes are on the heap, so they do not move with their buffers.
        let place = |buffer: &mut Buffer| (buffer.as_mut().as_mut_ptr(), buffer.len());
        let places = buffers.iter_mut().map(place).collect();
        Self {
            buffers: Mutex::new(Some(buffers)),
            places,
        }
    }

    /// Returns the address of a range of a buffer.
    ///
    /// # Panics
    ///
    /// If the range is outside the buffer.
    pub(super) fn place(&self, buffer: usize, range: Range<usize>) -> *mut u8 {
        let (start, len) = self.places[buffer];
        assert!(
            range.start <= range.end && range.end <= len,
            "{range:?} of a buffer of {len} bytes"
        );
        // SAFETY: in bounds of one allocation, as just checked.
        unsafe { start.add(range.start) }
    }

    /// Copies bytes to a range of a buffer, while transfers into other ranges may continue.
    ///
    /// # Panics
    ///
    /// If the range is outside the buffer, or its length differs from the number of bytes.
    pub(super) fn put(&self, buffer: usize, range: Range<usize>, bytes: &[u8]) {
        assert_eq!(range.len(), bytes.len(), "bytes for a range of a buffer");
        let guard = self.buffers.lock();
        if guard.is_some() {
            // SAFETY: the range is in bounds. The lock guarantees that the buffers are not taken, and that only one
            // thread copies at a time. The ranges of an operation's ranks do not overlap, so no transfer writes this
            // one.
            let place = unsafe {
                std::slice::from_raw_parts_mut(self.place(buffer, range.clone()), range.len())
            };
            copy(bytes, place);
        }
    }

    /// Passes the buffers to `fill`. Call it only when all transfers into them are complete.
    pub(super) fn fill(&self, fill: impl FnOnce(&mut [Buffer])) {
        if let Some(buffers) = self.buffers.lock().as_mut() {
            fill(buffers);
        }
    }

    /// Returns the buffers. Call it only when all transfers into them are complete.
    pub(super) fn take(&self) -> Vec<Buffer> {
        self.buffers.lock().take().unwrap_or_default()
    }
}
