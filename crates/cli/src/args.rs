//! The command line as it was typed: commands, arguments and their help texts.

mod check;
mod model;
mod optimizer;
mod steps;

use std::path::PathBuf;

use burn_fsdp::DeviceName;
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::launch::LaunchArgs;
use crate::operations::diff::DiffArgs;
pub(crate) use check::CheckArg;
pub(crate) use model::{DataArgs, ModelArgs, TrainedModelArg};
pub(crate) use optimizer::{OptimizerArgs, OptimizerName};
pub(crate) use steps::{ConsolidateArgs, FormatArg, GenerateArgs, InspectArgs, NamesArg};

/// Train models fully sharded: each rank holds a shard of the parameters, gradients and optimizer state.
#[derive(Debug, Parser)]
#[command(name = "burn-fsdp", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a GPT, a Llama or a GPT-2 on text, then print a sample
    Train(Box<TrainArgs>),
    /// Write the model of a saved step as safetensors, or as a folder in Hugging Face's format
    Consolidate(ConsolidateArgs),
    /// Show the contents of a saved step, and verify every byte
    Inspect(InspectArgs),
    /// Generate text from a saved step or a folder in Hugging Face's format
    ///
    /// Control characters except newlines and tabs, and bytes that are not UTF-8, are printed as U+FFFD.
    Generate(GenerateArgs),
    /// Estimate the memory, traffic and time of a training: whether it fits, when memory peaks, and what would make
    /// it fit
    Plan(PlanArgs),
    /// Restart a command, such as `mpirun -n 4 burn-fsdp train ..`, when it fails
    Launch(LaunchArgs),
    /// Name the first operation in which two runs differ
    Diff(DiffArgs),
    /// Print shell completions; put `source <(burn-fsdp completions bash)` into ~/.bashrc
    Completions(CompletionsArgs),
    /// Print a manual page: `burn-fsdp manual train | man -l -`
    Manual(ManualArgs),
}

/// The help text about the exit codes of every command.
const EXIT_CODES: &str = "\
Exit code:
  0  done; or a first signal ended a training, after a save
  1  a second signal, at least a second after the first, or SIGQUIT ended a training at once; saved steps are complete
  2  an error in the command line, an input file or the environment; nothing was trained or written
  3  two runs differ; or a rank failed, a loss was not finite, or a result could not be saved, written or printed.
     The message tells which. Saved steps are complete. Lost lines of --metrics are only a warning
  128 + N  signal N ended the process: 143 for SIGTERM in a training that saves nothing, or in another command";

const TRAIN_AFTER_HELP: &str = "\
Environment:
  BURN_FSDP_ENGINE   local: ranks are threads, even under mpirun; mpi: each process is a rank
  RAYON_NUM_THREADS  default of --threads, the threads of each rank
  BURN_FSDP_FAULT    make a rank fail on purpose:
                     rank:N,step:N,at:forward|backward|collective,how:panic|error|stall, or
                     rank:N,step:N,at:collective|shard|weight|gradient|state,how:flip,seed:N
                     (steps count from 0, warmup included)
  RUST_LOG           log filter for stderr [default: off]

Exit code: see `burn-fsdp --help`";

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManualArgs {
    /// Command to print the page of [default: the page of all commands]
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
    /// Sequences in a step, on all ranks together
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    /// Measured steps
    #[arg(long, default_value_t = 500)]
    pub(crate) steps: usize,
    /// Unmeasured steps before the measured ones; their losses are also reported
    #[arg(long, value_name = "STEPS", default_value_t = 2)]
    pub(crate) warmup: usize,
    /// Highest learning rate of the schedule
    #[arg(long, default_value_t = 2e-3, allow_negative_numbers = true)]
    pub(crate) lr: f64,
    /// Learning rate schedule; cosine falls to a tenth of --lr
    #[arg(long, value_enum, default_value_t = LrSchedule::Constant)]
    pub(crate) lr_schedule: LrSchedule,
    /// Steps in which the learning rate rises to --lr
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    pub(crate) lr_warmup: usize,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    /// Micro-batches in a step. --batch must be a multiple of this times --ranks
    #[arg(long, value_name = "MICRO_BATCHES", default_value_t = 1)]
    pub(crate) accumulate: usize,
    /// Reduce gradients once a step instead of once a micro-batch. This saves traffic and keeps whole gradients in
    /// memory
    #[arg(long)]
    pub(crate) no_sync: bool,
    /// Clip the global gradient norm to this value
    #[arg(long, value_name = "MAX_NORM", allow_negative_numbers = true)]
    pub(crate) clip_grad_norm: Option<f64>,
    /// What to do if the loss, a clipped gradient norm or a tensor to be saved is not finite
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = NotFinite::Stop)]
    pub(crate) nan: NotFinite,
    /// Compute type of parameters and activations. f16 scales the loss. The optimizer's parameters stay f32
    #[arg(long, value_enum, default_value_t = Float::F32)]
    pub(crate) precision: Float,
    /// Type in which gradients are reduced [default: --precision]
    #[arg(long, value_enum)]
    pub(crate) reduce_dtype: Option<Float>,
    /// Recompute each block's activations in backward instead of keeping them
    #[arg(long)]
    pub(crate) activation_checkpointing: bool,
    /// With --compile: limit the planned peak memory of a rank, such as 400MiB, by recomputing as few blocks as
    /// necessary. The plan is the exact peak of the tensors, and a measured fraction for everything else
    #[arg(
        long,
        value_name = "BYTES",
        value_parser = crate::bytes::parse,
        requires = "compile",
        conflicts_with_all = ["activation_checkpointing", "accumulate"]
    )]
    pub(crate) memory_budget: Option<u64>,
    /// With --compile: prove before the first step that the plans of the run compute the traced step. The proof uses
    /// a narrower model and few tokens, for which the passes decide as for the run. Steps with other plans are
    /// refused. Evaluations are not proved
    #[arg(long, requires = "compile")]
    pub(crate) certify: bool,
    /// Device to compute on: flex (the CPU), or wgpu, vulkan, metal, webgpu, cuda or rocm in builds with that
    /// feature. A name takes the device with the rank's number on its machine; wgpu:0 takes device 0
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceName,
    /// Compile the whole step into one graph, and run it instead of the eager engine. It takes less memory and gives
    /// the same losses. Saved steps work for both
    #[arg(long)]
    pub(crate) compile: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Sharding")]
pub(crate) struct ShardingArgs {
    /// Number of ranks: threads of this process, or the processes of mpirun or srun. --batch must be a multiple
    /// [default: 2 threads, or all processes]
    #[arg(long)]
    pub(crate) ranks: Option<usize>,
    /// Compute threads of each rank [default: RAYON_NUM_THREADS, or the cores divided by the ranks]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Sharding strategy
    #[arg(long, value_enum, default_value_t = StrategyArg::FullShard)]
    pub(crate) strategy: StrategyArg,
    /// Units to gather ahead of their use; 0 or 1 with --compile [default: 1 between processes; 0 between threads,
    /// where nothing overlaps]
    #[arg(long, value_name = "UNITS")]
    pub(crate) prefetch: Option<usize>,
    /// With --strategy hybrid-shard: number of copies of the shards; `host` for one copy on each machine. --ranks
    /// must be a multiple [default: 2]
    #[arg(long, value_name = "REPLICAS")]
    pub(crate) replicate_size: Option<ReplicateSize>,
    /// Make a unit of each module with at least this many parameters [default: the transformer blocks]
    #[arg(long, value_name = "PARAMETERS")]
    pub(crate) unit_size: Option<usize>,
    /// Keep the optimizer state in files of this folder, with one unit's state in memory. The files are removed at
    /// the end of the run, also after SIGTERM, SIGINT, SIGHUP or SIGUSR1
    #[arg(long, value_name = "FOLDER")]
    pub(crate) offload: Option<PathBuf>,
    /// What ranks compare in each operation
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = CheckArg::Calls)]
    pub(crate) check: CheckArg,
    /// Time after which a rank stops waiting for the others in an operation
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
    /// Save into this folder at the end, and when SIGTERM, SIGINT, SIGHUP or SIGUSR1 ends the run early. Only one run
    /// may use it at a time. If it has steps, add --resume or --overwrite
    #[arg(long, value_name = "FOLDER")]
    pub(crate) checkpoint_dir: Option<PathBuf>,
    /// Also save every this many steps, in the background
    #[arg(long, value_name = "STEPS", requires = "checkpoint_dir")]
    pub(crate) save_every: Option<usize>,
    /// Keep only the newest saved steps. 1 keeps two, because only the following step shows whether the newest gives
    /// finite losses [default: all]
    #[arg(long, value_name = "STEPS", requires = "checkpoint_dir")]
    pub(crate) keep_last: Option<std::num::NonZeroUsize>,
    /// Continue from a saved step, or start fresh if there is none
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
    /// Remove the steps in the folder before training, and start fresh
    #[arg(long, requires = "checkpoint_dir", conflicts_with = "resume")]
    pub(crate) overwrite: bool,
    /// Time after which a save is given up. Training continues during a save
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
    /// End the run with exit code 3, and save nothing more
    Stop,
    /// Continue. Steps saved after that do not replace older ones
    Continue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResumeFrom {
    /// The newest step. If it is damaged, this is an error
    Newest,
    /// The newest undamaged step, with every byte verified. It is an error if a step cannot be read, or if all are
    /// damaged
    NewestGood,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Write one JSON line per step to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Write a Chrome trace of one step to this file, for chrome://tracing or Perfetto: computation, communication
    /// and memory of every rank. It traces the first measured step that has two steps before it
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Write checksums of the operands of each operation of each rank into this folder, for `burn-fsdp diff`.
    /// Replaces the files of an earlier run. Implies --check agreement
    #[arg(long, value_name = "FOLDER")]
    pub(crate) operations: Option<PathBuf>,
    /// With --compile: write the traced graph of each plan and the graph after each pass into this folder, as text
    /// and pictures. Replaces the files of an earlier run
    #[arg(long, value_name = "FOLDER", requires = "compile")]
    pub(crate) dump_graphs: Option<PathBuf>,
    /// Measure after training what matrix products of 32 bits reach on all ranks at once, and report what part of that the median
    /// step needs: its operations are those of the model, without what is computed again
    #[arg(long)]
    pub(crate) utilization: bool,
    /// Draw the loss curve into this SVG file
    #[arg(long, value_name = "FILE", default_value = "loss.svg")]
    pub(crate) curve: PathBuf,
    /// Tokens to generate after training on text (bytes without a tokenizer); 0 for none
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
  2  an error in the command line or a file";

#[derive(Debug, Args)]
#[command(after_help = PLAN_AFTER_HELP)]
pub(crate) struct PlanArgs {
    /// Architecture
    #[arg(long, value_enum)]
    pub(crate) model: ModelArg,
    /// Size in parameters. gpt: 7b, 13b, 70b, 175b, 1t. llama: 7b, 8b, 13b, 34b, 70b, 175b, 1t
    #[arg(long, value_name = "NAME")]
    pub(crate) preset: String,
    /// Ranks, one per device
    #[arg(long, default_value_t = 8)]
    pub(crate) ranks: usize,
    /// Memory of one device, such as 80GiB or 40GB [default: the machine's]
    #[arg(long, value_name = "BYTES", value_parser = crate::bytes::parse)]
    pub(crate) gpu_memory: Option<u64>,
    /// Sequences in a step on each rank
    #[arg(long, default_value_t = 1)]
    pub(crate) batch: usize,
    /// Tokens in a sequence [default: the model's]
    #[arg(long)]
    pub(crate) seq: Option<usize>,
    /// Type of gathered parameters and activations. Parameters at rest have 32 bits [default: bf16; f32 with
    /// --compile]
    #[arg(long, value_enum)]
    pub(crate) precision: Option<PrecisionArg>,
    /// Keep parameters at rest, gradients and optimizer state in host memory
    #[arg(long)]
    pub(crate) offload: bool,
    /// Activations that backward recomputes instead of keeping them
    #[arg(long, value_enum, default_value_t = CheckpointingArg::None, num_args = 0..=1,
          default_missing_value = "full")]
    pub(crate) activation_checkpointing: CheckpointingArg,
    /// Sharding strategy. For hybrid-shard, plan one group of shards
    #[arg(long, value_enum, default_value_t = PlannedStrategyArg::FullShard)]
    pub(crate) strategy: PlannedStrategyArg,
    /// Units to gather ahead of their use. `train` uses 1 between processes and 0 between threads
    #[arg(long, value_name = "UNITS", default_value_t = 1)]
    pub(crate) prefetch: usize,
    /// Machine of the ranks: a100-80g, a100-40g, h100, cpu
    #[arg(long, value_name = "NAME", default_value = "a100-80g")]
    pub(crate) machine: String,
    /// Plan the compiled step from its traced graph. For more than 8 blocks, the plans of 6 and 8 blocks are
    /// extrapolated
    #[arg(long)]
    pub(crate) compile: bool,
    /// With --compile: trace every block. The plan is then exact, but takes seconds for large models
    #[arg(long, requires = "compile")]
    pub(crate) every_block: bool,
    /// With --compile: prove that the plan of all blocks computes the traced step, with blocks of a few elements, on
    /// at most 8 ranks
    #[arg(long, requires = "compile")]
    pub(crate) certify: bool,
    /// With --compile: write the planned graphs into this folder, as `train` does
    #[arg(long, value_name = "FOLDER", requires = "compile")]
    pub(crate) dump_graphs: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw memory over the step into this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
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
    /// Every second matrix product of a block, and all cheap operations
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
    /// Shard parameters, gradients and optimizer state. Full weights exist unit by unit
    FullShard,
    /// The same, but keep full weights from forward to backward
    ShardGradOp,
    /// Shard nothing: every rank holds everything
    NoShard,
    /// Shard inside groups of ranks, and copy the shards across groups
    HybridShard,
}

/// The strategies that are planned: copies of shards across groups of ranks are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlannedStrategyArg {
    /// Shard parameters, gradients and optimizer state. Full weights exist unit by unit
    FullShard,
    /// The same, but keep full weights from forward to backward
    ShardGradOp,
    /// Shard nothing: every rank holds everything
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
