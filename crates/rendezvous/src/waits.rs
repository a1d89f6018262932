//! The long waits of ranks: who waits for whom.

use std::collections::BTreeSet;
use std::fmt;

use parking_lot::Mutex;

/// A wait that has lasted for a while. Rank numbers are ranks of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LongWait {
    /// The ranks that are waited for.
    pub missing: Vec<usize>,
    /// Describes the part that the missing ranks have yet to do, and the operation.
    pub what: String,
}

impl fmt::Display for LongWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waits for ranks {:?} to {}", self.missing, self.what)
    }
}

/// The long waits of a world's ranks.
///
/// A stuck rank blocks others, and these block more ranks, so the rank that a timeout names is rarely the cause. Each
/// rank announces a wait that has lasted for a tenth of its deadline. After the deadline, the waits can be followed to
/// the ranks that wait for no other rank.
#[derive(Debug)]
pub(crate) struct LongWaits(Mutex<Vec<Option<LongWait>>>);

impl LongWaits {
    pub(crate) fn new(num_ranks: usize) -> Self {
        Self(Mutex::new(vec![None; num_ranks]))
    }

    /// Sets the wait of a rank; `None` if the rank continues.
    pub(crate) fn set(&self, rank: usize, wait: Option<LongWait>) {
        if let Some(place) = self.0.lock().get_mut(rank) {
            *place = wait;
        }
    }

    pub(crate) fn all(&self) -> Vec<Option<LongWait>> {
        self.0.lock().clone()
    }

    /// Follows a wait of `rank` for `missing` to the ranks that wait for no other rank, and returns those in ascending
    /// order. Empty if all of them wait for each other.
    pub(crate) fn ends(&self, rank: usize, missing: &[usize]) -> Vec<usize> {
        let waits = self.0.lock();
        let mut seen = BTreeSet::from([rank]);
        let mut next: Vec<_> = missing.to_vec();
        let mut ends = BTreeSet::new();
        while let Some(rank) = next.pop() {
            if !seen.insert(rank) {
                continue;
            }
            match waits.get(rank) {
                Some(Some(wait)) => next.extend(&wait.missing),
                _ => {
                    ends.insert(rank);
                }
            }
        }
        ends.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(all: &[&[usize]]) -> LongWaits {
        let waits = LongWaits::new(all.len());
        for (rank, missing) in all.iter().enumerate() {
            let wait = LongWait {
                missing: missing.to_vec(),
                what: String::new(),
            };
            waits.set(rank, (!missing.is_empty()).then_some(wait));
        }
        waits
    }

    #[test]
    fn waits_lead_to_ranks_that_do_not_wait() {
        let chain = waits(&[&[2], &[], &[1], &[2, 0], &[]]);
        assert_eq!(chain.ends(0, &[2]), [1]);
        assert_eq!(chain.ends(3, &[2, 0]), [1]);
        assert_eq!(chain.ends(3, &[2, 4]), [1, 4]);
        // The wait of rank 4 has not been announced.
        assert_eq!(chain.ends(1, &[4]), [4]);
    }

    #[test]
    fn a_circle_leads_nowhere() {
        let circle = waits(&[&[1], &[2], &[0]]);
        assert_eq!(circle.ends(0, &[1]), [0; 0]);
        assert_eq!(circle.ends(2, &[0, 1]), [0; 0]);
    }

    #[test]
    fn a_wait_that_is_over_leads_no_further() {
        let chain = waits(&[&[1], &[2], &[]]);
        chain.set(1, None);
        assert_eq!(chain.ends(0, &[1]), [1]);
        // A rank of another world.
        chain.set(7, None);
    }
}
