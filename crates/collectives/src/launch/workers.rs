//! The threads that compute for a rank.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder, Yield};

/// Stack of a rank's threads: that of a main thread, because whole training loops run on it.
const STACK_BYTES: usize = 8 << 20;

/// The pause between two looks of a background worker for work. Each look takes some microseconds.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A rank's rayon pool, on one of whose workers the body runs: parallel work that the body begins,
/// such as that of Burn's kernels, is shared among the workers of its own pool.
///
/// Work that the body spawns and does not take part in needs a second worker. A rank that has a
/// single thread to compute on gets one, but one that does not help with the kernels: all cores have
/// a rank to serve, and two threads that share each kernel of a few microseconds would spend more
/// time on waking each other than on the work. The second worker of such a rank is held by a job that
/// sleeps, and every few milliseconds runs what it finds. A piece of a kernel is found then only by
/// chance.
#[derive(Debug)]
pub(super) struct Workers {
    pool: ThreadPool,
    needs_background: bool,
}

impl Workers {
    /// Starts as many workers as are to compute, and one for the background if that is only one and there is to be one.
    pub(super) fn start(
        num_threads: usize,
        has_background: bool,
    ) -> Result<Self, ThreadPoolBuildError> {
        let needs_background = has_background && num_threads < 2;
        let pool = ThreadPoolBuilder::new()
            .num_threads(num_threads + usize::from(needs_background))
            .stack_size(STACK_BYTES)
            .build()?;
        Ok(Self {
            pool,
            needs_background,
        })
    }

    /// Runs the body on a worker.
    pub(super) fn run<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        self.pool.install(|| {
            // The worker in the background goes on until this is dropped.
            let _background = self.needs_background.then(begin_background);
            body()
        })
    }
}

/// Turns the other worker of this pool into one for the background. Returns when it is.
fn begin_background() -> Sender<()> {
    let (stop, stopped) = channel();
    let (begun, has_begun) = channel();
    rayon::spawn(move || {
        let _ = begun.send(());
        work_in_background(&stopped);
    });
    // Only the other worker can take the job, because this one waits here. Were the job still in this
    // worker's queue, this worker would take it itself, while it waits for a piece of a kernel.
    let _ = has_begun.recv();
    stop
}

/// Runs what it finds, until told to stop.
fn work_in_background(stopped: &Receiver<()>) {
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(LOOK_EVERY) {
        while rayon::yield_now() == Some(Yield::Executed) {}
    }
}
