//! The command line as it was typed: commands, arguments and their help texts.

mod check;
mod model;
mod optimizer;
mod steps;

use std::path::PathBuf;

use burn_fsdp::DeviceName;
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::bench::args::BenchArgs;
use crate::bench::encoder::EncoderArgs;
use crate::launch::LaunchArgs;
use crate::operations::diff::DiffArgs;
pub(crate) use check::CheckArg;
pub(crate) use model::{DataArgs, ModelArgs, TrainedModelArg};
pub(crate) use optimizer::{OptimizerArgs, OptimizerName};
pub(crate) use steps::{ConsolidateArgs, FormatArg, GenerateArgs, InspectArgs, NamesArg};

/// Train models fully sharded: parameters, gradients and optimizer state are divided over the ranks.
#[derive(Debug, Parser)]
#[command(name = "burn-fsdp", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a GPT, a Llama or a GPT-2 on text, and show what it has learned.
    Train(Box<TrainArgs>),
    /// Write the model of a saved step as plain safetensors, or as a folder in Hugging Face's form
    Consolidate(ConsolidateArgs),
    /// Show what is in a saved step, and verify every byte of it
    Inspect(InspectArgs),
    /// Let the model of a saved step, or of a folder in Hugging Face's form, go on from a text
    ///
    /// U+FFFD is printed for control characters but newlines and tabs, and for bytes that are not UTF-8.
    Generate(GenerateArgs),
    /// Say what training a model takes: whether it fits, when its memory peaks, what would make it fit.
    Plan(PlanArgs),
    /// Run a command, such as `mpirun -n 4 burn-fsdp train ..`, again when it fails
    Launch(LaunchArgs),
    /// Name the first operation in which two runs differ
    Diff(DiffArgs),
    /// Measure training against PyTorch, both in turn on the same cores
    Bench(BenchArgs),
    /// Print the completions of a shell: put `source <(burn-fsdp completions bash)` into ~/.bashrc
    Completions(CompletionsArgs),
    /// Print a page of the manual: `burn-fsdp manual train | man -l -`
    Manual(ManualArgs),
    /// Train a model of Burn's own layers on numbers that look random, for `bench`
    #[command(hide = true)]
    EncoderStep(EncoderArgs),
}

/// The help text about the exit codes of every command.
const EXIT_CODES: &str = "\
Exit code:
  0  done; of a training also: stopped by a first signal, after a save
  1  another signal, a second after the first or later, or SIGQUIT, ended a training at once; saved steps are whole
  2  the command line, a file that was to be read, or the environment is at fault; nothing was trained
     or written
  3  two runs differ; or a rank failed, a loss was not finite, or what was done could not be saved, written or printed; the
     message says which, and saved steps are whole (lines of --metrics that are lost are a warning)
  128 + N  signal N ended the process: 143 for SIGTERM where a training saves nothing, or in another command";

const TRAIN_AFTER_HELP: &str = "\
Environment:
  BURN_FSDP_ENGINE   local: ranks are threads, whatever has started the process; mpi: each process is one
  RAYON_NUM_THREADS  threads of each rank (not of the process), where --threads says nothing
  BURN_FSDP_FAULT    make a rank fail, to see that the command ends as it should:
                     rank:N,step:N,at:forward|backward|collective,how:panic|error|stall, or
                     rank:N,step:N,at:collective|shard|weight|gradient|state,how:flip,seed:N
                     (steps count from 0, warmup included)
  RUST_LOG           what to log on stderr [default: off]

Exit code: see `burn-fsdp --help`";

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManualArgs {
    /// The command that the page is of; without it, that of all commands
    pub(crate) command: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = TRAIN_AFTER_HELP)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) data: DataArgs,
    #[command(flatten)]
    pub(crate) training: TrainingArgs,
    #[command(flatten)]
    pub(crate) sharding: ShardingArgs,
    #[command(flatten)]
    pub(crate) checkpoint: CheckpointArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
pub(crate) struct TrainingArgs {
    /// Sequences of a step, over all ranks
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    /// Measured steps
    #[arg(long, default_value_t = 500)]
    pub(crate) steps: usize,
    /// Unmeasured steps before them; their losses are reported too
    #[arg(long, value_name = "STEPS", default_value_t = 2)]
    pub(crate) warmup: usize,
    /// Learning rate, the highest of the schedule
    #[arg(long, default_value_t = 2e-3, allow_negative_numbers = true)]
    pub(crate) lr: f64,
    /// Learning rate over the steps; cosine falls to a tenth
    #[arg(long, value_enum, default_value_t = LrSchedule::Constant)]
    pub(crate) lr_schedule: LrSchedule,
    /// Steps in which the learning rate rises to its highest
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    pub(crate) lr_warmup: usize,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    /// Micro-batches of a step; with the ranks, they divide the batch
    #[arg(long, value_name = "MICRO_BATCHES", default_value_t = 1)]
    pub(crate) accumulate: usize,
    /// Reduce gradients once a step, not for each micro-batch: less traffic, whole gradients
    #[arg(long)]
    pub(crate) no_sync: bool,
    /// Scale gradients down to this norm, taken over all parameters
    #[arg(long, value_name = "MAX_NORM", allow_negative_numbers = true)]
    pub(crate) clip_grad_norm: Option<f64>,
    /// What to do when the loss, the norm of gradients that are clipped, or a tensor of a step that is to be saved is no finite
    /// number
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = NotFinite::Stop)]
    pub(crate) nan: NotFinite,
    /// Type in which parameters and activations compute; f16 scales the loss. The optimizer's copy
    /// stays f32
    #[arg(long, value_enum, default_value_t = Float::F32)]
    pub(crate) precision: Float,
    /// Type in which gradients travel [default: that of --precision]
    #[arg(long, value_enum)]
    pub(crate) reduce_dtype: Option<Float>,
    /// Compute each block's activations again in backward, instead of keeping them
    #[arg(long)]
    pub(crate) activation_checkpointing: bool,
    /// With --compile: have at most so many bytes on a rank at once, such as 400MiB, by computing blocks again in
    /// backward, as few as it takes. It is the memory of the plan: tensors, scratch and transport
    #[arg(
        long,
        value_name = "BYTES",
        value_parser = crate::bytes::parse,
        requires = "compile",
        conflicts_with_all = ["activation_checkpointing", "accumulate"]
    )]
    pub(crate) memory_budget: Option<u64>,
    /// With --compile: prove, before the first step, that the plans of the run compute what was traced, on all ranks. The proof
    /// is that of a narrower model and a few tokens, for which passes decide as for the run. A step with any other plan is
    /// refused. Evaluations are not proved
    #[arg(long, requires = "compile")]
    pub(crate) certify: bool,
    /// Device that computes: flex (the CPU), or in builds with such a feature wgpu, vulkan, metal, webgpu, cuda
    /// or rocm, by itself for that of the rank's number on its machine, or with a number, as wgpu:0
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceName,
    /// Trace the whole step into one graph, and run that instead of the eager engine: less memory,
    /// the same losses. Saved steps are for both
    #[arg(long)]
    pub(crate) compile: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Sharding")]
pub(crate) struct ShardingArgs {
    /// Ranks, which divide the batch: threads of this process, or the processes that mpirun or srun has
    /// started [default: 2 threads, or all processes]
    #[arg(long)]
    pub(crate) ranks: Option<usize>,
    /// Threads that compute for each rank [default: RAYON_NUM_THREADS, or the cores divided by the ranks]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// What is divided over the ranks
    #[arg(long, value_enum, default_value_t = StrategyArg::FullShard)]
    pub(crate) strategy: StrategyArg,
    /// Units gathered ahead of their use; with --compile 0 or 1 [default: 1 of processes, 0 of threads,
    /// which move bytes when they wait and gain nothing]
    #[arg(long, value_name = "UNITS")]
    pub(crate) prefetch: Option<usize>,
    /// With --strategy hybrid-shard: copies of the shards, which divide the ranks; `host` for one on each
    /// machine [default: 2]
    #[arg(long, value_name = "REPLICAS")]
    pub(crate) replicate_size: Option<ReplicateSize>,
    /// Make units of modules with at least so many parameters [default: the transformer blocks]
    #[arg(long, value_name = "PARAMETERS")]
    pub(crate) unit_size: Option<usize>,
    /// Keep the optimizer's state in files of this folder, a unit at a time in memory; they are removed at the end, also when
    /// SIGTERM, SIGINT, SIGHUP or SIGUSR1 ends the run after a step
    #[arg(long, value_name = "FOLDER")]
    pub(crate) offload: Option<PathBuf>,
    /// What ranks compare of each other in each operation
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = CheckArg::Calls)]
    pub(crate) check: CheckArg,
    /// How long a rank waits for the others in one operation before it gives up
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) deadline: u64,
}

/// A number of copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplicateSize {
    /// This many.
    Number(usize),
    /// One on each machine.
    Host,
}

impl std::str::FromStr for ReplicateSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "host" => Ok(Self::Host),
            number => number
                .parse()
                .map(Self::Number)
                .map_err(|_| "expected a number or `host`".to_owned()),
        }
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointArgs {
    /// Save into this folder at the end, and when SIGTERM, SIGINT, SIGHUP or SIGUSR1 ends the run early. No
    /// other run may use it meanwhile; if it has steps, give --resume or --overwrite
    #[arg(long, value_name = "FOLDER")]
    pub(crate) checkpoint_dir: Option<PathBuf>,
    /// Save every so many steps, too, in the background
    #[arg(long, value_name = "STEPS", requires = "checkpoint_dir")]
    pub(crate) save_every: Option<usize>,
    /// Keep this many saved steps, the newest; of 1 two, as only the step after shows whether the newest
    /// gives finite losses [default: all]
    #[arg(long, value_name = "STEPS", requires = "checkpoint_dir")]
    pub(crate) keep_last: Option<std::num::NonZeroUsize>,
    /// Go on from a saved step, or start fresh where there is none
    #[arg(
        long,
        value_enum,
        value_name = "WHICH",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "newest",
        requires = "checkpoint_dir"
    )]
    pub(crate) resume: Option<ResumeFrom>,
    /// Remove the steps that are there before the first one is trained, and start fresh
    #[arg(long, requires = "checkpoint_dir", conflicts_with = "resume")]
    pub(crate) overwrite: bool,
    /// How long a save may take before it is given up; training goes on meanwhile
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 3600,
        requires = "checkpoint_dir"
    )]
    pub(crate) save_deadline: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NotFinite {
    /// End the run, saving nothing more, with exit code 3
    Stop,
    /// Go on; steps that are saved then push out no older ones
    Continue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResumeFrom {
    /// The newest step; it is an error if that is damaged
    Newest,
    /// The newest step that is whole, every byte of it verified. Damaged ones are passed over; it is an
    /// error if a step cannot be read, or all are damaged
    NewestGood,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Write one JSON line per step to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Write a Chrome trace of one step to this file, for chrome://tracing or Perfetto: computation,
    /// communication and memory of every rank. The first measured step, if there are two before it
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Write what each operation of each rank carries into this folder, as checksums for `burn-fsdp diff`, in the
    /// place of those of an earlier run; includes --check agreement
    #[arg(long, value_name = "FOLDER")]
    pub(crate) operations: Option<PathBuf>,
    /// With --compile: write the graph of each plan into this folder, as it was traced and after each pass, as text and as
    /// pictures, with what the pass has changed. In the place of those of an earlier run
    #[arg(long, value_name = "FOLDER", requires = "compile")]
    pub(crate) dump_graphs: Option<PathBuf>,
    /// Measure after training what matrix products of 32 bits reach on all ranks at once, and report what part of that the median
    /// step needs: its operations are those of the model, without what is computed again
    #[arg(long)]
    pub(crate) utilization: bool,
    /// Draw the loss curve into this SVG file
    #[arg(long, value_name = "FILE", default_value = "loss.svg")]
    pub(crate) curve: PathBuf,
    /// Tokens of text to generate after training on text, bytes where there is no tokenizer; 0: none
    #[arg(long, value_name = "TOKENS", default_value_t = 200)]
    pub(crate) sample: usize,
    /// Print one JSON object instead of the summary, and show no progress
    #[arg(long)]
    pub(crate) json: bool,
}

const PLAN_AFTER_HELP: &str = "\
Examples:
  burn-fsdp plan --model gpt --preset 175b --ranks 128 --gpu-memory 80GiB --activation-checkpointing
  burn-fsdp plan --model llama --preset 7b --ranks 8 --batch 4 --svg memory.svg
  burn-fsdp plan --model gpt --preset 13b --ranks 64 --compile --json

Exit code:
  0  planned, whether it fits or not
  2  the command line or a file is at fault";

#[derive(Debug, Args)]
#[command(after_help = PLAN_AFTER_HELP)]
pub(crate) struct PlanArgs {
    /// Architecture
    #[arg(long, value_enum, required_unless_present = "published")]
    pub(crate) model: Option<ModelArg>,
    /// Size, by its number of parameters: 7b, 13b, 70b, 175b, 1t of gpt; 7b, 8b, 13b, 34b, 70b, 175b, 1t of llama
    #[arg(long, value_name = "NAME", required_unless_present = "published")]
    pub(crate) preset: Option<String>,
    /// Ranks, one per device
    #[arg(long, default_value_t = 8)]
    pub(crate) ranks: usize,
    /// Memory of a device, such as 80GiB or 40GB [default: the machine's]
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes::parse)]
    pub(crate) gpu_memory: Option<u64>,
    /// Sequences of a step on each rank
    #[arg(long, default_value_t = 1)]
    pub(crate) batch: usize,
    /// Tokens of a sequence [default: the model's]
    #[arg(long)]
    pub(crate) seq: Option<usize>,
    /// Type in which parameters are gathered and activations computed; parameters at rest have 32
    /// bits [default: bf16; f32 with --compile]
    #[arg(long, value_enum)]
    pub(crate) precision: Option<PrecisionArg>,
    /// Keep parameters at rest, gradients and optimizer state in the host's memory
    #[arg(long)]
    pub(crate) offload: bool,
    /// What backward computes again instead of keeping it
    #[arg(long, value_enum, default_value_t = CheckpointingArg::None, num_args = 0..=1,
          default_missing_value = "full")]
    pub(crate) activation_checkpointing: CheckpointingArg,
    /// What is divided over the ranks; of hybrid-shard, plan one group of shards
    #[arg(long, value_enum, default_value_t = PlannedStrategyArg::FullShard)]
    pub(crate) strategy: PlannedStrategyArg,
    /// Units gathered ahead of their use: 1 is what processes do by default, 0 what threads do
    #[arg(long, value_name = "UNITS", default_value_t = 1)]
    pub(crate) prefetch: usize,
    /// What the ranks run on: a100-80g, a100-40g, h100, cpu
    #[arg(long, value_name = "NAME", default_value = "a100-80g")]
    pub(crate) machine: String,
    /// Plan the compiled step: its graph is traced. Of more than 8 blocks, 6 and 8 are, and the
    /// rest follows
    #[arg(long)]
    pub(crate) compile: bool,
    /// With --compile: trace every block; exact, but large models take seconds
    #[arg(long, requires = "compile")]
    pub(crate) every_block: bool,
    /// With --compile: prove that the passes make a plan of all blocks that computes what was traced, with blocks of a few
    /// elements, on 8 ranks at most
    #[arg(long, requires = "compile")]
    pub(crate) certify: bool,
    /// With --compile: write the graphs that are planned into this folder, as `train` does
    #[arg(long, value_name = "FOLDER", requires = "compile")]
    pub(crate) dump_graphs: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw memory over the step into this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print the predictions beside published figures, as a Markdown table
    #[arg(long, conflicts_with_all = ["model", "preset", "json", "svg", "compile"])]
    pub(crate) published: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelArg {
    /// Learned positions, layer norms, plain perceptrons
    Gpt,
    /// Rotary positions, root-mean-square norms, gated perceptrons, grouped heads
    Llama,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrecisionArg {
    F32,
    Bf16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckpointingArg {
    /// Nothing
    None,
    /// Every second matrix product of a block, and what is cheap
    Selective,
    /// Whole blocks
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LrSchedule {
    Constant,
    Cosine,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StrategyArg {
    /// Parameters, gradients and optimizer state; full weights exist unit by unit
    FullShard,
    /// The same, but full weights stay from forward to backward
    ShardGradOp,
    /// Nothing: every rank holds everything
    NoShard,
    /// Shards inside groups of ranks, copies of them across
    HybridShard,
}

/// The strategies that are planned: copies of shards across groups of ranks are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlannedStrategyArg {
    /// Parameters, gradients and optimizer state; full weights exist unit by unit
    FullShard,
    /// The same, but full weights stay from forward to backward
    ShardGradOp,
    /// Nothing: every rank holds everything
    NoShard,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Float {
    F32,
    Bf16,
    F16,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
