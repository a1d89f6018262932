//! Saves a training run while it continues.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn_fsdp_checkpoint::{
    BackgroundSaver, Checkpoints, Error as StepError, Existing, Rendezvous, SaveRequest, Saved,
    TrainingState,
};
use burn_fsdp_collectives::{Error as CollectiveError, ProcessGroup};

use crate::error::CheckpointError;
use crate::rendezvous::GroupRendezvous;
use crate::snapshot::TrainingSnapshot;

/// Pause before retrying a failed last save.
const BEFORE_RETRY: Duration = Duration::from_secs(1);

/// Default of [`Checkpointer::patience`].
const PATIENCE: Duration = Duration::from_secs(60);

/// One rank's handle for saving a training run in the background.
///
/// A save takes two calls. With [`offer`](Self::offer), the ranks agree on whether they are ready and have finite
/// values. The caller then decides whether to save, and [`begin`](Self::begin) starts saving. A failed save does not
/// end the training; it is reported as one of the [`remarks`](Self::remarks). Only [`finish`](Self::finish) returns the
/// failure of the last save.
///
/// To save in one call and wait for the disk, use [`save`](crate::blocking::save).
///
/// ```
/// use std::time::Duration;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp::checkpoint::{snapshot, Checkpoints};
/// use burn_fsdp::{
///     backward, fully_shard, launch, Checkpointer, Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh,
///     ShardPolicy,
/// };
///
/// fn train(world: ProcessGroup, folder: &std::path::Path) -> Result<Option<u64>, Error> {
///     let device = Device::flex().autodiff().gradient_checkpointing();
///     let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
///     let mut model = fully_shard(LinearConfig::new(4, 2).init(&device), &mesh, ShardPolicy::new())?;
///     let mut optimizer = AdamWConfig::new().init();
///     let mut saves = Checkpointer::new(&world, Checkpoints::new(folder), Duration::from_secs(600))?;
///     for step in 1..=4 {
///         let output = model.forward(Tensor::<2>::ones([3, 4], &device));
///         let gradients = backward(output.square().mean(), &model)?;
///         model = optimizer.step(1e-2, model, gradients);
///         if step % 2 == 0 {
///             let offered = saves.offer(snapshot(&model, &optimizer, mesh.mesh(), "shard")?)?;
///             let request = offered.request(step);
///             saves.begin(offered, request, step == 4)?;
///         }
///     }
///     match saves.finish()? {
///         Some(failure) => Err(failure.into()),
///         None => Ok(saves.newest()),
///     }
/// }
///
/// let folder = tempfile::tempdir().expect("a folder");
/// let path = folder.path().to_owned();
/// let newest = launch(LaunchConfig::new(2), move |world| train(world, &path))?;
/// assert_eq!(newest, [Some(4), Some(4)]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Checkpointer {
    world: ProcessGroup,
    saver: BackgroundSaver,
    patience: Duration,
    /// The last save, if it has to wait for the previous one.
    deferred: Option<Box<(SaveRequest, TrainingSnapshot)>>,
    /// True if the last save has begun: `finish` then reports its failure, even if another call notices it first.
    last_has_begun: bool,
    /// The failure of the last save, if it was noticed before `finish`.
    last_failure: Option<StepError>,
    newest: Option<u64>,
    remarks: Vec<SaveRemark>,
}

/// A snapshot that all ranks took at the same point, and the ranks' agreement on whether it can be saved.
#[derive(Debug)]
#[must_use = "nothing is saved before `begin`"]
pub struct Offered {
    taken: TrainingSnapshot,
    not_finite: Option<NotFiniteTensor>,
    /// True if any rank is still working on the previous save.
    is_busy: bool,
}

/// A tensor in a snapshot with a NaN or infinite element.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotFiniteTensor {
    /// The tensor's name.
    pub tensor: String,
    /// The first rank that has such an element.
    pub rank: usize,
}

/// An event during a save that the user should know about, although the training continues.
#[derive(Debug)]
#[non_exhaustive]
pub enum SaveRemark {
    /// A failed save. Earlier saves are unchanged.
    Failed(StepError),
    /// Older steps that a save should have removed but could not.
    NotRemoved(String),
    /// A step that was skipped because the previous save did not finish in time.
    LeftOut(u64),
}

impl fmt::Display for SaveRemark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => write!(f, "a save failed; training continues: {error}"),
            Self::NotRemoved(problem) => {
                write!(f, "older steps could not be removed: {problem}")
            }
            Self::LeftOut(step) => write!(
                f,
                "step {step} was not saved because the previous save is still running"
            ),
        }
    }
}

impl Offered {
    /// Returns the offered snapshot.
    pub fn taken(&self) -> &TrainingSnapshot {
        &self.taken
    }

    /// Returns a request that saves the snapshot as the state after `step` steps. By default, it keeps all older steps
    /// and does not replace an existing step; set its fields to change this.
    pub fn request(&self, step: u64) -> SaveRequest {
        let training = TrainingState {
            step,
            optimizer: self.taken.optimizer.clone(),
            ..TrainingState::default()
        };
        SaveRequest::new(Arc::clone(&self.taken.plan), training)
    }

    /// Returns a tensor that is not finite on some rank, if there is one. All ranks get the same result.
    pub fn not_finite(&self) -> Option<&NotFiniteTensor> {
        self.not_finite.as_ref()
    }
}

impl Checkpointer {
    /// Creates a checkpointer that saves to `checkpoints`. The ranks meet over a group
    /// [isolated](ProcessGroup::isolate) from `world`, so a save in which a rank waits longer than `deadline` for the
    /// others does not affect the training. That save and all later ones fail.
    ///
    /// Collective.
    ///
    /// # Errors
    ///
    /// A failed collective; a save thread that cannot be started.
    pub fn new(
        world: &ProcessGroup,
        checkpoints: Checkpoints,
        deadline: Duration,
    ) -> Result<Self, CheckpointError> {
        let group = world.isolate("checkpoints", deadline)?;
        Self::over(world, checkpoints, Box::new(GroupRendezvous::new(group)))
    }

    /// Creates a checkpointer that saves to `checkpoints`. The ranks communicate over `rendezvous`. If the rendezvous
    /// survives a failure of `world`, a save in progress is still completed.
    ///
    /// # Errors
    ///
    /// If the save thread cannot be started.
    pub fn over(
        world: &ProcessGroup,
        checkpoints: Checkpoints,
        rendezvous: Box<dyn Rendezvous>,
    ) -> Result<Self, CheckpointError> {
        Ok(Self {
            world: world.clone(),
            saver: BackgroundSaver::new(checkpoints, rendezvous)?,
            patience: PATIENCE,
            deferred: None,
            last_has_begun: false,
            last_failure: None,
            newest: None,
            remarks: Vec::new(),
        })
    }

    /// Sets how long [`offer`](Self::offer) waits for the previous save. It should be less than the deadline
    /// of the training's group.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Waits for the previous save for at most the [`patience`](Self::patience), and agrees with the other ranks on
    /// what can be saved.
    ///
    /// Collective: all ranks offer snapshots that they have taken at the same point.
    ///
    /// # Errors
    ///
    /// A failed collective.
    pub fn offer(&mut self, taken: TrainingSnapshot) -> Result<Offered, CheckpointError> {
        let not_finite = taken.snapshot.not_finite(&taken.plan, self.world.rank());
        let last = self.saver.wait_for(self.patience);
        self.note(last);
        let is_busy = self.saver.pending().is_some();
        let (not_finite, is_busy) = agree(&self.world, not_finite.as_deref(), is_busy)?;
        Ok(Offered {
            taken,
            not_finite,
            is_busy,
        })
    }

    /// Starts saving an offered snapshot; training may continue meanwhile. If the previous save is still running on
    /// some rank, the step is skipped, or saved by [`finish`](Self::finish) if it is the last one.
    ///
    /// All ranks must begin with equal requests, or none may begin.
    ///
    /// # Errors
    ///
    /// The saving thread has ended.
    pub fn begin(
        &mut self,
        offered: Offered,
        request: SaveRequest,
        is_last: bool,
    ) -> Result<(), CheckpointError> {
        let Offered { taken, is_busy, .. } = offered;
        // The failed save was not the last one.
        let failed = self.last_failure.take().map(SaveRemark::Failed);
        self.remarks.extend(failed);
        match (is_busy, is_last) {
            (false, _) => {
                self.saver.start(request, taken.snapshot)?;
                self.last_has_begun = is_last;
            }
            (true, true) => self.deferred = Some(Box::new((request, taken))),
            (true, false) => {
                let remark = SaveRemark::LeftOut(request.training.step);
                self.remarks.push(remark);
            }
        }
        Ok(())
    }

    /// Collects the result of the current save if it has ended. A failure of the final save is kept for
    /// [`finish`](Self::finish).
    pub fn poll(&mut self) {
        let saved = self.saver.poll();
        self.note(saved);
    }

    /// Waits for all saves, and returns the failure of the last one, if it failed.
    ///
    /// This does not communicate over the training's group, whose deadline a slow disk could exceed.
    ///
    /// # Errors
    ///
    /// The saving thread has ended.
    pub fn finish(&mut self) -> Result<Option<StepError>, CheckpointError> {
        let last = self.saver.wait();
        let Some(deferred) = self.deferred.take() else {
            let failure = self.failure(last);
            return Ok(failure.or_else(|| self.last_failure.take()));
        };
        self.note(last);
        let (request, taken) = *deferred;
        self.saver.start(request, taken.snapshot)?;
        let last = self.saver.wait();
        Ok(self.failure(last))
    }

    /// Returns true if a retry could succeed, as far as this rank knows. Ranks that only received the report of a
    /// failure do not know its kind. If one rank does not retry, the retries of the others fail when it leaves.
    pub fn may_be_tried_again(failure: &StepError) -> bool {
        !matches!(
            failure,
            StepError::Rendezvous { .. }
                | StepError::Exists { .. }
                | StepError::NotAFolder { .. }
                | StepError::Foreign { .. }
        )
    }

    /// Retries a failed last save once, after a pause, and returns the failure if it fails again. Call it on ranks
    /// whose failure [allows it](Self::may_be_tried_again).
    ///
    /// # Errors
    ///
    /// The saving thread has ended.
    pub fn try_again(
        &mut self,
        taken: TrainingSnapshot,
        mut request: SaveRequest,
    ) -> Result<Option<StepError>, CheckpointError> {
        std::thread::sleep(BEFORE_RETRY);
        // If the step already exists, the first attempt wrote it.
        request.existing = Existing::Replace;
        self.saver.start(request, taken.snapshot)?;
        let last = self.saver.wait();
        Ok(self.failure(last))
    }

    /// Returns the newest step that this rank knows to be saved.
    pub fn newest(&self) -> Option<u64> {
        self.newest
    }

    /// Returns the remarks since the last call. A failed save is reported on every rank.
    pub fn remarks(&mut self) -> Vec<SaveRemark> {
        std::mem::take(&mut self.remarks)
    }

    fn note(&mut self, saved: Result<Option<Saved>, StepError>) {
        match self.failure(saved) {
            Some(error) if self.last_has_begun => self.last_failure = Some(error),
            Some(error) => self.remarks.push(SaveRemark::Failed(error)),
            None => {}
        }
    }

    /// Stores the number of the saved step, and returns the failure if nothing was saved.
    fn failure(&mut self, saved: Result<Option<Saved>, StepError>) -> Option<StepError> {
        let saved = match saved {
            Ok(saved) => saved?,
            Err(error) => return Some(error),
        };
        self.newest = Some(saved.step);
        let problem = saved.removal_failure.map(SaveRemark::NotRemoved);
        self.remarks.extend(problem);
        None
    }
}

/// Agrees among all ranks on a tensor that is not finite, and on whether any rank is busy.
fn agree(
    world: &ProcessGroup,
    own_not_finite: Option<&str>,
    own_is_busy: bool,
) -> Result<(Option<NotFiniteTensor>, bool), CollectiveError> {
    let mut note = vec![u8::from(own_is_busy)];
    note.extend(own_not_finite.unwrap_or_default().as_bytes());
    let notes = world.exchange("begin of a save", note)?;
    let named = |(rank, note): (usize, &Vec<u8>)| {
        let name = note.get(1..).filter(|name| !name.is_empty())?;
        let tensor = String::from_utf8_lossy(name).into_owned();
        Some(NotFiniteTensor { tensor, rank })
    };
    let not_finite = notes.iter().enumerate().find_map(named);
    let is_busy = notes.iter().any(|note| note.first() == Some(&1));
    Ok((not_finite, is_busy))
}
