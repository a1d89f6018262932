//! The chat template beside a tokenizer, in Hugging Face's files.

use std::fs;
use std::path::{Path, PathBuf};

use burn_fsdp_models::TextCodec;
use serde_json::Value;

use crate::error::InputError;

/// A template of its own, which takes precedence.
const TEMPLATE: &str = "chat_template.jinja";

/// Settings of a tokenizer, among them the names of its special tokens.
const SETTINGS: &str = "tokenizer_config.json";

/// The names of special tokens, where the settings do not have them.
const SPECIAL: &str = "special_tokens_map.json";

/// A chat template, and the names of special tokens that it uses.
#[derive(Debug, Clone)]
pub(crate) struct ChatFiles {
    pub(crate) template: String,
    /// The names of the tokens before and after a text; empty if there are none.
    pub(crate) special_names: [String; 2],
}

impl ChatFiles {
    /// Reads the files of a codec, which must have a tokenizer.
    pub(crate) fn of(codec: &TextCodec) -> Result<Self, InputError> {
        match codec {
            TextCodec::Tokenizer(tokenizer) => Self::beside(tokenizer.path()),
            TextCodec::Bytes => Err(InputError::ChatOfBytes),
        }
    }

    /// Reads the files in the folder of a `tokenizer.json`.
    pub(crate) fn beside(tokenizer: &Path) -> Result<Self, InputError> {
        let folder = tokenizer.parent().unwrap_or(Path::new("."));
        let (own, settings_path) = (folder.join(TEMPLATE), folder.join(SETTINGS));
        let settings = json_of(&settings_path)?;
        let template = match read(&own)? {
            Some(template) => Some(template),
            None => template_of(&settings),
        };
        let template = template.ok_or_else(|| InputError::ChatFile {
            path: own,
            problem: format!(
                "there is no such file, and {} has no `chat_template`",
                settings_path.display()
            ),
        })?;
        let map = json_of(&folder.join(SPECIAL))?;
        let special_names = ["bos_token", "eos_token"].map(|name| {
            let own = name_of(&settings[name]);
            if own.is_empty() {
                name_of(&map[name])
            } else {
                own
            }
        });
        Ok(Self {
            template,
            special_names,
        })
    }
}

/// Reads a JSON file; null if there is none.
fn json_of(path: &Path) -> Result<Value, InputError> {
    let Some(text) = read(path)? else {
        return Ok(Value::Null);
    };
    serde_json::from_str(&text).map_err(|error| InputError::ChatFile {
        path: path.to_owned(),
        problem: error.to_string(),
    })
}

/// Reads a text file, or returns `None` if there is none.
fn read(path: &Path) -> Result<Option<String>, InputError> {
    let failed = |problem: String| InputError::ChatFile {
        path: PathBuf::from(path),
        problem,
    };
    // A dangling link is an error; a pipe would wait for a writer.
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let metadata = path.metadata().map_err(|error| failed(error.to_string()))?;
    if !metadata.is_file() {
        return Err(failed("it is not a regular file".to_owned()));
    }
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    Ok(Some(text))
}

/// Returns the template in a tokenizer's settings. If there are several, it is the one named `default`.
fn template_of(settings: &Value) -> Option<String> {
    let template = match &settings["chat_template"] {
        Value::Array(named) => {
            let default = named.iter().find(|named| named["name"] == "default")?;
            default["template"].as_str()
        }
        template => template.as_str(),
    };
    template.map(str::to_owned)
}

/// Returns the text of a special token, which is a string or an object with its content.
fn name_of(token: &Value) -> String {
    let name = token.as_str().or_else(|| token["content"].as_str());
    name.unwrap_or_default().to_owned()
}
