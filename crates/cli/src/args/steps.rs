//! The commands for a saved step.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::codec::TokenizerArg;

#[derive(Debug, Args)]
pub(crate) struct ConsolidateArgs {
    /// Folder of a step, or of checkpoints, of which the newest step is taken
    pub(crate) step: PathBuf,
    /// File to write; a folder with --max-shard-size or --format hugging-face
    pub(crate) out: PathBuf,
    /// Write Hugging Face's sharded form, of files with at most so many bytes: 500MB, 2GiB
    #[arg(long, value_name = "SIZE", value_parser = crate::bytes::parse)]
    pub(crate) max_shard_size: Option<u64>,
    /// What is written
    #[arg(long, value_enum, default_value_t = FormatArg::Safetensors)]
    pub(crate) format: FormatArg,
    /// Names and layout of the tensors [default: torch for the models of this command, else burn]
    #[arg(long, value_enum)]
    pub(crate) names: Option<NamesArg>,
    /// With --format hugging-face: folder in that form, such as the training's --init, of which the tokenizer, the
    /// generation_config.json and the ids of tokens in config.json are copied
    #[arg(long, value_name = "FOLDER")]
    pub(crate) init: Option<PathBuf>,
    /// Replace a file that is there; a folder has to be empty
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// The tensors alone
    Safetensors,
    /// A folder that transformers loads and `train --init` reads: config.json and the tensors; of a step of --lora one that peft
    /// loads
    HuggingFace,
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
    /// Folder of a step, or of checkpoints, of which the newest step is taken; --init names another model
    pub(crate) step: Option<PathBuf>,
    /// Folder in Hugging Face's form, in place of a step; or with a step of --lora, that which it was trained with
    #[arg(long, value_name = "FOLDER")]
    pub(crate) init: Option<PathBuf>,
    /// Tokenizer of the text, a tokenizer.json; `bytes`: each byte is a token [default: the tokenizer.json in the folder of --init;
    /// bytes where that has no tokenizer]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<TokenizerArg>,
    /// Text to go on from
    #[arg(long)]
    pub(crate) prompt: String,
    /// Tokens to generate at most, bytes where there is no tokenizer; a model of --init may end its text before
    #[arg(long, alias = "bytes", default_value_t = 200)]
    pub(crate) tokens: usize,
    /// Divisor of logits: below 1, likely tokens become likelier; 0: always the likeliest
    #[arg(long, default_value_t = crate::text::TEMPERATURE, allow_negative_numbers = true)]
    pub(crate) temperature: f64,
    /// Seed of the random choices
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Ranks, which have a shard of the model each: threads of this process, or the processes that mpirun or srun has started
    /// [default: 1 thread, or all processes]
    #[arg(long)]
    pub(crate) ranks: Option<usize>,
    /// Threads that compute for each rank [default: RAYON_NUM_THREADS, or the cores divided by the ranks]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// How long a rank waits for the others in one operation before it gives up
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) deadline: u64,
}
