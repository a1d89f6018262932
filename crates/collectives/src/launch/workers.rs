//! The compute threads of a rank.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder, Yield};

/// Stack size of a rank's threads: a main thread's size, because whole training loops run on them.
const STACK_BYTES: usize = 8 << 20;

/// The pause between a background worker's checks for work. Each check takes a few microseconds.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A rank's rayon pool. The body runs on one of its workers. Parallel work that the body begins, such as Burn's
/// kernels, is therefore shared among the workers of this pool.
///
/// Work that the body spawns without taking part in it needs a second worker. A rank with a single compute thread gets
/// one, but it does not help with the kernels: every core already has a rank, and if two threads shared each kernel of
/// a few microseconds, waking each other would take more time than the work. A job therefore occupies the second worker
/// of these ranks: it sleeps, and every few milliseconds runs the work that it finds. It finds a piece of a kernel only
/// by chance.
#[derive(Debug)]
pub(super) struct Workers {
    pool: ThreadPool,
    needs_background: bool,
}

impl Workers {
    /// Starts the compute workers. Adds a background worker if there is only one and `has_background` is true.
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
            // The background worker runs until this is dropped.
            let _background = self.needs_background.then(begin_background);
            body()
        })
    }
}

/// Turns the other worker of this pool into the background worker, and waits until that is done.
fn begin_background() -> Sender<()> {
    let (stop, stopped) = channel();
    let (begun, has_begun) = channel();
    rayon::spawn(move || {
        let _ = begun.send(());
        work_in_background(&stopped);
    });
    // Only the other worker can take the job, because this one waits here. If the job were still in this worker's
    // queue, this worker would take it itself while it waits for a piece of a kernel.
    let _ = has_begun.recv();
    stop
}

/// Runs the work that it finds, until it is stopped.
fn work_in_background(stopped: &Receiver<()>) {
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(LOOK_EVERY) {
        while rayon::yield_now() == Some(Yield::Executed) {}
    }
}
