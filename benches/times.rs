//! Measured times and their medians.

#![allow(dead_code, reason = "a benchmark takes of it what it needs")]

use std::fmt;
use std::time::Instant;

/// Milliseconds of an operation that all ranks did: wall time, and processor time of all threads of the process
/// together. Other programs disturb the processor time less.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Millis {
    pub(crate) clock: f64,
    pub(crate) processors: f64,
}

/// The start of a measurement.
pub(crate) struct Begun {
    clock: Instant,
    processors: f64,
}

impl Begun {
    pub(crate) fn now() -> Self {
        Self {
            clock: Instant::now(),
            processors: processor_millis(),
        }
    }

    pub(crate) fn elapsed(&self) -> Millis {
        Millis {
            clock: self.clock.elapsed().as_secs_f64() * 1e3,
            processors: processor_millis() - self.processors,
        }
    }
}

/// Returns the processor time of this process so far, in steps of ten milliseconds, or 0 if the system does not
/// provide it.
fn processor_millis() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The preceding name may contain spaces.
    let (_, fields) = stat.rsplit_once(')').unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks = ticks.filter_map(|field| field.parse::<f64>().ok());
    ticks.sum::<f64>() * 10.0
}

/// A median, with its 95 % interval by order statistics.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Middle {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Middle {
    /// Returns the median of at least one value, with its interval.
    pub(crate) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len() as f64;
        let half = 0.98 * n.sqrt();
        let low = (n / 2.0 - half).floor().max(0.0) as usize;
        let high = ((n / 2.0 + half).ceil() as usize).min(sorted.len() - 1);
        Self {
            median: sorted[sorted.len() / 2],
            low: sorted[low],
            high: sorted[high],
        }
    }
}

impl fmt::Display for Middle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { median, low, high } = self;
        write!(f, "{median:9.4}  [{low:.4}, {high:.4}]")
    }
}
