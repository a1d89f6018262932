//! The training loop of one rank, which drives its trainer and reports, evaluates and saves between steps.

use std::time::Instant;

use burn_fsdp::{ProcessGroup, ProcessMesh};
use burn_fsdp_models::{Architecture, ModelConfig};
use burn_fsdp_runs::StepLine;

use crate::args::NotFinite;
use crate::console;
use crate::error::{InputError, RankError};
use crate::host;
use crate::limits::Limits;
use crate::train::compiled;
use crate::train::config::TrainConfig;
use crate::train::eager::Eager;
use crate::train::metrics::Metrics;
use crate::train::outcome::{Collectives, RankOutcome};
use crate::train::progress::Progress;
use crate::train::resumed::Resumed;
use crate::train::saving::{Saving, Started};
use crate::train::share::{self, StepEnd};
use crate::train::trainer::Trainer;
use crate::train::utilization::flops_per_token;

/// Returns advice for the user after a non-finite number.
const fn advice(on_not_finite: NotFinite) -> &'static str {
    match on_not_finite {
        NotFinite::Stop => {
            "it is not saved; resume from a saved step with a lower --lr, or pass --nan continue to keep training"
        }
        NotFinite::Continue => {
            "--nan continue keeps training, and steps saved from now on do not replace older ones"
        }
    }
}

/// Trains on one rank. Times in traces are relative to `origin`. Rank 0 writes the metrics.
pub(crate) fn train(
    config: &TrainConfig,
    world: &ProcessGroup,
    mesh: &ProcessMesh,
    origin: Instant,
    metrics: Metrics,
) -> Result<RankOutcome, RankError> {
    if let Some(fault) = config.fault {
        world.set_fault(fault);
    }
    let is_first = world.rank() == 0;
    if is_first {
        tell_of_data(config);
    }
    let mut trainer = match config.model {
        ModelConfig::Gpt(sizes) => trainer(sizes, config, world, mesh),
        ModelConfig::Llama(sizes) => trainer(sizes, config, world, mesh),
        ModelConfig::Gpt2(sizes) => trainer(sizes, config, world, mesh),
    }?;
    let saving = Saving::begin(config, world)?;
    let mut first_step = 0;
    if let Some(resumed) = config.resumed() {
        first_step = restore(config, trainer.as_mut(), resumed)?;
    }
    let mut observers = Observers {
        progress: Progress::new(config, is_first, first_step),
        metrics,
        saving,
        lost: Vec::new(),
        has_told: false,
    };
    let mut result = RankOutcome::new(world.engine(), config.num_steps(), first_step);
    let run = Run {
        config,
        world,
        origin,
    };
    let trained = run.train(trainer.as_mut(), &mut observers, &mut result);
    if trained.is_err() && config.ranks.are_processes() {
        // The other ranks are notified only after this. Do not wait for a save in which they no longer take part.
        std::mem::forget(observers.saving.take());
    }
    trained?;
    let Observers {
        progress,
        metrics,
        saving,
        lost,
        ..
    } = observers;
    drop((progress, metrics));
    result.warnings.extend(lost);

    result.state_bytes = trainer.state_bytes()?;
    result.warnings.extend(trainer.warnings()?);
    result.recomputed_units = trainer.recomputed_units().to_vec();
    result.half_products = trainer.half_products();
    if !result.interrupted && result.failure.is_none() {
        result.sample = trainer.sample()?;
        result.products_per_s = products(config, world)?;
    }
    if let Some(mut saving) = saving {
        // The save comes last, because nothing in the training may wait for a disk. If the sample failed, dropping the
        // saver also waits for the save.
        let steps = first_step + result.losses.len();
        let is_whole = result.failure.is_none();
        let (saved_step, failure) = saving.finish(steps, trainer.as_mut(), is_whole)?;
        result.saved_step = saved_step;
        result.failure = result.failure.or(failure);
        result.warnings.append(&mut saving.warnings);
    }
    if let Some(resumed) = config.resumed() {
        result.warnings.extend(resumed.warnings.iter().cloned());
    }
    Ok(result)
}

/// Continues with the model and the data of a saved step. Returns the number of completed steps.
fn restore(
    config: &TrainConfig,
    trainer: &mut dyn Trainer,
    resumed: &Resumed,
) -> Result<usize, RankError> {
    let restored = trainer.resume(&resumed.step);
    restored.map_err(|source| RankError::Restore {
        path: resumed.step.path().to_owned(),
        source: Box::new(source),
    })?;
    let first_step = resumed.first_step();
    if let Some(documents) = config.data.documents() {
        let continued = documents.resume(&resumed.step.index().training, first_step);
        continued.map_err(|error| Box::new(InputError::Data(error)))?;
    }
    Ok(first_step)
}

/// Measures the operations per second of matrix products, if the run is to measure them. Collective.
fn products(config: &TrainConfig, world: &ProcessGroup) -> Result<Option<f64>, RankError> {
    if config.measures_limits {
        Ok(Some(
            Limits::measure(world, &config.device(world))?.products,
        ))
    } else {
        Ok(None)
    }
}

/// Prints the size of the text, and warnings about it, before the run rather than in the report.
fn tell_of_data(config: &TrainConfig) {
    if !config.json {
        console::tell(&config.data);
    }
    for warning in config.data.warnings().iter().chain(&config.other_training) {
        console::tell(format_args!("warning: {warning}"));
    }
}

/// Creates the trainer for a model with these sizes. Collective.
fn trainer<'a, A: Architecture>(
    sizes: A,
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    mesh: &'a ProcessMesh,
) -> Result<Box<dyn Trainer + 'a>, RankError> {
    if config.is_compiled {
        compiled::trainer(sizes, config, world, mesh)
    } else {
        Ok(Box::new(Eager::new(sizes, config, world, mesh)?))
    }
}

/// The observers of a training run: progress bar, metrics and saves.
struct Observers<'a> {
    progress: Progress,
    metrics: Metrics,
    saving: Option<Saving<'a>>,
    /// Warnings about metrics that could not be written, and about numbers that are not finite.
    lost: Vec<String>,
    /// True once the user was warned about non-finite numbers.
    has_told: bool,
}

impl Observers<'_> {
    /// Returns the resident bytes of this process, if anything shows them.
    fn rss_bytes(&self) -> Option<u64> {
        let is_shown = self.metrics.are_written() || self.progress.is_shown();
        is_shown.then(host::rss_bytes).flatten()
    }

    /// Prints warnings at once, and keeps them for the report. Training continues.
    fn note(&mut self, problems: impl IntoIterator<Item = String>) {
        for problem in problems {
            console::tell(format_args!("warning: {problem}"));
            self.lost.push(problem);
        }
    }
}

/// The parts of a run that do not change between steps.
struct Run<'a> {
    config: &'a TrainConfig,
    world: &'a ProcessGroup,
    origin: Instant,
}

impl Run<'_> {
    /// Returns the step to trace: the first measured step or the third step of this run, whichever is later, because
    /// the first two include setup. A shorter run traces its last step.
    fn traced_step(&self, first_step: usize) -> Option<usize> {
        self.config.trace.as_ref()?;
        let last = self.config.num_steps().checked_sub(1)?;
        Some(self.config.warmup.max(first_step + 2).min(last))
    }

    /// Checks the numbers of a completed step, and saves it if a save is due. Returns a message if the run must end.
    fn end_step(
        &self,
        step: usize,
        end: StepEnd,
        trainer: &mut dyn Trainer,
        observers: &mut Observers<'_>,
    ) -> Result<Option<String>, RankError> {
        if let Some(problem) = self.not_finite(step, end.loss, trainer) {
            if self.config.not_finite == NotFinite::Stop {
                return Ok(Some(problem));
            }
            // One warning is enough, because the numbers do not recover.
            if self.world.rank() == 0 && !std::mem::replace(&mut observers.has_told, true) {
                observers.note(Some(problem));
            }
        }
        let is_last = step + 1 == self.config.num_steps() || end.stop;
        let Some(saving) = &mut observers.saving else {
            return Ok(None);
        };
        saving.poll();
        if !is_last && !saving.is_due(step) {
            return Ok(None);
        }
        // Every saved step has its metrics.
        let problems = observers.metrics.sync();
        let started = saving.start(step + 1, trainer, (is_last, end.loss.is_finite()))?;
        observers.note(problems);
        let advice = advice(self.config.not_finite);
        Ok(match started {
            Started::Goes => None,
            Started::NotFinite { tensor, rank } => Some(format!(
                "after step {step}, {tensor} is not finite on rank {rank}; {advice}"
            )),
        })
    }

    /// Describes the numbers of a step that are not finite, if there are any. A scaled loss overflows occasionally,
    /// which the scaler handles. The run ends when no scale is left.
    fn not_finite(&self, step: usize, loss: f64, trainer: &dyn Trainer) -> Option<String> {
        let advice = advice(self.config.not_finite);
        let stops = self.config.not_finite == NotFinite::Stop;
        let norm = trainer.grad_norm().filter(|norm| !norm.is_finite());
        if let Some(norm) = norm.filter(|_| stops) {
            return Some(format!(
                "the gradient norm of step {step} is {norm}; {advice}"
            ));
        }
        let is_scaled = trainer.scaler().is_some();
        (!loss.is_finite() && !is_scaled)
            .then(|| format!("the loss of step {step} is {loss}; {advice}"))
    }

    fn train(
        &self,
        trainer: &mut dyn Trainer,
        observers: &mut Observers<'_>,
        result: &mut RankOutcome,
    ) -> Result<(), RankError> {
        let config = self.config;
        let traced_step = self.traced_step(result.first_step);
        let is_frozen = config.adapters.is_some();
        let flops_per_token = flops_per_token(&config.model, config.seq, is_frozen);
        let mut start = Instant::now();
        for step in result.first_step..config.num_steps() {
            let (before, staged) = (self.world.counts(), trainer.staged()?);
            let own_loss = if traced_step == Some(step) {
                let own_loss;
                (own_loss, result.trace) = trainer.traced_step(step, self.origin)?;
                own_loss
            } else {
                trainer.step(step)?
            };
            result.collectives = Collectives::of(&self.world.counts().since(&before));
            let [to_host, to_device] = trainer.staged()?;
            result.staged = [to_host - staged[0], to_device - staged[1]];
            let mut unsharded_peak = None;
            if step >= config.warmup {
                let peak = trainer.unsharded_peak()?;
                result.unsharded_peak = result.unsharded_peak.max(peak);
                unsharded_peak = Some(peak as u64);
            }
            let end_of_step = share::step_end(self.world, own_loss, config.is_stopped())?;
            let loss = end_of_step.loss;
            let end = Instant::now();
            let seconds = (end - start).as_secs_f64();
            // There is no gap between steps: their sum is the wall time of the loop.
            start = end;
            result.losses.push(loss);
            result.seconds.push(seconds);

            let eval_loss = if config.evaluates_after(step) {
                trainer.evaluate()?
            } else {
                None
            };
            let tokens_per_s = config.tokens_per_step() as f64 / seconds;
            let line = StepLine {
                step: step as u64,
                loss,
                tokens_per_s: Some(tokens_per_s),
                step_ms: Some(1e3 * seconds),
                lr: Some(config.schedule.at(step)),
                measured: step >= config.warmup,
                eval_loss,
                grad_norm: trainer.grad_norm(),
                ranks: Some(self.world.size() as u64),
                flops_per_s: Some(tokens_per_s * flops_per_token),
                rss_bytes: observers.rss_bytes(),
                unsharded_bytes: unsharded_peak,
            };
            observers.progress.step(&line);
            let problems = observers.metrics.write(&line);
            observers.note(problems);
            if let Some(eval_loss) = eval_loss {
                result.eval_losses.push((step, eval_loss));
            }
            result.failure = self.end_step(step, end_of_step, trainer, observers)?;
            if result.failure.is_some() {
                break;
            }
            if eval_loss.is_some() {
                // The evaluation does not count as part of a step.
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
