//! The whole run: initial weights, ranks, report.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::thread::{self, sleep};
use std::time::Instant;

use burn_fsdp::{LaunchConfig, ProcessGroup, launch};
use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use signal_hook::{flag, low_level};

use crate::console;
use crate::error::{Failure, InputError, RankError};
use crate::host;
use crate::launch::ONE_REQUEST;
use crate::operations;
use crate::output;
use crate::process::is_ignored;
use crate::tether;
use crate::train::collector::Collector;
use crate::train::config::TrainConfig;
use crate::train::curve;
use crate::train::metrics::Metrics;
use crate::train::model;
use crate::train::outcome::RankOutcome;
use crate::train::rank;
use crate::train::ranks;
use crate::train::report::Report;
use crate::train::trace;

/// Trains, and writes the files and the output that the configuration requests.
///
/// The report is printed even if another output cannot be written, because a lost report means a lost training run.
pub(crate) fn run(config: TrainConfig) -> Result<(), Failure> {
    let config = Arc::new(config);
    let start_rss_bytes = host::rss_bytes();
    let is_first = config.ranks.have_first();
    // Processes write nothing before they have agreed on their arguments and data.
    let metrics = if config.ranks.are_processes() {
        None
    } else {
        Some(begin_files(&config)?)
    };
    obey_signals(&config);
    let on_ranks = config.clone();
    let launch_config = LaunchConfig::new(config.ranks.number())
        .threads_per_rank(config.threads)
        .without_background()
        .deadline(config.deadline)
        .check(config.check);
    let start = Start {
        metrics: Mutex::new(metrics),
        origin: Instant::now(),
    };
    let results = launch(launch_config, move |world| {
        let result = run_rank(&on_ranks, &world, &start);
        if let Err(error) = &result
            && error.is_input()
        {
            // Another process may report the same problem first, as text.
            let _ = INPUT_PROBLEM.set(error.to_string());
        }
        result
    });
    let results = results.map_err(|error| match INPUT_PROBLEM.get() {
        Some(problem) if config.ranks.are_processes() => Failure::Agreed(problem.clone()),
        _ => Failure::from(error),
    })?;
    if !is_first {
        end_by_signal(&config);
        return Ok(());
    }
    let mut results: Vec<_> = results.into_iter().flatten().collect();
    let mut failures = Vec::new();
    failures.extend(results.iter_mut().find_map(|rank| rank.failure.take()));
    if let Some(path) = &config.trace {
        let events = results
            .iter_mut()
            .map(|rank| std::mem::take(&mut rank.trace));
        let text = trace::file(events.flatten().collect());
        let written = output::write_whole("--trace", path, text.as_bytes());
        failures.extend(written.err().map(|error| error.to_string()));
    }
    let mut report = Report::new(&config, start_rss_bytes, results);
    // Without a step, there is no point to draw.
    if !report.losses.is_empty() {
        let svg = curve::draw(report.first_step, &report.losses, &report.eval_losses);
        let written = output::write_whole("--curve", &config.curve, svg.as_bytes());
        failures.extend(written.err().map(|error| error.to_string()));
    }
    report.failures.clone_from(&failures);
    let text = if config.json {
        report.to_json()
    } else {
        report.to_string()
    };
    let printed = console::answer(text);
    end_by_signal(&config);
    if failures.is_empty() {
        printed
    } else {
        Err(Failure::Unfinished(failures.join("; ")))
    }
}

/// An input error that a rank of this process found.
static INPUT_PROBLEM: OnceLock<String> = OnceLock::new();

/// The initial state of this process's ranks.
struct Start {
    /// Rank 0 takes the metrics; `None` if rank 0 must still create the files.
    metrics: Mutex<Option<Metrics>>,
    origin: Instant,
}

/// Runs one rank, and returns the results to report in this process.
fn run_rank(
    config: &TrainConfig,
    world: &ProcessGroup,
    start: &Start,
) -> Result<Vec<RankOutcome>, RankError> {
    let folder = config.operations.as_ref();
    let operations = folder.map(|folder| operations::write::write(folder, world));
    let operations = operations.transpose().map_err(Box::new)?;
    let are_processes = config.ranks.are_processes();
    if are_processes {
        known_to_all(world, ranks::agree(world, config.data.identity()))?;
    }
    let mesh = known_to_all(world, model::mesh(config, world))?;
    if let Some(checkpoints) = config.checkpoints.as_ref().filter(|_| are_processes) {
        known_to_all(world, checkpoints.agree(world, config.deadline))?;
    }
    let collector = Collector::new(config, world)?;
    let mut metrics = Metrics::default();
    if world.rank() == 0 {
        let begun = start.metrics.lock().take();
        metrics = match begun {
            Some(metrics) => metrics,
            None => begin_files(config).map_err(Box::new)?,
        };
    }
    // Processes have no other common point in time.
    let origin = if are_processes {
        Instant::now()
    } else {
        start.origin
    };
    let mut outcome = rank::train(config, world, &mesh, origin, metrics)?;
    let lost = operations.as_ref().and_then(|lost| lost.get());
    outcome.warnings.extend(lost.cloned());
    collector.collect(outcome)
}

/// Returns `result`. If it is an input error, which all ranks find, first waits until all ranks have it, so no rank
/// sees another's failure earlier. Collective in that case.
fn known_to_all<T>(world: &ProcessGroup, result: Result<T, RankError>) -> Result<T, RankError> {
    if result.as_ref().is_err_and(RankError::is_input) {
        // If the barrier fails, the result stays the same.
        let _ = world.barrier("an error that all have found");
    }
    result
}

/// Writes the initial weights and starts the files of the metrics.
fn begin_files(config: &TrainConfig) -> Result<Metrics, InputError> {
    model::save_initial(config)?;
    let first_step = config.resumed().map_or(0, |resumed| resumed.first_step());
    Metrics::open(&config.metrics, first_step)
}

/// The last signal received.
static ENDED_BY: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// Ends this process by the signal that ended its run, if it has no checkpoint folder. The process has removed its
/// files, and ends as if the signal had had its default effect.
fn end_by_signal(config: &TrainConfig) {
    if config.checkpoints.is_none() && config.is_stopped() {
        let signal = ENDED_BY.load(Ordering::Relaxed) as i32;
        // No signal arrived: `launch` is gone, which counts as SIGTERM.
        let signal = if signal == 0 { SIGTERM } else { signal };
        let _ = low_level::emulate_default_handler(signal);
    }
}

/// Registers signal handlers. A first signal ends the run after its step and a save. A second signal or SIGQUIT ends it
/// at once with exit code 1. A run without a checkpoint folder only removes the files of `--offload`. Without these
/// files as well, signals keep their default effect.
///
/// A process started by a launcher may receive one request several times: from the launcher, as a member of a group,
/// and from a scheduler that signals all processes of a job. A second signal has no effect there. The launcher ends
/// processes that do not end.
fn obey_signals(config: &TrainConfig) {
    let Some(stop) = &config.stop else {
        return;
    };
    let at_once = Arc::new(AtomicBool::new(false));
    let is_launched = tether::is_tied() || config.ranks.are_processes();
    let waker = if is_launched {
        None
    } else {
        arm_after_first(at_once.clone())
    };
    // `mpirun` passes SIGUSR1 on, and schedulers can send it before the end of a job.
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1] {
        // `nohup` lets a run continue when its terminal is gone.
        if is_ignored(signal) {
            continue;
        }
        // If the system refuses, signals keep their default effect.
        let _ = flag::register_conditional_shutdown(signal, 1, at_once.clone());
        let _ = flag::register(signal, stop.clone());
        let _ = flag::register_usize(signal, ENDED_BY.clone(), signal as usize);
        if let Some(Ok(waker)) = waker.as_ref().map(UnixStream::try_clone) {
            let _ = low_level::pipe::register(signal, waker);
        }
    }
    let _ = flag::register_conditional_shutdown(SIGQUIT, 1, Arc::new(AtomicBool::new(true)));
    tether::tell(stop.clone(), config.ranks.have_first());
}

/// Sets the flag some time after the first signal, which arrives through the returned end. Until then, further signals
/// count as the same request.
fn arm_after_first(at_once: Arc<AtomicBool>) -> Option<UnixStream> {
    let (mut signals, waker) = UnixStream::pair().ok()?;
    let wait = move || {
        // An error means that nothing was registered.
        if signals.read(&mut [0]).is_ok_and(|read| read > 0) {
            sleep(ONE_REQUEST);
            at_once.store(true, Ordering::Relaxed);
        }
    };
    thread::Builder::new().spawn(wait).ok()?;
    Some(waker)
}
