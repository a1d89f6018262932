//! Adapters on parameters that stay lazy.

use burn::module::{Lora, LoraAdapter, Param, ParamId, Reparameterizer};
use burn::tensor::{Device, Distribution, FloatDType, Shape, Tensor};

/// Burn's [`Lora`] for a module whose parameters are lazy, such as the one that `init` of [`compile`](crate::compile())
/// creates. Burn's `apply_lora` initializes every matrix to read its shape. This type leaves the matrices lazy, and its
/// factors are also lazy: each is drawn when it is first used.
///
/// If parameters are initialized in module order, as by `compile`, the factors are the same as those of `apply_lora`,
/// unless something else draws from Burn's generator in between, such as a lazy bias. Factors of a weight that is still
/// lazy have the device's default type, unless the configuration specifies another.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_fsdp_spmd::LazyLora;
///
/// let model = LinearConfig::new(64, 64).init(&Device::flex());
/// let model = model.apply_reparameterization(LazyLora::new(Lora::new(4, 8.0)));
/// assert!(!model.weight.is_initialized());
/// ```
#[derive(Debug, Clone)]
pub struct LazyLora {
    /// The last group that matches a parameter adapts it.
    groups: Vec<Lora>,
}

impl LazyLora {
    /// Creates adapters with one configuration.
    #[must_use]
    pub fn new(lora: Lora) -> Self {
        Self { groups: vec![lora] }
    }

    /// Adds another group of parameters, which may have another rank and alpha. If the groups of two configurations
    /// match a parameter, the later one wins, as in the policy of the eager engine.
    #[must_use]
    pub fn and(mut self, lora: Lora) -> Self {
        self.groups.push(lora);
        self
    }
}

impl Reparameterizer for LazyLora {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let mut groups = self.groups.iter().rev().filter(|_| D == 2);
        let lora = groups.find(|lora| lora.param_group.matches(&param.id, Some(path)));
        let Some(lora) = lora else {
            return (param.set_require_grad(false), None);
        };
        let (device, shape) = (param.lazy_device(), shape_of(&param));
        let made = param.is_initialized().then(|| param.base().dtype());
        let own = made.filter(|dtype| dtype.is_float()).map(FloatDType::from);
        let dtype = lora.dtype.or(own);
        let std = lora.init_std.unwrap_or(1.0 / lora.rank as f64);
        let factor = |shape: [usize; 2], std: Option<f64>| {
            let make = move |device: &Device, is_trained: bool| {
                device.memory_persistent_allocations((), |()| {
                    let values: Tensor<2> = match std {
                        Some(std) => Tensor::random(shape, Distribution::Normal(0.0, std), device),
                        None => Tensor::zeros(shape, device),
                    };
                    let values = match dtype {
                        Some(dtype) => values.cast(dtype),
                        None => values,
                    };
                    values.set_require_grad(is_trained)
                })
            };
            Param::uninitialized(
                ParamId::new(),
                make,
                device.clone(),
                true,
                Shape::from(shape),
            )
        };
        let adapter = LoraAdapter {
            a: factor([shape[0], lora.rank], Some(std)),
            b: factor([lora.rank, shape[1]], None),
            scale: lora.alpha / lora.rank as f64,
        };
        (param.set_require_grad(false), Some(adapter))
    }
}

/// Returns the in-memory shape of a parameter without initializing it. A lazy parameter only stores its shape in
/// records, which may differ, for example in linear layers by columns.
fn shape_of<const D: usize>(param: &Param<Tensor<D>>) -> Shape {
    if param.is_initialized() {
        return param.base().shape();
    }
    let one = Tensor::<D>::zeros([1; D], &param.lazy_device());
    let stored = one.expand(param.lazy_shape());
    let loaded = param.clone().transform_for_load(stored, param.id);
    loaded.base().shape()
}
