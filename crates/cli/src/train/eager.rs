//! The trainer that runs the eager engine: Burn's usual training step, on a sharded model.

use std::time::Instant;

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::Device;
use burn_fsdp::inspect::{memory, wrap_plan};
use burn_fsdp::internals::checkpoint::{Step, TrainingSnapshot, restore_scaler};
use burn_fsdp::internals::inspect::{LiveBytes, WrapPlan, reset_peak};
use burn_fsdp::internals::state::local_state;
use burn_fsdp::internals::testing::At;
use burn_fsdp::{
    LossScaler, ProcessGroup, ProcessMesh, backward, catch, clip_grad_norm, no_sync, recompute,
};
use burn_fsdp_models::{Architecture, LanguageModel};
use serde_json::Value;

use crate::adapters::{Adapters, is_factor, is_saved};
use crate::args::NotFinite;
use crate::console;
use crate::error::RankError;
use crate::train::config::TrainConfig;
use crate::train::feed::{Feed, tokens_of};
use crate::train::optimizer::Optimizer;
use crate::train::trace::{Phases, Resident, eager_events};
use crate::train::trainer::Trainer;
use crate::train::{evaluation, model, sample};

/// The block type of a model with these sizes.
type BlockOf<A> = <<A as Architecture>::Model as LanguageModel>::Block;

/// A sharded model and its optimizer.
pub(crate) struct Eager<'a, A: Architecture> {
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    mesh: &'a ProcessMesh,
    device: Device,
    batches: Feed<'a>,
    /// The model; `None` during a step, and after a failed step.
    model: Option<A::Model>,
    /// The adapters, if nothing else is trained.
    adapters: Option<Adapters>,
    plan: WrapPlan,
    optimizer: Optimizer,
    scaler: Option<LossScaler>,
    /// Gradient norm of the last step, if it was computed.
    norm: Option<f64>,
    phases: Phases,
}

impl<'a, A: Architecture> Eager<'a, A> {
    /// Creates the model and its optimizer, and shards the model. Collective.
    pub(crate) fn new(
        sizes: A,
        config: &'a TrainConfig,
        world: &'a ProcessGroup,
        mesh: &'a ProcessMesh,
    ) -> Result<Self, RankError> {
        let model = model::sharded(sizes, config, world, mesh)?;
        let adapters = config.adapter_sizes();
        let adapters = adapters.map(|sizes| Adapters::of(sizes, &model, mesh));
        let plan = wrap_plan(&model)?;
        if world.rank() == 0 && !config.json {
            console::tell(plan.to_string().trim_end());
        }
        Ok(Self {
            config,
            world,
            mesh,
            device: model::device(config, world),
            batches: config
                .data
                .training(config.model.vocab(), config.batch_shape(), config.seed),
            optimizer: Optimizer::new(config, &model, world.rank())?,
            model: Some(model),
            adapters: adapters.transpose()?,
            plan,
            scaler: config.step.scales_loss.then(LossScaler::default),
            norm: None,
            phases: Phases::default(),
        })
    }

    fn model(&self) -> Result<&A::Model, RankError> {
        self.model.as_ref().ok_or(RankError::Ended)
    }

    /// Computes the loss of a micro-batch, and its contribution to the step's gradients.
    fn micro_step(
        &self,
        step: usize,
        micro: usize,
        model: &A::Model,
    ) -> Result<(f32, GradientsParams), RankError> {
        let rows = self.config.micro_rows_of(self.world.rank(), micro);
        let (inputs, targets) = tokens_of(&self.batches.rows(step, rows)?, &self.device);
        let again = self.config.step.activation_checkpointing;
        let start = Instant::now();
        let loss = catch(|| {
            model.loss_by(inputs, targets, |block, x, shared| {
                if again {
                    let shared = shared.clone();
                    let run =
                        move |block: &BlockOf<A>, x| A::Model::run_block(block, x, &shared, None);
                    recompute(block, x, run)
                } else {
                    A::Model::run_block(block, x, shared, None)
                }
            })
        })?;
        let own_loss = loss.clone().into_scalar::<f32>();
        self.phases.add("forward", start);
        let mut loss = loss;
        if self.config.step.accumulate > 1 {
            loss = loss.div_scalar(self.config.step.accumulate as f32);
        }
        if let Some(scaler) = &self.scaler {
            loss = scaler.scale(loss);
        }
        let start = Instant::now();
        let gradients = backward(loss, model)?;
        self.phases.add("backward", start);
        Ok((own_loss, gradients))
    }

    /// Computes the loss of a whole step, and the step's gradients.
    fn gradients(
        &self,
        step: usize,
        model: &A::Model,
    ) -> Result<(f32, GradientsParams), RankError> {
        let num_micro = self.config.step.accumulate;
        let mut own_loss = 0.0;
        let mut accumulator = GradientsAccumulator::new();
        for micro in 0..num_micro {
            let is_last = micro + 1 == num_micro;
            let run = || self.micro_step(step, micro, model);
            let (loss, gradients) = if self.config.step.no_sync && !is_last {
                no_sync(model, run)??
            } else {
                run()?
            };
            own_loss += loss / num_micro as f32;
            if num_micro == 1 {
                return Ok((own_loss, gradients));
            }
            accumulator.accumulate(model, gradients);
        }
        Ok((own_loss, accumulator.grads()))
    }

    /// Steps the optimizer and returns the updated model. Returns the model unchanged if gradients overflowed, or if
    /// the norm is not finite and the run must stop in that case.
    fn update(
        &mut self,
        step: usize,
        model: A::Model,
        gradients: GradientsParams,
    ) -> Result<A::Model, RankError> {
        self.norm = None;
        let gradients = match &mut self.scaler {
            None => Some(gradients),
            Some(scaler) => scaler.unscale(&model, gradients)?,
        };
        let Some(mut gradients) = gradients else {
            return Ok(model);
        };
        if let Some(clip) = self.config.step.clip {
            let clipped = clip_grad_norm(&model, gradients, clip)?;
            self.norm = Some(clipped.total_norm);
            if !clipped.total_norm.is_finite() && self.config.not_finite == NotFinite::Stop {
                return Ok(model);
            }
            gradients = clipped.gradients;
        }
        self.optimizer
            .step(self.config.schedule.at(step), model, gradients)
    }
}

impl<A: Architecture> Trainer for Eager<'_, A> {
    fn step(&mut self, step: usize) -> Result<f32, RankError> {
        let model = self.model.take().ok_or(RankError::Ended)?;
        reset_peak(&model)?;
        self.world.begin_step(step as u64);
        self.world.fault_point(At::Forward)?;
        let (own_loss, gradients) = self.gradients(step, &model)?;
        let start = Instant::now();
        self.model = Some(self.update(step, model, gradients)?);
        self.phases.add("optimizer", start);
        Ok(own_loss)
    }

    fn traced_step(
        &mut self,
        step: usize,
        origin: Instant,
    ) -> Result<(f32, Vec<Value>), RankError> {
        let live = LiveBytes::of(self.model()?)?;
        let resident = Resident::default();
        let sampled = resident.clone();
        self.world.start_recording(move || {
            sampled.sample();
            live.now()
        });
        self.phases.begin();
        let own_loss = self.step(step);
        let (phases, spans) = (self.phases.end(), self.world.end_recording());
        let events = eager_events(self.world.rank(), origin, &phases, &spans, &resident);
        Ok((own_loss?, events))
    }

    fn unsharded_peak(&self) -> Result<usize, RankError> {
        Ok(memory(self.model()?)?.unsharded_peak)
    }

    fn staged(&self) -> Result<[usize; 2], RankError> {
        // Called around each step, so do not walk the module if nothing is copied.
        if self.device.clone().without_autodiff() == Device::flex() {
            return Ok([0, 0]);
        }
        let staged = memory(self.model()?)?.staged;
        Ok([staged.to_host.bytes, staged.to_device.bytes])
    }

    fn evaluate(&mut self) -> Result<Option<f64>, RankError> {
        let model = self.model()?.valid();
        let device = self.config.device(self.world);
        evaluation::evaluate(self.config, self.world, |rows| {
            let (inputs, targets) = tokens_of(rows, &device);
            Ok(catch(|| {
                model.mean_loss(inputs, targets).into_scalar::<f32>()
            })?)
        })
    }

    fn snapshot(&mut self) -> Result<TrainingSnapshot, RankError> {
        let is_saved = is_saved(self.adapters.as_ref());
        let mesh = self.mesh.mesh();
        self.optimizer.snapshot(self.model()?, mesh, is_saved)
    }

    fn grad_norm(&self) -> Option<f64> {
        self.norm
    }

    fn adapters(&self) -> Option<&Adapters> {
        self.adapters.as_ref()
    }

    fn scaler(&self) -> Option<&LossScaler> {
        self.scaler.as_ref()
    }

    fn resume(&mut self, saved: &Step) -> Result<(), RankError> {
        if let Some(adapters) = &self.adapters {
            adapters.check(&saved.index().training)?;
        }
        let model = self.model.take().ok_or(RankError::Ended)?;
        let is_saved = is_saved(self.adapters.as_ref());
        let model = self
            .optimizer
            .restore(self.config, model, saved, is_saved)?;
        let scaler = self.scaler.take();
        self.scaler = scaler.map(|scaler| restore_scaler(scaler, saved));
        self.model = Some(model);
        Ok(())
    }

    fn state_bytes(&self) -> Result<usize, RankError> {
        // The parameters themselves, and the optimizer's values for each trained parameter.
        let model = self.model()?;
        let held = memory(model)?.parameters;
        if !self.optimizer.is_in_memory() {
            return Ok(held);
        }
        let tensors = local_state(model)?.into_iter();
        let trained = tensors.filter(|tensor| self.adapters.is_none() || is_factor(&tensor.path));
        let kept = trained
            .map(|tensor| tensor.elements.len() * self.config.optimizer.values_of(&tensor.path));
        Ok(held + kept.sum::<usize>())
    }

    fn warnings(&self) -> Result<Vec<String>, RankError> {
        let pinned = memory(self.model()?)?.pinned;
        let pinned = pinned.iter().map(ToString::to_string);
        Ok(self.plan.warnings.iter().cloned().chain(pinned).collect())
    }

    fn sample(&mut self) -> Result<Option<Vec<u8>>, RankError> {
        sample::generate(self.model()?, self.config, self.world)
    }
}
