//! Settings in a Hugging Face folder other than the sizes: how the model generates text, which tokens end it, padding
//! and dropout.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::settings::read_json;
use crate::{ModelConfig, ModelError};

/// Files that may name the tokens that end a text. The first one that does takes precedence, as in transformers.
const FILES: [&str; 2] = ["generation_config.json", "config.json"];

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "it is neither a token id nor a list of token ids"
)]
enum Ids {
    One(u32),
    Several(Vec<u32>),
}

/// Dropout settings that transformers applies in training to the decoders of this crate.
const DROPOUTS: [&str; 5] = [
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "attention_dropout",
    "hidden_dropout",
];

/// Settings that make transformers choose tokens by more than their logits, the temperature and a seed. A setting has
/// no effect if it is null, false, or an empty list or object, if it is 0 and not a token id, or, for
/// [`NEUTRAL_AT_ONE`], if it is 1.
const RULES: [&str; 26] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_decoder_ids",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_beams",
    "penalty_alpha",
    "repetition_penalty",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "top_h",
    "typical_p",
    "watermarking_config",
];

/// The [`RULES`] that have no effect at 1.
const NEUTRAL_AT_ONE: [&str; 5] = [
    "encoder_repetition_penalty",
    "guidance_scale",
    "num_beams",
    "repetition_penalty",
    "typical_p",
];

impl ModelConfig {
    /// Returns the names of settings in a folder in Hugging Face's format that make transformers choose tokens
    /// differently from this crate, such as `repetition_penalty`. They are read from `generation_config.json`.
    ///
    /// # Errors
    ///
    /// If the file exists and cannot be read.
    pub fn generation_rules(folder: impl AsRef<Path>) -> Result<Vec<&'static str>, ModelError> {
        let path = folder.as_ref().join(FILES[0]);
        if !path.exists() {
            return Ok(Vec::new());
        }
        let settings = read_json(&path)?;
        let has_effect = |name: &&&str| match settings.get(**name) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Number(number)) => {
                let number = number.as_f64();
                let is_id = name.ends_with("_id");
                let is_neutral = number == Some(0.0) && !is_id
                    || number == Some(1.0) && NEUTRAL_AT_ONE.contains(*name);
                !is_neutral
            }
            Some(Value::Array(values)) => !values.is_empty(),
            Some(Value::Object(values)) => !values.is_empty(),
            Some(_) => true,
        };
        Ok(RULES.iter().filter(has_effect).copied().collect())
    }

    /// Returns the names and values of dropout settings above zero in a folder in Hugging Face's format, such as
    /// `attn_pdrop`. The models of this crate have no dropout.
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

    /// Returns the padding token of a folder in Hugging Face's format, if it also begins or ends texts and transformers
    /// does not train its embedding by lookups. This crate trains it like any other. Padding tokens that neither begin
    /// nor end texts do not occur in them. Returns `None` for GPT-2 and GPT-NeoX, whose embeddings transformers also
    /// trains as a whole.
    ///
    /// # Errors
    ///
    /// If `config.json` cannot be read.
    pub fn padding_in_text(folder: impl AsRef<Path>) -> Result<Option<u64>, ModelError> {
        let settings = read_json(&folder.as_ref().join("config.json"))?;
        let default = match settings.get("model_type").and_then(Value::as_str) {
            // Transformers trains all embeddings of these models.
            Some("gpt2" | "gpt_neox") => return Ok(None),
            // The defaults of transformers.
            Some("phi3") => json!({"pad_token_id": 32000, "eos_token_id": 32000}),
            _ => Value::Null,
        };
        let setting = |name| settings.get(name).or(default.get(name));
        let ids = |name| match setting(name) {
            Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).collect(),
            id => Vec::from_iter(id.and_then(Value::as_u64)),
        };
        let of_text = [ids("bos_token_id"), ids("eos_token_id")].concat();
        let padding = ids("pad_token_id").first().copied();
        Ok(padding.filter(|padding| of_text.contains(padding)))
    }

    /// Returns the ids of the tokens that end a text for a model in a Hugging Face folder: `eos_token_id` of
    /// `generation_config.json`, or else of `config.json`. Returns no ids if neither file has the setting.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or the setting is malformed.
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
    fn only_effective_generation_rules_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let rules = || ModelConfig::generation_rules(folder.path()).unwrap();
        assert!(rules().is_empty());
        let write = |text| std::fs::write(folder.path().join(FILES[0]), text).unwrap();
        write(
            r#"{"repetition_penalty": 1.0, "num_beams": 1, "min_length": 0, "suppress_tokens": [], "bad_words_ids": null,
                "do_sample": true, "temperature": 0.6, "eos_token_id": 2}"#,
        );
        assert!(rules().is_empty());
        write(
            r#"{"repetition_penalty": 1.8, "min_new_tokens": 1, "suppress_tokens": [3], "stop_strings": "x",
                "forced_bos_token_id": 0}"#,
        );
        let expected = [
            "forced_bos_token_id",
            "min_new_tokens",
            "repetition_penalty",
            "stop_strings",
            "suppress_tokens",
        ];
        assert_eq!(rules(), expected);
    }

    #[test]
    fn padding_that_occurs_in_texts_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        for (text, padding) in [
            (
                r#"{"model_type": "llama", "pad_token_id": 2, "eos_token_id": 2}"#,
                Some(2),
            ),
            (
                r#"{"model_type": "llama", "pad_token_id": 4, "eos_token_id": [3, 4]}"#,
                Some(4),
            ),
            (
                r#"{"model_type": "qwen2", "pad_token_id": 1, "bos_token_id": 1}"#,
                Some(1),
            ),
            (
                r#"{"model_type": "llama", "pad_token_id": 0, "eos_token_id": 2}"#,
                None,
            ),
            (r#"{"model_type": "llama", "eos_token_id": 2}"#, None),
            (r#"{"model_type": "phi3"}"#, Some(32000)),
            (r#"{"model_type": "phi3", "pad_token_id": null}"#, None),
            (
                r#"{"model_type": "gpt_neox", "pad_token_id": 2, "eos_token_id": 2}"#,
                None,
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let found = ModelConfig::padding_in_text(folder.path()).unwrap();
            assert_eq!(found, padding, "{text}");
        }
    }

    #[test]
    fn the_generation_config_takes_precedence() {
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
