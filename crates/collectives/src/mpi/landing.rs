//! Buffers that are being filled.

#![allow(
    unsafe_code,
    reason = "MPI writes to different places of a buffer at once"
)]

use std::ops::Range;
use std::sync::Mutex;

use crate::Buffer;
use crate::lock::lock;

/// Buffers that belong to the transfers into them until they are taken.
#[derive(Debug)]
pub(super) struct Landing {
    buffers: Mutex<Option<Vec<Buffer>>>,
    /// The address and the number of the bytes of each buffer.
    places: Vec<(*mut u8, usize)>,
}

// SAFETY: the pointers are used by `Wire` alone, on MPI's thread, and by nobody once the buffers were
// taken; the buffers themselves are behind a lock.
unsafe impl Send for Landing {}
// SAFETY: as above; `place` hands out a pointer and reads or writes nothing.
unsafe impl Sync for Landing {}

impl Landing {
    pub(super) fn new(mut buffers: Vec<Buffer>) -> Self {
        // The bytes lie on the heap: they do not move with their buffers.
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
    /// If the buffer has no such range.
    pub(super) fn place(&self, buffer: usize, range: Range<usize>) -> *mut u8 {
        let (start, len) = self.places[buffer];
        assert!(
            range.start <= range.end && range.end <= len,
            "{range:?} of a buffer of {len} bytes"
        );
        // SAFETY: in bounds of one allocation, as just checked.
        unsafe { start.add(range.start) }
    }

    /// Returns the buffers, once all transfers into them are complete.
    pub(super) fn take(&self) -> Vec<Buffer> {
        lock(&self.buffers).take().unwrap_or_default()
    }
}
