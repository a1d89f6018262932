//! The arguments of the optimizer.

use clap::{Args, ValueEnum};
use serde::Serialize;

/// The heading of hyperparameters that only some optimizers have.
const HYPERPARAMETERS: &str = "Optimizer hyperparameters, for the optimizers that use them";

#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
pub(crate) struct OptimizerArgs {
    /// Optimizer
    #[arg(long, value_enum, value_name = "NAME", default_value_t = OptimizerName::Adamw)]
    pub(crate) optimizer: OptimizerName,
    /// Weight decay [default: 0.01 for adamw and muon, else 0]
    ///
    /// Applies to all parameters except those that --no-decay selects. adamw, adan, lion and muon decouple it; the
    /// others add it to gradients.
    #[arg(long, value_name = "DECAY", allow_negative_numbers = true)]
    pub(crate) weight_decay: Option<f32>,
    /// Parameters without weight decay: `vectors` for all one-dimensional ones, or a path pattern; repeatable
    ///
    /// A pattern names parameters or modules, such as 'blocks.*.ln1' or '**.bias'. Conflicts with --lora and a
    /// --weight-decay of 0.
    #[arg(long, value_name = "PATTERN", hide_short_help = true)]
    pub(crate) no_decay: Vec<String>,
    /// Decay rate of the first moment [default: 0.9; adan 0.98]
    #[arg(
        long,
        allow_negative_numbers = true,
        help_heading = HYPERPARAMETERS,
        hide_short_help = true
    )]
    pub(crate) beta1: Option<f32>,
    /// Decay rate of the second moment [default: 0.999; lion and rmsprop 0.99, adan 0.92]
    ///
    /// For lion, the decay rate of the momentum; for adan, of the gradient differences.
    #[arg(
        long,
        allow_negative_numbers = true,
        help_heading = HYPERPARAMETERS,
        hide_short_help = true
    )]
    pub(crate) beta2: Option<f32>,
    /// Epsilon, added to the update's denominator [default: 1e-8]
    #[arg(
        long,
        allow_negative_numbers = true,
        help_heading = HYPERPARAMETERS,
        hide_short_help = true
    )]
    pub(crate) eps: Option<f32>,
    /// Momentum of sgd, rmsprop and muon [default: 0.9; rmsprop 0, muon 0.95]
    #[arg(
        long,
        allow_negative_numbers = true,
        help_heading = HYPERPARAMETERS,
        hide_short_help = true
    )]
    pub(crate) momentum: Option<f32>,
}

/// The choices of `--optimizer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerName {
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam with weight decay added to gradients
    Adam,
    /// Stochastic gradient descent with momentum
    Sgd,
    /// RMSProp, optionally with momentum
    Rmsprop,
    /// AdaGrad
    Adagrad,
    /// Adan, with decay rate 0.99 for the mean of squares
    Adan,
    /// Lion
    Lion,
    /// Muon for the matrices of blocks, each whole on one rank, and AdamW for the rest
    Muon,
}

impl OptimizerName {
    /// Returns the flag that selects this optimizer.
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
