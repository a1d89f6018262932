//! Pseudorandom order as a function of seed, epoch and index, without state.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

const ROUNDS: u64 = 6;

/// The random numbers of one epoch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draws {
    pub(crate) seed: u64,
    pub(crate) epoch: u64,
}

impl Draws {
    fn draw(self, words: [u64; 3]) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.seed, self.epoch);
        for word in words {
            hasher.write(&word.to_le_bytes());
        }
        hasher.finish()
    }

    /// Returns the place of number `index` in a permutation of `0..count`. This is a Feistel network on the next larger
    /// power of 4, repeated until the result is in range, so no table is needed.
    pub(crate) fn permuted(self, index: u64, count: u64) -> u64 {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        let half = bits.div_ceil(2).max(1);
        let mask = (1 << half) - 1;
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> half, value & mask);
            for round in 0..ROUNDS {
                (left, right) = (right, left ^ (self.draw([0, round, right]) & mask));
            }
            value = left << half | right;
            if value < count {
                return value;
            }
        }
    }

    /// Shuffles the documents of the window that begins at `start` (Fisher-Yates).
    pub(crate) fn shuffle<T>(self, start: [u64; 2], window: &mut [T]) {
        let key = self.draw([1, start[0], start[1]]);
        for index in (1..window.len()).rev() {
            let drawn = u128::from(self.draw([2, key, index as u64]));
            window.swap(index, ((drawn * (index as u128 + 1)) >> 64) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_contain_every_index_once() {
        for count in (1..70).chain([255, 256, 257, 1000]) {
            let draws = Draws {
                seed: 3,
                epoch: count,
            };
            let mut all: Vec<u64> = (0..count)
                .map(|index| draws.permuted(index, count))
                .collect();
            if count == 1000 {
                assert!(all.windows(2).filter(|pair| pair[0] < pair[1]).count() < 600);
            }
            all.sort_unstable();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn seeds_and_epochs_have_different_orders() {
        let order = |seed, epoch| {
            let mut window: Vec<u32> = (0..50).collect();
            Draws { seed, epoch }.shuffle([4, 2], &mut window);
            window
        };
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
    }
}
