//! The final numbers of the runs, as a table.

use std::fmt;

use crate::line::StepLine;
use crate::run::Run;
use crate::text::{Escaped, Short, Whole};

const MIB: f64 = (1 << 20) as f64;

/// A column: its head, its unit, and a run's cell, which is empty if the run lacks the number.
type Column = (&'static str, &'static str, fn(&Run) -> Option<String>);

const COLUMNS: [Column; 12] = [
    ("steps", "", |run| {
        Some(Whole(run.steps.len() as u64).to_string())
    }),
    ("ranks", "", |run| {
        last(run, |line| line.ranks).map(|ranks| Whole(ranks).to_string())
    }),
    ("last loss", "nats/token", |run| {
        run.steps.last().map(|line| Short(line.loss).to_string())
    }),
    ("mean loss", "last tenth", |run| {
        mean_loss(run).map(|loss| Short(loss).to_string())
    }),
    ("held-out loss", "last", |run| {
        last(run, |line| line.eval_loss).map(|loss| Short(loss).to_string())
    }),
    ("lowest held-out", "at step", lowest_held_out),
    ("learning rate", "last", |run| {
        last(run, |line| line.lr).map(|rate| Short(rate).to_string())
    }),
    ("gradient norm", "median", |run| {
        median(run, |line| line.grad_norm).map(|norm| Short(norm).to_string())
    }),
    ("tokens/s", "median", |run| {
        median(run, |line| line.tokens_per_s).map(|tokens| Short(tokens).to_string())
    }),
    ("GFLOP/s", "median", |run| {
        median(run, |line| line.flops_per_s).map(|flops| Short(flops / 1e9).to_string())
    }),
    ("memory", "MiB, highest", |run| {
        let bytes = run.steps.iter().filter_map(|line| line.rss_bytes).max();
        bytes.map(|bytes| Short(bytes as f64 / MIB).to_string())
    }),
    ("time in steps", "h:mm:ss", duration),
];

/// The table of all runs. Columns without a number are absent.
pub(crate) struct Table<'a> {
    pub(crate) runs: &'a [Run],
    pub(crate) names: &'a [String],
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells =
            |(_, _, cell): &Column| -> Vec<Option<String>> { self.runs.iter().map(cell).collect() };
        let columns: Vec<_> = COLUMNS
            .iter()
            .map(|column| (column, cells(column)))
            .collect();
        let columns: Vec<_> = columns
            .into_iter()
            .filter(|(_, cells)| cells.iter().any(Option::is_some))
            .collect();
        f.write_str("<div class=\"scroll\"><table><thead><tr><th>run</th>")?;
        for ((head, unit, _), _) in &columns {
            write!(f, "<th>{head}<small>{unit}</small></th>")?;
        }
        f.write_str("</tr></thead>\n<tbody>")?;
        for (index, name) in self.names.iter().enumerate() {
            write!(
                f,
                "<tr class=\"run-{index}\"><th style=\"--c:var(--run-{index})\"><i class=\"swatch\"></i>{}</th>",
                Escaped(name)
            )?;
            for (_, cells) in &columns {
                let cell = cells[index].as_deref().unwrap_or("\u{2013}");
                write!(f, "<td>{cell}</td>")?;
            }
            f.write_str("</tr>\n")?;
        }
        f.write_str("</tbody></table></div>\n")
    }
}

fn last<T>(run: &Run, value: impl Fn(&StepLine) -> Option<T>) -> Option<T> {
    run.steps.iter().rev().find_map(value)
}

/// Returns the mean loss over the last tenth of the steps.
fn mean_loss(run: &Run) -> Option<f64> {
    let num_steps = run.steps.len().div_ceil(10);
    let lines = &run.steps[run.steps.len() - num_steps..];
    let losses = lines.iter().map(|line| line.loss / num_steps as f64);
    (num_steps > 1).then(|| losses.sum())
}

fn lowest_held_out(run: &Run) -> Option<String> {
    let losses = run
        .steps
        .iter()
        .filter_map(|line| Some((line.step, line.eval_loss?)));
    let (step, loss) = losses.min_by(|one, other| one.1.total_cmp(&other.1))?;
    Some(format!("{} <small>at {}</small>", Short(loss), Whole(step)))
}

/// Returns the median over the measured steps, or over all steps if none is measured.
fn median(run: &Run, value: impl Fn(&StepLine) -> Option<f64>) -> Option<f64> {
    let is_any_measured = run.steps.iter().any(|line| line.measured);
    let lines = run.steps.iter();
    let lines = lines.filter(|line| line.measured || !is_any_measured);
    let mut values: Vec<f64> = lines.filter_map(value).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let high = *values.get(middle)?;
    if values.len() % 2 == 1 {
        return Some(high);
    }
    Some(values[middle - 1] / 2.0 + high / 2.0)
}

/// Returns the sum of the durations of the steps, without evaluations and saves.
fn duration(run: &Run) -> Option<String> {
    let all: f64 = run.steps.iter().filter_map(|line| line.step_ms).sum();
    let has_any = run.steps.iter().any(|line| line.step_ms.is_some());
    has_any.then(|| {
        let seconds = (all / 1e3).round() as u64;
        let (minutes, seconds) = (seconds / 60, seconds % 60);
        format!("{}:{:02}:{seconds:02}", minutes / 60, minutes % 60)
    })
}
