//! The measured cases.

use std::path::Path;

use clap::ValueEnum;
use serde::Serialize;

/// A training run that both sides run with equal sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Case {
    /// A GPT (6 layers, dim 384, vocabulary 4096, 256 tokens, batch 8), compiled, fully sharded over 2 ranks,
    /// against FSDP2
    FullShard,
    /// The same with 12 layers, dim 768, vocabulary 8192, batch 4
    FullShardLarge,
    /// The first GPT, compiled, on 2 ranks without sharding, against DDP
    NoShard,
    /// The first GPT, compiled, on 1 rank with all cores, against one process of PyTorch
    OneRank,
    /// The first GPT, with the eager engine, fully sharded over 2 ranks, against FSDP2
    Eager,
    /// The first GPT, compiled in bf16, fully sharded over 2 ranks, against FSDP2 in bf16
    Bf16,
    /// A model of Burn's unmodified layers (TransformerEncoder, 6 layers, dim 384, batch 8), compiled, fully sharded
    /// over 2 ranks, against a model of PyTorch's own layers in FSDP2
    Encoder,
    /// The same on 1 rank with all cores, against one process of PyTorch
    EncoderOneRank,
}

/// The sizes of a model and its batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    layers: usize,
    dim: usize,
    heads: usize,
    vocab: usize,
    seq: usize,
    batch: usize,
}

/// The steps of one run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    pub(crate) measured: usize,
    pub(crate) warmup: usize,
}

/// A program of the peer with its arguments.
#[derive(Debug, Clone)]
pub(crate) struct PeerCommand {
    pub(crate) script: &'static str,
    pub(crate) words: Vec<String>,
    /// Variants of the program, as additional arguments. The fastest one is compared.
    pub(crate) forms: &'static [&'static [&'static str]],
}

const SMALL: Sizes = Sizes {
    layers: 6,
    dim: 384,
    heads: 6,
    vocab: 4096,
    seq: 256,
    batch: 8,
};

const LARGE: Sizes = Sizes {
    layers: 12,
    dim: 768,
    heads: 12,
    vocab: 8192,
    batch: 4,
    ..SMALL
};

const ENCODER_FORMS: &[&[&str]] = &[&[], &["--malloc", "keep-heap"]];
const GPT_FORMS: &[&[&str]] = &[&[], &["--malloc", "keep-heap"], &["--compile"]];

impl Case {
    pub(crate) fn all() -> Vec<Self> {
        Self::value_variants().to_vec()
    }

    /// Returns the name as typed on the command line.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Returns the number of ranks of both sides.
    pub(crate) fn ranks(self) -> usize {
        match self {
            Self::OneRank | Self::EncoderOneRank => 1,
            _ => 2,
        }
    }

    fn sizes(self) -> Sizes {
        match self {
            Self::FullShardLarge => LARGE,
            _ => SMALL,
        }
    }

    pub(crate) fn is_encoder(self) -> bool {
        matches!(self, Self::Encoder | Self::EncoderOneRank)
    }

    /// Returns the arguments for a GPT's sizes, the same on both sides; `None` for an encoder.
    pub(crate) fn shape(self) -> Option<Vec<String>> {
        let sizes = self.sizes();
        (!self.is_encoder()).then(|| sizes.words())
    }

    /// Returns the floating-point operations per token in matrix products: six for each weight of a matrix, and
    /// attention's, halved by the causal mask.
    pub(crate) fn flop_per_token(self) -> f64 {
        let Sizes {
            layers,
            dim,
            vocab,
            seq,
            ..
        } = self.sizes();
        6.0 * (layers * 12 * dim * dim + vocab * dim + layers * seq * dim) as f64
    }

    /// Returns the arguments for our side's command.
    pub(crate) fn ours(self, steps: Steps, weights: Option<&Path>, scratch: &Path) -> Vec<String> {
        let mut words = Words::default();
        if self.is_encoder() {
            words.add(["encoder-step", "--ranks", &self.ranks().to_string()]);
            words.steps(steps);
            return words.0;
        }
        words.add(["train", "--json", "--synthetic", "--sample", "0"]);
        words.add(["--ranks", &self.ranks().to_string()]);
        words.add(["--curve", &scratch.join("loss.svg").to_string_lossy()]);
        words.0.extend(self.sizes().words());
        words.training(steps);
        if let Some(weights) = weights {
            words.add(["--init", &weights.to_string_lossy()]);
        }
        match self {
            Self::Eager => {}
            Self::Bf16 => words.add(["--compile", "--precision", "bf16", "--reduce-dtype", "f32"]),
            Self::NoShard | Self::OneRank => words.add(["--compile", "--strategy", "no-shard"]),
            _ => words.add(["--compile"]),
        }
        words.0
    }

    /// Returns the peer's program.
    pub(crate) fn peer(self, steps: Steps, weights: Option<&Path>) -> PeerCommand {
        let mode = match self {
            Self::NoShard => "ddp",
            Self::OneRank | Self::EncoderOneRank => "single",
            _ => "fsdp2",
        };
        let mut words = Words::default();
        words.add(["--mode", mode]);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / self.ranks()).max(1);
        words.add(["--threads-per-rank", &threads.to_string()]);
        if self.is_encoder() {
            words.steps(steps);
            return PeerCommand {
                script: "encoder_peer.py",
                words: words.0,
                forms: ENCODER_FORMS,
            };
        }
        words.add(["--ranks", &self.ranks().to_string()]);
        words.0.extend(self.sizes().words());
        words.training(steps);
        if let Some(weights) = weights {
            words.add(["--load-init", &weights.to_string_lossy()]);
        }
        if self == Self::Bf16 {
            words.add(["--dtype", "bf16"]);
        }
        PeerCommand {
            script: "train_peer.py",
            words: words.0,
            forms: GPT_FORMS,
        }
    }
}

impl Sizes {
    fn words(self) -> Vec<String> {
        let all = [
            ("--layers", self.layers),
            ("--dim", self.dim),
            ("--heads", self.heads),
            ("--vocab", self.vocab),
            ("--seq", self.seq),
            ("--batch", self.batch),
        ];
        let words = all.map(|(flag, value)| [flag.to_owned(), value.to_string()]);
        words.into_iter().flatten().collect()
    }
}

/// A builder of command-line arguments.
#[derive(Default)]
struct Words(Vec<String>);

impl Words {
    fn add<const N: usize>(&mut self, words: [&str; N]) {
        self.0.extend(words.map(str::to_owned));
    }

    fn steps(&mut self, steps: Steps) {
        self.add(["--steps", &steps.measured.to_string()]);
        self.add(["--warmup", &steps.warmup.to_string()]);
    }

    /// With these arguments, losses show the size of gradients, which Adam would otherwise divide out.
    fn training(&mut self, steps: Steps) {
        self.steps(steps);
        self.add(["--lr", "0.01", "--eps", "0.01"]);
    }
}
