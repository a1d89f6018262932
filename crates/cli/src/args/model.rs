//! The model of a training, and its data.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::codec::TokenizerArg;

#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Architecture. llama and gpt2 take their sizes from config.json in the --init folder [default: the one in
    /// config.json, else gpt]
    #[arg(long, value_enum)]
    pub(crate) model: Option<TrainedModelArg>,
    /// Transformer blocks of a gpt [default: 3]
    #[arg(long)]
    pub(crate) layers: Option<usize>,
    /// Hidden size of a gpt [default: 128]
    #[arg(long)]
    pub(crate) dim: Option<usize>,
    /// Attention heads of a gpt. --dim must be a multiple [default: 4]
    #[arg(long)]
    pub(crate) heads: Option<usize>,
    /// Vocabulary size of a gpt. Text needs 256 for bytes, or the tokenizer's size [default: this size]
    #[arg(long)]
    pub(crate) vocab: Option<usize>,
    /// Tokens in a sequence
    #[arg(long, default_value_t = 128)]
    pub(crate) seq: usize,
    /// Seed of the initial weights, the text windows and the sample
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Start from this safetensors file with PyTorch's names, or from this folder in Hugging Face's format. Each rank
    /// reads only its shards
    #[arg(long, value_name = "PATH")]
    pub(crate) init: Option<PathBuf>,
    /// Write the initial weights to this safetensors file before training
    #[arg(long, value_name = "FILE")]
    pub(crate) save_init: Option<PathBuf>,
    /// Freeze the weights of --init, and train LoRA adapters of this rank on all matrices of the blocks. Saved steps
    /// contain only the adapters; give the same --init to resume
    #[arg(long, value_name = "RANK", requires = "init")]
    pub(crate) lora: Option<usize>,
    /// LoRA alpha: adapters are scaled by alpha / rank [default: twice the rank]
    #[arg(
        long,
        value_name = "ALPHA",
        requires = "lora",
        allow_negative_numbers = true
    )]
    pub(crate) lora_alpha: Option<f64>,
}

/// The architectures that are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainedModelArg {
    /// Learned positions, layer norms, plain MLPs, untied head
    Gpt,
    /// Rotary positions, RMS norms, gated MLPs, grouped-query attention
    Llama,
    /// GPT-2 as it was published
    Gpt2,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// Text file or folder to train on; its first 16 MiB are read. --seed draws the windows. The last 5 % are held
    /// out for evaluation. Hidden files, files that are not text and files of this run are skipped and counted
    /// [default: Burn's source code, which cargo has downloaded; every 20th file is held out]
    #[arg(long, value_name = "PATH", conflicts_with = "synthetic")]
    pub(crate) data: Option<PathBuf>,
    /// tokenizer.json for the text, or `bytes` for one token per byte [default: tokenizer.json in the --init folder,
    /// else bytes]
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    pub(crate) tokenizer: Option<TokenizerArg>,
    /// Train on computed tokens instead of text. They are the same on every machine
    #[arg(long)]
    pub(crate) synthetic: bool,
    /// Evaluate every this many steps; 0 for only at the end. Not with --synthetic [default: 100]
    #[arg(long, value_name = "STEPS")]
    pub(crate) eval_every: Option<usize>,
    /// Maximum number of held-out batches in an evaluation; 0 for no evaluation
    #[arg(long, value_name = "BATCHES", default_value_t = 8)]
    pub(crate) eval_batches: usize,
}
