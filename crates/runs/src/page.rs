//! The page: all charts and the table of some runs in one HTML file, without scripts and links to other files.

use std::collections::HashSet;
use std::fmt::{self, Write};

use crate::chart::{Chart, Series, Style};
use crate::line::StepLine;
use crate::run::Run;
use crate::scale::Range;
use crate::series::{Point, points};
use crate::table::Table;
use crate::text::{Escaped, Whole};

const STYLE: &str = include_str!("page.css");
/// The colors of the first runs, on a light and on a dark background. They differ for color-blind readers.
const COLORS: [[&str; 2]; 8] = [
    ["#0b6bbf", "#5ab0f5"],
    ["#d1560a", "#ff9a50"],
    ["#0a8a5f", "#45d19f"],
    ["#b23a8f", "#f08ccf"],
    ["#6a51b5", "#ae9bf7"],
    ["#a07a00", "#e8c547"],
    ["#b3202c", "#ff7a80"],
    ["#4f5b66", "#b4c0cc"],
];

/// A kind of chart: its title, its unit, the range of its values, how its lines are drawn, and its value in a line.
struct Kind {
    title: &'static str,
    unit: &'static str,
    range: Range,
    style: Style,
    value: fn(&StepLine) -> Option<f64>,
}

const KINDS: [Kind; 7] = [
    Kind {
        title: LOSS,
        unit: "nats per token",
        range: Range::Fit,
        style: Style::Smoothed,
        value: |line| Some(line.loss),
    },
    Kind {
        title: "Learning rate",
        unit: "",
        range: Range::FromZero,
        style: Style::Line,
        value: |line| line.lr,
    },
    Kind {
        title: "Gradient norm",
        unit: "before clipping",
        range: Range::Fit,
        style: Style::Smoothed,
        value: |line| line.grad_norm,
    },
    Kind {
        title: "Throughput",
        unit: "tokens/s, all ranks",
        range: Range::FromZero,
        style: Style::Smoothed,
        value: |line| line.tokens_per_s,
    },
    Kind {
        title: PER_RANK,
        unit: "tokens/s",
        range: Range::FromZero,
        style: Style::Smoothed,
        value: |line| Some(line.tokens_per_s? / line.ranks.filter(|ranks| *ranks > 0)? as f64),
    },
    Kind {
        title: "Resident memory",
        unit: "MiB, process of rank 0",
        range: Range::FromZero,
        style: Style::Line,
        value: |line| Some(line.rss_bytes? as f64 / MIB),
    },
    Kind {
        title: "Full tensors",
        unit: "MiB, peak of each step on rank 0",
        range: Range::FromZero,
        style: Style::Line,
        value: |line| Some(line.unsharded_bytes? as f64 / MIB),
    },
];

const LOSS: &str = "Loss";
const PER_RANK: &str = "Throughput per rank";
const MIB: f64 = (1 << 20) as f64;

/// Returns a page with charts and a table of some runs.
pub fn page(runs: &[Run]) -> String {
    let mut html = String::new();
    // Writing to a string does not fail.
    let _ = write_page(&mut html, runs);
    html
}

fn write_page(html: &mut String, runs: &[Run]) -> fmt::Result {
    let names = names(runs);
    let title = match names.as_slice() {
        [name] => format!("Training run {name}"),
        names => format!("{} training runs", names.len()),
    };
    write!(
        html,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>{}</title>\n<style>\n{STYLE}",
        Escaped(&title)
    )?;
    write_colors(html, runs.len())?;
    write!(
        html,
        "</style>\n</head>\n<body>\n<header><h1>{}</h1>\n",
        Escaped(&title)
    )?;
    if runs.len() > 1 {
        write_legend(html, runs, &names)?;
    }
    html.write_str("</header>\n<main>\n")?;
    write!(
        html,
        "{}",
        Table {
            runs,
            names: &names
        }
    )?;
    write_notes(html, runs, &names)?;
    html.write_str("<div class=\"charts\">\n")?;
    for kind in KINDS.iter().filter(|kind| kind.is_drawn(runs)) {
        write!(html, "{}", kind.chart(runs, &names))?;
    }
    html.write_str(
        "</div>\n</main>\n<footer>Drawn by burn-fsdp report. Point at a chart to see its values.</footer>\n</body>\n\
         </html>\n",
    )
}

impl Kind {
    /// Returns true if the chart shows something that no other chart shows.
    fn is_drawn(&self, runs: &[Run]) -> bool {
        let lines = || runs.iter().flat_map(|run| &run.steps);
        let has_value = lines().any(|line| (self.value)(line).is_some_and(f64::is_finite));
        let is_parallel = || lines().any(|line| line.ranks.is_some_and(|ranks| ranks > 1));
        match self.title {
            LOSS => true,
            PER_RANK => has_value && is_parallel(),
            _ => has_value,
        }
    }

    fn chart<'a>(&self, runs: &[Run], names: &'a [String]) -> Chart<'a> {
        let mut series = Vec::new();
        for (run, metrics) in runs.iter().enumerate() {
            let mut add = |style, points: Vec<Point>| {
                if !points.is_empty() {
                    series.push(Series { run, style, points });
                }
            };
            add(self.style, points(metrics, self.value));
            if self.title == LOSS {
                add(Style::HeldOut, points(metrics, |line| line.eval_loss));
            }
        }
        let steps = runs
            .iter()
            .flat_map(|run| [run.steps.first(), run.steps.last()]);
        let steps = steps.flatten().map(|line| line.step);
        Chart {
            title: self.title,
            unit: self.unit,
            names,
            steps: (steps.clone().min().unwrap_or(0), steps.max().unwrap_or(0)),
            range: self.range,
            is_wide: self.title == LOSS,
            series,
        }
    }
}

/// Returns names that differ: paths of runs that would have the same name.
fn names(runs: &[Run]) -> Vec<String> {
    let mut seen = HashSet::new();
    let repeated: HashSet<&String> = runs
        .iter()
        .map(|run| &run.name)
        .filter(|name| !seen.insert(*name))
        .collect();
    let name = |run: &Run| {
        if repeated.contains(&run.name) {
            run.path.display().to_string()
        } else {
            run.name.clone()
        }
    };
    runs.iter().map(name).collect()
}

/// Writes the color of each run, and the rules that hide a run whose box in the legend is not checked.
fn write_colors(html: &mut String, num_runs: usize) -> fmt::Result {
    let queries = ["light", "dark"].into_iter().enumerate();
    for (shade, query) in queries {
        write!(html, "@media (prefers-color-scheme: {query}) {{ :root {{")?;
        for run in 0..num_runs {
            match COLORS.get(run) {
                Some(color) => write!(html, " --run-{run}: {};", color[shade])?,
                None => {
                    // Multiples of the golden angle are far apart.
                    let (hue, lightness) = (run * 137 % 360, [38, 70][shade]);
                    write!(html, " --run-{run}: hsl({hue} 65% {lightness}%);")?;
                }
            }
        }
        html.write_str(" } }\n")?;
    }
    for run in 0..num_runs {
        writeln!(
            html,
            "body:has(#show-{run}:not(:checked)) :is(.charts, tbody) .run-{run} {{ display: none }}"
        )?;
    }
    Ok(())
}

fn write_legend(html: &mut String, runs: &[Run], names: &[String]) -> fmt::Result {
    html.write_str("<div class=\"legend\">\n")?;
    for (index, (run, name)) in runs.iter().zip(names).enumerate() {
        writeln!(
            html,
            "<label style=\"--c:var(--run-{index})\" title=\"{}\"><input type=\"checkbox\" id=\"show-{index}\" checked>\
             <i class=\"swatch\"></i>{}</label>",
            Escaped(&run.path.display().to_string()),
            Escaped(name)
        )?;
    }
    html.write_str("</div>\n")
}

/// Writes what a reader cannot see in the charts.
fn write_notes(html: &mut String, runs: &[Run], names: &[String]) -> fmt::Result {
    let mut notes = String::new();
    for (run, name) in runs.iter().zip(names) {
        let mut note = |text: String| writeln!(notes, "<li><b>{}</b>: {text}</li>", Escaped(name));
        let mut lost = run.steps.iter().filter(|line| !line.loss.is_finite());
        if let Some(first) = lost.next() {
            let count = 1 + lost.count();
            note(format!(
                "{} not finite, the first in step {}",
                counted(count, "loss is", "losses are"),
                Whole(first.step)
            ))?;
        }
        if run.num_restarts > 0 {
            note(format!(
                "went back to an earlier step {}; the charts show the last attempt at each step",
                counted(run.num_restarts, "time", "times")
            ))?;
        }
        if run.num_skipped > 0 {
            note(format!(
                "{} not a complete step",
                counted(run.num_skipped, "line is", "lines are")
            ))?;
        }
    }
    if notes.is_empty() {
        return Ok(());
    }
    write!(html, "<ul class=\"notes\">\n{notes}</ul>\n")
}

fn counted(count: usize, one: &str, several: &str) -> String {
    let noun = if count == 1 { one } else { several };
    format!("{} {noun}", Whole(count as u64))
}
