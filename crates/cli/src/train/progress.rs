//! The progress bar.

use std::fmt::Write;

use burn_fsdp_runs::StepLine;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::train::config::TrainConfig;

const MIB: f64 = (1 << 20) as f64;
const TEMPLATE: &str = "{bar:32} {pos}/{len} {msg}, {eta} left";

/// A progress bar on stderr, shown on one rank, if stderr is a terminal.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn new(config: &TrainConfig, is_first: bool, first_step: usize) -> Self {
        let target = if is_first && !config.json {
            // The bar hides itself if stderr is not a terminal.
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(config.num_steps() as u64), target);
        let style = ProgressStyle::with_template(TEMPLATE);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(first_step as u64);
        Self(bar)
    }

    /// Returns true if the bar is visible.
    pub(crate) fn is_shown(&self) -> bool {
        !self.0.is_hidden()
    }

    /// Advances the bar by a step.
    pub(crate) fn step(&self, line: &StepLine) {
        let mut message = format!("loss {:.4}", line.loss);
        if let Some(tokens) = line.tokens_per_s {
            let _ = write!(message, ", {tokens:.0} tokens/s");
        }
        if let Some(bytes) = line.rss_bytes {
            let _ = write!(message, ", {:.0} MiB", bytes as f64 / MIB);
        }
        self.0.set_message(message);
        self.0.inc(1);
    }
}

impl Drop for Progress {
    /// Removes the bar, even when a rank fails, so that the message has its own line.
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
