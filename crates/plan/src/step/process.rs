//! The estimate of a process's memory from the memory of its tensors.

use std::fmt;

use serde::Serialize;

use crate::size::Size;

/// An estimate of a rank's share of its process's memory at the peak of a step, in bytes.
///
/// A process holds more than tensors: copies that kernels make while they run, and buffers that the transport keeps.
/// The estimate is the planned peak of the tensors times [`FACTOR`](Self::FACTOR), which was measured on Burn's CPU
/// backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ProcessBytes {
    /// The estimate.
    pub bytes: u64,
    /// The estimate with the lowest factor of the [range](Self::RANGE).
    pub least: u64,
    /// The estimate with the highest factor of the range.
    pub most: u64,
}

impl ProcessBytes {
    /// Bytes of process memory per byte of tensors at the peak.
    ///
    /// It exceeds the factors measured for GPT and Llama models: 1.01 to 1.07, at peaks of 10 to 190 MB on 1 to 4
    /// ranks. `cargo test --release --test plan_allocator -- --nocapture` repeats the measurement under an allocator
    /// that counts the bytes of each rank. `docs/book/src/planning.md` has the numbers and the processors.
    pub const FACTOR: f64 = 1.08;

    /// The range of the factor for other models. It is highest for convolutions, which copy their windows into rows.
    pub const RANGE: [f64; 2] = [1.0, 1.5];

    /// Estimates the bytes of the process from the tensors' peak bytes.
    pub fn of(peak: u64) -> Self {
        let times = |factor: f64| (peak as f64 * factor).ceil() as u64;
        let [least, most] = Self::RANGE;
        Self {
            bytes: times(Self::FACTOR),
            least: times(least),
            most: times(most),
        }
    }
}

impl fmt::Display for ProcessBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [least, most] = [self.least, self.most].map(|bytes| Size(bytes).trimmed());
        let factor = Self::FACTOR;
        write!(
            f,
            "{}  on the CPU, estimated as {factor} times the peak; in the measured range {least} to {most}",
            Size(self.bytes)
        )
    }
}
