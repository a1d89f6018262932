//! The learning rate of every step.

use std::f64::consts::PI;

use serde::Serialize;

use crate::args::{LrSchedule, TrainingArgs};
use crate::error::InputError;

/// Learning rate at the end of a cosine schedule, as a fraction of the peak.
const COSINE_FLOOR: f64 = 0.1;

/// By default, the number of steps over which `wsd` falls is all steps divided by this number, rounded up.
const WSD_PART: usize = 10;

/// A learning rate that rises linearly, then stays or falls.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Schedule {
    /// The highest learning rate.
    peak: f64,
    shape: LrSchedule,
    /// Number of steps over which the rate rises.
    rise: usize,
    /// Total number of steps of the run.
    total: usize,
    /// Number of last steps over which the rate of `Wsd` falls.
    fall: usize,
}

impl Schedule {
    /// Returns the schedule of a run, or an error if --lr-decay has no effect.
    pub(crate) fn new(args: &TrainingArgs) -> Result<Self, InputError> {
        if args.lr_decay.is_some() && args.lr_schedule != LrSchedule::Wsd {
            return Err(InputError::Excludes {
                first: "--lr-decay",
                second: "an --lr-schedule other than wsd",
                reason: "only wsd falls over a chosen number of steps",
            });
        }
        let total = args.warmup.saturating_add(args.steps);
        Ok(Self {
            peak: args.lr,
            shape: args.lr_schedule,
            rise: args.lr_warmup,
            total,
            fall: args.lr_decay.unwrap_or(total.div_ceil(WSD_PART)),
        })
    }

    /// Returns the rate of a step, for a rate that falls linearly over the last `fall` steps. The first of them has the
    /// peak, and the step after the last would have 0.
    fn falling(&self, step: usize, fall: usize) -> f64 {
        let left = self.total.saturating_sub(step);
        self.peak * (left as f64 / fall.max(1) as f64).min(1.0)
    }

    /// Returns the learning rate of a step, counted from 0.
    pub(crate) fn at(&self, step: usize) -> f64 {
        if step < self.rise {
            return self.peak * (step + 1) as f64 / self.rise as f64;
        }
        match self.shape {
            LrSchedule::Constant => self.peak,
            LrSchedule::Cosine => {
                // The first step after the rise has the highest rate, and the last step has the lowest.
                let falling = self.total.saturating_sub(self.rise + 1).max(1);
                let progress = ((step - self.rise) as f64 / falling as f64).min(1.0);
                let height = (1.0 + (PI * progress).cos()) / 2.0;
                self.peak * (COSINE_FLOOR + (1.0 - COSINE_FLOOR) * height)
            }
            LrSchedule::Linear => self.falling(step, self.total.saturating_sub(self.rise)),
            LrSchedule::Wsd => self.falling(step, self.fall),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(shape: LrSchedule) -> Schedule {
        Schedule {
            peak: 2.0,
            shape,
            rise: 4,
            total: 15,
            fall: 5,
        }
    }

    #[test]
    fn rises_linearly_to_the_peak() {
        let rates: Vec<f64> = (0..5)
            .map(|step| schedule(LrSchedule::Constant).at(step))
            .collect();
        assert_eq!(rates, [0.5, 1.0, 1.5, 2.0, 2.0]);
    }

    #[test]
    fn cosine_ends_at_a_tenth_with_the_last_step() {
        let schedule = schedule(LrSchedule::Cosine);
        assert_eq!(schedule.at(4), 2.0);
        assert!((schedule.at(9) - 1.1).abs() < 1e-12);
        assert!((schedule.at(14) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn linear_falls_from_the_warmup_to_the_end() {
        let schedule = schedule(LrSchedule::Linear);
        assert_eq!([3, 4].map(|step| schedule.at(step)), [2.0, 2.0]);
        assert!((schedule.at(14) - 2.0 / 11.0).abs() < 1e-12);
        assert_eq!([15, 16].map(|step| schedule.at(step)), [0.0, 0.0]);
    }

    #[test]
    fn wsd_stays_until_the_last_steps() {
        let schedule = schedule(LrSchedule::Wsd);
        let rates = [4, 9, 10, 11, 14, 15].map(|step| schedule.at(step));
        assert_eq!(rates, [2.0, 2.0, 2.0, 1.6, 0.4, 0.0]);
    }

    #[test]
    fn a_warmup_as_long_as_the_run_does_not_divide_by_zero() {
        let schedule = Schedule {
            rise: 15,
            ..schedule(LrSchedule::Cosine)
        };
        assert_eq!(schedule.at(14), 2.0);
        assert!(schedule.at(15).is_finite());
    }
}
