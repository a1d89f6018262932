//! The tokenizer, generation settings and token ids of a Hugging Face folder, which are copied with a model.

use std::fs;
use std::path::Path;

use burn_fsdp_models::ModelConfig;
use serde_json::Value;

use crate::error::InputError;

/// The token ids in a `config.json`.
const IDS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// Names of the files to copy, or prefixes of their names.
const FILES: [&str; 8] = [
    "added_tokens.json",
    "chat_template.",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer",
    "vocab.",
];

/// The copied files of a folder, and the token ids of its `config.json`.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// Names and contents, sorted by name.
    pub(crate) files: Vec<(String, Vec<u8>)>,
    ids: Vec<(&'static str, Value)>,
}

/// Returns JSON as the text of a file.
pub(super) fn text_of(json: &Value) -> Vec<u8> {
    format!("{json:#}\n").into_bytes()
}

impl Beside {
    /// Reads a folder whose model must have the same sizes as `model`. Token ids of another model would be wrong for
    /// it.
    pub(crate) fn of(model: &ModelConfig, folder: &Path) -> Result<Self, InputError> {
        let unfit = |problem: String| InputError::Beside {
            path: folder.to_owned(),
            problem,
        };
        let found = ModelConfig::from_hugging_face(folder);
        let found = found.map_err(|error| unfit(error.to_string()))?;
        if found != *model {
            let found = found.name();
            return Err(unfit(format!(
                "its {found} has different sizes from the step's model"
            )));
        }
        Self::read(folder)
    }

    fn read(folder: &Path) -> Result<Self, InputError> {
        let unread = |path: &Path, problem: String| InputError::Beside {
            path: path.to_owned(),
            problem: format!("cannot be read: {problem}"),
        };
        let config = folder.join("config.json");
        let text = fs::read(&config).map_err(|error| unread(&config, error.to_string()))?;
        let json: Value =
            serde_json::from_slice(&text).map_err(|error| unread(&config, error.to_string()))?;
        let ids = IDS.into_iter();
        let ids = ids.filter_map(|name| Some((name, json.get(name)?.clone())));
        let mut beside = Self {
            ids: ids.collect(),
            files: Vec::new(),
        };
        let entries = fs::read_dir(folder).map_err(|error| unread(folder, error.to_string()))?;
        for entry in entries {
            let path = entry
                .map_err(|error| unread(folder, error.to_string()))?
                .path();
            let name = path.file_name().and_then(|name| name.to_str());
            let is_beside = |name: &&str| FILES.iter().any(|file| name.starts_with(file));
            let Some(name) = name.filter(is_beside).filter(|_| path.is_file()) else {
                continue;
            };
            let bytes = fs::read(&path).map_err(|error| unread(&path, error.to_string()))?;
            beside.files.push((name.to_owned(), bytes));
        }
        beside.files.sort();
        Ok(beside)
    }

    /// Adds the token ids to a `config.json` that already has the sizes.
    pub(crate) fn complete(&self, config: &mut Value) {
        if let Some(config) = config.as_object_mut() {
            for (name, id) in &self.ids {
                config.insert((*name).to_owned(), id.clone());
            }
        }
    }
}
