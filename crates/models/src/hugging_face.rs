//! Folders in Hugging Face's format, for every model of this crate that transformers supports.

use std::path::Path;

use serde_json::Value;

use crate::settings::{Settings, read_config};
use crate::{Gpt2, Gpt2Config, Llama, LlamaConfig, ModelConfig, ModelError, gpt2_json, llama_json};

/// The kinds of models that both transformers and this crate support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Llama,
    Gpt2,
}

impl Kind {
    /// Returns the kind that `model_type` names, or else the class, as in older files.
    fn of(settings: Settings<'_>) -> Result<Self, String> {
        if llama_json::family_of(settings)?.is_some() {
            return Ok(Self::Llama);
        }
        let gpt2 = gpt2_json::MODEL_TYPE;
        let named = settings.word(&["model_type"], "")?;
        if named == gpt2 {
            return Ok(Self::Gpt2);
        }
        let own = "write the model as your own Burn module";
        let known = format!("\"{gpt2}\", {}", llama_json::model_types());
        if !named.is_empty() {
            let hint = hint(named);
            return Err(format!(
                "`model_type` is {named:?}{hint}, which is none of {known}; {own}"
            ));
        }
        let classes = settings.given("architectures").and_then(Value::as_array);
        let mut classes = classes.into_iter().flatten().filter_map(Value::as_str);
        if classes.any(|class| class.starts_with("GPT2")) {
            Ok(Self::Gpt2)
        } else {
            Err(format!(
                "`model_type` is missing; add one of {known}, whichever applies, or {own}"
            ))
        }
    }
}

/// Describes how an unsupported model differs from a supported one, or returns an empty string.
fn hint(model_type: &str) -> &'static str {
    match model_type {
        "gemma3" => {
            " (images and text; its text model is a \"gemma3_text\", with the settings of `text_config`)"
        }
        "smollm3" => " (a Llama with layers without rotary positions, `no_rope_layers`)",
        "qwen2_moe" | "qwen3_moe" | "mixtral" | "phimoe" => " (a mixture of experts)",
        _ => "",
    }
}

impl ModelConfig {
    /// Reads the configuration of a model from the `config.json` of a folder in Hugging Face's format. The file
    /// specifies the type of the model.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or describes a model that this crate does not have; otherwise as
    /// [`LlamaConfig::from_hugging_face`] and [`Gpt2Config::from_hugging_face`].
    pub fn from_hugging_face(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        let folder = folder.as_ref();
        Ok(match read_config(folder, Kind::of, |_| Ok(()))? {
            Kind::Llama => Self::Llama(LlamaConfig::from_hugging_face(folder)?),
            Kind::Gpt2 => Self::Gpt2(Gpt2Config::from_hugging_face(folder)?),
        })
    }

    /// Returns the `config.json` of this model for a folder in Hugging Face's format, with 32-bit weights. Returns
    /// `None` if transformers does not have this kind of model.
    #[must_use]
    pub fn to_hugging_face(&self) -> Option<Value> {
        match self {
            Self::Gpt(_) => None,
            Self::Llama(config) => Some(config.to_hugging_face()),
            Self::Gpt2(config) => Some(config.to_hugging_face()),
        }
    }
}

impl Llama {
    /// Writes `config.json` and `model.safetensors` into a folder. Both transformers' `from_pretrained` and
    /// [`WeightsFile`](crate::WeightsFile) can read the model from it.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, or if the model's parameters do not match its table.
    pub fn save_hugging_face(&self, folder: impl AsRef<Path>) -> Result<(), ModelError> {
        let folder = folder.as_ref();
        write(folder, &self.config().to_hugging_face())?;
        self.save(folder.join("model.safetensors"))
    }
}

impl Gpt2 {
    /// Writes `config.json` and `model.safetensors` into a folder. Both transformers' `from_pretrained` and
    /// [`WeightsFile`](crate::WeightsFile) can read the model from it.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, or if the model's parameters do not match its table.
    pub fn save_hugging_face(&self, folder: impl AsRef<Path>) -> Result<(), ModelError> {
        let folder = folder.as_ref();
        write(folder, &self.config().to_hugging_face())?;
        self.save(folder.join("model.safetensors"))
    }
}

/// Writes `config.json` into a folder.
fn write(folder: &Path, json: &Value) -> Result<(), ModelError> {
    let path = folder.join("config.json");
    std::fs::write(&path, format!("{json:#}\n")).map_err(|source| ModelError::File { path, source })
}
