//! Random numbers that are the same on every rank and machine.

/// A generator of random numbers, SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// Returns a number in the range 0 to 1, excluding 1.
    pub(crate) fn next_unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (finished(self.0) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Returns a number in which every bit depends on every bit of `value`.
pub(crate) fn mixed(value: u64) -> u64 {
    finished(value.wrapping_add(0x9e37_79b9_7f4a_7c15))
}

fn finished(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn random_numbers_are_spread_over_the_unit() {
        let mut random = Random(1);
        let numbers: Vec<f64> = (0..1000).map(|_| random.next_unit()).collect();
        assert!(numbers.iter().all(|x| (0.0..1.0).contains(x)));
        let mean = numbers.iter().sum::<f64>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.05);
    }
}
