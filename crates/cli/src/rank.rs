//! What each rank does: the loop around the engine that trains.

use std::time::Instant;

use burn_fsdp::{OperationCounts, ProcessGroup};
use serde_json::Value;

use crate::compiled::Compiled;
use crate::config::TrainConfig;
use crate::eager::{self, Eager};
use crate::engine::Engine;
use crate::error::RankError;
use crate::metrics::{Metrics, StepLine};
use crate::progress::Progress;
use crate::saving::Saving;
use crate::share;

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
    /// Events of the step that was traced.
    pub(crate) trace: Vec<Value>,
    /// Generated text, with the text it goes on from.
    pub(crate) sample: Option<Vec<u8>>,
}

/// One training run as one rank lives it. Times of traces count from `origin`.
pub(crate) fn train(
    config: &TrainConfig,
    world: &ProcessGroup,
    origin: Instant,
) -> Result<RankResult, RankError> {
    if let Some(fault) = config.fault {
        world.set_fault(fault);
    }
    let is_first = world.rank() == 0;
    if is_first && !config.json {
        eprintln!("{}", config.data);
    }
    let mesh = eager::mesh(config, world)?;
    let mut engine: Box<dyn Engine> = match config.is_compiled {
        true => Box::new(Compiled::new(config, world, &mesh)?),
        false => Box::new(Eager::new(config, world, &mesh)?),
    };
    let mut saving = Saving::begin(config, &mesh)?;
    let mut first_step = 0;
    let resumed = saving.as_mut().map(Saving::resumed_step).transpose()?;
    if let Some(saved) = resumed.flatten() {
        engine.resume(&saved)?;
        first_step = saved.index().training.step as usize;
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
    let run = Run {
        config,
        world,
        origin,
    };
    run.train(engine.as_mut(), &mut observers, &mut result)?;
    if let Some(saving) = &mut observers.saving {
        result.saved_step = saving.finish()?;
        result.warnings.append(&mut saving.warnings);
    }
    drop(observers);

    result.state_bytes = engine.state_bytes()?;
    result.warnings.extend(engine.warnings()?);
    if !result.interrupted {
        result.sample = engine.sample()?;
    }
    Ok(result)
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
            trace: Vec::new(),
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

/// What stays the same from step to step.
struct Run<'a> {
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    origin: Instant,
}

impl Run<'_> {
    /// The step to trace: the first measured one, but none of the first two of the run, which prepare
    /// things, unless there are no others.
    fn traced_step(&self, first_step: usize) -> Option<usize> {
        self.config.trace.as_ref()?;
        let last = self.config.num_steps().checked_sub(1)?;
        Some(self.config.warmup.max(first_step + 2).min(last))
    }

    fn train(
        &self,
        engine: &mut dyn Engine,
        observers: &mut Observers<'_>,
        result: &mut RankResult,
    ) -> Result<(), RankError> {
        let config = self.config;
        let traced_step = self.traced_step(result.first_step);
        let mut start = Instant::now();
        for step in result.first_step..config.num_steps() {
            let before = self.world.counts();
            let own_loss = match traced_step == Some(step) {
                false => engine.step(step)?,
                true => {
                    let own_loss;
                    (own_loss, result.trace) = engine.traced_step(step, self.origin)?;
                    own_loss
                }
            };
            result.collectives = self.world.counts().since(&before);
            if step >= config.warmup {
                let peak = engine.unsharded_peak()?;
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
                true => engine.evaluate()?,
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
                    let taken = engine.snapshot()?;
                    saving.start(step + 1, taken, engine.scaler())?;
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
        Ok(())
    }
}
