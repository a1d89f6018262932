//! Low-rank adapters of sharded parameters: the product of two small factors is added to a weight.

use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};

/// The adapter of one parameter of a unit: the effective weight is `base + scale * (a @ b)`, as in Burn's `LoraAdapter`
/// (Hu et al., "LoRA", arXiv 2106.09685, equation 3). The factors are parameters of the same unit. As in Burn, their
/// product takes the shape of a weight with any number of dims, such as a convolution's.
///
/// With magnitudes, each column of this sum is divided by its norm and multiplied by its magnitude (Liu et al., "DoRA",
/// arXiv 2402.09353, equation 5). A column of Burn's matrices has the weights of one output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adapter {
    /// The slot of the factor of shape `[rows, rank]`.
    pub(crate) a: usize,
    /// The slot of the factor of shape `[rank, columns]`.
    pub(crate) b: usize,
    /// The slot of the magnitudes of shape `[columns]`.
    pub(crate) magnitude: Option<usize>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) rank: usize,
    pub(crate) scale: f64,
    pub(crate) origin: Origin,
}

/// Where an adapter comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Origin {
    /// The policy attaches it.
    Policy {
        /// The standard deviation of the initial values of `a`.
        std: f64,
    },
    /// The module had it before it was sharded, and plain copies of the module have it again.
    Module,
}

/// The kinds of low-rank adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Lora,
    /// LoRA with a trained magnitude for each column.
    Dora,
}

impl Method {
    /// Returns the name of the policy's method that attaches such adapters.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Lora => "lora",
            Self::Dora => "dora",
        }
    }
}

/// The trained parameters of an adapter, as optimizers and records see them.
#[derive(Debug, Module)]
pub(crate) struct AdapterParams {
    pub(crate) a: Param<Tensor<2>>,
    pub(crate) b: Param<Tensor<2>>,
    pub(crate) magnitude: Option<Param<Tensor<1>>>,
}

impl Adapter {
    /// Returns the slots of the factors and the magnitudes.
    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> + use<> {
        [self.a, self.b].into_iter().chain(self.magnitude)
    }

    /// Returns the effective weight of `base`. `full` returns the full value of a slot. All tensors are flat and without
    /// autodiff.
    pub(crate) fn applied<E>(
        &self,
        base: Tensor<1>,
        full: impl Fn(usize) -> Result<Tensor<1>, E>,
    ) -> Result<Tensor<1>, E> {
        let dtype = base.dtype();
        let sum = self.sum(base, full(self.a)?, full(self.b)?);
        let Some(magnitude) = self.magnitude else {
            return Ok(sum);
        };
        let (sum, norms) = self.with_norms(sum);
        let ratio = self.in_row(full(magnitude)?) / norms;
        let weight: Tensor<1> = (sum * ratio).reshape([self.rows * self.columns]);
        Ok(weight.cast(dtype))
    }

    /// Returns the gradients of the base in slot `base`, the factors and the magnitudes, from the weight's gradient. The
    /// norms count as constants.
    pub(crate) fn gradients<E>(
        &self,
        base: usize,
        of_weight: Tensor<1>,
        full: impl Fn(usize) -> Result<Tensor<1>, E>,
    ) -> Result<Vec<(usize, Tensor<1>)>, E> {
        let (a, b) = (full(self.a)?, full(self.b)?);
        let mut gradients = Vec::with_capacity(4);
        let mut of_sum = of_weight;
        if let Some(magnitude) = self.magnitude {
            let (dtype, shape) = (of_sum.dtype(), of_sum.shape());
            let (sum, norms) = self.with_norms(self.sum(full(base)?, a.clone(), b.clone()));
            let of_weight = self.matrix(of_sum.cast(FloatDType::F32));
            let of_ratio = (of_weight.clone() * sum).sum_dim(0);
            let own = full(magnitude)?;
            let of_magnitude: Tensor<1> = (of_ratio / norms.clone()).reshape([self.columns]);
            gradients.push((magnitude, of_magnitude.cast(own.dtype())));
            let flat: Tensor<1> = (of_weight * (self.in_row(own) / norms)).reshape(shape);
            of_sum = flat.cast(dtype);
        }
        gradients.push((base, of_sum.clone()));
        let of_delta = self.matrix(of_sum.cast(a.dtype())).mul_scalar(self.scale);
        let of_a = of_delta.clone().matmul(self.matrix_b(b).transpose());
        let of_b = self.matrix_a(a).transpose().matmul(of_delta);
        gradients.push((self.a, of_a.reshape([self.rows * self.rank])));
        gradients.push((self.b, of_b.reshape([self.rank * self.columns])));
        Ok(gradients)
    }

    /// Returns `base` plus the scaled product of the factors.
    fn sum(&self, base: Tensor<1>, a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
        let delta = self.matrix_a(a).matmul(self.matrix_b(b));
        let delta = delta.mul_scalar(self.scale);
        let dtype = base.dtype();
        let delta: Tensor<1> = delta.reshape([self.rows * self.columns]);
        base + delta.cast(dtype)
    }

    /// Returns a weight as a matrix in 32 bits, and the norms of its columns. The squares of 16-bit numbers may overflow.
    fn with_norms(&self, weight: Tensor<1>) -> (Tensor<2>, Tensor<2>) {
        let weight = self.matrix(weight.cast(FloatDType::F32));
        let norms = (weight.clone() * weight.clone()).sum_dim(0).sqrt();
        // A column of zeros stays zero. Other norms do not change.
        (weight, norms.add_scalar(f32::MIN_POSITIVE))
    }

    /// Returns magnitudes as a matrix of one row in 32 bits.
    fn in_row(&self, magnitudes: Tensor<1>) -> Tensor<2> {
        let row: Tensor<2> = magnitudes.reshape([1, self.columns]);
        row.cast(FloatDType::F32)
    }

    fn matrix(&self, weight: Tensor<1>) -> Tensor<2> {
        weight.reshape([self.rows, self.columns])
    }

    fn matrix_a(&self, a: Tensor<1>) -> Tensor<2> {
        a.reshape([self.rows, self.rank])
    }

    fn matrix_b(&self, b: Tensor<1>) -> Tensor<2> {
        b.reshape([self.rank, self.columns])
    }
}
