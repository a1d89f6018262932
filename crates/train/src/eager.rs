//! The eager engine in a training run.

use std::collections::HashSet;

use burn::module::{ModuleVisitor, Param, ParamId};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use burn::train::{InferenceStep, LearnerModel, TrainStep};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_shard::{
    Agreement, BufferSync, Clip, LossScaler, catch, check_agreement, check_elementwise,
    check_same_optimizer, clip_grad_norm, local_ids, sync_buffers,
};

use crate::agreement::{Rates, check_same};
use crate::course::Ranks;
use crate::groups::Groups;
use crate::rank::{Rank, Start, check_scratch};
use crate::rounds::Weight;
use crate::scaled::within;
use crate::scratch::Scratch;
use crate::staging::{Staged, staged};
use crate::trainer::Trainer;
use crate::whole_state::divided;
use burn_fsdp_glue::error::Error;
use burn_fsdp_glue::state_types::check_state_types;

/// Trains on one rank. Returns the mesh over which the model is sharded, the model and its optimizer.
///
/// Collective.
pub(crate) fn train<M: LearnerModel>(
    world: &ProcessGroup,
    start: Start<M>,
) -> Result<(ProcessMesh, M, ModuleOptimizer), Error> {
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
    let policy = course.settings.policy.clone().unwrap_or_default();
    if policy.attaches_adapters() {
        return Err(Error::AdaptersInTraining);
    }
    let are_processes = course.among == Ranks::Processes;
    if are_processes {
        check_same(world, &course, &model, &[])?;
    }
    let policy = policy.gradient_hook(by_items);
    let (mut model, groups) = Groups::shard(model, world, course.settings.replicas, policy)?;
    check_managed(&model)?;
    check_elementwise(&model, &optimizer)?;
    if course.saves {
        // Reject now, rather than on resuming, an optimizer whose checkpoints could not be resumed.
        check_state_types(&model, &optimizer)?;
    }
    if are_processes {
        check_same_optimizer(&model, &optimizer)?;
        model = sync_buffers(model, BufferSync::Broadcast)?;
        // Each process has created the tensors outside of all units itself.
        check_agreement(&model, Agreement::ParametersAndBuffers)?;
    }
    let parent = course.settings.scratch.as_deref();
    check_scratch(&course, lead.as_ref())?;
    let optimizer = divided(&model, optimizer, whole, &groups, parent)?;
    let rates = are_processes.then(|| Rates::of(&model)).transpose()?;
    let trainer = Eager {
        groups,
        model: Some(model),
        valid: None,
        optimizer,
        gradients: match course.accumulation {
            None => Gradients::Single(None),
            Some(_) => Gradients::Accumulated(GradientsAccumulator::new()),
        },
        clip: course.settings.clip,
        scaler: course.settings.scaler.clone(),
        weight,
    };
    let mut rank = Rank {
        world: world.clone(),
        device,
        rates,
        trainer,
        learner,
        course,
        lead,
    };
    rank.train(&training, &validation)?;
    let trained = rank.trainer;
    let model = trained.model.expect("the optimizer gives it back");
    Ok((trained.groups.mesh, model, trained.optimizer))
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

/// A sharded model, with the gradients of the current step.
struct Eager<M> {
    groups: Groups,
    /// `None` only while the optimizer has it.
    model: Option<M>,
    /// The model without autodiff, during a validation.
    valid: Option<M>,
    optimizer: ModuleOptimizer,
    gradients: Gradients<M>,
    clip: Option<Clip>,
    /// The scaler of the losses, if they are scaled.
    scaler: Option<LossScaler>,
    weight: Weight,
}

/// The gradients since the last step.
enum Gradients<M> {
    Single(Option<GradientsParams>),
    Accumulated(GradientsAccumulator<M>),
}

impl<M: LearnerModel> Eager<M> {
    fn model(&self) -> &M {
        let model = self.model.as_ref();
        model.expect("the optimizer gives it back")
    }
}

impl<M: LearnerModel> Trainer<M> for Eager<M> {
    fn run(
        &mut self,
        batch: <M as TrainStep>::Input,
        weight: f64,
    ) -> Result<Option<<M as TrainStep>::Output>, Error> {
        self.weight.set(weight);
        let step = || Ok::<_, Error>(catch(|| TrainStep::step(self.model(), batch))?);
        let output = match &self.scaler {
            None => step()?,
            Some(scaler) => match within(scaler, step) {
                (output, true) => output?,
                (output, false) => output.and(Err(Error::UnscaledLoss))?,
            },
        };
        let model = self.model.as_ref().expect("the optimizer gives it back");
        match &mut self.gradients {
            Gradients::Single(gradients) => *gradients = Some(output.grads),
            Gradients::Accumulated(sum) => catch(|| sum.accumulate(model, output.grads))?,
        }
        Ok(Some(output.item))
    }

    /// Skips the step if scaled gradients overflow on any rank.
    fn step(&mut self, rates: ModuleLearningRate) -> Result<Vec<<M as TrainStep>::Output>, Error> {
        let gradients = match &mut self.gradients {
            Gradients::Single(gradients) => gradients.take().unwrap_or_default(),
            Gradients::Accumulated(sum) => sum.grads(),
        };
        let model = self.model.as_ref().expect("the optimizer gives it back");
        let gradients = match &mut self.scaler {
            Some(scaler) => match scaler.unscale(model, gradients)? {
                Some(gradients) => gradients,
                None => return Ok(Vec::new()),
            },
            None => gradients,
        };
        let gradients = match self.clip {
            Some(clip) => clip_grad_norm(model, gradients, clip)?.gradients,
            None => gradients,
        };
        let model = self.model.take().expect("the optimizer gives it back");
        let optimizer = &mut self.optimizer;
        self.model = Some(catch(|| model.optimize(optimizer, rates, gradients))?);
        Ok(Vec::new())
    }

    fn begin_validation(&mut self) -> Result<(), Error> {
        self.valid = Some(catch(|| self.model().valid())?);
        Ok(())
    }

    fn validate(
        &mut self,
        batch: <M as InferenceStep>::Input,
        _weight: f64,
    ) -> Result<<M as InferenceStep>::Output, Error> {
        let model = self.valid.as_ref().expect("a validation has begun");
        Ok(catch(|| InferenceStep::step(model, batch))?)
    }

    fn end_validation(&mut self) {
        self.valid = None;
    }

    fn staged(&mut self, files: Option<Scratch>) -> Result<Option<Staged>, Error> {
        staged(self.model(), &self.optimizer, &self.groups, files)
    }
}
