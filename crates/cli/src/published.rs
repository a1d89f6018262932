//! Predictions beside published figures.
//!
//! Each kind of device has one constant that is fitted, the part of its peak that train steps reach, and
//! it is fitted on the one row that is marked so. Everything else is from data sheets, from the
//! publications, or from the formulas.

use burn_fsdp::spmd::plan::{
    Checkpointing, Division, Estimate, Job, Machine, Precision, Transformer,
};
use burn_fsdp_models::{GptConfig, LlamaConfig};

use crate::preset::{gpt, llama};

/// What was published of a run.
#[derive(Debug, Clone, Copy)]
enum Figure {
    /// Per device, recomputation included.
    Teraflops(f64),
    /// Per second and device.
    Tokens(f64),
    /// Peak of device memory.
    Gibibytes(f64),
    /// Part of the step's forward and backward that is backward, in percent.
    Backward(f64),
    /// That it runs.
    Fits,
}

struct Row {
    source: &'static str,
    job: Job,
    machine: Machine,
    figure: Figure,
    is_fitted: bool,
}

/// The table of `docs/plan.md`.
pub(crate) fn table() -> String {
    let mut table = String::from(
        "| source | model | ranks | machine | batch x tokens | recomputed | figure | published | predicted | difference |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows() {
        table.push_str(&row.line());
        table.push('\n');
    }
    table
}

impl Row {
    fn line(&self) -> String {
        let (name, published, predicted) = self.compare();
        let difference = match (published, predicted) {
            _ if self.is_fitted => "fitted".to_owned(),
            (Some(published), Some(predicted)) => {
                let tenths = (1000.0 * (predicted / published - 1.0)).round();
                // Adding zero makes a negative one positive.
                format!("{:+.1} %", tenths / 10.0 + 0.0)
            }
            _ => String::new(),
        };
        let text = |value: Option<f64>| match (value, self.figure) {
            (Some(value), Figure::Gibibytes(_)) => format!("{value:.1}"),
            (Some(value), _) => format!("{value:.0}"),
            (None, _) => "runs".to_owned(),
        };
        let predicted = match self.figure {
            Figure::Fits => self.verdict(),
            _ => text(predicted),
        };
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
        format!(
            "| {} | {} | {} | {}{offload}{unhurried} | {} x {} | {recomputed} | {name} | {} | {predicted} | {difference} |",
            self.source,
            job.model.name,
            job.ranks,
            self.machine.name,
            job.batch,
            job.seq,
            text(published),
        )
    }

    fn estimate(&self) -> Estimate {
        Estimate::new(&self.job, &self.machine, self.machine.memory_bytes)
    }

    fn verdict(&self) -> String {
        let estimate = self.estimate();
        let gib = estimate.peak.bytes.total() as f64 / (1u64 << 30) as f64;
        let verdict = if estimate.fits {
            "fits"
        } else {
            "does not fit"
        };
        format!("{verdict}: {gib:.1} GiB")
    }

    /// Name of the figure, what was published, what is predicted.
    fn compare(&self) -> (&'static str, Option<f64>, Option<f64>) {
        let estimate = self.estimate();
        match self.figure {
            Figure::Teraflops(published) => {
                let predicted = estimate.flops_per_second() / 1e12;
                ("TFLOP/s per device", Some(published), Some(predicted))
            }
            Figure::Tokens(published) => {
                let predicted = estimate.tokens_per_second();
                ("tokens/s per device", Some(published), Some(predicted))
            }
            Figure::Gibibytes(published) => {
                let predicted = estimate.peak.bytes.total() as f64 / (1u64 << 30) as f64;
                ("peak GiB", Some(published), Some(predicted))
            }
            Figure::Backward(published) => {
                let forward = estimate.model_flops / 3.0;
                let predicted = 100.0 * (1.0 - forward / estimate.hardware_flops);
                (
                    "backward, % of arithmetic",
                    Some(published),
                    Some(predicted),
                )
            }
            Figure::Fits => ("fits", None, None),
        }
    }
}

const FSDP: &str = "arXiv 2304.11277";
const AWS: &str = "PyTorch on AWS";
const IBM: &str = "IBM fms-fsdp";
const TITAN: &str = "torchtitan";
const FAIRSCALE: &str = "fairscale PR 413";

fn rows() -> Vec<Row> {
    let gpt_13b = || gpt(&GptConfig::gpt_13b(), "gpt 13b");
    let gpt_175b = || gpt(&GptConfig::gpt_175b(), "gpt 175b");
    let gpt_1t = || gpt(&GptConfig::gpt_1t(), "gpt 1t");
    let llama_7b = || llama(&LlamaConfig::llama_7b(), "llama 7b");
    let llama_8b = || llama(&LlamaConfig::llama_8b(), "llama 8b");
    let llama_13b = || llama(&LlamaConfig::llama_13b(), "llama 13b");
    let llama_34b = || llama(&LlamaConfig::llama_34b(), "llama 34b");
    let a100 = Machine::a100_80g;
    let aws = Machine::a100_40g;
    let h100 = Machine::h100;
    let (full, selective) = (Checkpointing::Full, Checkpointing::Selective);
    let row = |source, model, ranks, machine, shape, checkpointing, figure| Row {
        source,
        job: job(model, ranks, shape, checkpointing),
        machine,
        figure,
        is_fitted: false,
    };
    use Figure::{Backward, Fits, Gibibytes, Teraflops, Tokens};
    vec![
        row(
            FSDP,
            gpt_175b(),
            512,
            a100(),
            (1, 2048),
            full,
            Teraflops(173.0),
        )
        .fitted(),
        row(
            FSDP,
            gpt_175b(),
            256,
            a100(),
            (1, 2048),
            full,
            Teraflops(173.0),
        ),
        row(
            FSDP,
            gpt_175b(),
            128,
            a100(),
            (1, 2048),
            full,
            Teraflops(173.0),
        ),
        row(
            FSDP,
            gpt_175b(),
            512,
            a100(),
            (2, 2048),
            full,
            Teraflops(186.0),
        ),
        row(
            FSDP,
            gpt_175b(),
            256,
            a100(),
            (2, 2048),
            full,
            Teraflops(186.0),
        ),
        row(
            FSDP,
            gpt_175b(),
            512,
            a100(),
            (2, 2048),
            full,
            Backward(67.0),
        ),
        row(
            AWS,
            gpt_175b(),
            128,
            aws(),
            (20, 512),
            full,
            Teraflops(159.0),
        )
        .offloaded(),
        row(AWS, gpt_1t(), 128, aws(), (4, 2048), full, Teraflops(84.0)).offloaded(),
        row(
            IBM,
            llama_7b(),
            128,
            a100(),
            (2, 4096),
            selective,
            Tokens(3700.0),
        ),
        row(
            IBM,
            llama_13b(),
            128,
            a100(),
            (2, 4096),
            selective,
            Tokens(1800.0),
        ),
        row(
            IBM,
            llama_34b(),
            128,
            a100(),
            (2, 4096),
            selective,
            Tokens(700.0),
        ),
        row(
            IBM,
            llama_7b(),
            96,
            h100(),
            (2, 4096),
            selective,
            Tokens(7500.0),
        )
        .fitted(),
        row(
            IBM,
            llama_13b(),
            96,
            h100(),
            (2, 4096),
            selective,
            Tokens(3800.0),
        ),
        row(
            IBM,
            llama_34b(),
            96,
            h100(),
            (2, 4096),
            selective,
            Tokens(1550.0),
        ),
        row(
            TITAN,
            llama_8b(),
            8,
            h100(),
            (2, 8192),
            selective,
            Tokens(5762.0),
        ),
        row(
            TITAN,
            llama_8b(),
            128,
            h100(),
            (2, 8192),
            selective,
            Tokens(5605.0),
        ),
        row(
            TITAN,
            llama_8b(),
            8,
            h100(),
            (2, 8192),
            selective,
            Gibibytes(82.4),
        ),
        row(
            TITAN,
            llama_8b(),
            128,
            h100(),
            (2, 8192),
            selective,
            Gibibytes(67.0),
        ),
        row(FAIRSCALE, gpt_13b(), 8, aws(), (1, 2048), full, Fits),
        row(FAIRSCALE, gpt_175b(), 128, aws(), (1, 2048), full, Fits),
        row(FAIRSCALE, gpt_1t(), 256, a100(), (1, 2048), full, Fits)
            .offloaded()
            .unhurried()
            .unhurried(),
    ]
}

impl Row {
    fn fitted(self) -> Self {
        Self {
            is_fitted: true,
            ..self
        }
    }

    /// Without prefetching: fewer blocks at once.
    fn unhurried(mut self) -> Self {
        self.job.prefetch = 0;
        self
    }

    fn offloaded(mut self) -> Self {
        self.job.is_offloaded = true;
        self
    }
}

fn job(
    model: Transformer,
    ranks: usize,
    (batch, seq): (usize, usize),
    checkpointing: Checkpointing,
) -> Job {
    Job {
        model,
        ranks,
        batch,
        seq,
        precision: Precision::Bf16,
        division: Division::FullShard,
        checkpointing,
        is_offloaded: false,
        prefetch: 1,
    }
}
