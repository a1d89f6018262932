//! Loss scaling for half precision, agreed among the ranks.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_fsdp_collectives::Reduction;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::inspect;
use crate::optim::clip;
use crate::optim::gradients;

/// The options of a [`LossScaler`]. The defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossScaling {
    /// The scale of the first step. Default 65536.
    pub initial_scale: f64,
    /// The factor of the scale after `growth_interval` steps without overflow. Default 2.
    pub growth_factor: f64,
    /// The factor of the scale after an overflow. Default 0.5.
    pub backoff_factor: f64,
    /// Steps without overflow before the scale grows. Default 2000.
    pub growth_interval: u32,
}

impl Default for LossScaling {
    fn default() -> Self {
        Self {
            initial_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
        }
    }
}

/// The state of a [`LossScaler`], which changes from step to step: put it into checkpoints. The
/// same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScalerState {
    /// The factor of the loss.
    pub scale: f64,
    /// Steps without overflow since the scale last changed.
    pub growth_tracker: u32,
}

/// A scaler of the loss, which keeps small gradients of `f16` from vanishing: the loss is
/// multiplied by a scale, the gradients are divided by it, and a step in which a gradient
/// overflowed on *any* rank is skipped on *all*, with a smaller scale from there on.
///
/// A scaler that looks at one rank's gradients is wrong with sharding: each rank sees only its
/// shards, and ranks would skip different steps. With `bf16` and `f32` no scaling is needed.
///
/// ```no_run
/// # use burn::{module::Module, optim::ModuleOptimizer, tensor::Tensor};
/// # use burn_fsdp_shard::{Error, LossScaler, backward};
/// # fn step<M: Module>(
/// #     mut model: M, loss: Tensor<1>, optimizer: &mut ModuleOptimizer, scaler: &mut LossScaler,
/// # ) -> Result<M, Error> {
/// let gradients = backward(scaler.scale(loss), &model)?;
/// if let Some(gradients) = scaler.unscale(&model, gradients)? {
///     model = optimizer.step(1e-3, model, gradients);
/// }
/// # Ok(model)
/// # }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LossScaler {
    scaling: LossScaling,
    state: LossScalerState,
}

impl Default for LossScaler {
    fn default() -> Self {
        let scaling = LossScaling::default();
        Self {
            scaling,
            state: LossScalerState {
                scale: scaling.initial_scale,
                growth_tracker: 0,
            },
        }
    }
}

impl LossScaler {
    /// Returns a scaler at its initial scale. All ranks make the same.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the initial scale is not positive and finite, the growth factor not
    /// above 1, the backoff factor not between 0 and 1, or the interval 0.
    pub fn new(scaling: LossScaling) -> Result<Self, Error> {
        let refuse = |option, expected, got: f64| {
            Err(Error::Option {
                option,
                expected,
                got: got.to_string(),
            })
        };
        let LossScaling {
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
        } = scaling;
        if !(initial_scale.is_finite() && initial_scale > 0.0) {
            return refuse("initial_scale", "positive and finite", initial_scale);
        }
        if !(growth_factor.is_finite() && growth_factor > 1.0) {
            return refuse("growth_factor", "above 1 and finite", growth_factor);
        }
        if !(backoff_factor > 0.0 && backoff_factor < 1.0) {
            return refuse("backoff_factor", "between 0 and 1", backoff_factor);
        }
        if growth_interval == 0 {
            return refuse("growth_interval", "at least 1", 0.0);
        }
        Ok(Self {
            scaling,
            state: LossScalerState {
                scale: initial_scale,
                growth_tracker: 0,
            },
        })
    }

    /// Goes on from the state of a checkpoint.
    #[must_use]
    pub fn restored(mut self, state: LossScalerState) -> Self {
        self.state = state;
        self
    }

    /// Returns the state to put into a checkpoint.
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Returns the loss times the scale, to be differentiated. A loss in half precision becomes
    /// `f32`, in which the product fits. Not collective.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        let loss = match loss.dtype() {
            DType::F16 | DType::BF16 => loss.cast(FloatDType::F32),
            _ => loss,
        };
        loss.mul_scalar(self.state.scale)
    }

    /// Returns the gradients divided by the scale, or `None` if any rank has one that is infinite or not a
    /// number: then the step is to be skipped. The scale for the next step is set either way. Call it once for
    /// each step of the optimizer, when all micro-batches have been accumulated.
    ///
    /// Collective over all ranks of the module: one all-reduce of one number.
    ///
    /// # Errors
    ///
    /// [`Error::NotSharded`]; [`Error::LossScale`] when the scale has come to nothing; a failed
    /// collective.
    pub fn unscale<M: Module>(
        &mut self,
        module: &M,
        gradients: GradientsParams,
    ) -> Result<Option<GradientsParams>, Error> {
        let root = inspect::root_of(module)?;
        let entries = gradients::entries(module, &gradients);
        let found = f64::from(u8::from(!entries.iter().all(clip::is_finite)));
        drop(entries);
        let found_anywhere = clip::all_reduce(&root.group, found, Reduction::max())? > 0.0;
        if found_anywhere {
            self.back_off()?;
            return Ok(None);
        }
        let gradients = gradients::scaled(module, gradients, self.state.scale.recip())?;
        self.grow();
        Ok(Some(gradients))
    }

    fn back_off(&mut self) -> Result<(), Error> {
        let scale = self.state.scale * self.scaling.backoff_factor;
        // Below, the product of loss and scale is zero: every step would be skipped, in silence.
        if scale < f64::from(f32::MIN_POSITIVE) {
            return Err(Error::LossScale {
                scale: self.state.scale,
            });
        }
        self.state = LossScalerState {
            scale,
            growth_tracker: 0,
        };
        Ok(())
    }

    fn grow(&mut self) {
        self.state.growth_tracker += 1;
        if self.state.growth_tracker >= self.scaling.growth_interval {
            let scale = self.state.scale * self.scaling.growth_factor;
            if scale <= f64::from(f32::MAX) {
                self.state.scale = scale;
            }
            self.state.growth_tracker = 0;
        }
    }
}
