//! Loss scaling for half precision, synchronized across ranks.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Tensor};
use burn_fsdp_collectives::Reduction;
use burn_fsdp_mesh::{LossScalerState, LossScaling, ScalingFault};
use burn_fsdp_tensors::is_half;

use crate::error::Error;
use crate::inspect;
use crate::optim::clip;
use crate::optim::gradients;

/// A loss scaler, which keeps small `f16` gradients from vanishing. The loss is multiplied by a scale, and the
/// gradients are divided by it. If a gradient overflows on *any* rank, the step is skipped on *all*, and later steps
/// use a smaller scale.
///
/// With sharding, a scaler must not check only one rank's gradients: each rank sees only its shards, so ranks would
/// skip different steps. `bf16` and `f32` need no scaling.
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
            state: scaling.begin(),
        }
    }
}

impl LossScaler {
    /// Returns a scaler with the initial scale from `scaling`. All ranks must pass the same settings.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] unless the initial scale is positive, finite and normal in 32 bits, the growth factor finite
    /// and above 1, the backoff factor between 0 and 1, and the interval above 0.
    pub fn new(scaling: LossScaling) -> Result<Self, Error> {
        match scaling.fault() {
            Some(ScalingFault {
                option,
                expected,
                got,
            }) => Err(Error::Option {
                option,
                expected,
                got: format!("{got:?}"),
            }),
            None => Ok(Self {
                scaling,
                state: scaling.begin(),
            }),
        }
    }

    /// Returns the scaler with its state from a checkpoint.
    #[must_use]
    pub fn restored(mut self, state: LossScalerState) -> Self {
        self.state = state;
        self
    }

    /// Returns the state for a checkpoint.
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Returns the loss times the scale, ready for backward. A half-precision loss becomes `f32`, so the product fits.
    /// Not collective.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        let loss = if is_half(loss.dtype()) {
            loss.cast(FloatDType::F32)
        } else {
            loss
        };
        loss.mul_scalar(self.state.scale)
    }

    /// Returns the gradients divided by the scale. Returns `None` if a gradient on any rank is infinite or not a
    /// number; then skip the step. Either way, the scale for the next step is set. Call this once per optimizer step,
    /// after all micro-batches have been accumulated.
    ///
    /// Collective over all ranks of the module: one all-reduce of one number.
    ///
    /// # Errors
    ///
    /// [`Error::NotSharded`]; [`Error::LossScale`] when the scale has become too small; a failed collective.
    pub fn unscale<M: Module>(
        &mut self,
        module: &M,
        gradients: GradientsParams,
    ) -> Result<Option<GradientsParams>, Error> {
        let root = inspect::root_of(module)?;
        let entries = gradients::entries(module, &gradients);
        let found = f64::from(u8::from(!clip::are_finite(&entries)));
        drop(entries);
        let found = clip::all_reduce(&root.group, found, Reduction::max(), false)?;
        let found_anywhere = found.number > 0.0;
        if found_anywhere {
            let LossScalerState { scale, .. } = self.state;
            let smaller = self.scaling.back_off(self.state);
            self.state = smaller.ok_or(Error::LossScale { scale })?;
            return Ok(None);
        }
        let gradients = gradients::scaled(module, gradients, self.state.scale.recip())?;
        self.state = self.scaling.grow(self.state);
        Ok(Some(gradients))
    }
}
