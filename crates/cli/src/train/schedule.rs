//! The learning rate of every step.

use std::f64::consts::PI;

use serde::Serialize;

use crate::args::{LrSchedule, TrainingArgs};

/// Learning rate at the end of a cosine schedule, as a fraction of the peak.
const COSINE_FLOOR: f64 = 0.1;

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
}

impl Schedule {
    pub(crate) fn new(args: &TrainingArgs) -> Self {
        Self {
            peak: args.lr,
            shape: args.lr_schedule,
            rise: args.lr_warmup,
            total: args.warmup + args.steps,
        }
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
    fn a_warmup_as_long_as_the_run_does_not_divide_by_zero() {
        let schedule = Schedule {
            rise: 15,
            ..schedule(LrSchedule::Cosine)
        };
        assert_eq!(schedule.at(14), 2.0);
        assert!(schedule.at(15).is_finite());
    }
}
