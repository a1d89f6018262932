//! Results in the memory of a device that threads share.

use std::fmt;
use std::ops::Range;

use burn_fsdp_rendezvous::{ElementType, Reduction};

use super::payload::{Payload, Space};
use super::source::Source;

/// The memory of a device, in which an engine makes a rank's results from the sources of all ranks. The ranks are
/// threads of one process.
///
/// The engine calls it on the rank's thread. Its methods may return before the device has done the work. Work that the
/// rank enqueues later reads complete results, and work that a source's owner has enqueued earlier is complete before
/// the source is read. Sources may be in this memory, in that of another device, or on the host.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Returns the memory's name.
    fn space(&self) -> Space;

    /// Returns new memory of `len` bytes with copies of the `stretches`, which cover it.
    ///
    /// # Errors
    ///
    /// A description of the failure, such as a type of elements that the device lacks.
    fn join(
        &self,
        element: ElementType,
        len: usize,
        stretches: &[Stretch<'_>],
    ) -> Result<Box<dyn Payload>, String>;

    /// Returns the combination of the addends, one stretch of equal length per rank, in rank order. It is in new memory,
    /// unless there is one rank, whose own source may be the result. The
    /// results have the bits of [`reduce`](crate::reduce), if the device computes sums and products as IEEE 754
    /// defines.
    ///
    /// # Errors
    ///
    /// As [`join`](Self::join).
    fn combine(
        &self,
        reduction: &Reduction,
        element: ElementType,
        addends: &[Stretch<'_>],
    ) -> Result<Box<dyn Payload>, String>;
}

/// A range of a source's bytes, and its place in a result.
#[derive(Debug, Clone)]
pub struct Stretch<'a> {
    /// The source.
    pub source: &'a Source,
    /// The range of the source, in bytes.
    pub given: Range<usize>,
    /// The offset of the first byte in the result, in bytes.
    pub at: usize,
}
