//! The training of one rank.

use std::collections::VecDeque;

use burn::data::dataset::DatasetError;
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use burn::train::{InferenceStep, Learner, LearnerModel, TrainStep, TrainingItem};
use burn_fsdp_collectives::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::agreement::Rates;
use crate::course::{Course, Ranks};
use crate::lead::Lead;
use crate::lent::Lent;
use crate::notes::exchanged;
use crate::outputs::progress;
use crate::rounds::{Next, Own, Round, Rounds, Share, Turn};
use crate::scratch::Scratch;
use crate::stop::Stop;
use crate::trainer::Trainer;
use burn_fsdp_glue::error::Error;

/// The initial state of a rank.
pub(crate) struct Start<M: LearnerModel> {
    pub(crate) model: M,
    /// The optimizer without state.
    pub(crate) optimizer: ModuleOptimizer,
    /// On rank 0: the optimizer with the state of whole parameters.
    pub(crate) whole: Option<ModuleOptimizer>,
    /// The learner without its model, for its learning-rate schedule.
    pub(crate) learner: Learner<Lent<M>>,
    pub(crate) training: Share<<M as TrainStep>::Input>,
    pub(crate) validation: Share<<M as InferenceStep>::Input>,
    pub(crate) device: Device,
    pub(crate) course: Course<M>,
    /// Rank 0's additional work; `None` on other ranks.
    pub(crate) lead: Option<Lead<M>>,
}

/// Whether a rank continues after an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Another,
    End,
}

/// A rank's message to the others at the end of an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct End {
    /// True on rank 0 if the user's early stopping ends the training here.
    ends: bool,
    stop: Option<Stop>,
}

/// Fails now, rather than after the first epoch, if the folder for files in transit cannot be written to.
pub(crate) fn check_scratch<M: LearnerModel>(
    course: &Course<M>,
    lead: Option<&Lead<M>>,
) -> Result<(), Error> {
    if lead.is_some() && course.saves {
        drop(Scratch::new(course.settings.scratch.as_deref())?);
    }
    Ok(())
}

/// One rank in the middle of a training run.
pub(crate) struct Rank<M: LearnerModel, T> {
    pub(crate) world: ProcessGroup,
    /// The device where outputs of other processes are reassembled.
    pub(crate) device: Device,
    /// The learning rates, which processes compare.
    pub(crate) rates: Option<Rates>,
    pub(crate) trainer: T,
    pub(crate) learner: Learner<Lent<M>>,
    pub(crate) course: Course<M>,
    pub(crate) lead: Option<Lead<M>>,
}

impl<M: LearnerModel, T: Trainer<M>> Rank<M, T> {
    /// Runs all epochs.
    pub(crate) fn train(
        &mut self,
        training: &Share<<M as TrainStep>::Input>,
        validation: &Share<<M as InferenceStep>::Input>,
    ) -> Result<(), Error> {
        for epoch in self.course.epochs.clone() {
            if self.epoch(epoch, training, validation)? == After::End {
                break;
            }
        }
        self.end()
    }

    /// Trains and validates one epoch, saves it, and agrees on whether another one follows.
    fn epoch(
        &mut self,
        epoch: usize,
        training: &Share<<M as TrainStep>::Input>,
        validation: &Share<<M as InferenceStep>::Input>,
    ) -> Result<After, Error> {
        self.as_lead(|lead| lead.begin_training(epoch, self.course.items));
        let trained = self.train_epoch(training)?;
        self.as_lead(|lead| lead.end_training(epoch));
        if trained == After::End {
            return Ok(After::End);
        }
        self.as_lead(|lead| lead.begin_validation(epoch, self.course.validated_items));
        self.trainer.begin_validation()?;
        let validated = self.validate(validation)?;
        self.trainer.end_validation();
        self.as_lead(|lead| lead.end_validation(epoch));
        if validated == After::End {
            return Ok(After::End);
        }
        // If a rank stopped at the end of validation, do not judge the epoch by its metrics.
        if self.agreed(false)? == After::End {
            return Ok(After::End);
        }
        self.save(epoch)?;
        let ends = self
            .lead
            .as_mut()
            .is_some_and(|lead| lead.ends_early(epoch));
        self.agreed(ends)
    }

    /// Trains on all batches of an epoch.
    fn train_epoch(&mut self, share: &Share<<M as TrainStep>::Input>) -> Result<After, Error> {
        let mut rounds = Rounds::new("batches of a training step", share);
        let mut accumulated = 0;
        // The batches whose outputs are not known yet.
        let mut batches = VecDeque::new();
        for iteration in 1.. {
            let outputs = &self.course.outputs.training;
            let Turn { next, waiting } = self.next(&mut rounds, outputs.waiting())?;
            let rates = Some(self.learner.lr_current());
            outputs.bring(&self.world, &waiting, &self.device, rates.as_ref())?;
            self.as_lead(|lead| {
                lead.pass_on();
            });
            let Round {
                batch,
                counts,
                weight,
                is_last,
                had_by_all,
            } = match next {
                Next::Round(round) => round,
                Next::Through => {
                    // A step over several batches returns their outputs together.
                    self.as_lead(|lead| while lead.pass_on() {});
                    break;
                }
                Next::Stopped(failure, by) => {
                    self.as_lead(|lead| while lead.pass_on() {});
                    return Ok(self.stopped(failure, by));
                }
            };
            batches.push_back((iteration, counts, had_by_all));
            let output = self.trainer.run(batch, weight)?;
            let mut outputs: Vec<_> = output.into_iter().collect();
            accumulated += 1;
            let is_due = |accumulation| accumulated >= accumulation || is_last;
            if self.course.accumulation.is_none_or(is_due) {
                self.learner.lr_step();
                outputs.extend(self.trainer.step(self.learner.lr_current())?);
                accumulated = 0;
            }
            for output in outputs {
                let Some((iteration, true, had)) = batches.pop_front() else {
                    continue;
                };
                let progress = progress(had, self.course.items);
                let rates = Some(self.learner.lr_current());
                let item = TrainingItem::new(output, progress, Some(iteration), rates);
                self.course.outputs.training.put(self.world.rank(), item)?;
            }
        }
        Ok(After::Another)
    }

    /// Runs all batches of the validation.
    fn validate(&mut self, share: &Share<<M as InferenceStep>::Input>) -> Result<After, Error> {
        let device = self.device.clone().inner();
        let mut rounds = Rounds::new("batches of a validation", share);
        for iteration in 1.. {
            let outputs = &self.course.outputs.validation;
            let Turn { next, waiting } = self.next(&mut rounds, outputs.waiting())?;
            outputs.bring(&self.world, &waiting, &device, None)?;
            self.as_lead(|lead| {
                lead.pass_on();
            });
            let round = match next {
                Next::Round(round) => round,
                Next::Through => break,
                Next::Stopped(failure, by) => return Ok(self.stopped(failure, by)),
            };
            let output = self.trainer.validate(round.batch, round.weight)?;
            if round.counts {
                let progress = progress(round.had_by_all, self.course.validated_items);
                let item = TrainingItem::new(output, progress, Some(iteration), None);
                self.course
                    .outputs
                    .validation
                    .put(self.world.rank(), item)?;
            }
        }
        Ok(After::Another)
    }

    /// Gathers a checkpoint's contents into files on rank 0, which saves it, if the user's strategy requests it.
    fn save(&mut self, epoch: usize) -> Result<(), Error> {
        if !self.course.saves {
            return Ok(());
        }
        let parent = self.course.settings.scratch.as_deref();
        let files = self.lead.is_some().then(|| Scratch::new(parent));
        let staged = self.trainer.staged(files.transpose()?)?;
        let Some((lead, staged)) = self.lead.as_mut().zip(staged) else {
            return Ok(());
        };
        Lent::put_into(&mut self.learner, staged.record, staged.optimizer);
        lead.save(&self.learner, epoch, staged.files);
        Lent::clear(&mut self.learner);
        Ok(())
    }

    /// Agrees on the next batch with the other ranks.
    fn next<I>(&self, rounds: &mut Rounds<'_, I>, waiting: Vec<usize>) -> Result<Turn<I>, Error> {
        let rates = self.rates.as_ref();
        let own = Own {
            stop: Stop::of(&self.course.interrupter),
            rates: rates.map_or(0, |rates| rates.fingerprint(&self.learner.lr_current())),
            waiting,
        };
        rounds.next(&self.world, own)
    }

    /// Ends training on all ranks if any rank `ends` it or was stopped.
    fn agreed(&self, ends: bool) -> Result<After, Error> {
        let stop = Stop::of(&self.course.interrupter);
        let all = exchanged(&self.world, "end of an epoch", &End { ends, stop })?;
        let ends = all.iter().any(|end| end.ends);
        Ok(match Stop::first(all.into_iter().map(|end| end.stop)) {
            Some(by) => self.stopped(None, by),
            None if ends => After::End,
            None => After::Another,
        })
    }

    /// Waits until rank 0 has rendered and written everything, and notifies the other processes if that failed.
    fn end(&mut self) -> Result<(), Error> {
        if let Some(lead) = self.lead.take() {
            lead.end();
        }
        if self.course.among == Ranks::Processes {
            self.agreed(true)?;
        }
        Ok(())
    }

    /// Stops this rank's loop because rank `rank` stops. `failure` is the failure of this rank's own loader, if any.
    fn stopped(&self, failure: Option<DatasetError>, (rank, stop): (usize, Stop)) -> After {
        if let Some(failure) = failure {
            self.course.interrupter.fail(failure);
        }
        // All threads share one interrupter.
        if self.course.among == Ranks::Processes {
            stop.tell(rank, &self.course.interrupter);
        }
        After::End
    }

    fn as_lead(&self, act: impl FnOnce(&Lead<M>)) {
        if let Some(lead) = &self.lead {
            act(lead);
        }
    }
}
