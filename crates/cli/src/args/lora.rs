//! The arguments of low-rank adapters.

use std::path::PathBuf;
use std::str::FromStr;

use burn_fsdp::internals::sharding::BaseBits;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::headings::FINE_TUNING;

#[derive(Debug, Args)]
#[command(next_help_heading = FINE_TUNING)]
pub(crate) struct LoraArgs {
    /// Freeze the weights of --init, and train LoRA adapters of this rank
    ///
    /// Adapts all matrices of the blocks, or those of --lora-targets. Saved steps contain only the adapters; pass the
    /// same --init to resume. Conflicts with --save-init, --no-decay and --optimizer muon.
    #[arg(long, value_name = "RANK", requires = "init", group = "adapted")]
    pub(crate) lora: Option<usize>,
    /// LoRA alpha: adapters are scaled by alpha / rank [default: twice the rank]
    #[arg(
        long,
        value_name = "ALPHA",
        requires = "lora",
        allow_negative_numbers = true,
        hide_short_help = true
    )]
    pub(crate) lora_alpha: Option<f64>,
    /// Adapt only these matrices, such as q_proj,v_proj [default: all matrices of the blocks]
    ///
    /// As in peft, a target is the end of a module's name in the files of --init, such as q_proj, mlp.down_proj or
    /// layers.0.mlp.down_proj, or all-linear. In names, `*` matches any characters, and `**` any number of names. A
    /// target may also be a pattern of paths as in --no-decay.
    #[arg(long, value_name = "TARGETS", requires = "lora", value_delimiter = ',')]
    pub(crate) lora_targets: Vec<String>,
    /// Rank of the adapters that a target matches, such as down_proj=4; a list, the last match wins
    #[arg(
        long,
        value_name = "TARGET=RANK",
        requires = "lora",
        value_delimiter = ',',
        hide_short_help = true
    )]
    pub(crate) lora_rank_pattern: Vec<ForTarget<usize>>,
    /// Alpha of the adapters that a target matches, such as down_proj=16; a list, the last match wins
    #[arg(
        long,
        value_name = "TARGET=ALPHA",
        requires = "lora",
        value_delimiter = ',',
        hide_short_help = true
    )]
    pub(crate) lora_alpha_pattern: Vec<ForTarget<f64>>,
    /// Scale adapters by alpha / sqrt(rank) instead of alpha / rank (rsLoRA)
    #[arg(long, requires = "lora", hide_short_help = true)]
    pub(crate) rslora: bool,
    /// Also train a magnitude for each output of an adapted matrix (DoRA)
    #[arg(long, requires = "lora", hide_short_help = true)]
    pub(crate) dora: bool,
    /// Hold and send the frozen matrices that have adapters in 8 or 4 bits (QLoRA)
    ///
    /// Each block of 64 elements has a 32-bit scale, so 4 bits (NF4) take 4.5 bits per element, and 8 bits take 8.5. The
    /// adapters are trained on the rounded weights, which `generate` and `consolidate --merge` also use. Not supported
    /// with --compile.
    #[arg(
        long,
        value_name = "BITS",
        requires = "adapted",
        hide_short_help = true
    )]
    pub(crate) base_bits: Option<BaseBitsArg>,
    /// Freeze the weights of --init, and continue training the adapters of this peft folder
    ///
    /// adapter_config.json specifies the matrices, ranks and alphas. The rest as for --lora. To resume, pass the same
    /// folder again: the adapters then come from the saved step.
    #[arg(
        long,
        value_name = "FOLDER",
        requires = "init",
        conflicts_with = "lora",
        group = "adapted",
        hide_short_help = true
    )]
    pub(crate) adapter: Option<PathBuf>,
}

impl LoraArgs {
    /// Returns the flag that selects adapters, if one is given.
    pub(crate) fn flag(&self) -> Option<&'static str> {
        match (&self.lora, &self.adapter) {
            (Some(_), _) => Some("--lora"),
            (None, Some(_)) => Some("--adapter"),
            (None, None) => None,
        }
    }
}

/// The bits of frozen matrices with adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum BaseBitsArg {
    /// 255 evenly spaced levels
    #[value(name = "8")]
    #[serde(rename = "8")]
    Eight,
    /// The 16 levels of NF4
    #[value(name = "4")]
    #[serde(rename = "4")]
    Four,
}

impl BaseBitsArg {
    /// Returns the value of the flag.
    pub(crate) fn number(self) -> usize {
        match self {
            Self::Eight => 8,
            Self::Four => 4,
        }
    }
}

/// Returns a lower bound of the bytes of a model's parameters, of which the matrices with adapters may have fewer bits.
pub(crate) fn least_bytes(base_bits: Option<BaseBitsArg>, num_elements: u128) -> u128 {
    // Adapted matrices may be almost all of the model.
    let bits = base_bits.map_or(32, BaseBitsArg::number);
    num_elements * bits as u128 / 8
}

impl From<BaseBitsArg> for BaseBits {
    fn from(bits: BaseBitsArg) -> Self {
        match bits {
            BaseBitsArg::Eight => Self::Eight,
            BaseBitsArg::Four => Self::Four,
        }
    }
}

/// A number for the matrices that a target matches.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ForTarget<T> {
    pub(crate) target: String,
    pub(crate) value: T,
}

impl<T: FromStr> FromStr for ForTarget<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pair = text.rsplit_once('=');
        let parsed = pair.and_then(|(target, value)| Some((target, value.parse().ok()?)));
        let Some((target, value)) = parsed else {
            return Err("write a target, `=` and a number, such as down_proj=4".to_owned());
        };
        let target = target.to_owned();
        Ok(Self { target, value })
    }
}
