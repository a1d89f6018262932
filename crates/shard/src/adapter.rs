//! Low-rank adapters of sharded parameters: the product of two small factors is added to a weight.

use burn::tensor::Tensor;

/// The adapter of one parameter of a unit: the effective weight is `base + scale * (a @ b)`, as in Burn's `LoraAdapter`
/// (Hu et al., "LoRA", arXiv 2106.09685, equation 3). The factors are parameters of the same unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adapter {
    /// The slot of the factor of shape `[rows, rank]`.
    pub(crate) a: usize,
    /// The slot of the factor of shape `[rank, columns]`.
    pub(crate) b: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) rank: usize,
    pub(crate) scale: f64,
}

/// The flat gradients of an adapter's factors.
pub(crate) struct FactorGradients {
    pub(crate) a: Tensor<1>,
    pub(crate) b: Tensor<1>,
}

impl Adapter {
    /// Returns `base` plus the scaled product of the factors. All tensors are flat and without autodiff.
    pub(crate) fn applied(&self, base: Tensor<1>, a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
        let delta = self.matrix_a(a).matmul(self.matrix_b(b));
        let delta = delta.mul_scalar(self.scale);
        let dtype = base.dtype();
        let delta: Tensor<1> = delta.reshape([self.rows * self.columns]);
        base + delta.cast(dtype)
    }

    /// Computes the gradients of the factors from the weight's gradient.
    pub(crate) fn gradients(
        &self,
        of_weight: Tensor<1>,
        a: Tensor<1>,
        b: Tensor<1>,
    ) -> FactorGradients {
        let of_weight = of_weight.cast(a.dtype());
        let of_weight: Tensor<2> = of_weight.reshape([self.rows, self.columns]);
        let of_delta = of_weight.mul_scalar(self.scale);
        let of_a = of_delta.clone().matmul(self.matrix_b(b).transpose());
        let of_b = self.matrix_a(a).transpose().matmul(of_delta);
        FactorGradients {
            a: of_a.reshape([self.rows * self.rank]),
            b: of_b.reshape([self.rank * self.columns]),
        }
    }

    fn matrix_a(&self, a: Tensor<1>) -> Tensor<2> {
        a.reshape([self.rows, self.rank])
    }

    fn matrix_b(&self, b: Tensor<1>) -> Tensor<2> {
        b.reshape([self.rank, self.columns])
    }
}
