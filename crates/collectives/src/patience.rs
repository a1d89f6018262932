//! The patience of a rank: the rest of its deadline.

use std::time::{Duration, Instant};

/// The parts into which a deadline is cut.
const SLICES: u32 = 10;

/// The rest of a deadline, of which at most one slice is spent at a time.
///
/// The clock also runs while the whole machine stands still: a stopped process, a suspended virtual
/// machine. To the rank that waits such a pause is one very long look at the clock, and costs it one
/// slice, as long as its peers were stopped with it. After the deadline one more slice is granted:
/// the peer may have been woken after the rank that waits.
#[derive(Debug, Clone)]
pub(crate) struct Patience {
    left: Duration,
    slice: Duration,
    seen: Instant,
}

impl Patience {
    /// Returns the whole of a deadline, counted from `now` on.
    pub(crate) fn new(deadline: Duration, now: Instant) -> Self {
        let slice = deadline / SLICES;
        Self {
            left: deadline.saturating_add(slice),
            slice,
            seen: now,
        }
    }

    /// Counts the time since the last look, and says how long to sleep at most before the next one;
    /// zero when the patience has come to its end.
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
    fn looks_in_between_cost_what_they_take() {
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
    fn none_and_endless() {
        let start = Instant::now();
        assert!(Patience::new(Duration::ZERO, start).spend(start).is_zero());
        let mut endless = Patience::new(Duration::MAX, start);
        assert!(!endless.spend(start + 1_000_000 * SECOND).is_zero());
    }
}
