//! The training of one rank.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::data::dataset::DatasetError;
use burn::module::{ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn::train::{InferenceStep, Interrupter, Learner, LearnerModel, TrainStep, TrainingItem};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_shard::{
    WriteBack, catch, check_elementwise, clip_grad_norm, fully_shard, into_record, local_ids,
    summon_full_params,
};

use crate::error::Error;
use crate::optimizer_record::OptimizerParts;
use crate::train::lead::{Lead, Outputs};
use crate::train::lent::Lent;
use crate::train::rounds::{Next, Round, Rounds, Share, Weight};
use crate::train::settings::Settings;
use crate::train::whole_state::{divided, joined};

/// What all ranks do.
#[derive(Clone)]
pub(crate) struct Course<M: LearnerModel> {
    pub(crate) settings: Settings,
    pub(crate) epochs: RangeInclusive<usize>,
    /// Batches of a rank whose gradients make one step.
    pub(crate) accumulation: Option<usize>,
    /// True if epochs may be saved.
    pub(crate) saves: bool,
    /// The items of an epoch, of all ranks.
    pub(crate) items: usize,
    pub(crate) validated_items: usize,
    pub(crate) interrupter: Interrupter,
    pub(crate) outputs: Arc<Outputs<M>>,
}

/// What a rank begins with.
pub(crate) struct Start<M: LearnerModel> {
    pub(crate) model: M,
    /// The optimizer without state.
    pub(crate) optimizer: ModuleOptimizer,
    /// The optimizer's state, of whole parameters.
    pub(crate) state: Arc<OptimizerParts>,
    /// The learner without its model, for its schedule of rates.
    pub(crate) learner: Learner<Lent<M>>,
    pub(crate) training: Share<<M as TrainStep>::Input>,
    pub(crate) validation: Share<<M as InferenceStep>::Input>,
    pub(crate) device: Device,
    pub(crate) course: Course<M>,
    /// On rank 0.
    pub(crate) lead: Option<Lead<M>>,
}

/// Trains on one rank, and returns the whole model on rank 0.
///
/// Collective.
pub(crate) fn train<M: LearnerModel>(
    world: &ProcessGroup,
    start: Start<M>,
) -> Result<Option<M>, Error> {
    let Start {
        model,
        optimizer,
        state,
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
        // Whatever the batch that counts for nothing came to.
        0.0 => gradient.zeros_like(),
        weight => gradient.mul_scalar(weight),
    };
    if course.settings.policy.attaches_adapters() {
        return Err(Error::AdaptersInTraining);
    }
    let policy = course.settings.policy.clone().gradient_hook(by_items);
    let model = fully_shard(model.fork(&device), world, policy)?;
    check_managed(&model)?;
    check_elementwise(&model, &optimizer)?;
    let optimizer = divided(&model, optimizer, &state)?;
    drop(state);
    let mut rank = Rank {
        world,
        model: Some(model),
        optimizer,
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
    rank.whole_model()
}

/// Refuses a model with trained parameters that no unit manages: they would be each rank's own, and only one rank's are saved
/// and returned.
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

/// A visitor that looks for a trained parameter beside those that units manage.
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

/// What comes after an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Another,
    End,
}

/// One rank in the middle of a training.
struct Rank<'a, M: LearnerModel> {
    world: &'a ProcessGroup,
    /// None only while the optimizer has it.
    model: Option<M>,
    optimizer: ModuleOptimizer,
    learner: Learner<Lent<M>>,
    course: Course<M>,
    lead: Option<Lead<M>>,
    weight: Weight,
}

impl<M: LearnerModel> Rank<'_, M> {
    /// Trains and validates one epoch, saves it, and agrees on whether there is another.
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
        // What failed at the end of the validation must not be judged by its metrics.
        if self.agreed(self.course.interrupter.should_stop())? == After::End {
            return Ok(After::End);
        }
        self.save(epoch)?;
        let ends = self
            .lead
            .as_mut()
            .is_some_and(|lead| lead.ends_early(epoch));
        self.agreed(ends || self.course.interrupter.should_stop())
    }

    /// Trains on all batches of an epoch.
    fn train(&mut self, share: &Share<<M as TrainStep>::Input>) -> Result<After, Error> {
        let mut rounds = Rounds::new("batches of a training step", share);
        let mut accumulator = GradientsAccumulator::new();
        let mut accumulated = 0;
        for iteration in 1.. {
            let next = rounds.next(self.world, self.course.interrupter.should_stop())?;
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
                Next::Stopped(failure) => return Ok(self.stopped(failure)),
            };
            self.weight.set(weight);
            let output = catch(|| TrainStep::step(self.model(), batch))?;
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
                self.course.outputs.trained(self.world.rank(), item);
            }
        }
        Ok(After::Another)
    }

    /// Makes one step of the optimizer, at the next rates of the schedule.
    fn step(&mut self, gradients: GradientsParams) -> Result<(), Error> {
        self.learner.lr_step();
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

    /// Goes through all batches of the validation.
    fn validate(&mut self, share: &Share<<M as InferenceStep>::Input>) -> Result<After, Error> {
        let model = catch(|| self.model().valid())?;
        let mut rounds = Rounds::new("batches of a validation", share);
        for iteration in 1.. {
            let next = rounds.next(self.world, self.course.interrupter.should_stop())?;
            self.as_lead(|lead| lead.pass_on());
            let round = match next {
                Next::Round(round) => round,
                Next::Through => break,
                Next::Stopped(failure) => return Ok(self.stopped(failure)),
            };
            let output = catch(|| InferenceStep::step(&model, round.batch))?;
            if round.counts {
                let progress = progress(round.had_by_all, self.course.validated_items);
                let item = TrainingItem::new(output, progress, Some(iteration), None);
                self.course.outputs.validated(self.world.rank(), item);
            }
        }
        Ok(After::Another)
    }

    /// Gathers what a checkpoint has on rank 0, and saves it there, if the user's strategy says so.
    fn save(&mut self, epoch: usize) -> Result<(), Error> {
        if !self.course.saves {
            return Ok(());
        }
        let record = into_record(self.model().clone())?;
        let record = self.lead.is_some().then_some(record);
        let state = joined(self.model(), &self.optimizer, self.world)?;
        let (Some(lead), Some(record), Some(state)) = (&mut self.lead, record, state) else {
            return Ok(());
        };
        Lent::put_into(&mut self.learner, record, state);
        lead.save(&self.learner, epoch);
        Lent::clear(&mut self.learner);
        Ok(())
    }

    /// Ends the training of all ranks if it `ends` on one.
    fn agreed(&self, ends: bool) -> Result<After, Error> {
        let all = self
            .world
            .exchange("end of an epoch", vec![u8::from(ends)])?;
        Ok(match all.iter().any(|note| note.first() == Some(&1)) {
            true => After::End,
            false => After::Another,
        })
    }

    fn stopped(&self, failure: Option<DatasetError>) -> After {
        if let Some(failure) = failure {
            self.course.interrupter.fail(failure);
        }
        After::End
    }

    /// Returns the whole model on rank 0, as it is for inference.
    fn whole_model(mut self) -> Result<Option<M>, Error> {
        let model = self.model.take().expect("the optimizer gives it back");
        let mut whole = None;
        let is_first = self.world.rank() == 0;
        let keep = |full: M| {
            if is_first {
                whole = Some(full.clone());
            }
            full
        };
        summon_full_params(model, WriteBack::Discard, keep)?;
        Ok(whole)
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

fn progress(had: usize, of: usize) -> Progress {
    Progress::new(had, of, Some("items".to_owned()))
}
