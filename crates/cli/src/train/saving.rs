//! The saves of a run: when they happen, and what they contain.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use burn_fsdp::internals::checkpoint::{
    DataPosition, Existing, SaveRemark, SaveRequest, TrainingSnapshot, TrainingState, loss_scale,
};
use burn_fsdp::{Checkpointer, LossScaler, ProcessGroup};
use serde_json::json;

use crate::adapters::Adapters;
use crate::args::NotFinite;
use crate::console;
use crate::error::RankError;
use crate::train::config::TrainConfig;
use crate::train::documents;
use crate::train::run_folder::CheckpointConfig;
use crate::train::trainer::Trainer;

/// One rank's handle for the saves of a run.
pub(crate) struct Saving<'a> {
    contents: Contents<'a>,
    is_first: bool,
    saves: Checkpointer,
    /// The group in which processes agree on whether to retry the last save.
    last_save: Option<ProcessGroup>,
    /// Warnings about saves.
    pub(crate) warnings: Vec<String>,
    /// True once the user was warned about a saved step with a non-finite number.
    has_told_not_finite: bool,
    /// Save failures that recurred after their warning, with counts.
    again: BTreeMap<String, usize>,
}

/// The contents of a saved step other than tensors.
struct Contents<'a> {
    config: &'a TrainConfig,
    checkpoints: &'a CheckpointConfig,
    /// Number of newest steps to keep, including the current save; all if `None`.
    keep_last: Option<NonZeroUsize>,
}

/// The outcome of starting a save.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Started {
    /// Accepted: the step is saved now or later, or it was skipped with a warning.
    Goes,
    /// Not saved, because this tensor is not finite on this rank.
    NotFinite { tensor: String, rank: usize },
}

impl<'a> Saving<'a> {
    /// Prepares the saves of a rank, if the run has a checkpoint folder. Rank 0 removes old steps if this was
    /// requested.
    pub(crate) fn begin(
        config: &'a TrainConfig,
        world: &ProcessGroup,
    ) -> Result<Option<Self>, RankError> {
        let Some(checkpoints) = &config.checkpoints else {
            return Ok(None);
        };
        let rank = world.rank();
        if rank == 0 && checkpoints.overwrite {
            checkpoints.folder.clear()?;
        }
        let folder = checkpoints.folder.clone();
        let rendezvous = checkpoints.meeting.end_of(world)?;
        let saves = Checkpointer::over(world, folder, rendezvous)?;
        Ok(Some(Self {
            contents: Contents {
                config,
                checkpoints,
                keep_last: checkpoints.keep_last,
            },
            is_first: rank == 0,
            last_save: if config.ranks.are_processes() {
                Some(world.isolate("last save", checkpoints.save_deadline)?)
            } else {
                None
            },
            // Shorter than ranks wait for each other.
            saves: saves.patience(config.deadline / 2),
            warnings: Vec::new(),
            again: BTreeMap::new(),
            has_told_not_finite: false,
        }))
    }

    /// Returns true if a save is due after this step, counted from 0.
    pub(crate) fn is_due(&self, step: usize) -> bool {
        let every = self.contents.checkpoints.save_every;
        every.is_some_and(|every| (step + 1).is_multiple_of(every))
    }

    /// Starts to save the state after `steps` steps. Training continues in the meantime.
    ///
    /// Waits for a previous save that is not complete, but for less time than ranks wait for each other. After that,
    /// the save is skipped, or done at the end if it is the last.
    ///
    /// Collective: all ranks call it at the same point, and agree on the outcome.
    pub(crate) fn start(
        &mut self,
        steps: usize,
        trainer: &mut dyn Trainer,
        (is_last, has_finite_loss): (bool, bool),
    ) -> Result<Started, RankError> {
        let offered = self.saves.offer(trainer.snapshot()?);
        self.tell();
        let offered = offered?;
        // Only the next step shows whether a step has finite losses, so the step before the newest is also kept.
        let least = |keep: NonZeroUsize| keep.max(NonZeroUsize::MIN.saturating_add(1));
        self.contents.keep_last = self.contents.checkpoints.keep_last.map(least);
        // A step whose loss is not finite must not replace older ones.
        if !has_finite_loss {
            self.contents.keep_last = None;
        }
        if let Some(not_finite) = offered.not_finite() {
            if self.contents.config.not_finite == NotFinite::Stop {
                return Ok(Started::NotFinite {
                    tensor: not_finite.tensor.clone(),
                    rank: not_finite.rank,
                });
            }
            // A step with numbers that are not finite must not replace one with finite numbers.
            self.contents.keep_last = None;
            let (tensor, rank) = (&not_finite.tensor, not_finite.rank);
            if !std::mem::replace(&mut self.has_told_not_finite, true) {
                let warning = format!(
                    "step {steps} is saved although {tensor} is not finite on rank {rank} (--nan continue); steps \
                     saved from then on do not replace older ones"
                );
                self.warn(warning);
            }
        }
        let scaler = trainer.scaler();
        let adapters = trainer.adapters();
        let request = self
            .contents
            .request(steps, offered.taken(), scaler, adapters);
        self.saves.begin(offered, request, is_last)?;
        self.tell();
        Ok(Started::Goes)
    }

    /// Handles the result of the current save, if it is complete.
    pub(crate) fn poll(&mut self) {
        self.saves.poll();
        self.tell();
    }

    /// Waits for the current save. If `is_of_last`, it is of the last step and is retried once after a failure. Returns
    /// the newest saved step, and a message if the save of the last step failed.
    ///
    /// Uses no collectives of the training, because a disk may be slow.
    pub(crate) fn finish(
        &mut self,
        steps: usize,
        trainer: &mut dyn Trainer,
        is_of_last: bool,
    ) -> Result<(Option<u64>, Option<String>), RankError> {
        let failure = self.saves.finish();
        self.tell();
        let mut failure = failure?;
        if !is_of_last && let Some(error) = failure.take() {
            self.pass_on(&SaveRemark::Failed(error));
        }
        self.tell_again();
        if !is_of_last {
            return Ok((self.saves.newest(), None));
        }
        let may = failure.as_ref().map(Checkpointer::may_be_tried_again);
        if self.is_tried_again(may)? {
            if let Some(error) = &failure {
                self.warn(format!("the last save failed and is retried once: {error}"));
            }
            let taken = trainer.snapshot()?;
            let request =
                self.contents
                    .request(steps, &taken, trainer.scaler(), trainer.adapters());
            failure = self.saves.try_again(taken, request)?;
            self.tell();
        }
        let failure = failure.map(|error| {
            // If another rank failed, the error already contains this text.
            let (said, text) = (format!("step {steps} was not saved"), error.to_string());
            if text.starts_with(&said) {
                text
            } else {
                format!("{said}: {text}")
            }
        });
        Ok((self.saves.newest(), failure))
    }

    /// Returns true if the last save should be retried. Threads decide individually, because an attempt ends when one
    /// of them leaves. Processes agree.
    fn is_tried_again(&self, may: Option<bool>) -> Result<bool, RankError> {
        let Some(group) = &self.last_save else {
            return Ok(may == Some(true));
        };
        let own = match may {
            None => 0,
            Some(true) => 1,
            Some(false) => 2,
        };
        let all = group.exchange("try the last save again", vec![own])?;
        let has = |answer: u8| all.iter().any(|note| note.first() == Some(&answer));
        Ok(has(1) && !has(2))
    }

    /// Turns remarks about saves into warnings.
    fn tell(&mut self) {
        for remark in self.saves.remarks() {
            self.pass_on(&remark);
        }
    }

    fn pass_on(&mut self, remark: &SaveRemark) {
        let text = remark.to_string();
        if matches!(remark, SaveRemark::Failed(_)) && self.warnings.contains(&text) {
            *self.again.entry(text).or_default() += 1;
        } else {
            self.warn(text);
        }
    }

    /// Emits a warning with the number of repeated save failures.
    fn tell_again(&mut self) {
        for (failure, times) in std::mem::take(&mut self.again) {
            self.warn(format!(
                "{times} more saves failed in the same way: {failure}"
            ));
        }
    }

    /// Prints each warning once on rank 0, which learns of every failure, and keeps it for the report.
    fn warn(&mut self, warning: String) {
        if self.is_first && !self.warnings.contains(&warning) {
            console::tell(format_args!("warning: {warning}"));
            self.warnings.push(warning);
        }
    }
}

impl Contents<'_> {
    fn request(
        &self,
        steps: usize,
        taken: &TrainingSnapshot,
        scaler: Option<&LossScaler>,
        adapters: Option<&Adapters>,
    ) -> SaveRequest {
        let config = self.config;
        let mut training = TrainingState {
            step: steps as u64,
            seed: config.seed,
            data: DataPosition {
                epoch: 0,
                sample: (steps * config.batch) as u64,
            },
            loss_scale: scaler.map(loss_scale),
            learning_rate: json!(config.schedule),
            optimizer: taken.optimizer.clone(),
            sections: Default::default(),
        };
        config.settings.save_into(&mut training);
        let documents = config.data.documents();
        if let Some(position) = documents.and_then(|documents| documents.position_after(steps)) {
            let section = documents::SECTION.to_owned();
            training.sections.insert(section, position);
        }
        if let Some(adapters) = adapters {
            adapters.save_into(&mut training);
        }
        SaveRequest {
            model: json!(config.model),
            keep_last: self.keep_last,
            existing: if self.checkpoints.may_replace(steps as u64) {
                Existing::Replace
            } else {
                Existing::Refuse
            },
            ..SaveRequest::new(taken.plan.clone(), training)
        }
    }
}
