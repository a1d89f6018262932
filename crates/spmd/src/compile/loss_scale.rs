//! Steps with a scaled loss: detects gradient overflow, and skips the steps in which it occurs.

use burn::tensor::{DType, TensorData};
use burn_fsdp_mesh::{LossScalerState, LossScaling};
use burn_ir::{BackendIr, TensorId};

use super::scaler::{Last, Scaler};
use super::step::CompiledStep;
use crate::error::{Error, ScaleError};
use crate::graph::{Graph, Role};
use crate::trace::Batch;

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Returns the scale of the next step's loss, for checkpoints; `None` if
    /// [`Options`](crate::passes::schedule::Options::scale_loss) do not scale it. It is equal on all ranks.
    pub fn loss_scale(&self) -> Option<LossScalerState> {
        Some(self.done.scaler.as_ref()?.state)
    }

    /// Sets the scale of the next step's loss, to continue a saved run. All ranks must set the same state.
    ///
    /// # Errors
    ///
    /// [`Error::LossScale`] if the step does not scale its loss, or the scale is not positive, finite and normal in 32
    /// bits.
    pub fn set_loss_scale(&mut self, state: LossScalerState) -> Result<(), Error> {
        let Some(scaler) = &mut self.done.scaler else {
            return Err(ScaleError::Off.into());
        };
        let like = LossScaling {
            initial_scale: state.scale,
            ..scaler.scaling
        };
        match like.fault() {
            Some(fault) => Err(ScaleError::from(fault).into()),
            None => {
                scaler.state = state;
                Ok(())
            }
        }
    }

    /// Returns true if the last step was skipped because a gradient had overflowed on some rank. Parameters, optimizer
    /// states and the optimizer's step numbers are then unchanged, but running statistics are not. The result is equal
    /// on all ranks.
    pub fn was_skipped(&self) -> bool {
        self.done
            .scaler
            .is_some_and(|scaler| scaler.last != Last::Taken)
    }

    /// Divides the pending gradients of this graph's optimizer by the scale of the loss, if it is scaled. Returns false
    /// if a gradient of any rank is infinite or NaN; the scale is then reduced if possible, and the step must be
    /// skipped. All ranks must call it; with a scaled loss, they exchange one byte.
    pub(super) fn unscale(&mut self, update: &Graph) -> Result<bool, Error> {
        let Some(mut scaler) = self.done.scaler else {
            return Ok(true);
        };
        let gradients: Vec<TensorId> = {
            let pending = update.values();
            let pending = pending.filter(|value| matches!(value.role, Role::Pending(_)));
            let ids = pending.map(|value| value.id);
            ids.filter(|id| self.executor.has(*id)).collect()
        };
        let own = self.are_finite(&gradients);
        let answer = match own {
            Ok(is_finite) => u8::from(is_finite),
            Err(_) => FAILED,
        };
        let group = self.mode.ranks().group();
        let all = group.exchange("overflow of gradients", vec![answer]);
        own?;
        let all = all.map_err(Error::among_ranks)?;
        if let Some(rank) = all.iter().position(|of_rank| *of_rank == [FAILED]) {
            return Err(Error::PeerNotReady { rank });
        }
        if all.iter().all(|of_rank| *of_rank == [1]) {
            let inverse = scaler.state.scale.recip();
            for id in gradients {
                let scaled = scaled(self.executor.get_sealed(id)?, inverse)?;
                self.executor.replace(id, scaled);
            }
            scaler.state = scaler.scaling.grow(scaler.state);
            scaler.last = Last::Taken;
        } else if let Some(smaller) = scaler.scaling.back_off(scaler.state) {
            scaler.state = smaller;
            scaler.last = Last::Skipped;
        } else {
            scaler.last = Last::Vanished;
        }
        self.done.scaler = Some(scaler);
        Ok(scaler.last == Last::Taken)
    }

    /// Returns an error if the gradients of the last step overflowed and the scale cannot be reduced.
    pub(super) fn vanished(&self) -> Result<(), Error> {
        match self.done.scaler {
            Some(Scaler {
                last: Last::Vanished,
                state: LossScalerState { scale, .. },
                ..
            }) => Err(ScaleError::Vanished { scale }.into()),
            _ => Ok(()),
        }
    }

    fn are_finite(&mut self, gradients: &[TensorId]) -> Result<bool, Error> {
        let mut are_finite = true;
        for id in gradients {
            are_finite &= is_finite(&self.executor.get_sealed(*id)?)?;
        }
        Ok(are_finite)
    }
}

/// The byte that a rank sends if it cannot read its gradients.
const FAILED: u8 = 2;

fn is_finite(gradient: &TensorData) -> Result<bool, Error> {
    match gradient.dtype() {
        DType::F32 => {
            let all = gradient.as_slice::<f32>().map_err(unreadable)?;
            Ok(all.iter().all(|of| of.is_finite()))
        }
        _ => Ok(gradient.iter::<f64>().all(f64::is_finite)),
    }
}

fn unreadable(error: impl std::fmt::Debug) -> Error {
    Error::Internal(format!("a gradient cannot be read: {error:?}"))
}

/// Returns a gradient times a factor, in the gradient's type.
fn scaled(mut gradient: TensorData, factor: f64) -> Result<TensorData, Error> {
    match gradient.dtype() {
        DType::F32 => {
            let factor = factor as f32;
            let all = gradient.as_mut_slice::<f32>().map_err(unreadable)?;
            all.iter_mut().for_each(|of| *of *= factor);
            Ok(gradient)
        }
        dtype => {
            let all = gradient.iter::<f64>().map(|of| of * factor).collect();
            let shape = gradient.shape().to_vec();
            Ok(TensorData::new::<f64, _>(all, shape).convert_dtype(dtype))
        }
    }
}
