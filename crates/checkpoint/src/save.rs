//! A whole save, from the first to the last message between the ranks.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::BoxError;
use crate::rendezvous::Rendezvous;
use crate::source::Source;
use crate::staging::write_shard;
use crate::{Checkpoints, Error, Existing, Receipt, Staging, Ticket, TrainingState, WritePlan};

/// The content of a save other than the bytes of the tensors; the same on every rank.
#[derive(Debug, Clone)]
pub struct SaveRequest {
    /// The parts that each rank writes. Can be created once per training run and shared by its saves.
    pub plan: Arc<WritePlan>,
    /// State of the training run. Its step determines the folder's name.
    pub training: TrainingState,
    /// The model's configuration.
    pub model: Value,
    /// Number of steps to keep, including this one; all if `None`.
    pub keep_last: Option<NonZeroUsize>,
    /// Whether to replace the step if it already exists.
    pub existing: Existing,
}

impl SaveRequest {
    /// Creates a request that keeps all steps and does not replace any.
    pub fn new(plan: Arc<WritePlan>, training: TrainingState) -> Self {
        Self {
            plan,
            training,
            model: Value::Null,
            keep_last: None,
            existing: Existing::default(),
        }
    }
}

/// A step that was saved: complete, synced and visible. The same on every rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// Number of the step.
    pub step: u64,
    /// Folder of the step, set locally by each rank because a path that is not UTF-8 cannot be sent.
    #[serde(skip)]
    pub path: PathBuf,
    /// Older steps that were removed, oldest first.
    pub removed: Vec<u64>,
    /// The reason why older steps could not be removed: the error that ended the removal, or the problem with the
    /// oldest remaining step. The new step is good nevertheless.
    pub removal_failure: Option<String>,
}

/// The failure of a rank, in the form that is sent to the other ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Failure {
    rank: usize,
    reason: String,
}

/// Saves a step together with the other ranks, each of which calls this with the same request. Returns the saved step.
///
/// # Errors
///
/// If any rank fails, all ranks fail: the failed rank with its own error, and the others with [`Error::PeerFailed`].
/// The folder then keeps its earlier steps, and no new one. [`Error::Rendezvous`] if the ranks could not communicate;
/// if the outcome did not reach this rank, the step may be saved. [`Error::Argument`] if the plan is for another number
/// of ranks.
pub fn save(
    checkpoints: &Checkpoints,
    request: &SaveRequest,
    source: &mut dyn Source,
    rendezvous: &mut dyn Rendezvous,
) -> Result<Saved, Error> {
    let step = request.training.step;
    let rank = rendezvous.rank();
    let (plan_size, world_size) = (request.plan.mesh().size(), rendezvous.world_size());
    if plan_size != world_size {
        return Err(Error::Argument {
            argument: "plan",
            expected: format!("for the {world_size} ranks of the rendezvous"),
            got: format!("for {plan_size} ranks"),
        });
    }
    let failed = |failure: Failure| Error::PeerFailed {
        step,
        rank: failure.rank,
        reason: failure.reason,
    };
    let lost = |source: BoxError| Error::Rendezvous { step, rank, source };

    // Rank 0 creates the folder and sends its name.
    let staging = (rank == 0).then(|| {
        guarded(step, || {
            Staging::create(checkpoints, step, request.existing)
        })
    });
    let start = staging.as_ref().map(|staging| match staging {
        Ok(staging) => Ok(staging.ticket().clone()),
        Err(error) => Err(failure(rank, error)),
    });
    let start: Result<Ticket, Failure> = exchange(rendezvous, start).map_err(&lost)?;
    let staging = staging.transpose()?;
    let ticket = start.map_err(failed)?;

    // Every rank writes its file and reports, even after a failure, because rank 0 waits for all.
    let receipt = guarded(step, || {
        write_shard(checkpoints, &ticket, &request.plan, rank, source)
    });
    let report: Result<&Receipt, Failure> = receipt.as_ref().map_err(|error| failure(rank, error));
    let report = serde_json::to_vec(&report).map_err(|error| lost(error.into()))?;
    let reports = rendezvous.gather(report).map_err(&lost)?;

    // Rank 0 commits if all succeeded, and broadcasts the outcome.
    let outcome = staging.map(|staging| {
        guarded(step, || {
            let reports = reports.unwrap_or_default();
            finish(staging, request, &reports, failed)
        })
    });
    let verdict: Option<Result<Saved, Failure>> = outcome.as_ref().map(|outcome| match outcome {
        Ok(saved) => Ok(saved.clone()),
        Err(Error::PeerFailed { rank, reason, .. }) => Err(Failure {
            rank: *rank,
            reason: reason.clone(),
        }),
        Err(error) => Err(failure(rank, error)),
    });
    let verdict = exchange(rendezvous, verdict).map_err(&lost);
    // The nearest error is the most specific: this rank's, then the commit's, then the one received.
    receipt?;
    if let Some(outcome) = outcome {
        // A committed step is saved, even if not every rank could be notified.
        return outcome;
    }
    let mut saved: Saved = verdict?.map_err(failed)?;
    saved.path = checkpoints.path(step);
    Ok(saved)
}

fn finish(
    staging: Staging,
    request: &SaveRequest,
    reports: &[Vec<u8>],
    failed: impl Fn(Failure) -> Error,
) -> Result<Saved, Error> {
    let mut receipts = Vec::with_capacity(reports.len());
    for (rank, report) in reports.iter().enumerate() {
        let unreadable = |error: serde_json::Error| Failure {
            rank,
            reason: format!("its report cannot be read: {error}"),
        };
        let report: Result<Receipt, Failure> =
            serde_json::from_slice(report).map_err(|error| failed(unreadable(error)))?;
        receipts.push(report.map_err(&failed)?);
    }
    let (training, model) = (request.training.clone(), request.model.clone());
    let committed = staging.commit(&request.plan, receipts, training, model)?;
    let removal = request.keep_last.map(|keep| committed.remove_older(keep));
    let (removed, removal_failure) = match removal {
        None => (Vec::new(), None),
        // Reports only the oldest step's reason, which is the same at each save.
        Some(Ok(removal)) => (removal.removed, removal.stays.first().map(Error::to_string)),
        Some(Err(error)) => {
            tracing::warn!(%error, "cannot remove older steps");
            (Vec::new(), Some(error.to_string()))
        }
    };
    tracing::info!(step = committed.step, path = %committed.path.display(), "saved");
    Ok(Saved {
        step: committed.step,
        path: committed.path,
        removed,
        removal_failure,
    })
}

/// Broadcasts the message of rank 0.
fn exchange<T: Serialize + DeserializeOwned>(
    rendezvous: &mut dyn Rendezvous,
    word: Option<T>,
) -> Result<T, BoxError> {
    let bytes = word.map(|word| serde_json::to_vec(&word)).transpose()?;
    Ok(serde_json::from_slice(&rendezvous.broadcast(bytes)?)?)
}

fn failure(rank: usize, error: &Error) -> Failure {
    let reason = error.to_string();
    Failure { rank, reason }
}

/// Turns a panic into an error, so this rank still communicates with the others.
fn guarded<T>(step: u64, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let reason = payload
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| {
                payload
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
            })
            .unwrap_or_else(|| "no message".to_owned());
        Err(Error::Panicked { step, reason })
    })
}
