//! The progress of a run: a bar on a terminal, and now and then a line in a log.

use std::cell::Cell;
use std::fmt::Write;
use std::time::{Duration, Instant};

use burn_fsdp_runs::StepLine;
use indicatif::{ProgressBar, ProgressStyle};

use crate::console;
use crate::train::config::TrainConfig;

const MIB: f64 = (1 << 20) as f64;
const TEMPLATE: &str = "{bar:32} {pos}/{len} {msg}, {eta} left";

/// The time between two lines in a log.
const LINE_EVERY: Duration = Duration::from_secs(30);

/// The progress of a run on stderr, shown on one rank.
pub(crate) enum Progress {
    Hidden,
    /// Stderr is a terminal that can show it.
    Bar(ProgressBar),
    /// Stderr is a file, a pipe or a simple terminal.
    Lines {
        last: Cell<Instant>,
        num_steps: usize,
    },
}

impl Progress {
    pub(crate) fn new(config: &TrainConfig, is_first: bool, first_step: usize) -> Self {
        if !is_first || config.json {
            return Self::Hidden;
        }
        let bar = ProgressBar::new(config.num_steps() as u64);
        // It is hidden if stderr is not a terminal, or one without control sequences.
        if bar.is_hidden() {
            return Self::Lines {
                last: Cell::new(Instant::now()),
                num_steps: config.num_steps(),
            };
        }
        let style = ProgressStyle::with_template(TEMPLATE);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(first_step as u64);
        Self::Bar(bar)
    }

    /// Returns true if the next step is shown.
    pub(crate) fn is_shown(&self) -> bool {
        match self {
            Self::Hidden => false,
            Self::Bar(_) => true,
            Self::Lines { last, .. } => last.get().elapsed() >= LINE_EVERY,
        }
    }

    /// Shows a completed step.
    pub(crate) fn step(&self, line: &StepLine) {
        match self {
            Self::Bar(bar) => {
                bar.set_message(described(line));
                bar.inc(1);
            }
            Self::Lines { last, num_steps } if self.is_shown() => {
                last.set(Instant::now());
                let message = described(line);
                console::tell(format_args!(
                    "step {}/{num_steps}, {message}",
                    line.step + 1
                ));
            }
            Self::Hidden | Self::Lines { .. } => {}
        }
    }
}

fn described(line: &StepLine) -> String {
    let mut message = format!("loss {:.4}", line.loss);
    if let Some(tokens) = line.tokens_per_s {
        let _ = write!(message, ", {tokens:.0} tokens/s");
    }
    if let Some(bytes) = line.rss_bytes {
        let _ = write!(message, ", {:.0} MiB", bytes as f64 / MIB);
    }
    message
}

impl Drop for Progress {
    /// Removes the bar, even when a rank fails, so that the message has its own line.
    fn drop(&mut self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
