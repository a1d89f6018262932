//! The arguments of the model and its data.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::headings::FINE_TUNING;
use super::lora::LoraArgs;
use crate::codec::TokenizerArg;

#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Architecture [default: as in --init, else gpt]
    ///
    /// llama and gpt2 take their sizes from config.json in the --init folder.
    #[arg(long, value_enum)]
    pub(crate) model: Option<TrainedModelArg>,
    /// Number of transformer blocks; gpt only [default: 3]
    #[arg(long)]
    pub(crate) layers: Option<usize>,
    /// Hidden size, a multiple of --heads; gpt only [default: 128]
    #[arg(long)]
    pub(crate) dim: Option<usize>,
    /// Number of attention heads; gpt only [default: 4]
    #[arg(long)]
    pub(crate) heads: Option<usize>,
    /// Vocabulary size; gpt only [default: the tokenizer's size, at least 256]
    ///
    /// Text needs at least the tokenizer's size, or 256 for bytes.
    #[arg(long, hide_short_help = true)]
    pub(crate) vocab: Option<usize>,
    /// Sequence length in tokens
    #[arg(long, default_value_t = 128)]
    pub(crate) seq: usize,
    /// Seed for the initial weights, the text windows and the sample
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Write the initial weights to this safetensors file before training; not with --lora
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) save_init: Option<PathBuf>,
    /// Start from this Hugging Face folder or safetensors file
    ///
    /// A file must use PyTorch's parameter names. Each rank reads only its shards.
    #[arg(long, value_name = "PATH", help_heading = FINE_TUNING)]
    pub(crate) init: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
}

/// The architectures that `train` supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainedModelArg {
    /// Learned positions, layer norms, plain MLPs, untied head
    Gpt,
    /// Llama, Mistral, Qwen, Phi-3, Gemma or GPT-NeoX: the family is in config.json
    Llama,
    /// The published GPT-2 architecture
    Gpt2,
}

/// How documents share sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PackingArg {
    /// Several documents in a sequence. Each is computed as if it were alone: attention does not see the others, and
    /// positions start from 0
    Documents,
    /// Texts follow each other without gaps. Attention sees the texts before, and positions run on
    Joined,
    /// One document in a sequence, followed by padding
    Single,
}

impl PackingArg {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Documents => "documents",
            Self::Joined => "joined",
            Self::Single => "single",
        }
    }
}

/// The formats of documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DataFormat {
    /// Plain text in UTF-8
    Text,
    /// A JSON object on each line
    Jsonl,
    /// Apache Parquet
    Parquet,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// Text file or folder to train on, or .jsonl or .parquet files [default: Burn's source code]
    ///
    /// .jsonl and .parquet files contain documents, see --data-format. Of other text, only the first 16 MiB are read.
    /// --seed selects the text windows. The last 5 % of the text is held out for evaluation. Of Burn's source code, as
    /// downloaded by cargo, every 20th file is held out instead. Hidden files, binary files and files of this run are
    /// skipped and counted.
    #[arg(long, value_name = "PATH", conflicts_with = "synthetic")]
    pub(crate) data: Option<PathBuf>,
    /// Read --data as documents of this format [default: by extension]
    ///
    /// A document has at most 16 MiB. Documents are the rows of .parquet files, the lines of .jsonl and .ndjson files, and with
    /// `text`, files or pieces of 64 KiB. They are shuffled by --seed, a twentieth is held out, and a resumed run
    /// continues with the next document on any number of ranks. --data may then also be a folder with such files, or a
    /// glob such as 'data/*.parquet'.
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        requires = "data",
        conflicts_with = "synthetic",
        hide_short_help = true
    )]
    pub(crate) data_format: Option<DataFormat>,
    /// Field with the text of a document in JSONL or Parquet [default: text]
    #[arg(
        long,
        value_name = "FIELD",
        requires = "data",
        conflicts_with = "synthetic",
        hide_short_help = true
    )]
    pub(crate) text_field: Option<String>,
    /// Field with the prompt of a document in JSONL or Parquet; with --completion-field
    ///
    /// The loss is the mean over the tokens of the completions, and the tokens after them. Documents that are longer than
    /// a sequence are divided.
    #[arg(
        long,
        value_name = "FIELD",
        requires_all = ["data", "completion_field"],
        conflicts_with_all = ["text_field", "synthetic"],
        hide_short_help = true
    )]
    pub(crate) prompt_field: Option<String>,
    /// Field with the completion of --prompt-field, on which the model is trained
    #[arg(
        long,
        value_name = "FIELD",
        requires = "prompt_field",
        conflicts_with = "synthetic",
        hide_short_help = true
    )]
    pub(crate) completion_field: Option<String>,
    /// Field with the messages of a chat in JSONL or Parquet
    ///
    /// Each message has a `role` and a `content`. The chat template beside the tokenizer renders them:
    /// chat_template.jinja, or `chat_template` in tokenizer_config.json. The loss is the mean over the tokens that the
    /// assistant writes. Chats that are longer than a sequence are divided.
    #[arg(
        long,
        value_name = "FIELD",
        requires = "data",
        conflicts_with_all = ["text_field", "prompt_field", "synthetic"],
        hide_short_help = true
    )]
    pub(crate) chat_field: Option<String>,
    /// How documents share sequences [default: documents, or as in the step of --resume]
    ///
    /// `joined` conflicts with --prompt-field and --chat-field.
    #[arg(
        long,
        value_enum,
        value_name = "PACKING",
        requires = "data",
        conflicts_with = "synthetic",
        hide_short_help = true
    )]
    pub(crate) packing: Option<PackingArg>,
    /// Path of a tokenizer.json, or `bytes` for one token per byte [default: --init's tokenizer.json, else bytes]
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    pub(crate) tokenizer: Option<TokenizerArg>,
    /// Train on synthetic tokens; not with --data or --tokenizer
    ///
    /// The tokens are the same on every machine.
    #[arg(long, hide_short_help = true)]
    pub(crate) synthetic: bool,
    /// Steps between evaluations; 0 to evaluate only at the end [default: 100]
    ///
    /// Has no effect with --synthetic.
    #[arg(long, value_name = "STEPS")]
    pub(crate) eval_every: Option<usize>,
    /// Maximum number of held-out batches per evaluation; 0 for no evaluation
    #[arg(
        long,
        value_name = "BATCHES",
        default_value_t = 8,
        hide_short_help = true
    )]
    pub(crate) eval_batches: usize,
}
