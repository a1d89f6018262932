//! The commands for a saved step.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

#[derive(Debug, Args)]
pub(crate) struct ConsolidateArgs {
    /// Folder of a step, or of checkpoints, of which the newest step is taken
    pub(crate) step: PathBuf,
    /// File to write; a folder with --max-shard-size
    pub(crate) out: PathBuf,
    /// Write Hugging Face's sharded form, of files with at most so many bytes: 500MB, 2GiB
    #[arg(long, value_name = "SIZE", value_parser = crate::bytes::parse)]
    pub(crate) max_shard_size: Option<u64>,
    /// Names and layout of the tensors [default: torch for the models of this command, else burn]
    #[arg(long, value_enum)]
    pub(crate) names: Option<NamesArg>,
    /// Replace what is there
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NamesArg {
    /// Those of PyTorch, by the table of the model: what `train --init` and PyTorch read
    Torch,
    /// Those of the Burn module, as they are in the step
    Burn,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Folder of a step, or of checkpoints, of which the newest step is taken
    pub(crate) step: PathBuf,
    /// Read the index alone, and verify nothing
    #[arg(long)]
    pub(crate) no_verify: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct GenerateArgs {
    /// Folder of a step, or of checkpoints, of which the newest step is taken
    pub(crate) step: PathBuf,
    /// Text to go on from
    #[arg(long)]
    pub(crate) prompt: String,
    /// Bytes to generate
    #[arg(long, default_value_t = 200)]
    pub(crate) bytes: usize,
    /// Seed of the random choices
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}
