//! The scale of a loss in half precision, and how it changes from step to step.

use serde::{Deserialize, Serialize};

/// The initial scale of a loss, and how it grows and backs off. The defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossScaling {
    /// The scale of the first step. Default 65536.
    pub initial_scale: f64,
    /// The factor that multiplies the scale after `growth_interval` steps without overflow. Default 2.
    pub growth_factor: f64,
    /// The factor that multiplies the scale after an overflow. Default 0.5.
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

/// The scale of a loss, which changes from step to step. It must be saved in checkpoints and is the same on all
/// ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScalerState {
    /// The factor that multiplies the loss.
    pub scale: f64,
    /// Steps without overflow since the scale last changed.
    pub growth_tracker: u32,
}

/// An option of [`LossScaling`] that is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("loss scaling option {option} is {got:?}; it must be {expected}")]
pub struct ScalingFault {
    /// Name of the option.
    pub option: &'static str,
    /// A description of the valid range.
    pub expected: &'static str,
    /// The option's value.
    pub got: f64,
}

impl LossScaling {
    /// Returns the first option that is out of its range; `None` if all are valid.
    pub fn fault(&self) -> Option<ScalingFault> {
        let Self {
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
        } = *self;
        // The factor that multiplies the loss is an `f32`.
        let range = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
        let all = [
            (
                range.contains(&initial_scale),
                "initial_scale",
                "positive, finite and normal in 32 bits",
                initial_scale,
            ),
            (
                growth_factor.is_finite() && growth_factor > 1.0,
                "growth_factor",
                "above 1 and finite",
                growth_factor,
            ),
            (
                backoff_factor > 0.0 && backoff_factor < 1.0,
                "backoff_factor",
                "between 0 and 1",
                backoff_factor,
            ),
            (
                growth_interval > 0,
                "growth_interval",
                "at least 1",
                growth_interval.into(),
            ),
        ];
        let fault = all.into_iter().find(|(is_right, ..)| !is_right);
        fault.map(|(_, option, expected, got)| ScalingFault {
            option,
            expected,
            got,
        })
    }

    /// Returns the state before the first step.
    pub fn begin(&self) -> LossScalerState {
        LossScalerState {
            scale: self.initial_scale,
            growth_tracker: 0,
        }
    }

    /// Returns the state after a step that was skipped because a gradient overflowed.
    ///
    /// Returns `None` if the scale becomes too small: the product of loss and scale would be zero, and every step
    /// would be silently skipped.
    pub fn back_off(&self, state: LossScalerState) -> Option<LossScalerState> {
        let scale = state.scale * self.backoff_factor;
        (scale >= f64::from(f32::MIN_POSITIVE)).then_some(LossScalerState {
            scale,
            growth_tracker: 0,
        })
    }

    /// Returns the state after a step without overflow.
    #[must_use]
    pub fn grow(&self, state: LossScalerState) -> LossScalerState {
        let growth_tracker = state.growth_tracker.saturating_add(1);
        if growth_tracker < self.growth_interval {
            return LossScalerState {
                growth_tracker,
                ..state
            };
        }
        let grown = state.scale * self.growth_factor;
        let scale = if grown <= f64::from(f32::MAX) {
            grown
        } else {
            state.scale
        };
        LossScalerState {
            scale,
            growth_tracker: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaling_grows_after_an_interval_and_backs_off_immediately() {
        let scaling = LossScaling {
            growth_interval: 3,
            ..LossScaling::default()
        };
        let mut state = scaling.begin();
        for tracker in [1, 2] {
            state = scaling.grow(state);
            assert_eq!((state.scale, state.growth_tracker), (65536.0, tracker));
        }
        state = scaling.grow(state);
        assert_eq!((state.scale, state.growth_tracker), (131_072.0, 0));
        state = scaling.grow(state);
        state = scaling.back_off(state).unwrap();
        assert_eq!((state.scale, state.growth_tracker), (65536.0, 0));
        let least = LossScalerState {
            scale: f64::from(f32::MIN_POSITIVE),
            growth_tracker: 0,
        };
        assert_eq!(scaling.back_off(least), None);
        let most = LossScalerState {
            scale: f64::from(f32::MAX),
            growth_tracker: 2,
        };
        assert_eq!(scaling.grow(most).scale, f64::from(f32::MAX));
    }

    #[test]
    fn options_out_of_their_range_are_named() {
        let of = |change: fn(&mut LossScaling)| {
            let mut scaling = LossScaling::default();
            change(&mut scaling);
            scaling.fault().map(|fault| fault.option)
        };
        assert_eq!(of(|_| {}), None);
        assert_eq!(of(|s| s.initial_scale = 0.0), Some("initial_scale"));
        assert_eq!(of(|s| s.growth_factor = 1.0), Some("growth_factor"));
        assert_eq!(of(|s| s.backoff_factor = 1.0), Some("backoff_factor"));
        assert_eq!(of(|s| s.growth_interval = 0), Some("growth_interval"));
        for scale in [f64::NAN, 1e-40, 1e39, -1.0] {
            let scaling = LossScaling {
                initial_scale: scale,
                ..LossScaling::default()
            };
            assert!(scaling.fault().is_some(), "{scale}");
        }
    }
}
