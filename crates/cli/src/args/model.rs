//! The model of a training, and its data.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::codec::TokenizerArg;

#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Architecture. The sizes of a llama or a gpt2 are those of config.json in the folder of --init [default: what that says,
    /// else gpt]
    #[arg(long, value_enum)]
    pub(crate) model: Option<TrainedModelArg>,
    /// Transformer blocks of a gpt [default: 3]
    #[arg(long)]
    pub(crate) layers: Option<usize>,
    /// Width of the residual stream of a gpt [default: 128]
    #[arg(long)]
    pub(crate) dim: Option<usize>,
    /// Attention heads of a block of a gpt; they divide the width [default: 4]
    #[arg(long)]
    pub(crate) heads: Option<usize>,
    /// Different tokens of a gpt; text needs 256, one per byte, or those of the tokenizer [default: these]
    #[arg(long)]
    pub(crate) vocab: Option<usize>,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 128)]
    pub(crate) seq: usize,
    /// Seed of the initial weights, of the windows of text, and of the sample
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Start from the weights in this safetensors file (PyTorch's names and layout), or in this folder of Hugging Face's form, of
    /// which each rank reads the bytes of its shards
    #[arg(long, value_name = "PATH")]
    pub(crate) init: Option<PathBuf>,
    /// Write the initial weights to this safetensors file before training
    #[arg(long, value_name = "FILE")]
    pub(crate) save_init: Option<PathBuf>,
    /// Freeze the weights of --init, and train low-rank adapters of all matrices of the blocks, of this rank. Steps have the
    /// adapters alone: give the same --init to go on from one
    #[arg(long, value_name = "RANK", requires = "init")]
    pub(crate) lora: Option<usize>,
    /// With --lora: what the product of an adapter's factors is multiplied by is this over the rank [default: twice the rank]
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
    /// Learned positions, layer norms, plain perceptrons, a head of its own
    Gpt,
    /// Rotary positions, root-mean-square norms, gated perceptrons, grouped heads
    Llama,
    /// GPT-2 as it was published
    Gpt2,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// File or folder to train on, its first 16 MiB, in windows drawn by --seed; the last 5 % of them are
    /// held out for evaluation. Of a folder, what is hidden, no text, or of this run is left out, and counted [default: the sources of Burn, which cargo has downloaded; every 20th file is held out]
    #[arg(long, value_name = "PATH", conflicts_with = "synthetic")]
    pub(crate) data: Option<PathBuf>,
    /// Read text in the tokens of this tokenizer.json; `bytes`: each byte is a token [default: the tokenizer.json in the folder of
    /// --init; bytes where that has no tokenizer]
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    pub(crate) tokenizer: Option<TokenizerArg>,
    /// Train on a computed sequence of tokens: nothing to learn, but the same everywhere
    #[arg(long)]
    pub(crate) synthetic: bool,
    /// Evaluate every so many steps; 0: only at the end. Never with --synthetic [default: 100]
    #[arg(long, value_name = "STEPS")]
    pub(crate) eval_every: Option<usize>,
    /// Batches of held-out text per evaluation, at most; 0: do not evaluate
    #[arg(long, value_name = "BATCHES", default_value_t = 8)]
    pub(crate) eval_batches: usize,
}
