//! The memory of one rank's operations.

use std::any::Any;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::device::DeviceMemory;
use super::payload::{Payload, Space};

/// A pool that lends [`Buffer`]s, takes their memory back and counts the live bytes. Cheap to clone: all clones are the
/// same pool.
///
/// Large memory that is fresh from the system costs a page fault per 4 KiB when it is first used. The faults take
/// longer than the transfer into it. The pool therefore keeps the memory of dropped buffers for the next buffer of the
/// same size. Used and kept memory together never exceed the peak of the memory in use. Where keeping would exceed that
/// peak, the memory kept longest is returned to the system.
#[derive(Clone, Default)]
pub struct BufferPool(Arc<Mutex<Books>>);

#[derive(Default)]
struct Books {
    /// Memory of dropped buffers, the most recent last.
    kept: VecDeque<Vec<u64>>,
    kept_words: usize,
    used_words: usize,
    /// The maximum of `used_words`. Never reset, because it bounds the kept memory.
    most_used_words: usize,
    /// Bytes of live buffers and accounts.
    live_bytes: usize,
    peak_bytes: usize,
}

impl BufferPool {
    /// Creates a pool that shares nothing with other pools.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a buffer of `len` bytes, aligned to 8 bytes.
    ///
    /// Its contents are initialised but unspecified: zeros, or the contents of an earlier buffer.
    pub fn take(&self, len: usize) -> Buffer {
        let num_words = len.div_ceil(size_of::<u64>());
        let (recycled, evicted) = self.0.lock().take(num_words, len);
        // Not under the lock: returning large memory to the system takes a long time.
        drop(evicted);
        let words = recycled.unwrap_or_else(|| vec![0; num_words]);
        Buffer(Memory::Pooled(Pooled {
            words,
            len,
            pool: self.clone(),
        }))
    }

    /// Counts `len` bytes as live until the account is dropped, without allocating. For memory that belongs to this
    /// rank's operations but is owned elsewhere.
    pub fn account(&self, len: usize) -> Account {
        self.0.lock().open(len);
        Account {
            len,
            pool: self.clone(),
        }
    }

    /// Returns the bytes of the buffers and accounts that are alive now.
    pub fn live_bytes(&self) -> usize {
        self.0.lock().live_bytes
    }

    /// Returns the maximum of `live_bytes` since the pool was created or [`reset_peak`](Self::reset_peak) was last
    /// called.
    pub fn peak_bytes(&self) -> usize {
        self.0.lock().peak_bytes
    }

    /// Restarts the measurement of `peak_bytes` from the bytes that are alive now.
    pub fn reset_peak(&self) {
        let mut books = self.0.lock();
        books.peak_bytes = books.live_bytes;
    }

    /// Returns the bytes of memory kept for future buffers.
    pub fn kept_bytes(&self) -> usize {
        self.0.lock().kept_words * size_of::<u64>()
    }

    /// Frees the memory that is kept for future buffers.
    pub fn trim(&self) {
        let kept = self.0.lock().take_kept();
        drop(kept);
    }
}

impl Books {
    /// Returns kept memory of this size for a buffer, if there is any, and memory to free.
    fn take(&mut self, num_words: usize, len: usize) -> (Option<Vec<u64>>, Vec<Vec<u64>>) {
        self.open(len);
        self.used_words += num_words;
        self.most_used_words = self.most_used_words.max(self.used_words);
        // From the back: the memory dropped last is most likely to be in the caches.
        let found = self.kept.iter().rposition(|words| words.len() == num_words);
        let recycled = found.and_then(|index| self.kept.remove(index));
        if recycled.is_some() {
            self.kept_words -= num_words;
        }
        (recycled, self.evict())
    }

    /// Keeps the memory of a buffer; returns memory to free.
    fn give_back(&mut self, words: Vec<u64>, len: usize) -> Vec<Vec<u64>> {
        self.live_bytes -= len;
        self.used_words -= words.len();
        self.kept_words += words.len();
        self.kept.push_back(words);
        self.evict()
    }

    fn open(&mut self, len: usize) {
        self.live_bytes += len;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
    }

    /// Removes the excess, the memory kept longest first.
    fn evict(&mut self) -> Vec<Vec<u64>> {
        let mut evicted = Vec::new();
        while self.used_words + self.kept_words > self.most_used_words {
            let Some(oldest) = self.kept.pop_front() else {
                break;
            };
            self.kept_words -= oldest.len();
            evicted.push(oldest);
        }
        evicted
    }

    fn take_kept(&mut self) -> VecDeque<Vec<u64>> {
        self.kept_words = 0;
        std::mem::take(&mut self.kept)
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let books = self.0.lock();
        f.debug_struct("BufferPool")
            .field("live_bytes", &books.live_bytes)
            .field("peak_bytes", &books.peak_bytes)
            .field("kept_bytes", &(books.kept_words * size_of::<u64>()))
            .finish()
    }
}

/// Memory for the result of an operation. In host memory, it is [taken](BufferPool::take) from a pool, aligned to 8
/// bytes, and dropping it returns the memory to the pool. [Elsewhere](Self::in_space), the engine allocates it.
pub struct Buffer(Memory);

enum Memory {
    Pooled(Pooled),
    /// To be allocated when the bytes arrive.
    Awaited {
        space: Space,
        len: usize,
        /// The memory in which an engine of threads makes the bytes.
        memory: Option<Arc<dyn DeviceMemory>>,
    },
    Arrived(Box<dyn Payload>),
}

/// Host memory that belongs to a pool.
struct Pooled {
    words: Vec<u64>,
    len: usize,
    pool: BufferPool,
}

impl Buffer {
    /// Returns a buffer for `len` bytes in some memory. Outside of host memory, nothing is allocated until the
    /// operation returns it. In host memory, it belongs to a separate pool.
    pub fn in_space(space: Space, len: usize) -> Self {
        match space {
            Space::Host => BufferPool::new().take(len),
            _ => Self(Memory::Awaited {
                space,
                len,
                memory: None,
            }),
        }
    }

    /// Returns a buffer for `len` bytes that an engine of threads makes in `memory`. Nothing is allocated until the
    /// operation returns it.
    pub fn in_memory(memory: Arc<dyn DeviceMemory>, len: usize) -> Self {
        Self(Memory::Awaited {
            space: memory.space(),
            len,
            memory: Some(memory),
        })
    }

    /// Returns the memory in which an engine of threads makes the bytes, if they have not arrived.
    #[inline]
    pub fn memory(&self) -> Option<&Arc<dyn DeviceMemory>> {
        match &self.0 {
            Memory::Awaited { memory, .. } => memory.as_ref(),
            Memory::Pooled(_) | Memory::Arrived(_) => None,
        }
    }

    /// Returns a buffer with bytes that an engine has allocated.
    pub fn arrived(payload: Box<dyn Payload>) -> Self {
        Self(Memory::Arrived(payload))
    }

    /// Returns the number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.0 {
            Memory::Pooled(Pooled { len, .. }) | Memory::Awaited { len, .. } => *len,
            Memory::Arrived(payload) => payload.len(),
        }
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if there is memory for the bytes.
    #[inline]
    pub fn is_arrived(&self) -> bool {
        !matches!(self.0, Memory::Awaited { .. })
    }

    /// Returns the memory that holds, or will hold, the bytes.
    #[inline]
    pub fn space(&self) -> Space {
        match &self.0 {
            Memory::Pooled(_) => Space::Host,
            Memory::Awaited { space, .. } => *space,
            Memory::Arrived(payload) => payload.space(),
        }
    }

    /// Returns the bytes if they are in host memory.
    #[inline]
    pub fn host(&self) -> Option<&[u8]> {
        match &self.0 {
            Memory::Pooled(pooled) => Some(&bytemuck::cast_slice(&pooled.words)[..pooled.len]),
            Memory::Awaited { .. } => None,
            Memory::Arrived(payload) => payload.host(),
        }
    }

    /// Returns the bytes for writing, if they are in host memory and from a pool.
    #[inline]
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.0 {
            Memory::Pooled(pooled) => {
                let Pooled { words, len, .. } = pooled;
                Some(&mut bytemuck::cast_slice_mut(words)[..*len])
            }
            Memory::Awaited { .. } | Memory::Arrived(_) => None,
        }
    }

    /// Returns the payload that an engine has allocated.
    ///
    /// # Errors
    ///
    /// The buffer itself, if it is from a pool or has not arrived.
    pub fn into_payload(self) -> Result<Box<dyn Payload>, Self> {
        match self.0 {
            Memory::Arrived(payload) => Ok(payload),
            memory => Err(Self(memory)),
        }
    }
}

impl Payload for Buffer {
    fn len(&self) -> usize {
        self.len()
    }

    fn space(&self) -> Space {
        self.space()
    }

    fn host(&self) -> Option<&[u8]> {
        self.host()
    }

    fn read(&self) -> Result<Cow<'_, [u8]>, String> {
        match &self.0 {
            Memory::Arrived(payload) => payload.read(),
            _ => {
                let host = self.host().map(Cow::Borrowed);
                host.ok_or_else(|| "the bytes have not arrived".to_owned())
            }
        }
    }

    fn is_shared(&self) -> bool {
        matches!(&self.0, Memory::Arrived(payload) if payload.is_shared())
    }

    /// Returns the payload that an engine has allocated, or the buffer.
    fn as_any(&self) -> &dyn Any {
        match &self.0 {
            Memory::Arrived(payload) => payload.as_any(),
            _ => self,
        }
    }
}

/// The bytes in host memory.
///
/// # Panics
///
/// If they are [elsewhere](Buffer::in_space); [`host`](Buffer::host) returns `None` there.
impl AsRef<[u8]> for Buffer {
    #[inline]
    fn as_ref(&self) -> &[u8] {
        let bytes = self.host();
        bytes.unwrap_or_else(|| panic!("the bytes are in {}, not in host memory", self.space()))
    }
}

/// The bytes in host memory.
///
/// # Panics
///
/// If they are [elsewhere](Buffer::in_space), or in memory that an engine has allocated;
/// [`host_mut`](Buffer::host_mut) returns `None` there.
impl AsMut<[u8]> for Buffer {
    #[inline]
    fn as_mut(&mut self) -> &mut [u8] {
        let space = self.space();
        let bytes = self.host_mut();
        bytes.unwrap_or_else(|| panic!("the bytes are in {space}, not in a pool's memory"))
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let words = std::mem::take(&mut self.words);
        let evicted = self.pool.0.lock().give_back(words, self.len);
        drop(evicted);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

/// Bytes that count as live in a [`BufferPool`] until this is dropped.
#[derive(Debug)]
#[must_use = "dropping the account ends it"]
pub struct Account {
    len: usize,
    pool: BufferPool,
}

impl Account {
    /// Returns the number of bytes that this account counts.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.pool.0.lock().live_bytes -= self.len;
    }
}
