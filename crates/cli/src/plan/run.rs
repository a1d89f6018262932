//! The plan of a training run, from arguments to printed text, JSON or a drawing.

use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_fsdp::Strategy;
use burn_fsdp::compile::Options;
use burn_fsdp::internals::compile::graph::Graph;
use burn_fsdp::internals::compile::passes::schedule::pipeline;
use burn_fsdp::internals::compile::trace::{TraceConfig, trace};
use burn_fsdp::internals::compile::{Error, GraphDump, kernels};
use burn_fsdp::internals::plan::{
    Checkpointing, Estimate, Job, Machine, Plan, Precision, Size, TracedEstimate,
};
use burn_fsdp::plan::MemoryPlan;
use burn_fsdp_models::fused::recorded;
use burn_fsdp_models::{Gpt, Llama};

use crate::args::{CheckpointingArg, ModelArg, PlanArgs, PlannedStrategyArg, PrecisionArg};
use crate::error::{Failure, InputError};

use crate::plan::preset::Preset;
use crate::plan::proof::{Proof, Proved};
use crate::{console, output};

/// Maximum number of ranks. More ranks, like more tokens, are rejected, so no product overflows.
const MOST_RANKS: usize = 1 << 20;
const MOST_TOKENS: usize = 1 << 24;
/// The smaller of two numbers of blocks from which larger models are extrapolated.
const FEW_BLOCKS: usize = 6;
const MORE_BLOCKS: usize = 8;

/// Computes the plan, and prints or draws the requested output.
pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let name = &args.preset;
    let preset = Preset::named(args.model, name)?;
    let machine = machine(&args.machine)?;
    let job = job(args, &preset, &name.to_ascii_lowercase())?;
    if let Some(path) = &args.svg {
        output::check_one("--svg", path)?;
    }
    if let Some(path) = &args.dump_graphs {
        output::check_dump(path)?;
    }
    let available = args.gpu_memory.unwrap_or(machine.memory_bytes);
    let answer = if args.compile {
        traced(args, &preset, &job, &machine, available)?
    } else {
        estimated(&job, &machine, available)?
    };
    if let Some(path) = &args.svg {
        output::write_whole("--svg", path, answer.svg.as_bytes())?;
    }
    let text = if args.json {
        &answer.json
    } else {
        &answer.text
    };
    console::answer(text.trim_end())
}

struct Answer {
    text: String,
    json: String,
    svg: String,
}

fn estimated(job: &Job, machine: &Machine, available: u64) -> Result<Answer, InputError> {
    let estimate = Estimate::new(job, machine, available);
    Ok(Answer {
        text: format!("{}{estimate}", heading(job, "eager, by formula")),
        json: json(&estimate)?,
        svg: estimate.to_svg(),
    })
}

fn traced(
    args: &PlanArgs,
    preset: &Preset,
    job: &Job,
    machine: &Machine,
    available: u64,
) -> Result<Answer, InputError> {
    let blocks = job.model.layers;
    let dump = args.dump_graphs.as_ref().map(GraphDump::new);
    let planned = |preset: &Preset| traced_blocks(args, preset, job, machine, dump.as_ref());
    let (plan, without) = if args.every_block || blocks <= MORE_BLOCKS {
        planned(preset)?
    } else {
        let few = planned(&preset.with_layers(FEW_BLOCKS))?;
        let more = planned(&preset.with_layers(MORE_BLOCKS))?;
        let plan = Plan::extrapolated((&few.0, FEW_BLOCKS), (&more.0, MORE_BLOCKS), blocks);
        let slope = (more.1 as f64 - few.1 as f64) / (MORE_BLOCKS - FEW_BLOCKS) as f64;
        let without = few.1 as f64 + slope * (blocks - FEW_BLOCKS) as f64;
        (plan, without as u64)
    };
    let estimate = TracedEstimate::new(job, plan, without, available);
    let proof = if args.certify {
        Some(proof(args, preset, job)?)
    } else {
        None
    };
    let proved = proof.as_ref().map(Proof::to_string).unwrap_or_default();
    Ok(Answer {
        text: format!("{}{estimate}{proved}", heading(job, "compiled, traced")),
        json: json(&Proved {
            estimate: &estimate,
            proof,
        })?,
        svg: estimate.plan.to_svg(),
    })
}

/// Proves that the passes produce a plan of all blocks that computes the traced step.
fn proof(args: &PlanArgs, preset: &Preset, job: &Job) -> Result<Proof, InputError> {
    const MOST_PROVED_RANKS: usize = 8;
    let narrow = preset.narrow();
    let ranks = job.ranks.min(MOST_PROVED_RANKS);
    let job = Job {
        model: narrow.transformer("narrow"),
        batch: 1,
        seq: narrow.seq(),
        ranks,
        ..job.clone()
    };
    let traced = traced_graph(&narrow, &job)?;
    let pipeline = pipeline(ranks, job.strategy, &options(args, preset, &job), &[]);
    Ok(Proof::of(
        &pipeline.stages(traced)?,
        job.model.layers,
        ranks,
    )?)
}

/// Returns the plan of a traced step, and its peak without recomputation.
fn traced_blocks(
    args: &PlanArgs,
    preset: &Preset,
    job: &Job,
    machine: &Machine,
    dump: Option<&GraphDump>,
) -> Result<(Plan, u64), InputError> {
    let options = options(args, preset, job);
    let graph = traced_graph(preset, job)?;
    let keeping = options.clone().recompute(None).recompute_units([""; 0]);
    let keeping = pipeline(job.ranks, job.strategy, &keeping, &[]).run(graph.clone())?;
    let without = MemoryPlan::new(&keeping, 0)?.peak_bytes();
    drop(keeping);
    let pipeline = pipeline(job.ranks, job.strategy, &options, &[]);
    let graph = match dump {
        Some(dump) => {
            let mut stages = pipeline.stages(graph)?;
            let layers = preset.transformer("").layers;
            dump.write(&format!("{}, {layers} blocks", job.model.name), &stages)?;
            stages.pop().unwrap_or_default()
        }
        None => pipeline.run(graph)?,
    };
    Ok((Plan::new(&graph, machine, 0)?, without))
}

fn options(args: &PlanArgs, preset: &Preset, job: &Job) -> Options {
    let options = Options::default().prefetch(args.prefetch > 0);
    let options = options.precision(compute_types(job));
    let options = options.loss_chunks(args.loss_chunks);
    match (args.activation_checkpointing, preset) {
        (CheckpointingArg::Full, Preset::Gpt(_)) => options.recompute_units(["blocks.*"]),
        (CheckpointingArg::Full, Preset::Llama(_)) => options.recompute_units(["layers.*"]),
        _ => options,
    }
}

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

/// Traces the train step of a preset, before it is sharded.
fn traced_graph(preset: &Preset, job: &Job) -> Result<Graph, InputError> {
    let expected = "presets are valid, their tests say";
    match *preset {
        Preset::Gpt(config) => step(
            move |device| config.init(device, 1).expect(expected),
            |model: &Gpt, (tokens, targets): Tokens| recorded(|| model.loss(tokens, targets)),
            job,
        ),
        Preset::Llama(config) => step(
            move |device| config.init(device, 1).expect(expected),
            |model: &Llama, (tokens, targets): Tokens| recorded(|| model.loss(tokens, targets)),
            job,
        ),
    }
}

fn step<M: Module>(
    init: impl Fn(&Device) -> M,
    loss: impl Fn(&M, Tokens) -> Tensor<1>,
    job: &Job,
) -> Result<Graph, InputError> {
    // One element, expanded to the full shape: only the shape is used.
    let tokens = || Tensor::<2, Int>::zeros([1, 1], &Device::flex()).expand([job.batch, job.seq]);
    let optimizer = AdamWConfig::new().build();
    let batch = (tokens(), tokens());
    let config = TraceConfig {
        precision: compute_types(job),
        ..TraceConfig::default()
    };
    let graph = trace(init, loss, &optimizer, &batch, config)?;
    Ok(kernels().describe(graph)?)
}

fn machine(name: &str) -> Result<Machine, InputError> {
    Machine::named(&name.to_ascii_lowercase()).ok_or_else(|| InputError::UnknownName {
        what: "machine",
        name: name.to_owned(),
        known: Machine::NAMES.join(", "),
    })
}

fn job(args: &PlanArgs, preset: &Preset, name: &str) -> Result<Job, InputError> {
    let seq = args.seq.unwrap_or(preset.seq());
    for (flag, value, most) in [
        ("--ranks", args.ranks, MOST_RANKS),
        ("--batch", args.batch, MOST_TOKENS),
        ("--seq", seq, MOST_TOKENS),
        ("--prefetch", args.prefetch.max(1), MOST_RANKS),
        ("--loss-chunks", args.loss_chunks, MOST_TOKENS),
    ] {
        if value == 0 {
            return Err(InputError::Zero { flag });
        }
        if value > most {
            return Err(InputError::TooLarge { flag, value, most });
        }
    }
    // Each may be large, but not both.
    let tokens = args.batch.saturating_mul(seq);
    if tokens > MOST_TOKENS {
        return Err(InputError::TooLarge {
            flag: "--batch times --seq",
            value: tokens,
            most: MOST_TOKENS,
        });
    }
    let is_learned = args.model == ModelArg::Gpt;
    if is_learned && seq > preset.seq() {
        let longest = preset.seq();
        return Err(InputError::TooLongSequence { seq, longest });
    }
    let precision = precision(args);
    if args.compile {
        check_compiled(args)?;
    }
    Ok(Job {
        model: preset.transformer(name),
        ranks: args.ranks,
        batch: args.batch,
        seq,
        precision,
        strategy: match args.strategy {
            PlannedStrategyArg::FullShard => Strategy::FullShard,
            PlannedStrategyArg::ShardGradOp => Strategy::ShardGradOp,
            PlannedStrategyArg::NoShard => Strategy::NoShard,
        },
        checkpointing: match args.activation_checkpointing {
            CheckpointingArg::None => Checkpointing::None,
            CheckpointingArg::Selective => Checkpointing::Selective,
            CheckpointingArg::Full => Checkpointing::Full,
        },
        is_offloaded: args.offload,
        prefetch: args.prefetch,
    })
}

fn precision(args: &PlanArgs) -> Precision {
    match (args.precision, args.compile) {
        (Some(PrecisionArg::F32), _) | (None, true) => Precision::F32,
        (Some(PrecisionArg::Bf16), _) | (None, false) => Precision::Bf16,
    }
}

/// Returns the compute types of a job's compiled step.
fn compute_types(job: &Job) -> burn_fsdp::Precision {
    match job.precision {
        Precision::F32 => burn_fsdp::Precision::default(),
        Precision::Bf16 => burn_fsdp::Precision::new(FloatDType::BF16),
    }
}

fn check_compiled(args: &PlanArgs) -> Result<(), InputError> {
    if args.offload {
        return Err(InputError::NotCompiled {
            flag: "--offload",
            reason: "all their tensors are on the device",
        });
    }
    if args.activation_checkpointing == CheckpointingArg::Selective {
        return Err(InputError::NotCompiled {
            flag: "--activation-checkpointing selective",
            reason: "they recompute a whole block, or its cheap operations",
        });
    }
    Ok(())
}

/// Describes the planned job and its assumptions.
fn heading(job: &Job, how: &str) -> String {
    let billions = job.model.num_params() as f64 / 1e9;
    let precision = match job.precision {
        Precision::F32 => "f32",
        Precision::Bf16 => "bf16 over f32 at rest",
    };
    let checkpointing = match job.checkpointing {
        Checkpointing::None => "no activation checkpointing",
        Checkpointing::Selective => "selective activation checkpointing",
        Checkpointing::Full => "full activation checkpointing",
    };
    let strategy = job.strategy;
    let offload = if job.is_offloaded { ", offload" } else { "" };
    let at_rest = 16.0 * job.model.num_params() as f64;
    format!(
        "{} ({billions:.2} B parameters), {how}\n{} ranks, {} x {} tokens each, {precision}, {strategy}, \
         {checkpointing}{offload}, AdamW\nstates: 16 bytes per parameter, {} in total\n",
        job.model.name,
        job.ranks,
        job.batch,
        job.seq,
        Size(at_rest as u64).trimmed(),
    )
}

fn json(value: &impl serde::Serialize) -> Result<String, InputError> {
    serde_json::to_string(value)
        .map_err(|error| InputError::from(Error::Internal(error.to_string())))
}
