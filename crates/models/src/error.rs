//! The errors of this crate.

use std::ops::Range;
use std::path::{Path, PathBuf};

/// Name of the head in files.
pub(crate) const HEAD: &str = "lm_head.weight";

use crate::remark::Remarks;

/// An error of a model, its weights or its data.
///
/// Every message names the item at fault and gives the expected and actual values. If the remedy is not obvious, the
/// message ends with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    // === Configuration ===
    /// A size of the model is zero.
    #[error("{name} is 0; every size of the model must be at least 1")]
    ZeroSize {
        /// Name of the size, such as `layers`.
        name: &'static str,
    },

    /// A setting other than a size is out of range.
    #[error(
        "{name} is {found}; use positive, finite numbers, with the low factor below the high one"
    )]
    Nonsense {
        /// Name of the field, such as `norm_epsilon`.
        name: &'static str,
        /// The value of the field.
        found: String,
    },

    /// The number of attention heads does not divide the width of the model.
    #[error("{heads} heads do not divide dim {dim}; choose a dim that is a multiple of heads")]
    HeadsDoNotDivideDim {
        /// The requested number of heads.
        heads: usize,
        /// The requested width of the model.
        dim: usize,
    },

    /// The number of key and value heads does not divide the number of query heads.
    #[error(
        "{kv_heads} key and value heads do not divide {heads} query heads; \
         choose a number of heads that is a multiple of kv_heads"
    )]
    HeadsNotGrouped {
        /// The requested number of query heads.
        heads: usize,
        /// The requested number of key and value heads.
        kv_heads: usize,
    },

    /// The number of rotated elements of a head is odd, but rotary positions rotate pairs.
    #[error(
        "a head has {head_dim} elements, which is odd; choose a dim that gives each head an even number"
    )]
    OddHeadDim {
        /// Number of elements of a head that are rotated.
        head_dim: usize,
    },

    /// The number of parameters overflows, or there are more than 65536 layers.
    #[error(
        "the model has more parameters than fit in a usize, or more than 65536 layers; choose smaller sizes"
    )]
    TooManyParameters,

    // === Weights ===
    /// A file could not be opened, read, or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },

    /// A `config.json` or `generation_config.json` is malformed, or describes no model of this crate.
    #[error("{}: {problem}", path.display())]
    MalformedConfig {
        /// The file.
        path: PathBuf,
        /// A description of the problem.
        problem: String,
    },

    /// The file is not a well-formed safetensors file.
    #[error("{}: not a valid safetensors file: {problem}", path.display())]
    MalformedWeights {
        /// The file.
        path: PathBuf,
        /// A description of the problem.
        problem: String,
    },

    /// A folder in Hugging Face's format has no usable weights, or files that do not belong to one model.
    #[error("{}: {problem}", path.display())]
    MalformedFolder {
        /// The folder, or the faulty file in it.
        path: PathBuf,
        /// A description of the problem.
        problem: String,
    },

    /// A weights file lacks a tensor of the model.
    #[error(
        "{}: tensor {name} is missing; the model expects it with shape {expected:?}{}",
        path.display(),
        match name.as_str() {
            HEAD => ", because `tie_word_embeddings` in config.json is not true; set it to true if the head shares \
                 the embedding's table",
            _ => "",
        }
    )]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file.
        name: String,
        /// Shape that the model needs.
        expected: Vec<usize>,
    },

    /// A weights file has a tensor of the model only under a name with an additional prefix.
    #[error(
        "{}: tensor {name} is missing, but {found} is there: the names have the prefix `{prefix}`, which a wrapper \
         adds (`module.` in data-parallel training, `_orig_mod.` in torch.compile, `base_model.model.` in PEFT); \
         save the wrapped model itself, or rename the tensors",
        path.display()
    )]
    WrappedNames {
        /// The file.
        path: PathBuf,
        /// The name that the model expects.
        name: String,
        /// The name in the file.
        found: String,
        /// The prefix.
        prefix: String,
    },

    /// A weights file has a tensor that the model does not have.
    #[error("{}: tensor {name} with shape {found:?} is not part of the model{problem}", path.display())]
    UnexpectedTensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file.
        name: String,
        /// Shape of the tensor in the file.
        found: Vec<usize>,
        /// The reason and the remedy, after a colon or a semicolon.
        problem: String,
    },

    /// A tensor of a file has a different shape from the model's parameter.
    #[error("{}: tensor {name} has shape {found:?}, but the model expects {expected:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file.
        name: String,
        /// Shape that the model needs.
        expected: Vec<usize>,
        /// Shape of the tensor in the file.
        found: Vec<usize>,
    },

    /// The model does not have the requested parameter, or not all of the requested elements.
    #[error(
        "elements {range:?} of parameter {parameter} cannot be read: {}",
        match num_elements {
            Some(count) => format!("it has {count} elements"),
            None => "the model has no such parameter; use its path in the module".to_owned(),
        }
    )]
    NoParameter {
        /// Path of the parameter in the module.
        parameter: String,
        /// The requested elements.
        range: Range<usize>,
        /// The parameter's number of elements, if the parameter exists.
        num_elements: Option<usize>,
    },

    /// A tensor of a file does not have 32-bit or 16-bit floats.
    #[error("{}: tensor {name} has type {found}, but only F32, F16 and BF16 can be loaded; convert the file first", path.display())]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file.
        name: String,
        /// Type of the tensor in the file.
        found: String,
    },

    /// A module has a parameter that its model's table lacks, or has in another shape.
    #[error(
        "{}: cannot write parameter {parameter} of shape {found:?}, which is not in the model's table; write a \
         model with whole parameters that matches its configuration",
        path.display()
    )]
    UnexpectedParameter {
        /// The file.
        path: PathBuf,
        /// Path of the parameter in the module.
        parameter: String,
        /// The parameter's shape.
        found: Vec<usize>,
    },

    /// A module lacks a parameter of its model's table.
    #[error(
        "{}: the model has no parameter {parameter} of shape {expected:?} to write; write a model with whole \
         parameters that matches its configuration",
        path.display()
    )]
    MissingParameter {
        /// The file.
        path: PathBuf,
        /// Path of the parameter in the module.
        parameter: String,
        /// The parameter's expected shape.
        expected: Vec<usize>,
    },

    /// Burn's store rejected weights that had passed every check above.
    #[error("{}: {problem}", path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// The store's message.
        problem: String,
    },

    // === Data ===
    /// The path should contain text, but is neither a regular file nor a folder.
    #[error("{}: neither a regular file nor a folder; give the path of a text file or folder", path.display())]
    NotText {
        /// The path.
        path: PathBuf,
    },

    /// A text is too short to train on.
    #[error(
        "{}: at least {needed} bytes of text are needed, but {found} were found{remarks}; give a path with more \
         text",
        path.display()
    )]
    TooLittleText {
        /// The file or folder that was read.
        path: PathBuf,
        /// Number of bytes that were read.
        found: usize,
        /// Minimum number of bytes.
        needed: usize,
        /// The files and folders that were skipped.
        remarks: Remarks,
    },

    /// The sources of a crate are not among cargo's downloads.
    #[error("{}: cargo has not downloaded these sources; name a text file or folder to train on instead", path.display())]
    NoCrateSources {
        /// The folder that was searched for.
        path: PathBuf,
    },

    /// The file is not a tokenizer.
    #[error("{}: not a tokenizer: {problem}; give the tokenizer.json of a model", path.display())]
    NotATokenizer {
        /// The file.
        path: PathBuf,
        /// The reader's message.
        problem: String,
    },

    /// A tokenizer rejects a text or ids.
    #[error("{}: cannot tokenize this text: {problem}", path.display())]
    Tokenize {
        /// The tokenizer's file.
        path: PathBuf,
        /// The tokenizer's message.
        problem: String,
    },

    /// A tokenizer has ids beyond the model's vocabulary.
    #[error(
        "{}: its ids go up to {}, but the model has a vocabulary of {vocab}; give this model's tokenizer, or a \
         model with a vocabulary of at least {num_ids}",
        path.display(),
        num_ids - 1
    )]
    TooManyIds {
        /// The tokenizer's file.
        path: PathBuf,
        /// The largest id plus one.
        num_ids: usize,
        /// The model's vocabulary size.
        vocab: usize,
    },

    /// The vocabulary is too small for text that is read as bytes.
    #[error(
        "text needs a vocabulary of at least 256 tokens, one per byte, but the vocabulary has {vocab}; choose a \
         larger one, or give a tokenizer"
    )]
    VocabTooSmall {
        /// The requested vocabulary size.
        vocab: usize,
    },
}

/// Returns the error for a message of Burn's store.
pub(crate) fn store_error(path: &Path, problem: &impl ToString) -> ModelError {
    ModelError::Store {
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}
