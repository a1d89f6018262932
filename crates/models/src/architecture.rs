//! The trait that all models have in common, and the sizes of any model.

use burn::store::ModuleSnapshot;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::initial::InitialValues;
use crate::{Gpt, Gpt2, Gpt2Config, GptConfig, Llama, LlamaConfig, ModelError, ParameterSpec};

/// The sizes of a model: what is needed to make it, and to know its files.
pub trait Architecture: Copy {
    /// The Burn module.
    type Model: ModuleSnapshot;

    /// Builds the model on a device.
    ///
    /// # Errors
    ///
    /// If such a model cannot exist.
    fn init(&self, device: &Device, seed: u64) -> Result<Self::Model, ModelError>;

    /// Builds the model on a device with zeros for matrices, where its weights are read later.
    ///
    /// # Errors
    ///
    /// If such a model cannot exist.
    fn blank(&self, device: &Device) -> Result<Self::Model, ModelError>;

    /// Checks that such a model can exist.
    ///
    /// # Errors
    ///
    /// If a size is at fault.
    fn validate(&self) -> Result<(), ModelError>;

    /// Returns the table of its parameters.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// Returns the table's name of a tensor that a file names `name`; `None` for one that files may have beside the
    /// parameters.
    fn name_of(&self, name: String) -> Option<String> {
        Some(name)
    }
}

impl Architecture for GptConfig {
    type Model = Gpt;

    fn init(&self, device: &Device, seed: u64) -> Result<Gpt, ModelError> {
        Self::init(self, device, seed)
    }

    fn blank(&self, device: &Device) -> Result<Gpt, ModelError> {
        self.built(InitialValues::zeros(device))
    }

    fn validate(&self) -> Result<(), ModelError> {
        Self::validate(self)
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Self::parameters(self)
    }
}

impl Architecture for Gpt2Config {
    type Model = Gpt2;

    fn init(&self, device: &Device, seed: u64) -> Result<Gpt2, ModelError> {
        Self::init(self, device, seed)
    }

    fn blank(&self, device: &Device) -> Result<Gpt2, ModelError> {
        self.built(InitialValues::zeros(device))
    }

    fn validate(&self) -> Result<(), ModelError> {
        Self::validate(self)
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Self::parameters(self)
    }

    /// The first published files have the names of the bare model, and the masks of the attention.
    fn name_of(&self, name: String) -> Option<String> {
        if name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") {
            return None;
        }
        let is_bare = ["wte.", "wpe.", "h.", "ln_f."]
            .iter()
            .any(|start| name.starts_with(start));
        Some(match is_bare {
            true => format!("transformer.{name}"),
            false => name,
        })
    }
}

impl Architecture for LlamaConfig {
    type Model = Llama;

    fn init(&self, device: &Device, seed: u64) -> Result<Llama, ModelError> {
        Self::init(self, device, seed)
    }

    fn blank(&self, device: &Device) -> Result<Llama, ModelError> {
        self.built(InitialValues::zeros(device))
    }

    fn validate(&self) -> Result<(), ModelError> {
        Self::validate(self)
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Self::parameters(self)
    }
}

/// The sizes of any model of this crate, as a saved run has them: each kind is known by its sizes'
/// names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum ModelConfig {
    /// A GPT.
    Gpt(GptConfig),
    /// A Llama.
    Llama(LlamaConfig),
}

impl ModelConfig {
    /// Returns the usual name of the model's kind.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Gpt(_) => "GPT",
            Self::Llama(_) => "Llama",
        }
    }

    /// Returns the number of transformer blocks.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        match self {
            Self::Gpt(config) => config.layers,
            Self::Llama(config) => config.layers,
        }
    }

    /// Returns the table of its parameters.
    ///
    /// # Errors
    ///
    /// If such a model cannot exist.
    pub fn parameters(&self) -> Result<Vec<ParameterSpec>, ModelError> {
        match self {
            Self::Gpt(config) => config.validate().map(|()| config.parameters()),
            Self::Llama(config) => config.validate().map(|()| config.parameters()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_known_by_its_fields() {
        let gpt = GptConfig::gpt_7b();
        let llama = LlamaConfig::preset("7b").expect("a preset");
        for (json, want) in [
            (serde_json::json!(gpt), Some(ModelConfig::Gpt(gpt))),
            (serde_json::json!(llama), Some(ModelConfig::Llama(llama))),
            (serde_json::json!({"layers": 3}), None),
            (serde_json::Value::Null, None),
        ] {
            assert_eq!(serde_json::from_value(json).ok(), want);
        }
    }
}
