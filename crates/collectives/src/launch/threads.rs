//! Ranks as threads of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Instant;

use super::body::{Cause, run_rank};
use super::config::{LaunchConfig, MOST_THREADS};
use super::error::{BoxError, LaunchError};
use super::worlds;
use crate::group::ProcessGroup;
use burn_fsdp_rendezvous::Control;

/// The outcome of a rank: its result, or the cause of its failure.
type End<T> = Result<T, Cause>;

/// Number of running ranks that are threads of this process.
static HERE: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of ranks that currently run as threads of this process. It is 0 if the process is a rank, or
/// trains without [`launch()`](crate::launch()).
pub fn thread_ranks() -> usize {
    HERE.load(Ordering::SeqCst)
}

/// Counts one running rank until it is dropped.
struct Here;

impl Here {
    fn begin() -> Self {
        HERE.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        HERE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs the body on all ranks, and returns their results in rank order.
pub(super) fn launch<T, E, F>(config: &LaunchConfig, body: F) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<BoxError>,
    F: Fn(ProcessGroup) -> Result<T, E> + Send + Sync + 'static,
{
    let (ranks, most) = (config.ranks, MOST_THREADS);
    if ranks > most {
        return Err(LaunchError::TooManyRanks { ranks, most });
    }
    let threads = (config.num_threads(ranks)?, config.has_background);
    let groups = worlds::of_threads(ranks, config.deadline, config.check);
    let control = groups[0].control().clone();
    let body = Arc::new(body);
    let (sender, receiver) = channel();
    // Counts all ranks before the first begins.
    let here: Vec<Here> = groups.iter().map(|_| Here::begin()).collect();
    for ((rank, group), here) in groups.into_iter().enumerate().zip(here) {
        let (shared, body, sender) = (control.clone(), body.clone(), sender.clone());
        let run = move || {
            let _here = here;
            let end = run_rank(threads, || body(group));
            match &end {
                Ok(_) => shared.world().depart(rank),
                Err(cause) => shared.fail(rank, cause.to_string()),
            }
            // The receiver is gone if this rank has been abandoned.
            let _ = sender.send((rank, end));
        };
        let thread = thread::Builder::new().name(format!("rank {rank}"));
        if let Err(error) = thread.spawn(run) {
            let cause = Cause::Start(error.into());
            control.fail(rank, cause.to_string());
            return Err(cause.of(rank, Vec::new()));
        }
    }
    // Now only the ranks have senders.
    drop(sender);
    verdict(&control, collect(config, &control, &receiver))
}

/// Waits for the ranks to return. Once one has returned after a failure, waits for at most the grace period. `None`
/// marks ranks that did not return.
fn collect<T>(
    config: &LaunchConfig,
    control: &Control,
    receiver: &Receiver<(usize, End<T>)>,
) -> Vec<Option<End<T>>> {
    let mut ends: Vec<Option<End<T>>> = (0..config.ranks).map(|_| None).collect();
    let mut give_up_at = None;
    while ends.iter().any(Option::is_none) {
        let received = match give_up_at {
            None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => {
                receiver.recv_timeout(Instant::saturating_duration_since(&at, Instant::now()))
            }
        };
        let Ok((rank, end)) = received else { break };
        ends[rank] = Some(end);
        // A rank may handle a failure and continue without its peers. The first rank that returns after the failure
        // shows that the world is ending.
        if give_up_at.is_none() && control.failure().is_some() {
            give_up_at = Instant::now().checked_add(config.grace);
        }
    }
    ends
}

/// Returns the results, or the first failure.
fn verdict<T>(control: &Control, mut ends: Vec<Option<End<T>>>) -> Result<Vec<T>, LaunchError> {
    let is_missing = |(rank, end): (usize, &Option<_>)| end.is_none().then_some(rank);
    let abandoned: Vec<_> = ends.iter().enumerate().filter_map(is_missing).collect();
    let failed = |end: &Option<End<T>>| matches!(end, Some(Err(_)));
    let first = control
        .failure()
        .map(|failure| failure.rank)
        .filter(|rank| failed(&ends[*rank]));
    if let Some(rank) = first.or_else(|| ends.iter().position(failed))
        && let Some(Err(cause)) = ends[rank].take()
    {
        return Err(cause.of(rank, abandoned));
    }
    match control.failure() {
        Some(failure) if !abandoned.is_empty() => {
            Err(Cause::Failed(failure.reason.clone().into()).of(failure.rank, abandoned))
        }
        _ => Ok(ends.into_iter().flatten().flat_map(Result::ok).collect()),
    }
}
