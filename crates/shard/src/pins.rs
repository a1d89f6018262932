//! Detects buffers of full weights that outlive their use.

use std::fmt;
use std::sync::{Arc, Weak};

use crate::report;

/// A unit whose full weights are kept alive outside the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pinned {
    /// Name of the unit.
    pub unit: String,
    /// Bytes of the full weights that were still alive when backward began.
    pub bytes: usize,
    /// Size of the unit's full parameters in bytes.
    pub of: usize,
}

impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unit `{}`: {} of {} bytes of full weights stayed alive from forward to backward because an operation saved \
             a view, a cast or the weight itself; use a device with `.autodiff().gradient_checkpointing()`, and leave \
             embeddings to the root, because they save their weight on every device",
            self.unit, self.bytes, self.of
        )
    }
}

/// A buffer of full weights, identified by its lifetime.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    bytes: usize,
    life: Weak<()>,
}

/// Tracks the buffers of dropped full weights, up to the start of backward.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watch {
    /// For each gathered unit, its name, the bytes of its full parameters, and their buffers.
    marks: Vec<(String, usize, Vec<Mark>)>,
    /// The units whose buffers were found still alive.
    pub(crate) pinned: Vec<Pinned>,
}

impl Watch {
    /// Forgets the buffers of the previous forward.
    pub(crate) fn begin(&mut self) {
        self.marks.clear();
    }

    /// Notes that the full weights of `unit`, of `bytes` bytes, now exist.
    pub(crate) fn unsharded(&mut self, unit: String, bytes: usize, marks: Vec<Mark>) {
        self.marks.push((unit, bytes, marks));
    }

    /// Warns about units whose full weights are still alive after forward, although they should have been dropped.
    pub(crate) fn check_pins(&mut self) {
        for (unit, of, marks) in std::mem::take(&mut self.marks) {
            let alive = marks.iter().filter(|mark| mark.life.strong_count() > 0);
            let bytes: usize = alive.map(|mark| mark.bytes).sum();
            let known = self.pinned.iter().any(|pinned| pinned.unit == unit);
            if bytes == 0 || known {
                continue;
            }
            let pinned = Pinned { unit, bytes, of };
            report::warn(&pinned);
            self.pinned.push(pinned);
        }
    }
}

/// A buffer with a lifetime, which ends when no tensor holds it any more.
pub(crate) struct Marked<B> {
    buffer: B,
    /// The lifetime of the buffer, dropped with it.
    _life: Arc<()>,
}

impl<B: AsRef<[u8]>> Marked<B> {
    /// Returns `buffer`, and the mark that tracks its lifetime.
    pub(crate) fn new(buffer: B) -> (Self, Mark) {
        let life = Arc::new(());
        let mark = Mark {
            bytes: buffer.as_ref().len(),
            life: Arc::downgrade(&life),
        };
        let marked = Self {
            buffer,
            _life: life,
        };
        (marked, mark)
    }
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for Marked<B> {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref()
    }
}
