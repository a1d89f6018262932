//! A whole run: initial weights, ranks, report.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Device;
use burn_fsdp::{LaunchConfig, launch};
use burn_fsdp_models::{Gpt, ModelError};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::config::TrainConfig;
use crate::curve;
use crate::error::{Failure, InputError};
use crate::output;
use crate::rank;
use crate::report::Report;
use crate::trace;

/// Trains, and leaves the files and the output that the configuration asks for.
pub(crate) fn run(config: TrainConfig) -> Result<(), Failure> {
    let config = Arc::new(config);
    save_initial_weights(&config).map_err(InputError::from)?;
    obey_signals(&config);
    let on_ranks = config.clone();
    let launch_config = LaunchConfig::new(config.ranks).deadline(config.deadline);
    let origin = Instant::now();
    let mut results = launch(launch_config, move |world| {
        rank::train(&on_ranks, &world, origin)
    })?;
    if let Some(path) = &config.trace {
        let events = results
            .iter_mut()
            .map(|rank| std::mem::take(&mut rank.trace));
        let text = trace::file(events.flatten().collect());
        output::write_whole("--trace", path, text.as_bytes())?;
    }
    let report = Report::new(&config, results);
    // Without a step there is no point to draw.
    if !report.losses.is_empty() {
        let svg = curve::draw(&report.losses, &report.eval_losses);
        output::write_whole("--curve", &config.curve, svg.as_bytes())?;
    }
    print(&report, config.json);
    Ok(())
}

/// A first signal ends the run after its step and a save; a second one ends it at once, as without
/// a folder for checkpoints the first does.
fn obey_signals(config: &TrainConfig) {
    let Some(checkpoints) = &config.checkpoints else {
        return;
    };
    for signal in [SIGTERM, SIGINT] {
        let stop = &checkpoints.stop;
        // Where the system refuses, signals do what they always did.
        let _ = flag::register_conditional_shutdown(signal, 1, stop.clone());
        let _ = flag::register(signal, stop.clone());
    }
}

/// The model on a device, lazy where its weights are drawn.
///
/// Only rank 0's values count, so only rank 0 reads the file.
pub(crate) fn initial_model(
    config: &TrainConfig,
    device: &Device,
    rank: usize,
) -> Result<Gpt, ModelError> {
    match &config.init {
        Some(file) if rank == 0 => file.load(device),
        _ => config.model.init(device, config.seed),
    }
}

/// Writes the weights that training starts from: the same seed gives them again.
fn save_initial_weights(config: &TrainConfig) -> Result<(), ModelError> {
    match &config.save_init {
        Some(path) => initial_model(config, &Device::flex(), 0)?.save(path),
        None => Ok(()),
    }
}

fn print(report: &Report, as_json: bool) {
    let text = match as_json {
        true => report.to_json(),
        false => report.to_string(),
    };
    // Whoever reads may have stopped reading; the run was a success all the same.
    let _ = writeln!(io::stdout(), "{text}");
}
