//! Counts of arithmetic operations.

use std::ops::AddAssign;

use serde::Serialize;

/// The number of floating-point operations of one rank; a multiply-add counts as two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Flops {
    /// Operations of matrix products, including linear layers: `2 m k n`.
    pub matmul: u64,
    /// Operations of convolutions: `2` times output elements times weights per output channel.
    pub convolution: u64,
    /// All other operations: one per element of the largest tensor involved.
    pub pointwise: u64,
}

impl Flops {
    /// Returns the sum of all kinds.
    pub fn total(&self) -> u64 {
        let products = self.matmul.saturating_add(self.convolution);
        products.saturating_add(self.pointwise)
    }
}

impl AddAssign for Flops {
    fn add_assign(&mut self, other: Self) {
        // A trillion parameters and millions of tokens overflow 64 bits.
        self.matmul = self.matmul.saturating_add(other.matmul);
        self.convolution = self.convolution.saturating_add(other.convolution);
        self.pointwise = self.pointwise.saturating_add(other.pointwise);
    }
}
