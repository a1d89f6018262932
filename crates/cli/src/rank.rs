//! What each rank does: the usual training loop of Burn, on a sharded model.

use std::time::Instant;

use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::Device;
use burn_fsdp::steps::Step;
use burn_fsdp::{
    At, LossScaler, Mesh, OperationCounts, ProcessGroup, ProcessMesh, ShardPolicy, auto_units,
    backward, catch, checkpoint, clip_grad_norm, fully_shard, memory, no_sync, reset_peak,
    wrap_plan,
};
use burn_fsdp_models::{Batches, Block, Gpt};

use crate::config::TrainConfig;
use crate::error::RankError;
use crate::evaluation::evaluate;
use crate::metrics::{Metrics, StepLine};
use crate::optimizer::Optimizer;
use crate::progress::Progress;
use crate::sample;
use crate::saving::{self, Saving};
use crate::share;
use crate::train::initial_model;

/// What a rank has to tell when it is done.
#[derive(Debug)]
pub(crate) struct RankResult {
    /// Mean over the ranks, of every step.
    pub(crate) losses: Vec<f64>,
    /// Duration of every step on this rank.
    pub(crate) seconds: Vec<f64>,
    /// Steps done and loss, of every evaluation.
    pub(crate) eval_losses: Vec<(usize, f64)>,
    /// Bytes of parameters and optimizer that this rank holds.
    pub(crate) state_bytes: usize,
    /// The most bytes of full tensors at once, in the measured steps.
    pub(crate) unsharded_peak: usize,
    /// Operations of the last step.
    pub(crate) collectives: OperationCounts,
    /// Steps done before this run.
    pub(crate) first_step: usize,
    /// The newest step that was saved.
    pub(crate) saved_step: Option<u64>,
    /// Whether a signal ended the run.
    pub(crate) interrupted: bool,
    /// Remarks on the sharding.
    pub(crate) warnings: Vec<String>,
    /// Generated text, with the text it goes on from.
    pub(crate) sample: Option<Vec<u8>>,
}

/// One training run as one rank lives it.
pub(crate) fn train(config: &TrainConfig, world: &ProcessGroup) -> Result<RankResult, RankError> {
    if let Some(fault) = config.fault {
        world.set_fault(fault);
    }
    let is_first = world.rank() == 0;
    let device = Device::flex().autodiff().gradient_checkpointing();
    let mesh = mesh(config, world)?;
    let mut model = shard(config, &mesh, &device)?;
    let plan = wrap_plan(&model)?;
    if is_first && !config.json {
        eprint!("{}\n{plan}", config.data);
    }
    let mut training = Training {
        config,
        world,
        device,
        batches: config.data.training(&config.model, config.batch),
        optimizer: Optimizer::new(config, &model, world.rank())?,
        scaler: config.step.scales_loss.then(LossScaler::default),
    };
    let mut saving = Saving::begin(config, &mesh)?;
    let mut first_step = 0;
    let resumed = saving.as_mut().map(Saving::resumed_step).transpose()?;
    if let Some(step) = resumed.flatten() {
        (model, first_step) = training.resume(&step, model)?;
    }
    let metrics = config.metrics.as_deref().filter(|_| is_first);
    let mut observers = Observers {
        progress: Progress::new(config, is_first, first_step),
        metrics: match first_step {
            0 => Metrics::create(metrics)?,
            _ => Metrics::resume(metrics, first_step)?,
        },
        saving,
    };
    let mut result = RankResult::new(config.num_steps(), first_step);
    let model = training.run(model, &mut observers, &mut result)?;
    if let Some(saving) = &mut observers.saving {
        result.saved_step = saving.finish()?;
        result.warnings.append(&mut saving.warnings);
    }
    drop(observers);

    let held = memory(&model)?;
    // The parameters themselves, and what AdamW keeps for each.
    result.state_bytes = (1 + training.optimizer.values_in_memory()) * held.parameters;
    result.warnings.extend(plan.warnings);
    let pinned = held.pinned.iter().map(ToString::to_string);
    result.warnings.extend(pinned);
    if !result.interrupted {
        result.sample = sample::generate(&model, config, world)?;
    }
    Ok(result)
}

fn mesh(config: &TrainConfig, world: &ProcessGroup) -> Result<ProcessMesh, RankError> {
    let replicas = config.sharding.replicas;
    let layout = match replicas {
        1 => Mesh::line("shard", world.size())?,
        _ => Mesh::new([("replicate", replicas), ("shard", world.size() / replicas)])?,
    };
    Ok(ProcessMesh::new(world, layout)?)
}

fn shard(config: &TrainConfig, mesh: &ProcessMesh, device: &Device) -> Result<Gpt, RankError> {
    let model = initial_model(config, device, mesh.world().rank())?;
    let sharding = &config.sharding;
    let units = match sharding.unit_size {
        None => vec!["blocks.*".to_owned()],
        Some(least) => auto_units(&model, least),
    };
    let policy = ShardPolicy::new()
        .units(units)
        .strategy(sharding.strategy)
        .prefetch(sharding.prefetch)
        .precision(sharding.precision.clone());
    let policy = match sharding.replicas {
        1 => policy,
        _ => policy.replicate_axis("replicate"),
    };
    Ok(fully_shard(model, mesh, policy)?)
}

impl RankResult {
    fn new(num_steps: usize, first_step: usize) -> Self {
        let num_steps = num_steps.saturating_sub(first_step);
        Self {
            first_step,
            saved_step: None,
            interrupted: false,
            // The steps may be more than memory could hold losses of; it grows as they come.
            losses: Vec::with_capacity(num_steps.min(1 << 16)),
            seconds: Vec::with_capacity(num_steps.min(1 << 16)),
            eval_losses: Vec::new(),
            state_bytes: 0,
            unsharded_peak: 0,
            collectives: OperationCounts::default(),
            warnings: Vec::new(),
            sample: None,
        }
    }
}

/// Those who look on while training runs.
struct Observers<'a> {
    progress: Progress,
    metrics: Metrics,
    saving: Option<Saving<'a>>,
}

/// What stays the same, or belongs to the optimizer, from step to step.
struct Training<'a> {
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    device: Device,
    batches: Batches,
    optimizer: Optimizer,
    scaler: Option<LossScaler>,
}

impl Training<'_> {
    fn run(
        &mut self,
        mut model: Gpt,
        observers: &mut Observers<'_>,
        result: &mut RankResult,
    ) -> Result<Gpt, RankError> {
        let config = self.config;
        let mut start = Instant::now();
        for step in result.first_step..config.num_steps() {
            reset_peak(&model)?;
            let before = self.world.counts();
            let own_loss;
            (model, own_loss) = self.step(step, model)?;
            result.collectives = self.world.counts().since(&before);
            if step >= config.warmup {
                let peak = memory(&model)?.unsharded_peak;
                result.unsharded_peak = result.unsharded_peak.max(peak);
            }
            let told_to_stop = observers.saving.as_ref().is_some_and(Saving::is_stopped);
            let end_of_step = share::step_end(self.world, own_loss, told_to_stop)?;
            let loss = end_of_step.loss;
            let end = Instant::now();
            let seconds = (end - start).as_secs_f64();
            // No gap between steps: their sum is the wall time of the loop.
            start = end;
            result.losses.push(loss);
            result.seconds.push(seconds);

            let eval_loss = match config.evaluates_after(step) {
                true => evaluate(&model, config, self.world)?,
                false => None,
            };
            let line = StepLine {
                step,
                loss,
                tokens_per_s: config.tokens_per_step() as f64 / seconds,
                step_ms: 1e3 * seconds,
                lr: config.schedule.at(step),
                measured: step >= config.warmup,
                eval_loss,
            };
            observers.progress.step(&line);
            observers.metrics.write(&line)?;
            if let Some(eval_loss) = eval_loss {
                result.eval_losses.push((step, eval_loss));
            }
            let is_last = step + 1 == config.num_steps() || end_of_step.stop;
            if let Some(saving) = &mut observers.saving {
                saving.poll();
                if is_last || saving.is_due(step) {
                    self.save(step + 1, &model, saving)?;
                }
            }
            if eval_loss.is_some() {
                // Evaluation is no part of a step.
                start = Instant::now();
            }
            if end_of_step.stop {
                result.interrupted = true;
                break;
            }
        }
        Ok(model)
    }

    /// The model as it was after the steps of a saved one, and how many they were.
    fn resume(&mut self, step: &Step, model: Gpt) -> Result<(Gpt, usize), RankError> {
        let Optimizer::InMemory(optimizer) = &mut self.optimizer else {
            unreachable!("the command line keeps --offload and --checkpoint-dir apart");
        };
        let fresh = self.config.optimizer.init();
        let resumed = saving::resume(step, model, fresh, self.scaler.as_mut())?;
        **optimizer = resumed.optimizer;
        Ok((resumed.model, resumed.steps))
    }

    fn save(&self, steps: usize, model: &Gpt, saving: &mut Saving<'_>) -> Result<(), RankError> {
        let Optimizer::InMemory(optimizer) = &self.optimizer else {
            unreachable!("the command line keeps --offload and --checkpoint-dir apart");
        };
        saving.start(steps, model, optimizer, self.scaler.as_ref())
    }

    /// One step on this rank's rows: the model after it, and the loss before it.
    fn step(&mut self, step: usize, model: Gpt) -> Result<(Gpt, f32), RankError> {
        self.world.begin_step(step as u64);
        self.world.fault_point(At::Forward)?;
        let num_micro = self.config.step.accumulate;
        let mut own_loss = 0.0;
        let mut accumulator = GradientsAccumulator::new();
        for micro in 0..num_micro {
            let is_last = micro + 1 == num_micro;
            let run = || self.micro_step(step, micro, &model);
            let (loss, gradients) = match self.config.step.no_sync && !is_last {
                true => no_sync(&model, run)??,
                false => run()?,
            };
            own_loss += loss / num_micro as f32;
            if num_micro == 1 {
                return Ok((self.update(step, model, gradients)?, own_loss));
            }
            accumulator.accumulate(&model, gradients);
        }
        Ok((self.update(step, model, accumulator.grads())?, own_loss))
    }

    /// The loss of a micro-batch, and the gradients of its part in the step's.
    fn micro_step(
        &self,
        step: usize,
        micro: usize,
        model: &Gpt,
    ) -> Result<(f32, GradientsParams), RankError> {
        let rows = self.config.micro_rows_of(self.world.rank(), micro);
        let (inputs, targets) = self.batches.rows(step, rows).to_tensors(&self.device);
        let again = self.config.step.activation_checkpointing;
        let loss = catch(|| {
            model.loss_with(inputs, targets, |block, x, batch| match again {
                true => checkpoint(block, x, move |block: &Block, x| block.forward(x, batch)),
                false => block.forward(x, batch),
            })
        })?;
        let own_loss = loss.clone().into_scalar::<f32>();
        let mut loss = loss;
        if self.config.step.accumulate > 1 {
            loss = loss.div_scalar(self.config.step.accumulate as f32);
        }
        if let Some(scaler) = &self.scaler {
            loss = scaler.scale(loss);
        }
        Ok((own_loss, backward(loss, model)?))
    }

    /// The model after the optimizer's step, or as it is if gradients overflowed.
    fn update(
        &mut self,
        step: usize,
        model: Gpt,
        gradients: GradientsParams,
    ) -> Result<Gpt, RankError> {
        let gradients = match &mut self.scaler {
            None => Some(gradients),
            Some(scaler) => scaler.unscale(&model, gradients)?,
        };
        let Some(mut gradients) = gradients else {
            return Ok(model);
        };
        if let Some(clip) = self.config.step.clip {
            gradients = clip_grad_norm(&model, gradients, clip)?.gradients;
        }
        self.optimizer
            .step(self.config.schedule.at(step), model, gradients)
    }
}
