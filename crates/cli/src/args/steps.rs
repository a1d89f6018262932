//! The arguments of the commands for a saved step.

use std::path::PathBuf;

use burn_fsdp::DeviceName;
use clap::{Args, ValueEnum};

use crate::codec::TokenizerArg;

#[derive(Debug, Args)]
pub(crate) struct ConsolidateArgs {
    /// Folder of a saved step, or a checkpoint folder to use its newest step
    pub(crate) step: PathBuf,
    /// Output file, or output folder with --max-shard-size or --format hugging-face
    pub(crate) out: PathBuf,
    /// Write several files of at most this size, such as 500MB or 2GiB, with Hugging Face's index
    #[arg(long, value_name = "SIZE", value_parser = crate::bytes::parse)]
    pub(crate) max_shard_size: Option<u64>,
    /// Output format
    #[arg(long, value_enum, default_value_t = FormatArg::Safetensors)]
    pub(crate) format: FormatArg,
    /// Names and layout of the tensors [default: torch for whole models of this command, else burn]
    #[arg(long, value_enum)]
    pub(crate) names: Option<NamesArg>,
    /// With --format hugging-face: copy tokenizer, generation settings and token ids from this folder
    ///
    /// Usually the folder that training used as --init. Generation settings are in generation_config.json.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) init: Option<PathBuf>,
    /// Add the adapters of a --lora step to the weights of --init, and write a Hugging Face folder with the whole model
    #[arg(long, requires = "init", conflicts_with = "max_shard_size")]
    pub(crate) merge: bool,
    /// Replace an existing file; an existing folder must be empty
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// Tensors only, without a configuration
    Safetensors,
    /// Folder with config.json and the tensors, for transformers and `train --init`; for a --lora step, a folder for
    /// peft
    HuggingFace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NamesArg {
    /// PyTorch's names, for PyTorch and `train --init`
    Torch,
    /// The Burn module's names, as in the step
    Burn,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Folder of a saved step, or a checkpoint folder to use its newest step
    pub(crate) step: PathBuf,
    /// Read only the index, and verify nothing
    #[arg(long)]
    pub(crate) no_verify: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// How the next token is chosen.
#[derive(Debug, Clone, Args)]
pub(crate) struct ChoiceArgs {
    /// Sampling temperature; 0 always picks the most likely token
    #[arg(long, default_value_t = crate::text::TEMPERATURE, allow_negative_numbers = true)]
    pub(crate) temperature: f64,
    /// Choose only among this many of the most likely tokens [default: all]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) top_k: Option<usize>,
    /// Choose only among the most likely tokens whose probabilities together reach this number
    #[arg(
        long,
        value_name = "PROBABILITY",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub(crate) top_p: f64,
    /// Divide the logits of tokens that are already in the text by this number, and multiply negative ones
    #[arg(
        long,
        value_name = "FACTOR",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub(crate) repetition_penalty: f64,
}

/// The texts to continue, and the form of the result.
#[derive(Debug, Clone, Args)]
pub(crate) struct PromptArgs {
    /// Text to continue; may be repeated
    #[arg(long, value_name = "TEXT", required_unless_present = "prompts")]
    pub(crate) prompt: Vec<String>,
    /// File with a prompt on each line, or JSONL (.jsonl, or with --prompt-field)
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: Option<PathBuf>,
    /// Field of the prompts in JSONL [default: prompt]
    #[arg(long, value_name = "NAME", requires = "prompts")]
    pub(crate) prompt_field: Option<String>,
    /// Treat each prompt as a user message, and answer it
    ///
    /// The message is rendered by the chat template next to the tokenizer.json, as with `train --chat-field`. The
    /// answer ends where the template ends the assistant's message.
    #[arg(long)]
    pub(crate) chat: bool,
    /// Maximum number of prompts that run at once, on all ranks together
    ///
    /// Each rank runs its share as one batch, and a waiting prompt starts as soon as another one ends. More prompts at
    /// once generate more tokens a second, and need more memory for keys and values.
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    /// Print a JSON object for each prompt
    ///
    /// Its fields are `index`, `prompt`, `text` (without the prompt), `finish` (`end`, `stop` or `length`),
    /// `prompt_tokens`, `tokens` and `seed`.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct GenerateArgs {
    /// Folder of a saved step, or a checkpoint folder to use its newest step
    pub(crate) step: Option<PathBuf>,
    /// Hugging Face folder instead of a step, or the base model of a --lora step
    #[arg(long, value_name = "FOLDER")]
    pub(crate) init: Option<PathBuf>,
    /// Path of a tokenizer.json, or `bytes` for one token per byte [default: --init's tokenizer.json, else bytes]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<TokenizerArg>,
    #[command(flatten)]
    pub(crate) prompts: PromptArgs,
    /// Maximum number of tokens to generate; a model from --init may stop earlier
    ///
    /// Counts bytes if there is no tokenizer.
    #[arg(long, alias = "bytes", default_value_t = 200)]
    pub(crate) tokens: usize,
    #[command(flatten)]
    pub(crate) choice: ChoiceArgs,
    /// End before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Seed for sampling
    ///
    /// The prompt with index i, counted from 0, has a generator of its own with this seed plus i.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
}

/// Where a generation runs.
#[derive(Debug, Clone, Args)]
pub(crate) struct PlaceArgs {
    /// Where the weights are while texts are generated
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) weights: ResidenceArg,
    /// Device: flex (the CPU), a GPU backend, or auto, as in `train`
    ///
    /// The command does not know the memory of a GPU, so --weights auto means whole there.
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceName,
    /// Ranks: threads, or the processes of mpirun or srun [default: 1 thread, or all processes]
    #[arg(long)]
    pub(crate) ranks: Option<usize>,
    /// Compute threads per rank [default: RAYON_NUM_THREADS, or cores / ranks]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Maximum time that a rank waits for the others in one collective operation
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        hide_short_help = true
    )]
    pub(crate) deadline: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResidenceArg {
    /// Whole if every process has the memory for it, else placed or sharded, whichever moves less
    Auto,
    /// One whole copy in each process, for all of its ranks
    Whole,
    /// A part of each matrix on each rank, which stays there: ranks exchange products of the new tokens
    Placed,
    /// A shard on each rank, which gathers each block for every token
    Sharded,
}
