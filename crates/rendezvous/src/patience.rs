//! The time that a waiting rank has left until its deadline.

use std::time::{Duration, Instant};

/// The number of slices of a deadline.
const SLICES: u32 = 10;

/// The time left until a deadline. At most one slice of it is spent between two looks at the clock.
///
/// The clock also runs while the process is stopped or its virtual machine is suspended. For a waiting rank, such a
/// pause is one very long interval between two looks. It costs only one slice, because the peers may have been stopped
/// at the same time. The deadline is extended by one slice, because a peer may be woken after the waiting rank.
#[derive(Debug, Clone)]
pub(crate) struct Patience {
    left: Duration,
    slice: Duration,
    seen: Instant,
}

impl Patience {
    /// Starts a deadline at `now`, with all of its time left.
    pub(crate) fn new(deadline: Duration, now: Instant) -> Self {
        let slice = deadline / SLICES;
        Self {
            left: deadline.saturating_add(slice),
            slice,
            seen: now,
        }
    }

    /// Subtracts the time since the last look, at most one slice. Returns the maximum time to sleep before the next
    /// look; zero when the extended deadline has passed.
    pub(crate) fn spend(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.seen).min(self.slice);
        self.seen = now;
        self.left = self.left.saturating_sub(passed);
        self.left.min(self.slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn ends_one_slice_after_the_deadline() {
        let start = Instant::now();
        let mut patience = Patience::new(10 * SECOND, start);
        for second in 1..11 {
            assert_eq!(patience.spend(start + second * SECOND), SECOND);
        }
        assert_eq!(patience.spend(start + 11 * SECOND), Duration::ZERO);
    }

    #[test]
    fn a_jump_of_the_clock_counts_as_one_slice() {
        let start = Instant::now();
        let mut patience = Patience::new(10 * SECOND, start);
        let jumped = start + 10_000 * SECOND;
        assert_eq!(patience.spend(jumped), SECOND);
        for second in 1..10 {
            assert_eq!(patience.spend(jumped + second * SECOND), SECOND);
        }
        assert_eq!(patience.spend(jumped + 10 * SECOND), Duration::ZERO);
    }

    #[test]
    fn extra_polls_cost_only_the_time_they_take() {
        let start = Instant::now();
        let mut patience = Patience::new(10 * SECOND, start);
        for look in 1..1100 {
            assert!(!patience.spend(start + look * SECOND / 100).is_zero());
        }
        assert!(patience.spend(start + 11 * SECOND).is_zero());
    }

    #[test]
    fn a_clock_that_goes_back_costs_nothing() {
        let start = Instant::now() + 100 * SECOND;
        let mut patience = Patience::new(10 * SECOND, start);
        assert_eq!(patience.spend(start - 50 * SECOND), SECOND);
    }

    #[test]
    fn zero_and_unlimited_patience() {
        let start = Instant::now();
        assert!(Patience::new(Duration::ZERO, start).spend(start).is_zero());
        let mut endless = Patience::new(Duration::MAX, start);
        assert!(!endless.spend(start + 1_000_000 * SECOND).is_zero());
    }
}
