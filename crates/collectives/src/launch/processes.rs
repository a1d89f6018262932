//! Ranks as processes that an MPI launcher has started.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::body::{Cause, run_rank};
use super::config::LaunchConfig;
use super::environment::Processes;
use super::error::{BoxError, LaunchError};
use super::worlds::Here;
use crate::engines::mpi;
use crate::group::ProcessGroup;
use burn_fsdp_rendezvous::Control;

/// The pause between two checks for the failure of another rank, while this one continues.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Runs the body on this process's rank, and returns its result.
pub(super) fn launch<T, E, F>(
    config: &LaunchConfig,
    processes: &Processes,
    body: F,
) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<BoxError>,
    F: Fn(ProcessGroup) -> Result<T, E> + Send + Sync + 'static,
{
    static HAS_LAUNCHED: AtomicBool = AtomicBool::new(false);
    if HAS_LAUNCHED.swap(true, Ordering::AcqRel) {
        return Err(LaunchError::Again);
    }
    let other_size = |processes_found| LaunchError::OtherSize {
        ranks: config.ranks,
        processes: processes_found,
        launcher: processes.launcher.to_owned(),
    };
    // Before MPI begins, so the launcher does not report a separate error.
    if config.ranks != processes.size {
        return Err(other_size(processes.size));
    }
    let num_threads = config.num_threads(processes.here)?;
    let connection = mpi::connect().map_err(LaunchError::Mpi)?;
    let (rank, size) = (connection.rank, connection.size);
    if config.ranks != size {
        connection.close(false, config.grace);
        return Err(other_size(size));
    }
    let here = Here {
        name: "world",
        size,
        rank,
        deadline: config.deadline,
        check: config.check,
    };
    let world = here.group(connection.messenger(), |control, pool| {
        connection.handle(control, pool.clone())
    });
    let control = world.control().clone();
    let end = run(config, num_threads, &control, move || body(world));
    match &end {
        Some(Ok(_)) => control.world().depart(rank),
        Some(Err(cause)) => {
            control.fail(rank, cause.to_string());
            control.world().depart(rank);
        }
        // Abandoned: another rank has failed.
        None => control.world().depart(rank),
    }
    let is_whole = part(config, &control);
    connection.close(is_whole, config.grace);
    verdict(&control, rank, end)
}

/// Runs the body. Returns `None` if another rank has failed and this one does not return within the grace period.
fn run<T, E>(
    config: &LaunchConfig,
    num_threads: usize,
    control: &Arc<Control>,
    body: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Option<Result<T, Cause>>
where
    T: Send + 'static,
    E: Into<BoxError>,
{
    let (sender, receiver) = channel();
    let has_background = config.has_background;
    let run = move || {
        // The receiver is gone if this rank has been abandoned.
        let _ = sender.send(run_rank((num_threads, has_background), body));
    };
    if let Err(error) = thread::Builder::new().name("rank".to_owned()).spawn(run) {
        return Some(Err(Cause::Start(error.into())));
    }
    let mut give_up_at: Option<Instant> = None;
    loop {
        match receiver.recv_timeout(LOOK_EVERY) {
            Ok(end) => return Some(end),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if give_up_at.is_none() && control.failure().is_some() {
            give_up_at = Instant::now().checked_add(config.grace);
        }
        if give_up_at.is_some_and(|at| at < Instant::now()) {
            return None;
        }
    }
}

/// Waits until all ranks have ended, and returns true if none has failed. After a failure, it waits at most the grace
/// period. This lets each rank report its view before the launcher ends them all, and no rank waits for a process that
/// is gone.
fn part(config: &LaunchConfig, control: &Control) -> bool {
    let world = control.world();
    let over = world.wait_for(Duration::MAX, || {
        let is_failed = control.failure().is_some();
        (is_failed || world.is_over()).then_some(!is_failed)
    });
    if over == Some(true) {
        return true;
    }
    world.wait_for(config.grace, || world.is_over().then_some(()));
    false
}

/// Returns this rank's result, or the first failure of any rank.
fn verdict<T>(
    control: &Control,
    rank: usize,
    end: Option<Result<T, Cause>>,
) -> Result<Vec<T>, LaunchError> {
    let abandoned: Vec<_> = end.is_none().then_some(rank).into_iter().collect();
    match (control.failure(), end) {
        // This rank's error keeps its type.
        (Some(failure), Some(Err(cause))) if failure.rank == rank => Err(cause.of(rank, abandoned)),
        (Some(failure), _) => {
            Err(Cause::Failed(failure.reason.clone().into()).of(failure.rank, abandoned))
        }
        (None, Some(Err(cause))) => Err(cause.of(rank, abandoned)),
        (None, Some(Ok(result))) => Ok(vec![result]),
        (None, None) => Ok(Vec::new()),
    }
}
