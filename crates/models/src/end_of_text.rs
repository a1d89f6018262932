//! What a folder in Hugging Face's form says of a model beside its sizes: the tokens at which it ends its text, and dropout.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::settings::read_json;
use crate::{ModelConfig, ModelError};

/// Files that may name them, the first that does so counts: as transformers does it.
const FILES: [&str; 2] = ["generation_config.json", "config.json"];

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Several(Vec<u32>),
}

/// Settings of what transformers drops out of the decoders of this crate in training.
const DROPOUTS: [&str; 4] = [
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "attention_dropout",
];

impl ModelConfig {
    /// Returns the settings of dropout above zero of a folder in Hugging Face's form, by name: `attn_pdrop`, say. The models of this
    /// crate have no dropout.
    ///
    /// # Errors
    ///
    /// If `config.json` cannot be read.
    pub fn dropouts(folder: impl AsRef<Path>) -> Result<Vec<(&'static str, f64)>, ModelError> {
        let settings = read_json(&folder.as_ref().join("config.json"))?;
        let value = |name: &&'static str| Some((*name, settings.get(*name)?.as_f64()?));
        let given = DROPOUTS.iter().filter_map(value);
        Ok(given.filter(|(_, share)| *share > 0.0).collect())
    }

    /// Returns the ids of the tokens after which a model in a folder in Hugging Face's form has no more to say: `eos_token_id` of
    /// `generation_config.json`, or of `config.json`; none if neither says so.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or has something else in their place.
    pub fn ends_of_text(folder: impl AsRef<Path>) -> Result<Vec<u32>, ModelError> {
        let present = FILES.map(|name| folder.as_ref().join(name));
        for path in present.iter().filter(|path| path.exists()) {
            let id = read_json(path)?.remove("eos_token_id");
            let ids = serde_json::from_value(id.unwrap_or(Value::Null));
            let ids: Option<Ids> = ids.map_err(|error| ModelError::MalformedConfig {
                path: path.clone(),
                problem: format!("`eos_token_id`: {error}"),
            })?;
            match ids {
                None => {}
                Some(Ids::One(id)) => return Ok(vec![id]),
                Some(Ids::Several(ids)) => return Ok(ids),
            }
        }
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_for_generation_counts_before_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let ends = || ModelConfig::ends_of_text(folder.path());
        assert!(ends().unwrap().is_empty());
        write(
            "config.json",
            r#"{"eos_token_id": 2, "model_type": "llama"}"#,
        );
        assert_eq!(ends().unwrap(), [2]);
        write("generation_config.json", r#"{"eos_token_id": null}"#);
        assert_eq!(ends().unwrap(), [2]);
        write("generation_config.json", r#"{"eos_token_id": [7, 9]}"#);
        assert_eq!(ends().unwrap(), [7, 9]);
        write("generation_config.json", r#"{"eos_token_id": "</s>"}"#);
        let error = ends().unwrap_err().to_string();
        assert!(error.contains("generation_config.json"), "{error}");
    }
}
