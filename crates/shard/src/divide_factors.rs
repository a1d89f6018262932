//! The divisors of gradients.

/// Divisors that replace the number of ranks when gradients are averaged: `pre` divides each rank's gradient, `post`
/// the sum. Sums are computed in at least 32 bits, so the split matters only for bitwise equality with other systems.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DivideFactors {
    /// The divisor of each rank's gradient before the sum.
    pub pre: f64,
    /// The divisor of the sum.
    pub post: f64,
}

impl DivideFactors {
    /// Splits `ranks` into two factors to keep 16-bit sums in range, as fairscale and PyTorch do: `pre` is the smallest
    /// power of two that is at least the square root of `ranks` or does not divide `ranks`, and `post` is the quotient.
    pub fn balanced(ranks: usize) -> Self {
        let mut pre = 1;
        while ranks.is_multiple_of(pre) && ranks / pre > pre {
            pre *= 2;
        }
        Self {
            pre: pre as f64,
            post: ranks as f64 / pre as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DivideFactors;

    #[test]
    fn factors_match_the_table() {
        let pairs = [
            (1, 1.0, 1.0),
            (2, 2.0, 1.0),
            (3, 2.0, 1.5),
            (4, 2.0, 2.0),
            (6, 4.0, 1.5),
            (8, 4.0, 2.0),
            (12, 4.0, 3.0),
            (16, 4.0, 4.0),
            (32, 8.0, 4.0),
            (64, 8.0, 8.0),
            (128, 16.0, 8.0),
            (256, 16.0, 16.0),
        ];
        for (ranks, pre, post) in pairs {
            assert_eq!(DivideFactors::balanced(ranks), DivideFactors { pre, post });
        }
    }
}
