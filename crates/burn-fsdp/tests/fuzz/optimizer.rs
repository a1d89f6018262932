//! Every optimizer of Burn that takes gradients, and some as users write them.

use burn::grad_clipping::GradientClipping;
use burn::module::ParamGroup;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig, LionConfig,
    ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use burn_fsdp::Error;
use burn_fsdp::compile::{CompiledStep, Mode, compile};

use super::model::{Batch, Net, Plan};
use super::wild::{Rows, Turns};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Optimizer {
    Sgd,
    Momentum,
    Decayed,
    Adam,
    AdamW,
    AmsGrad,
    Cautious,
    AdaGrad,
    RmsProp,
    Centered,
    Adan,
    Lion,
    /// AdamW, and SGD for the weights of layers.
    Groups,
    Turns,
    Lamb,
    Adafactor,
    /// Adafactor with steps of the size that it is told.
    Absolute,
    Rows,
    /// Muon for matrices, and AdamW for the rest.
    Muon,
    /// AdamW that clips the gradient of each parameter by its norm.
    Clipped,
}

pub(crate) const OPTIMIZERS: [Optimizer; 20] = [
    Optimizer::Sgd,
    Optimizer::Momentum,
    Optimizer::Decayed,
    Optimizer::Adam,
    Optimizer::AdamW,
    Optimizer::AmsGrad,
    Optimizer::Cautious,
    Optimizer::AdaGrad,
    Optimizer::RmsProp,
    Optimizer::Centered,
    Optimizer::Adan,
    Optimizer::Lion,
    Optimizer::Groups,
    Optimizer::Turns,
    Optimizer::Lamb,
    Optimizer::Adafactor,
    Optimizer::Absolute,
    Optimizer::Rows,
    Optimizer::Muon,
    Optimizer::Clipped,
];

/// Where gradients come near the epsilon of an optimizer that divides by their size, it makes much of their last bits.
const EPSILON: f32 = 1e-2;

impl Optimizer {
    pub(crate) fn needs_whole_tensors(self) -> bool {
        matches!(
            self,
            Self::Lamb | Self::Adafactor | Self::Absolute | Self::Rows | Self::Muon | Self::Clipped
        )
    }

    /// Returns true if it makes steps of one size of gradients of any.
    pub(crate) fn ignores_size(self) -> bool {
        matches!(
            self,
            Self::Lamb | Self::Adafactor | Self::Absolute | Self::Lion | Self::Muon
        )
    }

    /// Returns one in its place that is the same for all parameters, as a compiled step has it.
    pub(crate) fn of_all(self) -> Self {
        match self {
            Self::Groups | Self::Clipped => Self::AdamW,
            Self::Muon => Self::Rows,
            optimizer => optimizer,
        }
    }

    fn momentum() -> SgdConfig {
        SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_nesterov(true)))
    }

    fn decayed() -> SgdConfig {
        SgdConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.05)))
    }

    fn adamw() -> AdamWConfig {
        AdamWConfig::new()
            .with_epsilon(EPSILON)
            .with_weight_decay(0.1)
    }

    fn rms_prop() -> RmsPropConfig {
        RmsPropConfig::new().with_epsilon(EPSILON)
    }

    fn absolute() -> AdafactorConfig {
        AdafactorConfig::new()
            .with_relative_step(false)
            .with_scale_parameter(false)
            .with_weight_decay(0.01)
    }

    pub(crate) fn init(self, plan: &Plan) -> ModuleOptimizer {
        match self {
            Self::Sgd => SgdConfig::new().init(),
            Self::Momentum => Self::momentum().init(),
            Self::Decayed => Self::decayed().init(),
            Self::Adam => AdamConfig::new().with_epsilon(EPSILON).init(),
            Self::AdamW => Self::adamw().init(),
            Self::AmsGrad => Self::adamw().with_amsgrad(true).init(),
            Self::Cautious => Self::adamw().with_cautious_weight_decay(true).init(),
            Self::AdaGrad => AdaGradConfig::new().with_epsilon(EPSILON).init(),
            Self::RmsProp => Self::rms_prop().init(),
            Self::Centered => Self::rms_prop().with_centered(true).init(),
            Self::Adan => AdanConfig::new().with_epsilon(EPSILON).init(),
            Self::Lion => LionConfig::new().init(),
            Self::Groups => Self::adamw().init().with_group(
                ParamGroup::from_predicate("layers"),
                Self::momentum().build(),
                None,
            ),
            Self::Turns => ModuleOptimizer::from(Turns),
            Self::Lamb => LambConfig::new().with_epsilon(EPSILON).init(),
            Self::Adafactor => AdafactorConfig::new().init(),
            Self::Absolute => Self::absolute().init(),
            Self::Rows => ModuleOptimizer::from(Rows),
            Self::Muon => Self::adamw().init().with_group(
                ParamGroup::from_paths(plan.matrices()),
                MuonConfig::new().build(),
                None,
            ),
            Self::Clipped => Self::adamw()
                .init()
                .with_grad_clipping(GradientClipping::Norm(1e-2)),
        }
    }

    /// Returns the step by this optimizer of `plan`.
    pub(crate) fn compile(self, plan: &Plan, mode: Mode) -> Result<CompiledStep<Batch>, Error> {
        macro_rules! compiled {
            ($optimizer:expr) => {{
                let (built, run) = (plan.clone(), plan.clone());
                compile(
                    move |device| built.init(device),
                    move |net: &Net, batch: Batch| run.loss(net, batch, || {}),
                    $optimizer,
                    mode,
                )
            }};
        }
        let step = match self {
            Self::Sgd => compiled!(SgdConfig::new().build()),
            Self::Momentum => compiled!(Self::momentum().build()),
            Self::Decayed => compiled!(Self::decayed().build()),
            Self::Adam => compiled!(AdamConfig::new().with_epsilon(EPSILON).build()),
            Self::AdamW | Self::Groups | Self::Clipped => compiled!(Self::adamw().build()),
            Self::AmsGrad => compiled!(Self::adamw().with_amsgrad(true).build()),
            Self::Cautious => compiled!(Self::adamw().with_cautious_weight_decay(true).build()),
            Self::AdaGrad => compiled!(AdaGradConfig::new().with_epsilon(EPSILON).build()),
            Self::RmsProp => compiled!(Self::rms_prop().build()),
            Self::Centered => compiled!(Self::rms_prop().with_centered(true).build()),
            Self::Adan => compiled!(AdanConfig::new().with_epsilon(EPSILON).build()),
            Self::Lion => compiled!(LionConfig::new().build()),
            Self::Turns => compiled!(Turns),
            Self::Lamb => compiled!(LambConfig::new().with_epsilon(EPSILON).build()),
            Self::Adafactor => compiled!(AdafactorConfig::new().build()),
            Self::Absolute => compiled!(Self::absolute().build()),
            Self::Rows => compiled!(Rows),
            Self::Muon => compiled!(MuonConfig::new().build()),
        };
        Ok(step?)
    }
}
