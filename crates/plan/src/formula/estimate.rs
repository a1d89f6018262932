//! The formula-based estimate of a job, as text, JSON and SVG.

use std::fmt;

use serde::Serialize;

use super::fit::{Advice, advise};
use super::job::{Duration, Job, Stop};
use crate::machine::Machine;
#[cfg(feature = "draw")]
use crate::picture;
use crate::size::{Breakdown, Size};
use crate::traffic::Traffic;

/// The estimated cost of a job, whether it fits, and advice if it does not.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// The job that was estimated.
    pub job: Job,
    /// The machine that runs the job.
    pub machine: Machine,
    /// Number of the model's parameters.
    pub num_params: u64,
    /// Bytes of device memory per rank.
    pub available: u64,
    /// The moment of peak memory, with its bytes.
    pub peak: Stop,
    /// True if the peak is at most `available`.
    pub fits: bool,
    /// Bytes of host memory per rank.
    pub host_bytes: u64,
    /// Changes that would make the job fit. Empty if it fits, or if no change is found.
    pub advice: Vec<Advice>,
    /// The collectives of a step.
    pub traffic: Traffic,
    /// Floating-point operations that the model requires, per step and rank.
    pub model_flops: f64,
    /// Floating-point operations that are executed, per step and rank, including recomputation.
    pub hardware_flops: f64,
    /// Estimated duration of a step.
    pub time: Duration,
}

impl Estimate {
    /// Estimates a job on a machine whose devices have `available` bytes of memory.
    pub fn new(job: &Job, machine: &Machine, available: u64) -> Self {
        let peak = job.peak();
        let fits = peak.bytes.total() <= available;
        let advice = if fits {
            Vec::new()
        } else {
            advise(job, available, &|job| Some(job.peak_bytes()))
        };
        Self {
            num_params: job.model.num_params(),
            available,
            fits,
            host_bytes: job.host_bytes(),
            advice,
            traffic: job.traffic(),
            model_flops: job.model_flops(),
            hardware_flops: job.hardware_flops(),
            time: job.duration(machine),
            peak,
            job: job.clone(),
            machine: machine.clone(),
        }
    }

    /// Returns the floating-point operations that one rank executes per second, averaged over the step.
    pub fn flops_per_second(&self) -> f64 {
        self.hardware_flops / self.time.step
    }

    /// Returns the number of tokens that one rank processes per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.job.tokens() / self.time.step
    }

    /// Draws memory over the step as an SVG, stacked by category and with the peak marked. Requires the feature `draw`.
    #[cfg(feature = "draw")]
    pub fn to_svg(&self) -> String {
        let series: Vec<_> = self.job.timeline().iter().map(|stop| stop.bytes).collect();
        let title = format!(
            "Planned memory of {} on {} ranks",
            self.job.model.name, self.job.ranks
        );
        picture::draw(&title, "block: forward, then backward", &series)
    }
}

/// Prints a human-readable summary.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peak = self.peak.bytes.total();
        let bytes = Size(peak).trimmed();
        writeln!(f, "peak    {}  at {}", Size(peak), self.peak.moment)?;
        write!(f, "{}", Breakdown(&self.peak.bytes))?;
        if self.host_bytes > 0 {
            let host = Size(self.host_bytes);
            writeln!(f, "host    {host}  per rank")?;
        }
        write!(
            f,
            "{}",
            Verdict(&bytes, self.fits, self.available, &self.advice)
        )?;
        for (kind, tally) in self.traffic.by_kind() {
            if tally.operations > 0 {
                let (bytes, sent) = (Size(tally.bytes), Size(tally.sent));
                let (name, operations) = (kind.as_str(), tally.operations);
                writeln!(f, "{name:<14} {operations:>6}  {bytes} whole, {sent} sent")?;
            }
        }
        let time = &self.time;
        write!(
            f,
            "time on {}: {:.2} s per step ({:.2} s of operations, {:.2} s of collectives, {:.2} s of copies to the \
             host, {:.2} s of optimizer); {:.0} TFLOP/s and {:.0} tokens/s per rank",
            self.machine.name,
            time.step,
            time.compute,
            time.communication,
            time.host,
            time.optimizer,
            self.flops_per_second() / 1e12,
            self.tokens_per_second()
        )
    }
}

/// Prints whether a job fits and, if not, which changes would make it fit. The fields are the peak as text, `fits`, the
/// available bytes, and the changes.
pub(crate) struct Verdict<'a>(
    pub(crate) &'a str,
    pub(crate) bool,
    pub(crate) u64,
    pub(crate) &'a [Advice],
);

impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(peak, fits, available, advice) = self;
        let available = Size(*available).trimmed();
        if *fits {
            return writeln!(f, "fits: {peak} of {available}");
        }
        writeln!(f, "does not fit: {peak} of {available}")?;
        if advice.is_empty() {
            writeln!(f, "no change known to this plan would make it fit")?;
        }
        for advice in *advice {
            let peak = Size(advice.peak).trimmed();
            writeln!(f, "it would fit with {}: {peak}", advice.change)?;
        }
        Ok(())
    }
}
