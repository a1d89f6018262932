//! The arguments of a plan.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::headings::{DEVICES, DIAGNOSTICS, MEMORY};

const PLAN_AFTER_HELP: &str = "\
Examples:
  burn-fsdp plan --model gpt --preset 175b --ranks 128 --activation-checkpointing
  burn-fsdp plan --model llama --preset 7b --ranks 8 --gpu-memory 40GB --svg memory.svg
  burn-fsdp plan --model gpt --preset 13b --ranks 64 --compile --json

Exit code:
  0  planned, whether it fits or not
  2  an error in the command line or a file";

#[derive(Debug, Args)]
#[command(after_help = PLAN_AFTER_HELP)]
pub(crate) struct PlanArgs {
    /// Architecture
    #[arg(long, value_enum, help_heading = "Model")]
    pub(crate) model: ModelArg,
    /// Size: gpt 7b, 13b, 70b, 175b, 1t; llama 7b, 8b, 13b, 34b, 70b, 175b, 1t
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub(crate) preset: String,
    /// Sequence length in tokens [default: the model's]
    #[arg(long, help_heading = "Model")]
    pub(crate) seq: Option<usize>,
    /// Sequences per step on each rank
    #[arg(long, default_value_t = 1, help_heading = "Model")]
    pub(crate) batch: usize,
    /// Ranks, one per device
    #[arg(long, default_value_t = 8, help_heading = DEVICES)]
    pub(crate) ranks: usize,
    /// Machine: a100-80g, a100-40g, h100 or cpu
    #[arg(long, value_name = "NAME", default_value = "a100-80g", help_heading = DEVICES)]
    pub(crate) machine: String,
    /// Memory of one device, such as 80GiB or 40GB [default: the machine's]
    #[arg(
        long,
        value_name = "BYTES",
        value_parser = crate::bytes::parse,
        help_heading = DEVICES
    )]
    pub(crate) gpu_memory: Option<u64>,
    /// Sharding strategy
    ///
    /// To plan hybrid-shard, set --ranks to the size of a shard group.
    #[arg(
        long,
        value_enum,
        default_value_t = PlannedStrategyArg::FullShard,
        help_heading = DEVICES
    )]
    pub(crate) strategy: PlannedStrategyArg,
    /// Number of units to gather in advance
    ///
    /// By default, `train` uses 1 with processes and 0 with threads.
    #[arg(
        long,
        value_name = "UNITS",
        default_value_t = 1,
        help_heading = DEVICES,
        hide_short_help = true
    )]
    pub(crate) prefetch: usize,
    /// Compute type [default: bf16; f32 with --compile]
    ///
    /// The type of gathered parameters and of activations. Sharded parameters are f32.
    #[arg(long, value_enum, help_heading = MEMORY)]
    pub(crate) precision: Option<PrecisionArg>,
    /// What to recompute in backward; the flag without a value means `full`
    ///
    /// `selective` conflicts with --compile.
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        default_value_t = CheckpointingArg::None,
        num_args = 0..=1,
        default_missing_value = "full",
        help_heading = MEMORY
    )]
    pub(crate) activation_checkpointing: CheckpointingArg,
    /// Keep sharded parameters, gradients and optimizer state in host memory; not with --compile
    #[arg(long, help_heading = MEMORY)]
    pub(crate) offload: bool,
    /// With --compile: compute the loss in N parts, so that the logits are never whole
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "compile",
        help_heading = MEMORY,
        hide_short_help = true
    )]
    pub(crate) loss_chunks: usize,
    /// Plan the compiled step from its traced graph
    ///
    /// A plan for more than 8 blocks is extrapolated from plans for 6 and 8 blocks.
    #[arg(long, help_heading = MEMORY)]
    pub(crate) compile: bool,
    /// With --compile: trace every block
    ///
    /// The plan is then exact, but takes seconds for large models.
    #[arg(long, requires = "compile", help_heading = MEMORY, hide_short_help = true)]
    pub(crate) every_block: bool,
    /// With --compile: prove that the plan computes the traced step
    ///
    /// The proof covers all blocks, with widths narrowed to a few elements, on at most 8 ranks.
    #[arg(long, requires = "compile", help_heading = DIAGNOSTICS, hide_short_help = true)]
    pub(crate) certify: bool,
    /// With --compile: write the planned graphs into this folder, as `train` does
    #[arg(
        long,
        value_name = "FOLDER",
        requires = "compile",
        help_heading = DIAGNOSTICS,
        hide_short_help = true
    )]
    pub(crate) dump_graphs: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    /// Draw memory use over the step into this SVG file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelArg {
    /// Learned positions, layer norms, plain MLPs
    Gpt,
    /// Rotary positions, RMS norms, gated MLPs, grouped-query attention
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

/// The strategies that can be planned. Replication across groups is not planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlannedStrategyArg {
    /// Shard parameters, gradients and optimizer state, and gather full weights unit by unit
    FullShard,
    /// Like full-shard, but keep full weights from forward to backward
    ShardGradOp,
    /// Shard nothing: every rank holds everything
    NoShard,
}
