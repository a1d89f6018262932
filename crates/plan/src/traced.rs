//! The estimate of a job from its traced step.

use std::fmt;

use serde::Serialize;

use crate::formula::{Advice, Job, Verdict, advise};
use crate::size::Size;
use crate::step::Plan;

/// The plan of a job's graph, its verdict, and advice extrapolated to other batches and numbers of
/// ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TracedEstimate {
    /// The job that the graph was traced for.
    pub job: Job,
    /// Parameters of the model.
    pub num_params: u64,
    /// Device memory of a rank.
    pub available: u64,
    /// The peak in bytes: exact, if every block was traced.
    pub peak: u64,
    /// True if the peak is at most `available`.
    pub fits: bool,
    /// Changes that would make it fit, extrapolated from the plan.
    pub advice: Vec<Advice>,
    /// The peak in bytes if nothing of forward were computed again in backward.
    pub peak_without_recompute: u64,
    /// The plan of the graph.
    pub plan: Plan,
}

impl TracedEstimate {
    /// Makes the estimate of a job whose graph has that plan, and that peak without
    /// [`Recompute`](burn_fsdp_spmd::passes::Recompute).
    pub fn new(job: &Job, plan: Plan, peak_without_recompute: u64, available: u64) -> Self {
        let peak = plan.memory.peak_bytes();
        let fits = peak <= available;
        let advice = match fits {
            true => Vec::new(),
            false => advise(job, available, &|other| scaled(job, &plan, other)),
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

/// Scales the peak of the plan to another batch or number of ranks: parts of parameters and states
/// are inversely proportional to the ranks; activations, temporaries and buffers proportional to
/// the batch; full parameters and gradients neither. `None` for other changes, which a compiled
/// step does not have.
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

/// Prints lines for people.
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
