//! Saving in the background while training continues.

use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::rendezvous::Rendezvous;
use crate::save::save;
use crate::{Checkpoints, Error, SaveRequest, Saved, Snapshot};

/// Saves snapshots on a separate thread, one at a time.
///
/// Every rank has one, with a handle to a rendezvous that nothing else uses. A failed save does not damage earlier
/// saves. A later call of [`start`](Self::start), [`poll`](Self::poll), [`wait`](Self::wait) or
/// [`wait_for`](Self::wait_for) reports it, on every rank. Dropping the saver waits for the current save and only logs
/// its failure.
pub struct BackgroundSaver {
    /// Sends jobs to the thread; `None` once the thread is to end.
    jobs: Option<Sender<Box<Job>>>,
    results: Receiver<Result<Saved, Error>>,
    thread: Option<JoinHandle<()>>,
    /// Step of the save whose result no call has returned yet.
    pending: Option<u64>,
}

struct Job {
    request: SaveRequest,
    snapshot: Snapshot,
}

impl BackgroundSaver {
    /// Creates a saver and starts its thread.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the system cannot start a thread.
    pub fn new(
        checkpoints: Checkpoints,
        mut rendezvous: Box<dyn Rendezvous>,
    ) -> Result<Self, Error> {
        let (jobs, received) = channel::<Box<Job>>();
        let (sender, results) = channel();
        let root = checkpoints.root().to_owned();
        let run = move || {
            for job in received {
                let Job {
                    request,
                    mut snapshot,
                } = *job;
                let saved = save(&checkpoints, &request, &mut snapshot, &mut *rendezvous);
                drop(snapshot);
                if let Err(mpsc_error) = sender.send(saved) {
                    // Nobody can receive the result, because the saver has been dropped.
                    if let Err(error) = mpsc_error.0 {
                        tracing::error!(%error, "a background save failed");
                    }
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(run)
            .map_err(Error::io("start a thread to save into", root))?;
        Ok(Self {
            jobs: Some(jobs),
            results,
            thread: Some(thread),
            pending: None,
        })
    }

    /// Waits for the last save, then begins the next. Returns the result of the last save unless an earlier call has
    /// returned it.
    ///
    /// # Errors
    ///
    /// The error of the last save. The new save is then *not* begun, on any rank; call again to begin it.
    /// [`Error::Panicked`] if the thread has ended.
    pub fn start(
        &mut self,
        request: SaveRequest,
        snapshot: Snapshot,
    ) -> Result<Option<Saved>, Error> {
        let last = self.wait()?;
        let step = request.training.step;
        let job = Box::new(Job { request, snapshot });
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job));
        if !matches!(sent, Some(Ok(()))) {
            return Err(gone(step));
        }
        self.pending = Some(step);
        Ok(last)
    }

    /// Returns the result of the current save if it is done; `None` if it is still running or there is none.
    ///
    /// # Errors
    ///
    /// The error of the save.
    pub fn poll(&mut self) -> Result<Option<Saved>, Error> {
        let Some(step) = self.pending else {
            return Ok(None);
        };
        let result = match self.results.try_recv() {
            Err(TryRecvError::Empty) => return Ok(None),
            Err(TryRecvError::Disconnected) => Err(gone(step)),
            Ok(result) => result,
        };
        self.pending = None;
        result.map(Some)
    }

    /// Waits for the current save and returns its result; `None` if there is none.
    ///
    /// # Errors
    ///
    /// The error of the save.
    pub fn wait(&mut self) -> Result<Option<Saved>, Error> {
        let Some(step) = self.pending.take() else {
            return Ok(None);
        };
        let result = self.results.recv().unwrap_or_else(|_| Err(gone(step)));
        result.map(Some)
    }

    /// Like [`wait`](Self::wait), but waits no longer than `patience`. Returns `None` if the save is not done by then;
    /// its step stays [`pending`](Self::pending).
    ///
    /// # Errors
    ///
    /// The error of the save.
    pub fn wait_for(&mut self, patience: Duration) -> Result<Option<Saved>, Error> {
        let Some(step) = self.pending else {
            return Ok(None);
        };
        let result = match self.results.recv_timeout(patience) {
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(gone(step)),
            Ok(result) => result,
        };
        self.pending = None;
        result.map(Some)
    }

    /// Returns the step that is being saved or whose result no call has returned yet.
    pub fn pending(&self) -> Option<u64> {
        self.pending
    }
}

impl Drop for BackgroundSaver {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!(%error, "a background save failed");
        }
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the background save thread panicked");
        }
    }
}

impl fmt::Debug for BackgroundSaver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackgroundSaver")
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

/// The error for a thread that has panicked, most likely in the rendezvous.
fn gone(step: u64) -> Error {
    let reason = "the background save thread has ended; create a new saver".to_owned();
    Error::Panicked { step, reason }
}
