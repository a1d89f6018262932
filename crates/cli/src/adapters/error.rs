//! Errors about adapters.

use std::path::PathBuf;

/// An error about the adapters of a run, a step or a folder.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdapterError {
    #[error(
        "{flag}: `{target}` matches no matrix of the blocks; the nearest are {nearest}; give the end of a module's \
         name, as in peft, or a pattern of paths"
    )]
    NoMatch {
        flag: &'static str,
        target: String,
        nearest: String,
    },

    #[error("{flag}: {target}={value}; the number must be {expected}")]
    Number {
        flag: &'static str,
        target: String,
        value: f64,
        expected: &'static str,
    },

    #[error(
        "step {step} was saved with {found}, but this run trains {expected}; pass the same --lora, --lora-alpha and --base-bits"
    )]
    OtherAdapters {
        step: u64,
        found: String,
        expected: String,
    },

    #[error(
        "step {step} was saved with {found} on `{path}`, but this run trains {expected} on it; pass the same \
         --lora-targets, --lora-rank-pattern and --lora-alpha-pattern, or the same --adapter"
    )]
    OtherMatrix {
        step: u64,
        path: String,
        found: String,
        expected: String,
    },

    #[error(
        "the adapters of the step belong to weights with checksum {expected}, but the weights of --init have \
         {found}; pass the --init that they were trained with"
    )]
    OtherBase { expected: String, found: String },

    #[error(
        "{} has only adapters; pass --init FOLDER with the weights that they were trained on",
        path.display()
    )]
    Alone { path: PathBuf },

    #[error("{}: `{key}` is {value}, but {problem}", path.display())]
    Setting {
        path: PathBuf,
        key: String,
        value: String,
        problem: &'static str,
    },

    #[error("{}: {problem}", path.display())]
    Folder { path: PathBuf, problem: String },
}
