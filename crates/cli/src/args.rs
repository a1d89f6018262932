//! The command-line arguments and their help texts.

mod check;
mod headings;
mod lora;
mod model;
mod optimizer;
mod plan;
mod report;
mod steps;

use std::path::PathBuf;

use burn_fsdp::DeviceName;
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

use self::headings::{DEVICES, DIAGNOSTICS, MEMORY};
use crate::launch::LaunchArgs;
use crate::operations::diff::DiffArgs;
pub(crate) use check::CheckArg;
pub(crate) use lora::{BaseBitsArg, ForTarget, LoraArgs, least_bytes};
pub(crate) use model::{DataArgs, DataFormat, ModelArgs, PackingArg, TrainedModelArg};
pub(crate) use optimizer::{OptimizerArgs, OptimizerName};
pub(crate) use plan::{CheckpointingArg, ModelArg, PlanArgs, PlannedStrategyArg, PrecisionArg};
pub(crate) use report::ReportArgs;
pub(crate) use steps::{
    ConsolidateArgs, FormatArg, GenerateArgs, InspectArgs, NamesArg, PromptArgs, ResidenceArg,
};

/// Fully sharded training: each rank holds a shard of the parameters, gradients and optimizer state.
#[derive(Debug, Parser)]
#[command(name = "burn-fsdp", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a GPT, Llama or GPT-2 model on text, then print a sample
    Train(Box<TrainArgs>),
    /// Export the model of a saved step to safetensors or a Hugging Face folder
    Consolidate(ConsolidateArgs),
    /// Show the contents of a saved step, and verify every byte
    Inspect(InspectArgs),
    /// Generate text from a saved step or a Hugging Face folder
    ///
    /// Prints U+FFFD for invalid UTF-8 and for control characters other than newlines and tabs.
    Generate(GenerateArgs),
    /// Estimate the memory, traffic and time of training, and suggest changes that make it fit
    Plan(PlanArgs),
    /// Restart a command, such as `mpirun -n 4 burn-fsdp train ..`, when it fails
    Launch(LaunchArgs),
    /// Draw the metrics of one or more runs on an HTML page
    Report(ReportArgs),
    /// Name the first collective operation in which two runs differ
    Diff(DiffArgs),
    /// Print shell completions; put `source <(burn-fsdp completions bash)` into ~/.bashrc
    Completions(CompletionsArgs),
    /// Print a manual page: `burn-fsdp manual train | man -l -`
    Manual(ManualArgs),
}

/// The help text about the exit codes of every command.
const EXIT_CODES: &str = "\
Exit code:
  0  success, or training saved and ended after a first signal
  1  SIGQUIT, or a second signal at least a second after the first, ended training at once;
     saved steps are complete
  2  an error in the command line, an input file or the environment; nothing was trained or written
  3  two runs differ, a rank failed, a loss was not finite, or a result could not be saved, written
     or printed; the message names the cause, and saved steps are complete. Lost --metrics lines or
     --tensorboard events only cause a warning
  128 + N  signal N ended the process, e.g. 143 for SIGTERM in training that saves nothing, or in
     another command";

const TRAIN_AFTER_HELP: &str = "\
Examples:
  burn-fsdp train --steps 1000 --lr-schedule cosine --lr-warmup 50
  burn-fsdp train --init FOLDER --lora 8 --data notes.txt --checkpoint-dir run --resume
  mpirun -n 4 burn-fsdp train --compile --memory-budget 400MiB

`--help` also shows rare flags, the meaning of each choice, conflicts, and environment variables.";

const TRAIN_AFTER_LONG_HELP: &str = "\
Environment:
  BURN_FSDP_ENGINE   local: ranks are threads, even under mpirun; mpi: each process is a rank
  RAYON_NUM_THREADS  default of --threads, the threads of each rank
  RUST_LOG           log filter for stderr [default: off]

Exit code: see `burn-fsdp --help`";

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to print completions for
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManualArgs {
    /// Command whose page to print [default: the page for all commands]
    pub(crate) command: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = TRAIN_AFTER_HELP, after_long_help = TRAIN_AFTER_LONG_HELP)]
pub(crate) struct TrainArgs {
    /// Read flags from a TOML file with lines such as `steps = 1000`; the command line takes precedence
    ///
    /// Keys are long flags without dashes. Flags without a value are true or false. Flags that may be repeated take
    /// lists. Paths are relative to the working directory.
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub(crate) config: Option<PathBuf>,
    /// Print all flags as a file for --config, with defaults as comments, and exit
    #[arg(long, help_heading = "Configuration", hide_short_help = true)]
    pub(crate) print_config: bool,
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
    /// Sequences per step, across all ranks
    ///
    /// Must be a multiple of --ranks times --accumulate.
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    /// Training steps of the whole run, after the warmup; a resumed run trains the remaining ones
    #[arg(long, default_value_t = 500)]
    pub(crate) steps: usize,
    /// Warmup steps before the measured steps; their losses are also reported
    #[arg(
        long,
        value_name = "STEPS",
        default_value_t = 2,
        hide_short_help = true
    )]
    pub(crate) warmup: usize,
    /// Peak learning rate
    #[arg(
        long,
        value_name = "RATE",
        default_value_t = 2e-3,
        allow_negative_numbers = true
    )]
    pub(crate) lr: f64,
    /// Learning rate schedule, after --lr-warmup
    #[arg(long, value_enum, value_name = "SHAPE", default_value_t = LrSchedule::Constant)]
    pub(crate) lr_schedule: LrSchedule,
    /// Steps over which the learning rate rises to --lr
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    pub(crate) lr_warmup: usize,
    /// With --lr-schedule wsd: number of last steps over which the rate falls to 0 [default: a tenth of all steps]
    #[arg(long, value_name = "STEPS", hide_short_help = true)]
    pub(crate) lr_decay: Option<usize>,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    /// Clip the global gradient norm to this value [default: no clipping]
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    pub(crate) clip_grad_norm: Option<f64>,
    /// Micro-batches per step; not with --memory-budget
    #[arg(long, value_name = "MICRO_BATCHES", default_value_t = 1)]
    pub(crate) accumulate: usize,
    /// What to do if the loss, the norm of gradients to be clipped or a tensor to be saved is not finite
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        default_value_t = NotFinite::Stop,
        hide_short_help = true
    )]
    pub(crate) nan: NotFinite,
    /// Device: flex (the CPU), a GPU backend, or auto
    ///
    /// wgpu, vulkan, metal, webgpu, cuda and rocm need a build with the feature of the same name. The ranks on a
    /// machine use its devices 0, 1 and so on. With wgpu:0, all ranks share device 0. auto is the best backend of the
    /// build with a GPU on this machine, otherwise flex; ranks share its devices if there are too few.
    #[arg(
        long,
        value_name = "DEVICE",
        default_value_t,
        help_heading = DEVICES
    )]
    pub(crate) device: DeviceName,
    /// Compute type of parameters and activations; f16 scales the loss
    ///
    /// The optimizer updates f32 master parameters.
    #[arg(long, value_enum, default_value_t = Float::F32, help_heading = MEMORY)]
    pub(crate) precision: Float,
    /// Type in which gradients are reduced; f16 needs --precision f16 [default: --precision]
    #[arg(long, value_enum, help_heading = MEMORY, hide_short_help = true)]
    pub(crate) reduce_dtype: Option<Float>,
    /// Compile the whole step into one graph, which needs less memory
    ///
    /// Losses equal the eager engine's, and either engine can resume the other's saved steps. Conflicts with --offload,
    /// --no-sync and a --prefetch above 1.
    #[arg(long, help_heading = MEMORY)]
    pub(crate) compile: bool,
    /// Recompute the activations of each block in backward instead of keeping them
    ///
    /// With --compile, conflicts with --unit-size.
    #[arg(long, help_heading = MEMORY)]
    pub(crate) activation_checkpointing: bool,
    /// With --compile: compute the loss in N parts, so that the logits are never whole
    ///
    /// Saves memory if the vocabulary is large. Each rank divides the rows of its batch, which are its tokens; with
    /// --certify, N must be 2, 4 or 8.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "compile",
        help_heading = MEMORY,
        hide_short_help = true
    )]
    pub(crate) loss_chunks: usize,
    /// With --compile: limit the planned peak memory per rank, e.g. 400MiB
    ///
    /// Recomputes as few blocks as necessary. The planned peak is the exact peak of the tensors, times a measured
    /// factor. Conflicts with --activation-checkpointing, --accumulate, --precision f16 and a --device other than flex.
    #[arg(
        long,
        value_name = "BYTES",
        value_parser = crate::bytes::parse,
        requires = "compile",
        conflicts_with_all = ["activation_checkpointing", "accumulate"],
        help_heading = MEMORY
    )]
    pub(crate) memory_budget: Option<u64>,
    /// Reduce gradients once per step instead of once per micro-batch; not with --compile
    ///
    /// This saves traffic, but keeps whole gradients in memory.
    #[arg(long, help_heading = MEMORY, hide_short_help = true)]
    pub(crate) no_sync: bool,
    /// With --compile: prove before the first step that the run's plans compute the traced step
    ///
    /// The proof uses a narrower model and few tokens, for which the passes make the same decisions. A step that needs
    /// another plan is rejected. Evaluations are not proved. Conflicts with a --device other than flex.
    #[arg(long, requires = "compile", help_heading = MEMORY, hide_short_help = true)]
    pub(crate) certify: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = DEVICES)]
pub(crate) struct ShardingArgs {
    /// Ranks: threads, or the processes of mpirun or srun [default: 2 threads, or all processes]
    ///
    /// Processes need a build with the feature `mpi`: `--features burn-fsdp-cli/mpi`.
    #[arg(long)]
    pub(crate) ranks: Option<usize>,
    /// Compute threads per rank [default: RAYON_NUM_THREADS, or cores / ranks]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Sharding strategy
    #[arg(long, value_enum, default_value_t = StrategyArg::FullShard)]
    pub(crate) strategy: StrategyArg,
    /// Number of copies of the shards with hybrid-shard, or `host` for one per machine [default: 2]
    ///
    /// Must divide --ranks. Needs --strategy hybrid-shard.
    #[arg(long, value_name = "REPLICAS", hide_short_help = true)]
    pub(crate) replicate_size: Option<ReplicateSize>,
    /// Minimum number of parameters of a unit [default: one unit per transformer block]
    #[arg(long, value_name = "PARAMETERS", hide_short_help = true)]
    pub(crate) unit_size: Option<usize>,
    /// Maximum time that a rank waits for the others in one collective operation
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        hide_short_help = true
    )]
    pub(crate) deadline: u64,
    /// What ranks compare in each collective operation
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        default_value_t = CheckArg::Calls,
        hide_short_help = true
    )]
    pub(crate) check: CheckArg,
    /// Keep the optimizer state in files in this folder; not with --compile
    ///
    /// One unit's state is in memory at a time. The files are removed at the end of the run, even after SIGTERM,
    /// SIGINT, SIGHUP or SIGUSR1.
    #[arg(long, value_name = "FOLDER", help_heading = MEMORY)]
    pub(crate) offload: Option<PathBuf>,
    /// Number of units to gather in advance; at most 1 with --compile
    ///
    /// [default: 1 with processes; 0 with threads, which do not overlap communication]
    #[arg(long, value_name = "UNITS", help_heading = MEMORY, hide_short_help = true)]
    pub(crate) prefetch: Option<usize>,
}

/// The value of `--replicate-size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplicateSize {
    /// This many copies.
    Number(usize),
    /// One copy on each machine.
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
    /// Save into this folder at the end of the run
    ///
    /// Also saves when SIGTERM, SIGINT, SIGHUP or SIGUSR1 ends the run early. Only one run may use the folder at a
    /// time. If it contains steps, add --resume or --overwrite.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) checkpoint_dir: Option<PathBuf>,
    /// Also save every STEPS steps, in the background
    #[arg(long, value_name = "STEPS", requires = "checkpoint_dir")]
    pub(crate) save_every: Option<usize>,
    /// Number of newest saved steps to keep [default: all]
    ///
    /// 1 keeps two, because only the next training step shows whether the newest saved step yields a finite loss.
    #[arg(long, value_name = "STEPS", requires = "checkpoint_dir")]
    pub(crate) keep_last: Option<std::num::NonZeroUsize>,
    /// Continue from a saved step, or from scratch if there is none
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
    /// Remove the saved steps and train from scratch; not with --resume
    #[arg(long, requires = "checkpoint_dir", conflicts_with = "resume")]
    pub(crate) overwrite: bool,
    /// Time after which a save is abandoned; training continues during saves
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 3600,
        requires = "checkpoint_dir",
        hide_short_help = true
    )]
    pub(crate) save_deadline: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NotFinite {
    /// End the run with exit code 3, and save nothing more
    Stop,
    /// Continue; steps saved afterwards do not replace older ones
    Continue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResumeFrom {
    /// The newest step; an error if it is damaged
    Newest,
    /// The newest undamaged step, with every byte verified; an error if a step cannot be read, or if all are damaged
    NewestGood,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Write one JSON line per step to this file, for `burn-fsdp report`
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Write an event file for TensorBoard into this folder
    ///
    /// A resumed run adds another file. TensorBoard then shows the newest values of each step.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) tensorboard: Option<PathBuf>,
    /// Draw the loss curve into this SVG file
    #[arg(long, value_name = "FILE", default_value = "loss.svg")]
    pub(crate) curve: PathBuf,
    /// Tokens to generate after training on text; 0 for none
    ///
    /// Counts bytes if there is no tokenizer.
    #[arg(long, value_name = "TOKENS", default_value_t = 200)]
    pub(crate) sample: usize,
    /// Print one JSON object instead of the summary, and show no progress
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a Chrome trace of one step to this file, for chrome://tracing or Perfetto
    ///
    /// Shows each rank's computation, communication and memory in one step: the first measured step or the third step
    /// of this run, whichever is later. A shorter run traces its last step.
    #[arg(long, value_name = "FILE", help_heading = DIAGNOSTICS, hide_short_help = true)]
    pub(crate) trace: Option<PathBuf>,
    /// Report utilization: the median step's arithmetic rate divided by the measured rate of 32-bit matrix products
    ///
    /// The rate of matrix products is measured on all ranks at once, after training. The step's rate counts the model's
    /// operations, but not recomputation.
    #[arg(long, help_heading = DIAGNOSTICS, hide_short_help = true)]
    pub(crate) utilization: bool,
    /// Write checksums of what each rank sends and receives in its collectives into this folder, for `burn-fsdp diff`
    ///
    /// Replaces the files of an earlier run. Implies --check agreement.
    #[arg(long, value_name = "FOLDER", help_heading = DIAGNOSTICS, hide_short_help = true)]
    pub(crate) operations: Option<PathBuf>,
    /// With --compile: write the traced graph of each plan and the graph after each pass into this folder, as text
    /// and pictures
    ///
    /// Replaces the files of an earlier run.
    #[arg(
        long,
        value_name = "FOLDER",
        requires = "compile",
        help_heading = DIAGNOSTICS,
        hide_short_help = true
    )]
    pub(crate) dump_graphs: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LrSchedule {
    /// Stay at --lr
    Constant,
    /// Fall along half a cosine to a tenth of --lr
    Cosine,
    /// Fall linearly, to reach 0 one step after the last
    Linear,
    /// Stay at --lr, then fall linearly to 0 over the last --lr-decay steps
    Wsd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StrategyArg {
    /// Shard parameters, gradients and optimizer state, and gather full weights unit by unit
    FullShard,
    /// Like full-shard, but keep full weights from forward to backward
    ShardGradOp,
    /// Shard nothing: every rank holds everything
    NoShard,
    /// Shard within groups of ranks, and replicate across groups
    HybridShard,
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
