//! The results of a run, from the results of all ranks.

use serde::Serialize;

use crate::host;
use crate::text::printable;
use crate::train::config::TrainConfig;
use crate::train::outcome::{Collectives, RankOutcome};
use crate::train::utilization::flops_per_token;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) mode: &'static str,
    /// Engine through which the ranks communicate.
    pub(crate) engine: String,
    pub(crate) strategy: &'static str,
    /// True if a compiled step trained, false for the eager engine.
    pub(crate) compiled: bool,
    pub(crate) ranks: usize,
    /// Compute threads of each rank.
    pub(crate) threads: usize,
    /// Number of parameters of the whole model.
    pub(crate) params: usize,
    /// Number of trained parameters: all parameters, or the adapters' factors.
    pub(crate) trained_params: usize,
    /// Number of values that the optimizer keeps for the trained parameters.
    #[serde(skip)]
    pub(crate) optimizer_values: usize,
    pub(crate) model: &'static str,
    pub(crate) layers: usize,
    pub(crate) dim: usize,
    pub(crate) heads: usize,
    pub(crate) vocab: usize,
    pub(crate) seq: usize,
    pub(crate) batch: usize,
    pub(crate) steps: usize,
    pub(crate) warmup: usize,
    pub(crate) data: String,
    /// Tokens per second in the median step; `None` without measured steps.
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) step_ms: Option<StepMillis>,
    /// Operations of the model per second in the median step, on all ranks together.
    pub(crate) flops_per_s: Option<f64>,
    /// `flops_per_s` divided by the operations per second of matrix products, if these were measured.
    pub(crate) utilization: Option<f64>,
    /// The step that the run resumed from; 0 for a fresh run.
    pub(crate) first_step: usize,
    /// Losses of all steps from `first_step` on. Unmeasured steps come first.
    pub(crate) losses: Vec<f64>,
    /// Loss of the last evaluation.
    pub(crate) eval_loss: Option<f64>,
    /// Step and loss of every evaluation.
    pub(crate) eval_losses: Vec<(usize, f64)>,
    /// Bytes of parameters and optimizer state on each rank.
    pub(crate) state_bytes: Vec<usize>,
    /// Peak bytes of full tensors on each rank.
    pub(crate) unsharded_peak_bytes: Vec<usize>,
    /// Bytes that collectives copied on each rank in the last step: from a device to the host, and to a device.
    pub(crate) staged_bytes: Vec<[usize; 2]>,
    /// Peak resident bytes of each process.
    pub(crate) peak_rss_bytes: Vec<u64>,
    /// Resident bytes of this process before the training.
    pub(crate) start_rss_bytes: Option<u64>,
    /// Collectives of the last training step.
    pub(crate) collectives: Collectives,
    /// Units that are recomputed in backward to meet the memory budget.
    pub(crate) recomputed_units: Vec<String>,
    /// Method of matrix products in `bf16`, if the compiler chose one.
    pub(crate) products: Option<String>,
    pub(crate) curve: String,
    pub(crate) sample: Option<String>,
    /// The newest step that this run saved in --checkpoint-dir.
    pub(crate) saved_step: Option<u64>,
    /// True if a signal ended the run before its last step.
    pub(crate) interrupted: bool,
    pub(crate) warnings: Vec<String>,
    /// The reasons why the run ends with an error, if it does.
    pub(crate) failures: Vec<String>,
}

/// Durations of the measured steps, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct StepMillis {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Report {
    /// Creates the report from the results of at least one rank, and the resident bytes before they started.
    pub(crate) fn new(
        config: &TrainConfig,
        start_rss_bytes: Option<u64>,
        mut results: Vec<RankOutcome>,
    ) -> Self {
        let seconds = slowest(&results);
        let first = results.first();
        let first_step = first.map_or(0, |first| first.first_step);
        let unmeasured = config.warmup.saturating_sub(first_step);
        let step_ms = StepMillis::of(&seconds[unmeasured.min(seconds.len())..]);
        let saved_step = first.and_then(|first| first.saved_step);
        let engine = first.map_or_else(String::new, |first| first.engine.clone());
        let interrupted = first.is_some_and(|first| first.interrupted);
        let tokens_per_s = step_ms.map(|step| 1e3 * config.tokens_per_step() as f64 / step.median);
        let [flops_per_s, utilization] = arithmetic(config, tokens_per_s, first);
        let collectives = results.first().map(|first| first.collectives);
        let state_bytes = results.iter().map(|result| result.state_bytes).collect();
        let unsharded_peak_bytes = results.iter().map(|result| result.unsharded_peak).collect();
        let mut peak_rss_bytes: Vec<_> = results
            .iter()
            .filter_map(|result| result.peak_rss_bytes)
            .collect();
        if peak_rss_bytes.is_empty() {
            peak_rss_bytes.extend(host::peak_rss_bytes());
        }
        let warnings = warnings(config, &results);
        let (losses, eval_losses, recomputed_units, products, sample) = match results.first_mut() {
            Some(first) => (
                std::mem::take(&mut first.losses),
                std::mem::take(&mut first.eval_losses),
                std::mem::take(&mut first.recomputed_units),
                first.half_products.take(),
                first.sample.take(),
            ),
            None => Default::default(),
        };
        Self {
            mode: "train",
            engine,
            strategy: config.sharding.name,
            compiled: config.is_compiled,
            ranks: config.ranks.number(),
            threads: config.threads,
            params: config.model.num_params(),
            trained_params: config.num_trained_params(),
            optimizer_values: config.num_optimizer_values(),
            model: config.model.name(),
            layers: config.model.num_layers(),
            dim: config.model.dim(),
            heads: config.model.heads(),
            vocab: config.model.vocab(),
            seq: config.seq,
            batch: config.batch,
            steps: config.steps,
            warmup: config.warmup,
            data: config.data.to_string(),
            tokens_per_s,
            step_ms,
            flops_per_s,
            utilization,
            first_step,
            losses,
            eval_loss: eval_losses.last().map(|(_, loss)| *loss),
            eval_losses,
            state_bytes,
            unsharded_peak_bytes,
            staged_bytes: results.iter().map(|result| result.staged).collect(),
            peak_rss_bytes,
            start_rss_bytes,
            collectives: collectives.unwrap_or_default(),
            recomputed_units,
            products,
            curve: config.curve.display().to_string(),
            sample: sample.map(|bytes| printable(&bytes)),
            saved_step,
            interrupted,
            warnings,
            failures: Vec::new(),
        }
    }

    pub(crate) fn to_json(&self) -> String {
        // Only strings, numbers and lists of them, which JSON can always represent.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Returns the model's operations per second, and their ratio to the operations per second of matrix products, if these
/// were measured.
fn arithmetic(
    config: &TrainConfig,
    tokens_per_s: Option<f64>,
    first: Option<&RankOutcome>,
) -> [Option<f64>; 2] {
    let of_token = flops_per_token(&config.model, config.seq, config.adapters.is_some());
    let flops = tokens_per_s.map(|tokens| tokens * of_token);
    let products = first.and_then(|first| first.products_per_s);
    let part = flops.zip(products).map(|(flops, limit)| flops / limit);
    [flops, part]
}

/// Returns the seconds of every step on its slowest rank.
fn slowest(results: &[RankOutcome]) -> Vec<f64> {
    let num_steps = results.first().map_or(0, |first| first.seconds.len());
    let of_step = |step: usize| results.iter().map(move |result| result.seconds[step]);
    (0..num_steps)
        .map(|step| of_step(step).fold(0.0, f64::max))
        .collect()
}

/// Collects all warnings, without duplicates.
fn warnings(config: &TrainConfig, results: &[RankOutcome]) -> Vec<String> {
    let mut warnings = config.data.warnings();
    warnings.extend(config.other_training.clone());
    if config.eval_every > 0 && config.data.held_out(config.batch_shape()).is_none() {
        warnings.push("--eval-every has no effect with --synthetic".to_owned());
    }
    for warning in results.iter().flat_map(|result| &result.warnings) {
        if !warnings.contains(warning) {
            warnings.push(warning.clone());
        }
    }
    let losses = results.first().map_or(&[][..], |first| &first.losses);
    if let Some(position) = losses.iter().position(|loss| !loss.is_finite()) {
        let step = position + results.first().map_or(0, |first| first.first_step);
        warnings.push(format!(
            "the loss is not finite from step {step} on; choose a lower --lr"
        ));
    }
    warnings
}

impl StepMillis {
    fn of(seconds: &[f64]) -> Option<Self> {
        let mut sorted = seconds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
            _ => sorted[middle],
        };
        Some(Self {
            median: 1e3 * median,
            min: 1e3 * min,
            max: 1e3 * max,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::StepMillis;

    #[test]
    fn an_even_median_is_the_mean_of_the_middle_two() {
        let of = |seconds: &[f64]| StepMillis::of(seconds).map(|step| step.median);
        assert_eq!(of(&[0.004, 0.001, 0.003, 0.002]), Some(2.5));
        assert_eq!(of(&[0.004, 0.001, 0.003]), Some(3.0));
        assert_eq!(of(&[]), None);
    }
}
