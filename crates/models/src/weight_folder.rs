//! A folder of weights in Hugging Face's format.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ModelError;

/// The file with all weights, if there is only one.
const SINGLE_FILE: &str = "model.safetensors";

/// The index that maps tensors to files.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Maximum size of the index, the same as for a safetensors header.
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// The files of a folder, with their tensors according to the index.
#[derive(Debug)]
pub(crate) struct WeightFolder {
    path: PathBuf,
    /// Names of tensors by file, or `None` for a single file without an index.
    index: Option<BTreeMap<String, BTreeSet<String>>>,
}

#[derive(Deserialize)]
struct IndexJson {
    weight_map: BTreeMap<String, String>,
}

impl WeightFolder {
    /// Reads the index, if there is one. If a folder has both forms, the single file is used, as in transformers.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let index_path = path.join(INDEX_FILE);
        let index = if path.join(SINGLE_FILE).exists() {
            None
        } else if index_path.exists() {
            Some(read_index(&index_path)?)
        } else {
            let problem = format!(
                "the folder has neither {SINGLE_FILE} nor {INDEX_FILE}{}",
                what_is_there(path)
            );
            return Err(malformed(path, problem));
        };
        Ok(Self {
            path: path.to_owned(),
            index,
        })
    }

    /// Returns the files, in order.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        match &self.index {
            None => vec![self.path.join(SINGLE_FILE)],
            Some(index) => index.keys().map(|name| self.path.join(name)).collect(),
        }
    }

    /// Checks that a file has exactly the needed tensors that the index assigns to it. Otherwise, a tensor could be
    /// read from the wrong file.
    pub(crate) fn check<'a>(
        &self,
        file: &Path,
        found: impl Iterator<Item = &'a String>,
        is_needed: impl Fn(&str) -> bool,
    ) -> Result<(), ModelError> {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let Some(expected) = self.index.as_ref().and_then(|index| index.get(&*name)) else {
            return Ok(());
        };
        let found: BTreeSet<String> = found.cloned().collect();
        let mut apart = expected.symmetric_difference(&found);
        let Some(tensor) = apart.find(|tensor| is_needed(tensor.as_str())) else {
            return Ok(());
        };
        let problem = if expected.contains(tensor) {
            format!("it lacks tensor {tensor}, which {INDEX_FILE} lists for it")
        } else {
            format!("it has tensor {tensor}, which {INDEX_FILE} does not list for it")
        };
        Err(malformed(
            file,
            format!("{problem}; use the index and the files of one model"),
        ))
    }
}

/// Files that are not a model in safetensors: the start and the end of the name, and a description.
const OTHER_FORMS: [(&str, &str, &str); 7] = [
    ("adapter_model", "", "a PEFT adapter without its base model"),
    ("pytorch_model", ".bin", "in PyTorch's format"),
    ("pytorch_model", ".bin.index.json", "in PyTorch's format"),
    ("tf_model", ".h5", "in TensorFlow's format"),
    ("flax_model", ".msgpack", "in Flax's format"),
    ("consolidated", ".pth", "in Meta's format"),
    (
        "model-",
        ".safetensors",
        "part of a model without its index",
    ),
];

/// Describes what a folder without weights contains instead, as the rest of a sentence.
fn what_is_there(folder: &Path) -> String {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    if let Some(name) = [SINGLE_FILE, INDEX_FILE]
        .into_iter()
        .find(|name| names.iter().any(|found| found == name))
    {
        return format!("; {name} is a link to a missing file");
    }
    let known = names.iter().find_map(|name| {
        let form = OTHER_FORMS
            .iter()
            .find(|(start, end, _)| name.starts_with(start) && name.ends_with(end));
        form.map(|(_, _, form)| (name, form))
    });
    match known {
        None => String::new(),
        Some((name, form)) => format!(
            "; {name} is {form}; save the model with `save_pretrained` of transformers, which writes safetensors"
        ),
    }
}

fn read_index(path: &Path) -> Result<BTreeMap<String, BTreeSet<String>>, ModelError> {
    let file_error = |source| ModelError::File {
        path: path.to_owned(),
        source,
    };
    let metadata = path.metadata().map_err(file_error)?;
    if !metadata.is_file() {
        return Err(malformed(path, "not a regular file"));
    }
    if metadata.len() > MAX_INDEX_BYTES {
        let problem = format!(
            "it has {} bytes, but at most {MAX_INDEX_BYTES} are read",
            metadata.len()
        );
        return Err(malformed(path, problem));
    }
    let mut json = Vec::new();
    let file = File::open(path).map_err(file_error)?;
    file.take(MAX_INDEX_BYTES)
        .read_to_end(&mut json)
        .map_err(file_error)?;
    let IndexJson { weight_map } = serde_json::from_slice(&json)
        .map_err(|error| malformed(path, format!("the index is invalid: {error}")))?;
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, file) in weight_map {
        if !is_plain(&file) {
            let problem =
                format!("tensor {tensor} should be in {file:?}, which is not a plain file name");
            return Err(malformed(path, problem));
        }
        files.entry(file).or_default().insert(tensor);
    }
    Ok(files)
}

/// Returns true for a name in the folder itself that is not hidden.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0'])
}

fn malformed(path: &Path, problem: impl Into<String>) -> ModelError {
    ModelError::MalformedFolder {
        path: path.to_owned(),
        problem: problem.into(),
    }
}
