//! The tokens at which a model of Hugging Face's ends its text.

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

impl ModelConfig {
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
