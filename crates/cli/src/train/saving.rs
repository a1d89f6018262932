//! Steps on disk: saved while the training goes on.

use std::num::NonZeroUsize;
use std::time::Duration;

use burn_fsdp::steps::{
    BackgroundSaver, DataPosition, Error as StepError, Existing, LossScale, SaveRequest, Saved,
    TrainingState,
};
use burn_fsdp::{LossScaler, ProcessMesh, TrainingSnapshot};
use serde_json::json;

use crate::args::NotFinite;
use crate::console;
use crate::error::RankError;
use crate::train::config::TrainConfig;
use crate::train::run_folder::CheckpointConfig;
use crate::train::share;
use crate::train::trainer::Trainer;

/// How long to wait before a last save that failed is tried once more.
const BEFORE_RETRY: Duration = Duration::from_secs(1);

/// One rank's end of the saves of a run.
pub(crate) struct Saving<'a> {
    config: &'a TrainConfig,
    checkpoints: &'a CheckpointConfig,
    mesh: &'a ProcessMesh,
    saver: BackgroundSaver,
    /// The last save, if it has to wait for the one before it.
    deferred: Option<Box<(SaveRequest, TrainingSnapshot)>>,
    /// How many steps the last save was to keep.
    keep_last: Option<NonZeroUsize>,
    /// The newest step that is known to be saved.
    saved_step: Option<u64>,
    /// What went wrong with saves.
    pub(crate) warnings: Vec<String>,
}

/// What became of the wish to save.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Started {
    /// The step is being saved, or will be; or it was left out, and the user was told.
    Goes,
    /// There is nothing worth saving: this tensor is not finite, on this rank.
    NotFinite { tensor: String, rank: usize },
}

impl<'a> Saving<'a> {
    /// Collective, where the run has a folder for checkpoints.
    pub(crate) fn begin(
        config: &'a TrainConfig,
        mesh: &'a ProcessMesh,
    ) -> Result<Option<Self>, RankError> {
        let Some(checkpoints) = &config.checkpoints else {
            return Ok(None);
        };
        let rank = mesh.world().rank();
        if rank == 0 && checkpoints.overwrite {
            checkpoints.folder.clear()?;
        }
        let folder = checkpoints.folder.clone();
        let rendezvous = checkpoints.meeting.end_of(rank)?;
        Ok(Some(Self {
            config,
            checkpoints,
            mesh,
            saver: BackgroundSaver::new(folder, rendezvous)?,
            deferred: None,
            keep_last: checkpoints.keep_last,
            saved_step: None,
            warnings: Vec::new(),
        }))
    }

    /// Whether to save after this step, counted from 0.
    pub(crate) fn is_due(&self, step: usize) -> bool {
        let every = self.checkpoints.save_every;
        every.is_some_and(|every| (step + 1).is_multiple_of(every))
    }

    /// Whether this rank was told to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.checkpoints.is_stopped()
    }

    /// Begins to save what there is after `steps` steps. The training goes on meanwhile.
    ///
    /// If the save before is not done, this waits for it, but less long than ranks wait for each other;
    /// then this save is left out, or comes at the end if it is the last.
    ///
    /// Collective: all ranks do so at the same point, and agree on what is done.
    pub(crate) fn start(
        &mut self,
        steps: usize,
        trainer: &mut dyn Trainer,
        is_last: bool,
    ) -> Result<Started, RankError> {
        let world = self.mesh.world();
        let taken = trainer.snapshot()?;
        let not_finite = taken.snapshot.not_finite(&taken.plan, world.rank());
        let last = self.saver.wait_for(self.config.deadline / 2);
        self.note(last);
        let is_busy = self.saver.pending().is_some();
        let agreed = share::save_begins(world, not_finite.as_deref(), is_busy)?;
        // Whether a step gives finite losses shows in the next one, so the one before it stays, too.
        let least = |keep: NonZeroUsize| keep.max(NonZeroUsize::MIN.saturating_add(1));
        self.keep_last = self.checkpoints.keep_last.map(least);
        if let Some((tensor, rank)) = agreed.not_finite {
            if self.config.not_finite == NotFinite::Stop {
                return Ok(Started::NotFinite { tensor, rank });
            }
            // A step of no numbers pushes out none that has some.
            self.keep_last = None;
        }
        let request = self.request(steps, &taken, trainer.scaler());
        match (agreed.is_busy, is_last) {
            (false, _) => {
                self.saver.start(request, taken.snapshot)?;
            }
            (true, true) => self.deferred = Some(Box::new((request, taken))),
            (true, false) => self.warn(format!(
                "step {steps} is not saved, as the save before it still goes on"
            )),
        }
        Ok(Started::Goes)
    }

    fn request(
        &self,
        steps: usize,
        taken: &TrainingSnapshot,
        scaler: Option<&LossScaler>,
    ) -> SaveRequest {
        let config = self.config;
        let mut training = TrainingState {
            step: steps as u64,
            seed: config.seed,
            data: DataPosition {
                epoch: 0,
                sample: (steps * config.batch) as u64,
            },
            loss_scale: scaler.map(|scaler| LossScale {
                scale: scaler.state().scale,
                good_steps: scaler.state().growth_tracker.into(),
            }),
            learning_rate: json!(config.schedule),
            optimizer: taken.optimizer.clone(),
            sections: Default::default(),
        };
        config.settings.save_into(&mut training);
        SaveRequest {
            model: json!(config.model),
            keep_last: self.keep_last,
            existing: match self.checkpoints.may_replace(steps as u64) {
                true => Existing::Replace,
                false => Existing::Refuse,
            },
            ..SaveRequest::new(taken.plan.clone(), training)
        }
    }

    /// Notices what has come of the save under way.
    pub(crate) fn poll(&mut self) {
        let saved = self.saver.poll();
        self.note(saved);
    }

    /// Waits for the last save, which is tried once more if it fails and was of the last step. Returns the
    /// newest saved step, and what went wrong with the last one.
    ///
    /// No collectives of the training: a disk may take its time.
    pub(crate) fn finish(
        &mut self,
        steps: usize,
        trainer: &mut dyn Trainer,
        is_of_last: bool,
    ) -> Result<(Option<u64>, Option<String>), RankError> {
        let mut last = self.saver.wait();
        if let Some(deferred) = self.deferred.take() {
            self.note(last);
            let (request, taken) = *deferred;
            self.saver.start(request, taken.snapshot)?;
            last = self.saver.wait();
        }
        if !is_of_last {
            self.note(last);
            return Ok((self.saved_step, None));
        }
        if let Err(error) = &last
            && may_be_tried_again(error)
        {
            self.warn(format!(
                "the last save failed, and is tried once more: {error}"
            ));
            std::thread::sleep(BEFORE_RETRY);
            let taken = trainer.snapshot()?;
            let mut request = self.request(steps, &taken, trainer.scaler());
            // If the step is there by now, it is what the first attempt left.
            request.existing = Existing::Replace;
            self.saver.start(request, taken.snapshot)?;
            last = self.saver.wait();
        }
        let failure = match last {
            Err(error) => Some(format!("step {steps} was not saved: {error}")),
            saved => {
                self.note(saved);
                None
            }
        };
        Ok((self.saved_step, failure))
    }

    fn note(&mut self, saved: Result<Option<Saved>, StepError>) {
        match saved {
            Ok(None) => {}
            Ok(Some(saved)) => {
                self.saved_step = Some(saved.step);
                if let Some(problem) = saved.removal_failure {
                    self.warn(format!("older steps could not be removed: {problem}"));
                }
            }
            Err(error) => self.warn(format!("a save failed, training goes on: {error}")),
        }
    }

    /// Rank 0 hears of every failure, and speaks for all.
    fn warn(&mut self, warning: String) {
        if self.mesh.world().rank() == 0 {
            console::tell(format_args!("warning: {warning}"));
            self.warnings.push(warning);
        }
    }
}

/// Whether another attempt could end otherwise. Every rank knows of a failure, but for one of the meeting
/// itself, after which there is no other.
fn may_be_tried_again(error: &StepError) -> bool {
    !matches!(
        error,
        StepError::Rendezvous { .. }
            | StepError::Exists { .. }
            | StepError::NotAFolder { .. }
            | StepError::Foreign { .. }
    )
}
