//! The adapted matrices of a model, and the ranks and scales of their adapters.

use std::collections::BTreeMap;

use burn::module::{Lora, Module, ParamGroup};
use burn_fsdp::ShardPolicy;
use burn_fsdp::internals::compile::{LazyDora, LazyLora};
use burn_fsdp::internals::sharding::BaseBits;
use burn_fsdp_models::{Architecture, ModelConfig, ModelError, ParameterSpec};
use serde::{Deserialize, Serialize};

use crate::args::BaseBitsArg;

/// The matrices that adapters adapt, with ranks and alphas.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdapterSizes {
    /// Rank: the dimension between the two factors of an adapter.
    pub(crate) rank: usize,
    /// LoRA alpha, from which the scale of the factors' product is computed.
    pub(crate) alpha: f64,
    #[serde(default, skip_serializing_if = "Scaling::is_usual")]
    pub(crate) scaling: Scaling,
    #[serde(default, skip_serializing_if = "Method::is_usual")]
    pub(crate) method: Method,
    /// The bits of the adapted matrices, if they do not keep their type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base_bits: Option<BaseBitsArg>,
    /// The adapted matrices by path; `None` for all matrices of the blocks, with the rank and alpha above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    matrices: Option<BTreeMap<String, MatrixSizes>>,
}

/// The rank and alpha of one matrix's adapter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct MatrixSizes {
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
}

/// What is trained in addition to the factors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Method {
    /// Nothing.
    #[default]
    Lora,
    /// A magnitude for each output (DoRA: Liu et al., arXiv 2402.09353).
    Dora,
}

impl Method {
    fn is_usual(&self) -> bool {
        *self == Self::Lora
    }
}

/// The scale of the product of an adapter's factors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Scaling {
    /// Alpha divided by the rank.
    #[default]
    ByRank,
    /// Alpha divided by the square root of the rank: rsLoRA (Kalajdzievski, arXiv 2312.03732).
    ByRootOfRank,
}

impl Scaling {
    fn is_usual(&self) -> bool {
        *self == Self::ByRank
    }

    fn scale(self, sizes: MatrixSizes) -> f64 {
        let rank = sizes.rank as f64;
        match self {
            Self::ByRank => sizes.alpha / rank,
            Self::ByRootOfRank => sizes.alpha / rank.sqrt(),
        }
    }
}

impl AdapterSizes {
    /// Describes adapters of `matrices` of a model whose blocks have the matrices `all`.
    pub(crate) fn new(
        usual: MatrixSizes,
        (scaling, method): (Scaling, Method),
        matrices: BTreeMap<String, MatrixSizes>,
        all: &[ParameterSpec],
    ) -> Self {
        let is_usual = |spec: &ParameterSpec| matrices.get(&spec.path) == Some(&usual);
        let are_usual = matrices.len() == all.len() && all.iter().all(is_usual);
        Self {
            rank: usual.rank,
            alpha: usual.alpha,
            scaling,
            method,
            base_bits: None,
            matrices: (!are_usual).then_some(matrices),
        }
    }

    /// Returns the same adapters on matrices in these bits.
    pub(crate) fn on_base(self, base_bits: Option<BaseBitsArg>) -> Self {
        Self { base_bits, ..self }
    }

    /// Returns the bits of the adapted matrices, if they do not keep their type.
    pub(crate) fn base_bits(&self) -> Option<BaseBitsArg> {
        self.base_bits
    }

    /// Returns the values of a parameter of the model, from a file, as the adapters are trained on them. `values` are
    /// all of its elements.
    pub(crate) fn as_trained_on<A: Architecture>(
        &self,
        spec: &ParameterSpec,
        values: Vec<f32>,
    ) -> Vec<f32> {
        let is_adapted = is_adaptable::<A>(spec) && self.of(&spec.path).is_some();
        match self.base_bits.filter(|_| is_adapted) {
            Some(bits) => BaseBits::from(bits).rounded(&values),
            None => values,
        }
    }

    /// Returns the rank and alpha of the adapter of the matrix at `path` in the blocks, if it has one.
    pub(crate) fn of(&self, path: &str) -> Option<MatrixSizes> {
        let usual = MatrixSizes {
            rank: self.rank,
            alpha: self.alpha,
        };
        match &self.matrices {
            None => Some(usual),
            Some(matrices) => matrices.get(path).copied(),
        }
    }

    /// Returns the scale of the product of the factors at the matrix `path`.
    pub(crate) fn scale_of(&self, path: &str) -> Option<f64> {
        Some(self.scaling.scale(self.of(path)?))
    }

    /// Returns the path of the first matrix of a model on which two descriptions differ.
    pub(crate) fn first_difference(&self, other: &Self, model: &ModelConfig) -> Option<String> {
        let all = matrices_of(model).ok()?;
        let mut paths = all.into_iter().map(|spec| spec.path);
        paths.find(|path| self.of(path) != other.of(path))
    }

    /// Returns true if every rank is from 1 to the model's width, every alpha is positive and finite, and all adapted
    /// matrices are in the blocks of the model.
    pub(crate) fn is_valid(&self, model: &ModelConfig) -> bool {
        let Ok(all) = matrices_of(model) else {
            return false;
        };
        let is_valid = |sizes: MatrixSizes| {
            let has_alpha = sizes.alpha.is_finite() && sizes.alpha > 0.0;
            has_alpha && (1..=model.dim()).contains(&sizes.rank)
        };
        let adapted: Vec<_> = all.iter().filter_map(|spec| self.of(&spec.path)).collect();
        let number = self.matrices.as_ref().map_or(all.len(), BTreeMap::len);
        number > 0 && adapted.len() == number && adapted.into_iter().all(is_valid)
    }

    /// Returns Burn's configurations, which match different matrices. They scale by alpha / rank.
    fn lora<A: Architecture>(&self, model: A) -> Vec<Lora> {
        let mut groups: Vec<(MatrixSizes, Vec<String>)> = Vec::new();
        for spec in matrices(model) {
            let Some(sizes) = self.of(&spec.path) else {
                continue;
            };
            match groups.iter_mut().find(|(group, _)| *group == sizes) {
                Some((_, paths)) => paths.push(spec.path),
                None => groups.push((sizes, vec![spec.path])),
            }
        }
        let lora = |(sizes, paths): (MatrixSizes, Vec<String>)| {
            let alpha = match self.scaling {
                Scaling::ByRank => sizes.alpha,
                Scaling::ByRootOfRank => self.scaling.scale(sizes) * sizes.rank as f64,
            };
            Lora::new(sizes.rank, alpha).set_param_group(ParamGroup::from_paths(paths))
        };
        groups.into_iter().map(lora).collect()
    }

    /// Returns a policy that attaches the adapters.
    pub(crate) fn attached_by<A: Architecture>(
        &self,
        policy: ShardPolicy,
        model: A,
    ) -> ShardPolicy {
        let attach = match self.method {
            Method::Lora => ShardPolicy::lora,
            Method::Dora => ShardPolicy::dora,
        };
        let policy = self.lora(model).into_iter().fold(policy, attach);
        match self.base_bits {
            Some(bits) => policy.base_in(bits.into()),
            None => policy,
        }
    }

    /// Returns a lazy model with the adapters. It stays lazy.
    pub(crate) fn attached_to<A: Architecture>(&self, lazy: A::Model, model: A) -> A::Model {
        let mut groups = self.lora(model).into_iter();
        let Some(first) = groups.next() else {
            return lazy;
        };
        match self.method {
            Method::Lora => {
                let adapters = groups.fold(LazyLora::new(first), LazyLora::and);
                lazy.apply_reparameterization(adapters)
            }
            Method::Dora => {
                let adapters = groups.fold(LazyDora::new(first), LazyDora::and);
                lazy.apply_reparameterization(adapters)
            }
        }
    }

    /// Returns the number of elements of all factors and magnitudes.
    pub(crate) fn num_params<A: Architecture>(&self, model: A) -> usize {
        let elements = matrices(model).into_iter().filter_map(|spec| {
            let sides: usize = spec.shape.iter().sum();
            let magnitudes = match self.method {
                Method::Lora => 0,
                Method::Dora => spec.module_shape()[1],
            };
            Some(self.of(&spec.path)?.rank * sides + magnitudes)
        });
        elements.sum()
    }
}

/// Returns the matrices in the blocks of a model, which adapters can adapt.
pub(crate) fn matrices<A: Architecture>(model: A) -> Vec<ParameterSpec> {
    let table = model.parameters().into_iter();
    table.filter(is_adaptable::<A>).collect()
}

/// Returns true for a matrix in a block.
fn is_adaptable<A: Architecture>(spec: &ParameterSpec) -> bool {
    let blocks = A::BLOCKS.trim_end_matches('*');
    spec.path.starts_with(blocks) && spec.shape.len() == 2
}

/// Returns the matrices in the blocks of a model, after checking its sizes.
pub(crate) fn matrices_of(model: &ModelConfig) -> Result<Vec<ParameterSpec>, ModelError> {
    model.validate()?;
    Ok(match *model {
        ModelConfig::Gpt(sizes) => matrices(sizes),
        ModelConfig::Llama(sizes) => matrices(sizes),
        ModelConfig::Gpt2(sizes) => matrices(sizes),
    })
}
