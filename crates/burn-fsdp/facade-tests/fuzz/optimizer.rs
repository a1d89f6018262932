//! Every optimizer of Burn that accepts gradients, and some custom ones.

use burn::grad_clipping::GradientClipping;
use burn::module::ParamGroup;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig, LionConfig,
    ModuleOptimizer, MuonConfig, Optimizer as BurnOptimizer, RmsPropConfig, SgdConfig,
};
use burn_fsdp::Error;
use burn_fsdp::compile::{CompiledStep, Mode, OptimizerGroups, compile};
use burn_fsdp::optim::{LowBitOptimizer, StateFormat};

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
    /// AdamW without decay for the embedding, and SGD for layers.
    Groups,
    Turns,
    Lamb,
    Adafactor,
    /// Adafactor with steps of a given size.
    Absolute,
    Rows,
    /// Muon for matrices, and AdamW for the rest.
    Muon,
    /// Muon for everything, regardless of the number of dims. It is not drawn.
    Matrices,
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

/// Where gradients come near the epsilon of an optimizer that divides by their size, their last bits have a large
/// effect.
const EPSILON: f32 = 1e-2;

impl Optimizer {
    pub(crate) fn needs_whole_tensors(self) -> bool {
        matches!(
            self,
            Self::Lamb
                | Self::Adafactor
                | Self::Absolute
                | Self::Rows
                | Self::Muon
                | Self::Matrices
                | Self::Clipped
        )
    }

    /// Returns true if the size of its step does not depend on the size of the gradient. Cautious decay adds a part of
    /// the parameter or nothing, as the signs of the two decide.
    pub(crate) fn ignores_size(self) -> bool {
        matches!(
            self,
            Self::Cautious
                | Self::Lamb
                | Self::Adafactor
                | Self::Absolute
                | Self::Lion
                | Self::Muon
                | Self::Matrices
        )
    }

    /// Returns a replacement that compiled steps support: it does not clip by the norm of one gradient.
    pub(crate) fn compiled(self) -> Self {
        match self {
            Self::Clipped => Self::AdamW,
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

    /// Returns the optimizer, with its states in a format, if one is given.
    pub(crate) fn init(self, plan: &Plan, format: Option<StateFormat>) -> ModuleOptimizer {
        let optimizer = ModuleOptimizer::from(self.groups(plan, format));
        match self {
            Self::Clipped => optimizer.with_grad_clipping(GradientClipping::Norm(1e-2)),
            _ => optimizer,
        }
    }

    /// Returns the step of `plan` with this optimizer.
    pub(crate) fn compile(
        self,
        plan: &Plan,
        mode: Mode,
        (has_regions, format): (bool, Option<StateFormat>),
    ) -> Result<CompiledStep<Batch>, Error> {
        let (built, run) = (plan.clone(), plan.clone());
        let step = compile(
            move |device| built.init(device),
            move |net: &Net, batch: Batch| {
                if has_regions {
                    run.loss_recomputed(net, batch, || {})
                } else {
                    run.loss(net, batch, || {})
                }
            },
            self.groups(plan, format),
            mode,
        );
        Ok(step?)
    }

    /// Returns true if its states are also drawn in fewer bits. Some of the others have no states. Some make steps of one
    /// size, so rounding a state near zero can reverse a step. Centered RMSProp takes the root of a difference of two
    /// states, which rounding can make negative.
    pub(crate) fn may_have_few_bits(self) -> bool {
        matches!(
            self,
            Self::Momentum
                | Self::Adam
                | Self::AdamW
                | Self::AmsGrad
                | Self::AdaGrad
                | Self::RmsProp
                | Self::Adan
                | Self::Groups
        )
    }

    fn in_few_bits(self, plan: &Plan, format: StateFormat) -> Option<OptimizerGroups> {
        fn low<O: BurnOptimizer + 'static>(optimizer: O, format: StateFormat) -> OptimizerGroups {
            LowBitOptimizer::new(optimizer, format).into()
        }
        Some(match self {
            Self::Momentum => low(Self::momentum().build(), format),
            Self::Adam => low(AdamConfig::new().with_epsilon(EPSILON).build(), format),
            Self::AdamW => low(Self::adamw().build(), format),
            Self::AmsGrad => low(Self::adamw().with_amsgrad(true).build(), format),
            Self::AdaGrad => low(AdaGradConfig::new().with_epsilon(EPSILON).build(), format),
            Self::RmsProp => low(Self::rms_prop().build(), format),
            Self::Adan => low(AdanConfig::new().with_epsilon(EPSILON).build(), format),
            // The layers' states stay in 32 bits.
            Self::Groups => {
                let groups = low(Self::adamw().build(), format);
                if plan.has_units("layers.*") {
                    groups.with_group(
                        ParamGroup::from_predicate("layers"),
                        Self::momentum().build(),
                    )
                } else {
                    groups
                }
            }
            _ => return None,
        })
    }

    fn groups(self, plan: &Plan, format: Option<StateFormat>) -> OptimizerGroups {
        if let Some(groups) = format.and_then(|format| self.in_few_bits(plan, format)) {
            return groups;
        }
        match self {
            Self::Sgd => SgdConfig::new().build().into(),
            Self::Momentum => Self::momentum().build().into(),
            Self::Decayed => Self::decayed().build().into(),
            Self::Adam => AdamConfig::new().with_epsilon(EPSILON).build().into(),
            Self::AdamW | Self::Clipped => Self::adamw().build().into(),
            Self::AmsGrad => Self::adamw().with_amsgrad(true).build().into(),
            Self::Cautious => Self::adamw()
                .with_cautious_weight_decay(true)
                .build()
                .into(),
            Self::AdaGrad => AdaGradConfig::new().with_epsilon(EPSILON).build().into(),
            Self::RmsProp => Self::rms_prop().build().into(),
            Self::Centered => Self::rms_prop().with_centered(true).build().into(),
            Self::Adan => AdanConfig::new().with_epsilon(EPSILON).build().into(),
            Self::Lion => LionConfig::new().build().into(),
            Self::Groups => {
                let undecayed = Self::adamw().with_weight_decay(0.0).build();
                let groups = OptimizerGroups::from(Self::adamw().build());
                let groups = groups.with_group(ParamGroup::from_predicate("embed"), undecayed);
                if plan.has_units("layers.*") {
                    groups.with_group(
                        ParamGroup::from_predicate("layers"),
                        Self::momentum().build(),
                    )
                } else {
                    groups
                }
            }
            Self::Turns => Turns.into(),
            Self::Lamb => LambConfig::new().with_epsilon(EPSILON).build().into(),
            Self::Adafactor => AdafactorConfig::new().build().into(),
            Self::Absolute => Self::absolute().build().into(),
            Self::Rows => Rows.into(),
            Self::Muon => OptimizerGroups::from(Self::adamw().build()).with_group(
                ParamGroup::from_paths(plan.matrices()),
                MuonConfig::new().build(),
            ),
            Self::Matrices => MuonConfig::new().build().into(),
        }
    }
}
