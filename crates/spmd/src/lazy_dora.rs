//! Adapters with magnitudes, on parameters that stay lazy.

use burn::module::{
    Lora, LoraAdapter, Module, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn::tensor::{DType, Device, Shape, Tensor};

use crate::lazy_lora::LazyLora;

/// Weight-decomposed adapters (Liu et al., "DoRA", arXiv 2402.09353; `use_dora` in peft), attached lazily as by
/// [`LazyLora`].
///
/// The effective weight is `base + alpha / rank * (a @ b)`, with each column divided by its norm and multiplied by its
/// magnitude. As in the paper, the norm counts as a constant in backward. The magnitudes start as the norms of the
/// columns of the base. If you read the base from a file ([`compile_from`](crate::compile_from())), also read the
/// magnitudes.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_fsdp_spmd::LazyDora;
///
/// let model = LinearConfig::new(64, 32).init(&Device::flex());
/// let model = model.apply_reparameterization(LazyDora::new(Lora::new(4, 8.0)));
/// // The matrix, the bias, two factors and the magnitudes.
/// assert_eq!(model.num_params(), 64 * 32 + 32 + 4 * (64 + 32) + 32);
/// ```
#[derive(Debug, Clone)]
pub struct LazyDora(LazyLora);

impl LazyDora {
    /// Creates adapters with one configuration.
    #[must_use]
    pub fn new(lora: Lora) -> Self {
        Self(LazyLora::new(lora))
    }

    /// Adds another group of parameters, as [`LazyLora::and`] does.
    #[must_use]
    pub fn and(self, lora: Lora) -> Self {
        Self(self.0.and(lora))
    }
}

/// The adapter that [`LazyDora`] attaches. Its parameters have the paths `lora.a`, `lora.b` and `lora.magnitude`.
#[derive(Debug, Module)]
pub struct DoraAdapter {
    /// The factor of shape `[in, rank]`.
    pub a: Param<Tensor<2>>,
    /// The factor of shape `[rank, out]`.
    pub b: Param<Tensor<2>>,
    /// The norms of the columns, of shape `[out]`.
    pub magnitude: Param<Tensor<1>>,
    /// The scale of the factors' product, alpha / rank.
    pub scale: f64,
}

impl Reparameterization for DoraAdapter {
    const NAME: &'static str = LoraAdapter::NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let (dtype, shape) = (base.dtype(), base.shape());
        let delta = self.a.val().matmul(self.b.val()).mul_scalar(self.scale);
        let delta: Tensor<D> = delta.reshape(shape.clone());
        // The squares of 16-bit numbers may overflow.
        let sum = cast(base + cast(delta, dtype), DType::F32);
        let sum: Tensor<2> = sum.reshape([shape[0], shape[1]]);
        let norms = norms(sum.clone()).detach();
        let magnitudes: Tensor<2> = cast(self.magnitude.val(), DType::F32).reshape([1, shape[1]]);
        cast((sum * (magnitudes / norms)).reshape(shape), dtype)
    }
}

/// Casts a tensor, without an operation if it has the type.
fn cast<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        tensor.cast(dtype)
    }
}

/// Returns the norms of the columns of a matrix, as a matrix of one row.
fn norms(matrix: Tensor<2>) -> Tensor<2> {
    let norms = (matrix.clone() * matrix).sum_dim(0).sqrt();
    // A column of zeros stays zero. Other norms do not change.
    norms.add_scalar(f32::MIN_POSITIVE)
}

impl Reparameterizer for LazyDora {
    type Reparam = DoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<DoraAdapter>) {
        // A lazy clone is initialized together with the parameter.
        let base = param.clone();
        let (param, adapter) = self.0.reparameterize(path, param);
        let adapter = adapter.map(|LoraAdapter { a, b, scale }| {
            let columns = b.lazy_shape()[1];
            let dtype = b.is_initialized().then(|| b.base().dtype());
            let make = move |device: &Device, is_trained: bool| {
                let base = base.base();
                let (dtype, shape) = (dtype.unwrap_or(base.dtype()), base.shape());
                let base: Tensor<2> = cast(base, DType::F32).reshape([shape[0], shape[1]]);
                let norms: Tensor<1> = norms(base).reshape([columns]);
                let values = cast(norms, dtype).to_device(device).detach();
                values.set_require_grad(is_trained)
            };
            let device = b.lazy_device();
            let shape = Shape::from([columns]);
            DoraAdapter {
                a,
                b,
                magnitude: Param::uninitialized(ParamId::new(), make, device, true, shape),
                scale,
            }
        });
        (param, adapter)
    }
}
