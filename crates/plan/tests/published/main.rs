//! A comparison of predictions with published figures.
//!
//! The rows are in `published.csv` in this folder: each source's figures of its run, and the row's kind of evidence.
//! Each kind of device has one fitted constant, the fraction of its peak that train steps reach. It is fitted to the
//! row that is marked as such. Everything else comes from data sheets, publications, or formulas.

use std::path::Path;

use burn_fsdp_models::{GptConfig, LlamaConfig};
use burn_fsdp_plan::{Checkpointing, Estimate, Job, Machine, Precision, Transformer};
use burn_fsdp_spmd::Strategy;

const ROWS: &str = include_str!("published.csv");

/// Maximum difference in percent of a prediction that is not marked as missed.
const NEAR_PERCENT: f64 = 15.0;

const GIB: f64 = (1u64 << 30) as f64;

/// A published figure of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Figure {
    /// TFLOP/s per device, including recomputation.
    Teraflops(f64),
    /// Tokens per second and device.
    Tokens(f64),
    /// Peak of device memory in GiB.
    Gibibytes(f64),
    /// Device memory reserved by the allocator, in GiB.
    Reserved(f64),
    /// Fraction of the step that is backward, in percent.
    Backward(f64),
    /// The run took place.
    Runs,
}

/// The kind of evidence that a row provides for the formulas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Evidence {
    /// None: the device's constant was fitted to this row.
    Fitted,
    /// Little: the prediction is the fitted constant again, whatever the formulas are.
    Repeats,
    /// Little: a ratio of arithmetic is compared with a ratio of time.
    Ratio,
    /// Little: the source names no device, and one was chosen on which the run fits.
    Chosen,
    /// A prediction by the formulas.
    Predicted,
}

struct Row {
    source: &'static str,
    job: Job,
    machine: Machine,
    figure: Figure,
    evidence: Evidence,
}

/// The published and the predicted value of a row.
struct Comparison {
    /// Name of the figure.
    name: &'static str,
    published: String,
    predicted: String,
    /// Difference in percent, if both values are numbers of the same kind.
    percent: Option<f64>,
}

/// Returns the table of `docs/book/src/planning.md`, with a summary below it.
fn table() -> String {
    let mut table = String::from(
        "| source | model | ranks | machine | batch x tokens | recomputed | figure | published | predicted | difference | planned GiB |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let rows = rows();
    for row in &rows {
        table.push_str(&row.line());
        table.push('\n');
    }
    table.push('\n');
    table.push_str(&summary(&rows));
    table
}

fn summary(rows: &[Row]) -> String {
    let of = |evidence| rows.iter().filter(move |row| row.evidence == evidence);
    let near = of(Evidence::Predicted)
        .filter(|row| !row.is_missed())
        .count();
    let unplanned = rows.iter().filter(|row| !row.estimate().fits).count();
    format!(
        "Of {} rows, {} are fitted, {} repeat a fit, {} is a ratio of another kind, and {} say that a run fits \
         on a device of our choice. Of the other {}, which are predicted, {near} are within {NEAR_PERCENT:.0} %. \
         {unplanned} runs that took place do not fit by the plan.\n",
        rows.len(),
        of(Evidence::Fitted).count(),
        of(Evidence::Repeats).count(),
        of(Evidence::Ratio).count(),
        of(Evidence::Chosen).count(),
        of(Evidence::Predicted).count(),
    )
}

impl Row {
    fn line(&self) -> String {
        let job = &self.job;
        let recomputed = match job.checkpointing {
            Checkpointing::None => "nothing",
            Checkpointing::Selective => "selective",
            Checkpointing::Full => "blocks",
        };
        let offload = if job.is_offloaded { ", offload" } else { "" };
        let unhurried = if job.prefetch == 0 {
            ", no prefetch"
        } else {
            ""
        };
        let Comparison {
            name,
            published,
            predicted,
            ..
        } = self.compare();
        format!(
            "| {} | {} | {} | {}{offload}{unhurried} | {} x {} | {recomputed} | {name} | {published} | {predicted} | {} | {} |",
            self.source,
            job.model.name,
            job.ranks,
            self.machine.name,
            job.batch,
            job.seq,
            self.difference(),
            self.memory(),
        )
    }

    fn estimate(&self) -> Estimate {
        Estimate::new(&self.job, &self.machine, self.machine.memory_bytes)
    }

    /// Compares the planned bytes with the device's memory.
    fn memory(&self) -> String {
        let estimate = self.estimate();
        let [peak, available] = [estimate.peak.bytes.total(), estimate.available];
        let [peak, available] = [peak, available].map(|bytes| bytes as f64 / GIB);
        let verdict = if estimate.fits {
            ""
        } else {
            ", **does not fit**"
        };
        format!("{peak:.1} of {available:.1}{verdict}")
    }

    fn is_missed(&self) -> bool {
        let is_far = |percent: f64| percent.abs() > NEAR_PERCENT;
        self.compare().percent.is_some_and(is_far)
    }

    fn difference(&self) -> String {
        let percent = self.compare().percent;
        let percent = percent.map(|percent| {
            // Adding zero turns a negative zero into a positive one.
            format!("{:+.1}", (10.0 * percent).round() / 10.0 + 0.0)
        });
        match (self.evidence, percent) {
            (Evidence::Fitted, _) => "fitted".to_owned(),
            (Evidence::Repeats, Some(percent)) => format!("{percent} %, the fit again"),
            (Evidence::Ratio, Some(points)) => format!("{points} points, not of time"),
            (Evidence::Predicted, Some(percent)) if self.is_missed() => {
                format!("**{percent} %, missed**")
            }
            (_, Some(percent)) => format!("{percent} %"),
            (_, None) => "chosen".to_owned(),
        }
    }

    fn compare(&self) -> Comparison {
        let estimate = self.estimate();
        let of = |name, published: f64, predicted: f64, digits: usize| Comparison {
            name,
            published: format!("{published:.digits$}"),
            predicted: format!("{predicted:.digits$}"),
            percent: Some(100.0 * (predicted / published - 1.0)),
        };
        let peak = estimate.peak.bytes.total() as f64 / GIB;
        match self.figure {
            Figure::Teraflops(published) => {
                let predicted = estimate.flops_per_second() / 1e12;
                of("TFLOP/s per device", published, predicted, 0)
            }
            Figure::Tokens(published) => {
                let predicted = estimate.tokens_per_second();
                of("tokens/s per device", published, predicted, 0)
            }
            Figure::Gibibytes(published) => of("peak GiB", published, peak, 1),
            Figure::Reserved(published) => of("GiB reserved", published, peak, 1),
            Figure::Backward(published) => {
                let forward = estimate.model_flops / 3.0;
                let predicted = 100.0 * (1.0 - forward / estimate.hardware_flops);
                Comparison {
                    // For percentages, the difference counts instead of the ratio.
                    percent: Some(predicted - published),
                    ..of("backward, %", published, predicted, 0)
                }
            }
            Figure::Runs => Comparison {
                name: "runs",
                published: "yes".to_owned(),
                predicted: if estimate.fits {
                    "fits"
                } else {
                    "does not fit"
                }
                .to_owned(),
                percent: None,
            },
        }
    }
}

fn rows() -> Vec<Row> {
    let row = |line: &'static str| {
        parse(line).unwrap_or_else(|| unreachable!("a test reads every row, this too: {line}"))
    };
    ROWS.lines().skip(1).map(row).collect()
}

/// Parses a line of the file. No value has a comma.
fn parse(line: &'static str) -> Option<Row> {
    let cells: Vec<_> = line.split(',').collect();
    let [
        source,
        model,
        ranks,
        machine,
        gigabits,
        batch,
        seq,
        recomputed,
        offload,
        prefetch,
        figure,
        published,
        evidence,
    ] = cells[..]
    else {
        return None;
    };
    let mut machine = Machine::named(machine)?;
    machine.between.bandwidth = gigabits.parse::<f64>().ok()? * 1e9 / 8.0;
    let (family, size) = model.split_once(' ')?;
    Some(Row {
        source,
        job: Job {
            model: transformer(family, size)?,
            ranks: ranks.parse().ok()?,
            batch: batch.parse().ok()?,
            seq: seq.parse().ok()?,
            precision: Precision::Bf16,
            strategy: Strategy::FullShard,
            checkpointing: match recomputed {
                "nothing" => Checkpointing::None,
                "selective" => Checkpointing::Selective,
                "blocks" => Checkpointing::Full,
                _ => return None,
            },
            is_offloaded: match offload {
                "yes" => true,
                "no" => false,
                _ => return None,
            },
            prefetch: prefetch.parse().ok()?,
        },
        machine,
        figure: match (figure, published.parse().ok()) {
            ("teraflops", Some(value)) => Figure::Teraflops(value),
            ("tokens", Some(value)) => Figure::Tokens(value),
            ("gibibytes", Some(value)) => Figure::Gibibytes(value),
            ("reserved", Some(value)) => Figure::Reserved(value),
            ("backward", Some(value)) => Figure::Backward(value),
            ("runs", None) => Figure::Runs,
            _ => return None,
        },
        evidence: match evidence {
            "fitted" => Evidence::Fitted,
            "repeats" => Evidence::Repeats,
            "ratio" => Evidence::Ratio,
            "chosen" => Evidence::Chosen,
            "predicted" => Evidence::Predicted,
            _ => return None,
        },
    })
}

/// Returns the sizes of a preset.
fn transformer(family: &str, size: &str) -> Option<Transformer> {
    Some(match family {
        "gpt" => {
            let config = GptConfig::preset(size)?;
            Transformer {
                name: format!("gpt {size}"),
                layers: config.layers,
                dim: config.dim,
                heads: config.heads,
                kv_heads: config.heads,
                hidden: 4 * config.dim,
                is_gated: false,
                has_bias: true,
                vocab: config.vocab,
                positions: config.seq,
            }
        }
        "llama" => {
            let config = LlamaConfig::preset(size)?;
            Transformer {
                name: format!("llama {size}"),
                layers: config.layers,
                dim: config.dim,
                heads: config.heads,
                kv_heads: config.kv_heads,
                hidden: config.hidden,
                is_gated: true,
                has_bias: false,
                vocab: config.vocab,
                positions: 0,
            }
        }
        _ => return None,
    })
}

#[test]
fn every_line_is_a_row() {
    for line in ROWS.lines().skip(1) {
        assert!(parse(line).is_some(), "{line}");
    }
}

/// Checks that the fitted rows differ by less than 0.05 percent, a margin for the rounding of the constants.
#[test]
fn the_constants_come_only_from_the_fitted_rows() {
    let mut machines = Vec::new();
    for row in rows() {
        if row.evidence == Evidence::Fitted {
            let percent = row.compare().percent.unwrap_or(f64::NAN);
            assert!(percent.abs() < 0.05, "{}: {percent}", row.line());
            machines.push(row.machine.name);
        }
    }
    assert_eq!(machines, ["a100-80g", "h100"]);
}

#[test]
fn rows_that_repeat_a_fit_are_predicted_as_the_fit() {
    let rows = rows();
    let fitted = rows[0].compare().predicted;
    for row in &rows {
        if row.evidence == Evidence::Repeats {
            assert_eq!(row.compare().predicted, fitted, "{}", row.line());
        }
    }
}

/// The table in the documentation must equal the computed one.
#[test]
fn published_figures_in_the_documentation_are_recomputed() {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the test");
    let path = Path::new(&folder).join("../../../docs/book/src/planning.md");
    let page = std::fs::read_to_string(path).expect("docs/book/src/planning.md");
    for line in table().lines() {
        assert!(
            page.contains(line),
            "docs/book/src/planning.md lacks: {line}"
        );
    }
}

/// Lists the missed rows and those that do not fit, and no others. A change of a formula that improves or breaks a
/// row shows here.
#[test]
fn the_table_of_published_figures_lists_its_misses() {
    let table = table();
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let (mut missed, mut unplanned, mut number) = (Vec::new(), Vec::new(), 0);
    for line in rows {
        number += 1;
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let name = format!(
            "{}: {}, {} ranks, {}",
            cells[1], cells[2], cells[3], cells[4]
        );
        // The marks must match the numbers.
        let percent = cells[10].trim_matches('*').split(" %").next();
        let percent = percent.and_then(|percent| percent.parse::<f64>().ok());
        let is_far = percent.is_some_and(|percent| percent.abs() > 15.0);
        assert_eq!(is_far, cells[10].contains("missed"), "{line}");
        if is_far {
            missed.push(name.clone());
        }
        if cells[11].contains("does not fit") {
            unplanned.push(name);
        }
    }
    assert_eq!(number, 24);
    assert_eq!(
        missed,
        [
            "arXiv 2304.11277: gpt 175b, 128 ranks, a100-80g",
            "PyTorch on AWS: gpt 1t, 128 ranks, a100-40g, offload",
            "IBM fms-fsdp: llama 34b, 128 ranks, a100-80g",
            "IBM fms-fsdp: llama 70b, 128 ranks, a100-80g",
            "IBM fms-fsdp: llama 34b, 96 ranks, h100",
            "IBM fms-fsdp: llama 70b, 96 ranks, h100",
        ]
    );
    assert_eq!(
        unplanned,
        [
            "PyTorch on AWS: gpt 175b, 128 ranks, a100-40g, offload",
            "PyTorch on AWS: gpt 1t, 128 ranks, a100-40g, offload",
        ]
    );
    let summary = table.lines().last().unwrap_or_default();
    assert!(summary.contains("Of the other 14"), "{summary}");
    assert!(summary.contains("8 are within 15 %"), "{summary}");
}
