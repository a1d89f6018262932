//! Named model configurations.

use burn_fsdp::internals::plan::Transformer;
use burn_fsdp_models::{GptConfig, LlamaConfig};

use crate::args::ModelArg;
use crate::error::InputError;

/// A named configuration.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::large_enum_variant, reason = "configurations are `Copy`")]
pub(crate) enum Preset {
    Gpt(GptConfig),
    Llama(LlamaConfig),
}

impl Preset {
    pub(crate) fn named(model: ModelArg, name: &str) -> Result<Self, InputError> {
        let lower = name.to_ascii_lowercase();
        let (found, what, known) = match model {
            ModelArg::Gpt => (
                GptConfig::preset(&lower).map(Self::Gpt),
                "gpt preset",
                GptConfig::PRESETS.join(", "),
            ),
            ModelArg::Llama => (
                LlamaConfig::preset(&lower).map(Self::Llama),
                "llama preset",
                LlamaConfig::PRESETS.join(", "),
            ),
        };
        found.ok_or_else(|| InputError::UnknownName {
            what,
            name: name.to_owned(),
            known,
        })
    }

    /// Returns the maximum sequence length in tokens.
    pub(crate) fn seq(&self) -> usize {
        match self {
            Self::Gpt(config) => config.seq,
            Self::Llama(config) => config.seq,
        }
    }

    /// Returns the same model with this number of blocks.
    pub(crate) fn with_layers(self, layers: usize) -> Self {
        match self {
            Self::Gpt(config) => Self::Gpt(GptConfig { layers, ..config }),
            Self::Llama(config) => Self::Llama(LlamaConfig { layers, ..config }),
        }
    }

    /// Returns the same model with tiny dims, for a proof.
    pub(crate) fn narrow(self) -> Self {
        match self {
            Self::Gpt(config) => Self::Gpt(GptConfig {
                vocab: 13,
                seq: 4,
                heads: 2,
                dim: 8,
                ..config
            }),
            Self::Llama(config) => Self::Llama(LlamaConfig {
                vocab: 13,
                seq: 4,
                heads: 2,
                kv_heads: 1,
                dim: 8,
                hidden: 12,
                ..config
            }),
        }
    }

    /// Returns the model's sizes for the planning formulas.
    pub(crate) fn transformer(&self, name: &str) -> Transformer {
        match *self {
            Self::Gpt(config) => gpt(&config, &format!("gpt {name}")),
            Self::Llama(config) => llama(&config, &format!("llama {name}")),
        }
    }
}

pub(crate) fn gpt(config: &GptConfig, name: &str) -> Transformer {
    Transformer {
        name: name.to_owned(),
        layers: config.layers,
        dim: config.dim,
        heads: config.heads,
        kv_heads: config.heads,
        hidden: 4 * config.dim,
        is_gated: false,
        has_bias: true,
        vocab: config.vocab,
        positions: config.seq,
    }
}

pub(crate) fn llama(config: &LlamaConfig, name: &str) -> Transformer {
    Transformer {
        name: name.to_owned(),
        layers: config.layers,
        dim: config.dim,
        heads: config.heads,
        kv_heads: config.kv_heads,
        hidden: config.hidden,
        is_gated: true,
        has_bias: false,
        vocab: config.vocab,
        positions: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_count_the_parameters_that_the_models_have() {
        for name in GptConfig::PRESETS {
            let config = GptConfig::preset(name).unwrap();
            assert_eq!(gpt(&config, name).num_params(), config.num_params() as u64);
        }
        for name in LlamaConfig::PRESETS {
            let config = LlamaConfig::preset(name).unwrap();
            assert_eq!(
                llama(&config, name).num_params(),
                config.num_params() as u64
            );
        }
    }
}
