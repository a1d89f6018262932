//! The estimate of a job from its traced step.

use std::fmt;

use serde::Serialize;

use crate::formula::{Advice, Job, Verdict, advise};
use crate::size::Size;
use crate::step::Plan;

/// The plan of a job's graph, whether the job fits, and advice extrapolated to other batch sizes and numbers of ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TracedEstimate {
    /// The job for which the graph was traced.
    pub job: Job,
    /// Number of the model's parameters.
    pub num_params: u64,
    /// Bytes of device memory per rank.
    pub available: u64,
    /// Peak memory in bytes. It is exact if every block was traced.
    pub peak: u64,
    /// True if the peak is at most `available`.
    pub fits: bool,
    /// Changes that would make the job fit, extrapolated from the plan.
    pub advice: Vec<Advice>,
    /// Peak memory in bytes if backward recomputed no results of forward.
    pub peak_without_recompute: u64,
    /// The plan of the graph.
    pub plan: Plan,
}

impl TracedEstimate {
    /// Creates the estimate of a job from the plan of its graph, and from the peak without
    /// [`Recompute`](burn_fsdp_spmd::passes::Recompute).
    pub fn new(job: &Job, plan: Plan, peak_without_recompute: u64, available: u64) -> Self {
        let peak = plan.memory.peak_bytes();
        let fits = peak <= available;
        let advice = if fits {
            Vec::new()
        } else {
            advise(job, available, &|other| scaled(job, &plan, other))
        };
        Self {
            num_params: job.model.num_params(),
            job: job.clone(),
            available,
            peak,
            fits,
            advice,
            peak_without_recompute,
            plan,
        }
    }
}

/// Scales the plan's peak to another batch size or number of ranks. Shards of parameters and states are inversely
/// proportional to the number of ranks. Activations, temporaries and buffers are proportional to the batch size. Full
/// parameters and gradients do not change. Returns `None` for other changes, which a compiled step does not support.
fn scaled(job: &Job, plan: &Plan, other: &Job) -> Option<u64> {
    let comparable = Job {
        ranks: job.ranks,
        batch: job.batch,
        ..other.clone()
    };
    if comparable != *job {
        return None;
    }
    let ranks = job.ranks as f64 / other.ranks as f64;
    let batch = other.batch as f64 / job.batch as f64;
    let peak = &plan.memory.peak;
    let divided = (peak.parameters + peak.optimizer_state) as f64 * ranks;
    let proportional = (peak.activations + peak.temporaries + peak.buffers) as f64 * batch;
    let fixed = (peak.full_parameters + peak.gradients) as f64;
    Some((divided + proportional + fixed) as u64)
}

/// Prints a human-readable summary.
impl fmt::Display for TracedEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peak = Size(self.peak).trimmed();
        write!(
            f,
            "{}",
            Verdict(&peak, self.fits, self.available, &self.advice)
        )?;
        let without = Size(self.peak_without_recompute).trimmed();
        writeln!(f, "recomputed: without it the peak is {without}")?;
        write!(f, "{}", self.plan)
    }
}
