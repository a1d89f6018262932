//! The result of one rank's run.

use burn_fsdp::internals::collectives::{OperationCounts, OperationKind};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The result of one rank's run. It is serializable because ranks may be separate processes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankOutcome {
    /// Name of the engine through which the ranks communicate.
    pub(crate) engine: String,
    /// Mean loss over the ranks, for every step.
    pub(crate) losses: Vec<f64>,
    /// Duration of every step on this rank.
    pub(crate) seconds: Vec<f64>,
    /// Step (counted from 0) and loss of every evaluation. The evaluation takes place after the step.
    pub(crate) eval_losses: Vec<(usize, f64)>,
    /// Bytes of parameters and optimizer state on this rank.
    pub(crate) state_bytes: usize,
    /// Peak bytes of full tensors in the measured steps.
    pub(crate) unsharded_peak: usize,
    /// Bytes that collectives copied in the last step: from a device to the host, and to a device.
    pub(crate) staged: [usize; 2],
    /// Collectives of the last step.
    pub(crate) collectives: Collectives,
    /// Number of steps completed before this run.
    pub(crate) first_step: usize,
    /// The newest step that was saved.
    pub(crate) saved_step: Option<u64>,
    /// True if a signal ended the run.
    pub(crate) interrupted: bool,
    /// The reason why the run is not a success, although this rank finished.
    pub(crate) failure: Option<String>,
    /// Units that are recomputed in backward to meet the memory budget.
    pub(crate) recomputed_units: Vec<String>,
    /// Method of products in `bf16`, if the compiler chose one.
    pub(crate) half_products: Option<String>,
    /// Warnings about the sharding.
    pub(crate) warnings: Vec<String>,
    /// Events of the traced step.
    pub(crate) trace: Vec<Value>,
    /// Operations per second of matrix products on all ranks together, if they were measured.
    pub(crate) products_per_s: Option<f64>,
    /// Peak resident bytes of the rank's process, if the rank has its own process.
    pub(crate) peak_rss_bytes: Option<u64>,
    /// Generated text, including its prompt.
    pub(crate) sample: Option<Vec<u8>>,
}

/// The operations on tensors in a step. An operation of all ranks counts once.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Collectives {
    pub(crate) all_gather: Count,
    pub(crate) reduce_scatter: Count,
    pub(crate) all_reduce: Count,
    pub(crate) all_to_all: Count,
    pub(crate) broadcast: Count,
}

/// The number of operations of one kind, and the bytes of their full tensors.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Count {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

impl RankOutcome {
    pub(crate) fn new(engine: &str, num_steps: usize, first_step: usize) -> Self {
        let num_steps = num_steps.saturating_sub(first_step);
        Self {
            engine: engine.to_owned(),
            first_step,
            saved_step: None,
            interrupted: false,
            failure: None,
            // Memory might not hold the losses of all steps, so the vector grows during the run.
            losses: Vec::with_capacity(num_steps.min(1 << 16)),
            seconds: Vec::with_capacity(num_steps.min(1 << 16)),
            eval_losses: Vec::new(),
            state_bytes: 0,
            unsharded_peak: 0,
            staged: [0, 0],
            collectives: Collectives::default(),
            recomputed_units: Vec::new(),
            half_products: None,
            warnings: Vec::new(),
            trace: Vec::new(),
            products_per_s: None,
            peak_rss_bytes: None,
            sample: None,
        }
    }
}

impl Collectives {
    pub(crate) fn of(counts: &OperationCounts) -> Self {
        let count = |kind| {
            let tally = counts.of(kind);
            Count {
                count: tally.operations,
                bytes: tally.bytes,
            }
        };
        Self {
            all_gather: count(OperationKind::AllGather),
            reduce_scatter: count(OperationKind::ReduceScatter),
            all_reduce: count(OperationKind::AllReduce),
            all_to_all: count(OperationKind::AllToAll),
            broadcast: count(OperationKind::Broadcast),
        }
    }
}
