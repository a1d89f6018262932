//! Steps on disk: saved while the training goes on, and gone on from.

use std::path::PathBuf;

use burn::optim::ModuleOptimizer;
use burn_fsdp::steps::{
    BackgroundSaver, Check, Checkpoints, DataPosition, Existing, LossScale, SaveRequest, Saved,
    Step, TrainingState,
};
use burn_fsdp::{
    GroupRendezvous, LossScaler, LossScalerState, ProcessMesh, TrainingSnapshot, restore,
};
use burn_fsdp_models::{Gpt, GptConfig};
use serde_json::json;

use crate::args::ResumeFrom;
use crate::config::{CheckpointConfig, TrainConfig};
use crate::error::RankError;
use crate::share;

/// One rank's end of the saves of a run.
pub(crate) struct Saving<'a> {
    config: &'a TrainConfig,
    checkpoints: &'a CheckpointConfig,
    mesh: &'a ProcessMesh,
    saver: BackgroundSaver,
    /// The newest step that is known to be saved.
    saved_step: Option<u64>,
    /// What went wrong with saves, and steps that were passed over.
    pub(crate) warnings: Vec<String>,
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
        let world = mesh.world();
        let group = world.split(0, world.rank(), "checkpoints")?;
        let rendezvous = Box::new(GroupRendezvous::new(group));
        let folder = Checkpoints::new(&checkpoints.folder);
        Ok(Some(Self {
            config,
            checkpoints,
            mesh,
            saver: BackgroundSaver::new(folder, rendezvous)?,
            saved_step: None,
            warnings: Vec::new(),
        }))
    }

    /// The step to go on from, the same on every rank; `None` to start fresh.
    ///
    /// Collective.
    pub(crate) fn resumed_step(&mut self) -> Result<Option<Step>, RankError> {
        let Some(which) = self.checkpoints.resume else {
            return Ok(None);
        };
        let folder = Checkpoints::new(&self.checkpoints.folder);
        let world = self.mesh.world();
        let own = match world.rank() {
            0 => self.newest(&folder, which)?,
            _ => None,
        };
        let Some(number) = share::number_of_rank_0(world, "step to resume from", own)? else {
            return Ok(None);
        };
        let step = folder.open(number)?;
        self.check_model(&step)?;
        Ok(Some(step))
    }

    fn newest(
        &mut self,
        folder: &Checkpoints,
        which: ResumeFrom,
    ) -> Result<Option<u64>, RankError> {
        let newest = folder.steps()?.last().copied();
        match (which, newest) {
            (_, None) => Ok(None),
            (ResumeFrom::Newest, Some(newest)) => {
                // Whole or an error: nothing else is looked for.
                folder.open(newest)?.check_sizes()?;
                Ok(Some(newest))
            }
            (ResumeFrom::NewestGood, Some(_)) => {
                let found = folder.newest_good(Check::Everything)?;
                for skipped in found.skipped {
                    let warning = format!("{} skipped: {}", skipped.path.display(), skipped.error);
                    self.warnings.push(warning);
                }
                Ok(found.step.map(|step| step.index().training.step))
            }
        }
    }

    /// Shapes do not tell everything: the number of heads leaves no trace in them.
    fn check_model(&self, step: &Step) -> Result<(), RankError> {
        let found: Result<GptConfig, _> = serde_json::from_value(step.index().model.clone());
        match found {
            Ok(found) if found == self.config.model => Ok(()),
            found => Err(RankError::OtherModel {
                path: step.path().to_owned(),
                expected: format!("{:?}", self.config.model),
                found: found.map_or("another kind".to_owned(), |found| format!("{found:?}")),
            }),
        }
    }

    /// Whether to save after this step, counted from 0.
    pub(crate) fn is_due(&self, step: usize) -> bool {
        let every = self.checkpoints.save_every;
        every.is_some_and(|every| (step + 1).is_multiple_of(every))
    }

    /// Whether this rank was told to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.checkpoints
            .stop
            .load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Begins to save what was taken after `steps` steps. The training goes on meanwhile.
    ///
    /// All ranks do so at the same point.
    pub(crate) fn start(
        &mut self,
        steps: usize,
        taken: TrainingSnapshot,
        scaler: Option<&LossScaler>,
    ) -> Result<(), RankError> {
        let config = self.config;
        let training = TrainingState {
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
            optimizer: taken.optimizer,
            sections: Default::default(),
        };
        // A save that failed was reported; this one is another.
        let last = self.saver.wait();
        self.note(last);
        let request = SaveRequest {
            model: json!(config.model),
            keep_last: self.checkpoints.keep_last,
            // The step may be there, damaged and passed over, or of a run that was not resumed.
            existing: Existing::Replace,
            ..SaveRequest::new(taken.plan, training)
        };
        self.saver.start(request, taken.snapshot)?;
        Ok(())
    }

    /// Notices what has come of the save under way.
    pub(crate) fn poll(&mut self) {
        let saved = self.saver.poll();
        self.note(saved);
    }

    /// Waits for the last save.
    pub(crate) fn finish(&mut self) -> Result<Option<u64>, RankError> {
        if let Some(saved) = self.saver.wait()? {
            self.note(Ok(Some(saved)));
        }
        Ok(self.saved_step)
    }

    fn note(&mut self, saved: Result<Option<Saved>, burn_fsdp::steps::Error>) {
        match saved {
            Ok(None) => {}
            Ok(Some(saved)) => {
                self.saved_step = Some(saved.step);
                let problem = saved.removal_failure;
                self.warnings.extend(
                    problem.map(|problem| format!("older steps could not be removed: {problem}")),
                );
            }
            Err(error) => {
                let warning = format!("a save failed, training goes on: {error}");
                if self.mesh.world().rank() == 0 {
                    eprintln!("warning: {warning}");
                }
                self.warnings.push(warning);
            }
        }
    }
}

/// The model and the optimizer as they were after the steps of a saved one.
pub(crate) fn resume(
    step: &Step,
    model: Gpt,
    optimizer: ModuleOptimizer,
    scaler: Option<&mut LossScaler>,
) -> Result<(Gpt, ModuleOptimizer), RankError> {
    let (model, optimizer) = restore(model, optimizer, step)?;
    let training = &step.index().training;
    if let (Some(scaler), Some(saved)) = (scaler, training.loss_scale) {
        let mut state: LossScalerState = scaler.state();
        state.scale = saved.scale;
        state.growth_tracker = u32::try_from(saved.good_steps).unwrap_or(u32::MAX);
        *scaler = scaler.clone().with_state(state);
    }
    Ok((model, optimizer))
}

/// The step at `path`, or the newest of the folder of checkpoints there.
pub(crate) fn open(path: PathBuf) -> Result<Step, burn_fsdp::steps::Error> {
    match Checkpoints::new(&path).steps() {
        Ok(steps) if !steps.is_empty() => Checkpoints::new(path).newest(),
        _ => Step::open(path),
    }
}
