//! The training of one rank.

use std::collections::HashSet;

use burn::data::dataset::DatasetError;
use burn::module::{ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn::train::{InferenceStep, Learner, LearnerModel, TrainOutput, TrainStep, TrainingItem};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_shard::{
    Agreement, BufferSync, LossScaler, catch, check_agreement, check_elementwise,
    check_same_optimizer, clip_grad_norm, local_ids, sync_buffers,
};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::state_types::check_state_types;
use crate::train::agreement::{Rates, check_same};
use crate::train::course::{Course, Ranks};
use crate::train::groups::Groups;
use crate::train::lead::Lead;
use crate::train::lent::Lent;
use crate::train::notes::exchanged;
use crate::train::outputs::progress;
use crate::train::rounds::{Next, Own, Round, Rounds, Share, Turn, Weight};
use crate::train::scaled::within;
use crate::train::scratch::Scratch;
use crate::train::staging::staged;
use crate::train::stop::Stop;
use crate::train::whole_state::divided;

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

/// Trains on one rank. Returns the sharded model and its optimizer.
///
/// Collective.
pub(crate) fn train<M: LearnerModel>(
    world: &ProcessGroup,
    start: Start<M>,
) -> Result<(M, ModuleOptimizer), Error> {
    let Start {
        model,
        optimizer,
        whole,
        learner,
        training,
        validation,
        device,
        course,
        lead,
    } = start;
    let weight = Weight::one();
    let weighted = weight.clone();
    let by_items = move |_: &str, gradient: Tensor<1>| match weighted.get() {
        1.0 => gradient,
        // Zeros, even if the uncounted batch has a gradient that is not finite.
        0.0 => gradient.zeros_like(),
        weight => gradient.mul_scalar(weight),
    };
    if course.settings.policy.attaches_adapters() {
        return Err(Error::AdaptersInTraining);
    }
    if course.among == Ranks::Processes {
        check_same(world, &course, &model)?;
    }
    let policy = course.settings.policy.clone().gradient_hook(by_items);
    let (mut model, groups) = Groups::shard(model, world, course.settings.replicas, policy)?;
    check_managed(&model)?;
    check_elementwise(&model, &optimizer)?;
    if course.saves {
        // Reject now, rather than on resuming, an optimizer whose checkpoints could not be resumed.
        check_state_types(&model, &optimizer)?;
    }
    if course.among == Ranks::Processes {
        check_same_optimizer(&model, &optimizer)?;
        model = sync_buffers(model, BufferSync::Broadcast)?;
        // Each process has created the tensors outside of all units itself.
        check_agreement(&model, Agreement::ParametersAndBuffers)?;
    }
    let parent = course.settings.scratch.as_deref();
    if lead.is_some() && course.saves {
        // Fail now, rather than after the first epoch, if the folder cannot be written to.
        drop(Scratch::new(parent)?);
    }
    let optimizer = divided(&model, optimizer, whole, &groups, parent)?;
    let rates = match course.among {
        Ranks::Threads => None,
        Ranks::Processes => Some(Rates::of(&model)?),
    };
    let mut rank = Rank {
        groups,
        device,
        rates,
        model: Some(model),
        optimizer,
        scaler: course.settings.scaler.clone(),
        learner,
        course,
        lead,
        weight,
    };
    for epoch in rank.course.epochs.clone() {
        if rank.epoch(epoch, &training, &validation)? == After::End {
            break;
        }
    }
    rank.end()?;
    let model = rank.model.take().expect("the optimizer gives it back");
    Ok((model, rank.optimizer))
}

/// Rejects a model with trained parameters outside of all units: each rank would train its own copy, and only one copy
/// is saved and returned.
fn check_managed<M: LearnerModel>(model: &M) -> Result<(), Error> {
    let managed = local_ids(model)?.into_iter();
    let managed = managed.flat_map(|ids| [ids.id, ids.recorded]).collect();
    let mut unmanaged = Unmanaged {
        managed,
        path: Vec::new(),
        found: None,
    };
    model.visit(&mut unmanaged);
    match unmanaged.found {
        Some(path) => Err(Error::IgnoredInTraining { path }),
        None => Ok(()),
    }
}

/// A visitor that looks for a trained parameter that no unit manages.
struct Unmanaged {
    managed: HashSet<ParamId>,
    path: Vec<String>,
    found: Option<String>,
}

impl ModuleVisitor for Unmanaged {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let is_own = self.found.is_none() && !self.managed.contains(&param.id);
        if is_own && param.is_require_grad() && !param.dims().contains(&0) {
            self.found = Some(self.path.join("."));
        }
    }
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

/// One rank in the middle of a training run.
struct Rank<M: LearnerModel> {
    groups: Groups,
    /// The device where outputs of other processes are reassembled.
    device: Device,
    /// The learning rates, which processes compare.
    rates: Option<Rates>,
    /// `None` only while the optimizer has it.
    model: Option<M>,
    optimizer: ModuleOptimizer,
    learner: Learner<Lent<M>>,
    /// The scaler of the losses, if they are scaled.
    scaler: Option<LossScaler>,
    course: Course<M>,
    lead: Option<Lead<M>>,
    weight: Weight,
}

impl<M: LearnerModel> Rank<M> {
    /// Trains and validates one epoch, saves it, and agrees on whether another one follows.
    fn epoch(
        &mut self,
        epoch: usize,
        training: &Share<<M as TrainStep>::Input>,
        validation: &Share<<M as InferenceStep>::Input>,
    ) -> Result<After, Error> {
        self.as_lead(|lead| lead.begin_training(epoch, self.course.items));
        let trained = self.train(training)?;
        self.as_lead(|lead| lead.end_training(epoch));
        if trained == After::End {
            return Ok(After::End);
        }
        self.as_lead(|lead| lead.begin_validation(epoch, self.course.validated_items));
        let validated = self.validate(validation)?;
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
    fn train(&mut self, share: &Share<<M as TrainStep>::Input>) -> Result<After, Error> {
        let mut rounds = Rounds::new("batches of a training step", share);
        let mut accumulator = GradientsAccumulator::new();
        let mut accumulated = 0;
        for iteration in 1.. {
            let outputs = &self.course.outputs.training;
            let Turn { next, waiting } = self.next(&mut rounds, outputs.waiting())?;
            let rates = Some(self.learner.lr_current());
            outputs.bring(&self.groups.world, &waiting, &self.device, rates.as_ref())?;
            self.as_lead(|lead| lead.pass_on());
            let Round {
                batch,
                counts,
                weight,
                is_last,
                had_by_all,
            } = match next {
                Next::Round(round) => round,
                Next::Through => break,
                Next::Stopped(failure, by) => return Ok(self.stopped(failure, by)),
            };
            self.weight.set(weight);
            let output = self.run(batch)?;
            match self.course.accumulation {
                None => self.step(output.grads)?,
                Some(accumulation) => {
                    catch(|| accumulator.accumulate(self.model(), output.grads))?;
                    accumulated += 1;
                    if accumulated >= accumulation || is_last {
                        self.step(accumulator.grads())?;
                        accumulated = 0;
                    }
                }
            }
            if counts {
                let progress = progress(had_by_all, self.course.items);
                let rates = Some(self.learner.lr_current());
                let item = TrainingItem::new(output.item, progress, Some(iteration), rates);
                self.course
                    .outputs
                    .training
                    .put(self.groups.world.rank(), item)?;
            }
        }
        Ok(After::Another)
    }

    /// Runs the user's step, forward and backward.
    fn run(
        &self,
        batch: <M as TrainStep>::Input,
    ) -> Result<TrainOutput<<M as TrainStep>::Output>, Error> {
        let step = || Ok(catch(|| TrainStep::step(self.model(), batch))?);
        let Some(scaler) = &self.scaler else {
            return step();
        };
        match within(scaler, step) {
            (output, true) => output,
            (output, false) => output.and(Err(Error::UnscaledLoss)),
        }
    }

    /// Runs one optimizer step, at the schedule's next rates. Skips it if scaled gradients overflow on any rank.
    fn step(&mut self, gradients: GradientsParams) -> Result<(), Error> {
        self.learner.lr_step();
        let model = self.model.as_ref().expect("the optimizer gives it back");
        let gradients = match &mut self.scaler {
            Some(scaler) => match scaler.unscale(model, gradients)? {
                Some(gradients) => gradients,
                None => return Ok(()),
            },
            None => gradients,
        };
        let gradients = match self.course.settings.clip {
            Some(clip) => clip_grad_norm(self.model(), gradients, clip)?.gradients,
            None => gradients,
        };
        let rates = self.learner.lr_current();
        let model = self.model.take().expect("the optimizer gives it back");
        let optimizer = &mut self.optimizer;
        self.model = Some(catch(|| model.optimize(optimizer, rates, gradients))?);
        Ok(())
    }

    /// Runs all batches of the validation.
    fn validate(&mut self, share: &Share<<M as InferenceStep>::Input>) -> Result<After, Error> {
        let device = self.device.clone().inner();
        let model = catch(|| self.model().valid())?;
        let mut rounds = Rounds::new("batches of a validation", share);
        for iteration in 1.. {
            let outputs = &self.course.outputs.validation;
            let Turn { next, waiting } = self.next(&mut rounds, outputs.waiting())?;
            outputs.bring(&self.groups.world, &waiting, &device, None)?;
            self.as_lead(|lead| lead.pass_on());
            let round = match next {
                Next::Round(round) => round,
                Next::Through => break,
                Next::Stopped(failure, by) => return Ok(self.stopped(failure, by)),
            };
            let output = catch(|| InferenceStep::step(&model, round.batch))?;
            if round.counts {
                let progress = progress(round.had_by_all, self.course.validated_items);
                let item = TrainingItem::new(output, progress, Some(iteration), None);
                self.course
                    .outputs
                    .validation
                    .put(self.groups.world.rank(), item)?;
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
        let staged = staged(
            self.model(),
            &self.optimizer,
            &self.groups,
            files.transpose()?,
        )?;
        let Some((lead, staged)) = self.lead.as_mut().zip(staged) else {
            return Ok(());
        };
        Lent::put_into(&mut self.learner, staged.record, staged.optimizer);
        lead.save(&self.learner, epoch, staged.files);
        Lent::clear(&mut self.learner);
        Ok(())
    }

    /// Agrees on the next batch with the other ranks.
    fn next<I>(&self, rounds: &mut Rounds<'_, I>, waiting: usize) -> Result<Turn<I>, Error> {
        let rates = self.rates.as_ref();
        let own = Own {
            stop: Stop::of(&self.course.interrupter),
            rates: rates.map_or(0, |rates| rates.fingerprint(&self.learner.lr_current())),
            waiting,
        };
        rounds.next(&self.groups.world, own)
    }

    /// Ends training on all ranks if any rank `ends` it or was stopped.
    fn agreed(&self, ends: bool) -> Result<After, Error> {
        let stop = Stop::of(&self.course.interrupter);
        let all = exchanged(&self.groups.world, "end of an epoch", &End { ends, stop })?;
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

    fn model(&self) -> &M {
        let model = self.model.as_ref();
        model.expect("the optimizer gives it back")
    }

    fn as_lead(&self, act: impl FnOnce(&Lead<M>)) {
        if let Some(lead) = &self.lead {
            act(lead);
        }
    }
}
