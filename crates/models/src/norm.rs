//! The norms of the models.

use burn::module::{Module, Param};
use burn::nn::{Initializer, LayerNorm, LayerNormConfig};
use burn::tensor::{DType, Device, Tensor};

use crate::LlamaConfig;
use crate::family::NormForm;

/// The number added to the variance, which prevents a division by zero for constant rows.
pub(crate) const EPSILON: f64 = 1e-5;

/// Returns a layer norm with scales of one and offsets of zero.
pub(crate) fn init(dim: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(dim).with_epsilon(EPSILON).init(device)
}

/// Normalizes rows to mean zero and variance one, then applies the scale and shift parameters.
pub(crate) fn layer_norm(norm: &LayerNorm, x: Tensor<2>) -> Tensor<2> {
    burn_fsdp_kernels::layer_norm(norm, EPSILON, x)
}

/// A norm of the family of a [`Llama`](crate::Llama).
#[derive(Module, Debug)]
pub(crate) struct Norm {
    /// The scale.
    gamma: Param<Tensor<1>>,
    /// The offset of a layer norm.
    beta: Option<Param<Tensor<1>>>,
    #[module(skip)]
    form: NormForm,
    #[module(skip)]
    epsilon: f64,
}

impl Norm {
    /// Creates a norm for rows of `dim` elements, with parameters that leave normalized rows unchanged.
    pub(crate) fn new(config: &LlamaConfig, dim: usize, device: &Device) -> Self {
        let form = config.variant.family.norm();
        let (gamma, beta) = match form {
            NormForm::RootMeanSquare => (Initializer::Ones, None),
            NormForm::OnePlusScale => (Initializer::Zeros, None),
            NormForm::Layer => (Initializer::Ones, Some(Initializer::Zeros)),
        };
        Self {
            gamma: gamma.init([dim], device),
            beta: beta.map(|beta| beta.init([dim], device)),
            form,
            epsilon: config.variant.norm_epsilon,
        }
    }

    /// Normalizes rows `[.., dim]`.
    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let dtype = x.dtype();
        if let Some(beta) = &self.beta {
            let shape = x.shape();
            let rows = x.flatten::<2>(0, D - 2);
            let factors = [self.gamma.val(), beta.val()];
            return burn_fsdp_kernels::layer_norm_of(factors, self.epsilon, rows).reshape(shape);
        }
        // As in Burn and transformers, only the mean has 32 bits.
        let squares = x.clone().cast(DType::F32).square();
        let rms = (squares.mean_dim(D - 1) + self.epsilon).sqrt();
        let normal = x / rms.cast(dtype);
        let scaled = normal.clone() * self.gamma.val().unsqueeze();
        match self.form {
            // Not `normal * (gamma + 1)`: the sum would be another value derived from a gathered weight.
            NormForm::OnePlusScale => normal + scaled,
            NormForm::RootMeanSquare | NormForm::Layer => scaled,
        }
    }
}
