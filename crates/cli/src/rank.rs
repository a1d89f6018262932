//! What each rank does: the usual training loop of Burn, on a sharded model.

use std::time::Instant;

use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use burn_fsdp::{
    At, Mesh, OperationCounts, ProcessGroup, ProcessMesh, ShardPolicy, backward, catch,
    fully_shard, memory, reset_peak, wrap_plan,
};
use burn_fsdp_models::{Batches, Gpt};

use crate::config::TrainConfig;
use crate::error::RankError;
use crate::evaluation::evaluate;
use crate::metrics::{Metrics, StepLine};
use crate::progress::Progress;
use crate::sample;
use crate::share;
use crate::train::initial_model;

/// Parameters, and AdamW's two moments of the same size.
const STATE_PER_PARAMETER: usize = 3;

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
    let model = shard(config, world, &device)?;
    let plan = wrap_plan(&model)?;
    if is_first && !config.json {
        eprint!("{}\n{plan}", config.data);
    }
    let mut training = Training {
        config,
        world,
        device,
        batches: config.data.training(&config.model, config.batch),
        optimizer: config.optimizer.init(),
    };
    let mut observers = Observers {
        progress: Progress::new(config, is_first),
        metrics: Metrics::create(config.metrics.as_deref().filter(|_| is_first))?,
    };
    let mut result = RankResult::new(config.num_steps());
    let model = training.run(model, &mut observers, &mut result)?;
    drop(observers);

    let held = memory(&model)?;
    result.state_bytes = STATE_PER_PARAMETER * held.parameters;
    result.warnings = plan.warnings;
    let pinned = held.pinned.iter().map(ToString::to_string);
    result.warnings.extend(pinned);
    result.sample = sample::generate(&model, config, world)?;
    Ok(result)
}

fn shard(config: &TrainConfig, world: &ProcessGroup, device: &Device) -> Result<Gpt, RankError> {
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let model = initial_model(config, device, world.rank())?;
    let policy = ShardPolicy::new()
        .units(["blocks.*"])
        .strategy(config.strategy)
        .prefetch(config.prefetch);
    Ok(fully_shard(model, &mesh, policy)?)
}

impl RankResult {
    fn new(num_steps: usize) -> Self {
        Self {
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
struct Observers {
    progress: Progress,
    metrics: Metrics,
}

/// What stays the same, or belongs to the optimizer, from step to step.
struct Training<'a> {
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    device: Device,
    batches: Batches,
    optimizer: ModuleOptimizer,
}

impl Training<'_> {
    fn run(
        &mut self,
        mut model: Gpt,
        observers: &mut Observers,
        result: &mut RankResult,
    ) -> Result<Gpt, RankError> {
        let config = self.config;
        let mut start = Instant::now();
        for step in 0..config.num_steps() {
            reset_peak(&model)?;
            let before = self.world.counts();
            let own_loss;
            (model, own_loss) = self.step(step, model)?;
            result.collectives = self.world.counts().since(&before);
            if step >= config.warmup {
                let peak = memory(&model)?.unsharded_peak;
                result.unsharded_peak = result.unsharded_peak.max(peak);
            }
            let loss = share::mean(self.world, "loss", own_loss)?;
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
                // Evaluation is no part of a step.
                start = Instant::now();
            }
        }
        Ok(model)
    }

    /// One step on this rank's rows: the model after it, and the loss before it.
    fn step(&mut self, step: usize, model: Gpt) -> Result<(Gpt, f32), RankError> {
        self.world.begin_step(step as u64);
        self.world.fault_point(At::Forward)?;
        let rows = self.config.rows_of(self.world.rank());
        let (inputs, targets) = self.batches.rows(step, rows).to_tensors(&self.device);
        let loss = catch(|| model.loss(inputs, targets))?;
        let own_loss = loss.clone().into_scalar::<f32>();
        let gradients = backward(loss, &model)?;
        let lr = self.config.schedule.at(step);
        let model = catch(|| self.optimizer.step(lr, model, gradients))?;
        Ok((model, own_loss))
    }
}
