//! What steps the parameters.

use clap::{Args, ValueEnum};
use serde::Serialize;

#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
pub(crate) struct OptimizerArgs {
    /// What steps the parameters. Its numbers have the flags below; one that it has not is refused
    #[arg(long, value_enum, value_name = "NAME", default_value_t = OptimizerName::Adamw)]
    pub(crate) optimizer: OptimizerName,
    /// Decay of the mean of gradients [default: 0.9; of adan 0.98]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) beta1: Option<f32>,
    /// Decay of the mean of squared gradients; of lion that of its momentum, of adan that of the differences of
    /// gradients [default: 0.999; of lion and rmsprop 0.99, of adan 0.92]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) beta2: Option<f32>,
    /// Added to the denominator [default: 1e-8]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) eps: Option<f32>,
    /// Momentum of sgd, rmsprop and muon [default: 0.9; of rmsprop 0, of muon 0.95]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) momentum: Option<f32>,
    /// Weight decay: decoupled of adamw, adan, lion and muon, of the others added to gradients. Applied to every
    /// parameter, or all but those of --no-decay [default: 0.01 of adamw and muon, 0 of the others]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) weight_decay: Option<f32>,
    /// Parameters without weight decay: `vectors` for all of one dim, or the path of parameters or modules, such as
    /// 'blocks.*.ln1' or '**.bias'. May be given several times
    #[arg(long, value_name = "PATTERN")]
    pub(crate) no_decay: Vec<String>,
}

/// The optimizers that a run can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerName {
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam, whose weight decay is added to gradients
    Adam,
    /// Stochastic gradient descent with momentum
    Sgd,
    /// RMSProp, with momentum or without
    Rmsprop,
    /// AdaGrad
    Adagrad,
    /// Adan, with 0.99 for the mean of squares
    Adan,
    /// Lion
    Lion,
    /// Muon for the matrices of blocks, each whole on the rank that owns it, and AdamW for the rest
    Muon,
}

impl OptimizerName {
    /// Returns the flag that chooses it.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Self::Adamw => "--optimizer adamw",
            Self::Adam => "--optimizer adam",
            Self::Sgd => "--optimizer sgd",
            Self::Rmsprop => "--optimizer rmsprop",
            Self::Adagrad => "--optimizer adagrad",
            Self::Adan => "--optimizer adan",
            Self::Lion => "--optimizer lion",
            Self::Muon => "--optimizer muon",
        }
    }
}
