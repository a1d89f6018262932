//! The errors of this crate.

use std::ops::Range;
use std::path::{Path, PathBuf};

/// Name of the head in files.
pub(crate) const HEAD: &str = "lm_head.weight";

use crate::remark::Remarks;

/// The errors of a model, its weights or its data.
///
/// Every message names the thing at fault, says what was expected and what was
/// found, and ends with what to do about it where that is not obvious.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    // === Configuration ===
    /// A size of the model that is zero.
    #[error("{name} is 0; every size of the model must be at least 1")]
    ZeroSize {
        /// Name of the size, such as `layers`.
        name: &'static str,
    },

    /// A number beside the sizes that makes no sense.
    #[error(
        "{name} is {found}; expected positive, finite numbers, a low factor below the high one"
    )]
    Nonsense {
        /// Name of the field, such as `norm_epsilon`.
        name: &'static str,
        /// Its value.
        found: String,
    },

    /// A number of attention heads that does not divide the width of the model.
    #[error("{heads} heads do not divide dim {dim}; choose a dim that is a multiple of heads")]
    HeadsDoNotDivideDim {
        /// Number of heads asked for.
        heads: usize,
        /// Width of the model asked for.
        dim: usize,
    },

    /// A number of key and value heads that does not divide that of the query heads.
    #[error(
        "{kv_heads} key and value heads do not divide {heads} query heads; \
         choose a number of heads that is a multiple of kv_heads"
    )]
    HeadsNotGrouped {
        /// Number of query heads asked for.
        heads: usize,
        /// Number of key and value heads asked for.
        kv_heads: usize,
    },

    /// A head of an odd number of elements, of which rotary positions turn pairs.
    #[error(
        "a head has {head_dim} elements, an odd number; choose a dim of an even number for each head"
    )]
    OddHeadDim {
        /// Elements of a head: `dim / heads`.
        head_dim: usize,
    },

    /// Sizes so large that the parameters cannot be counted.
    #[error(
        "the model has more parameters than this machine can count, or more than 65536 layers; choose smaller sizes"
    )]
    TooManyParameters,

    // === Weights ===
    /// A file that could not be opened, read, or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason given by the operating system.
        source: std::io::Error,
    },

    /// A `config.json` that is not one of a model that this crate has.
    #[error("{}: {problem}", path.display())]
    MalformedConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// A file that is not a well-formed safetensors file.
    #[error("{}: not a valid safetensors file: {problem}", path.display())]
    MalformedWeights {
        /// The file.
        path: PathBuf,
        /// The reason why it is not well-formed.
        problem: String,
    },

    /// A folder in Hugging Face's form whose files are not those of one model.
    #[error("{}: {problem}", path.display())]
    MalformedFolder {
        /// The folder, or the file in it that is at fault.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// A tensor of the model that a file of weights lacks.
    #[error(
        "{}: tensor {name} is missing; the model expects it with shape {expected:?}{}",
        path.display(),
        match name.as_str() {
            HEAD => ", as `tie_word_embeddings` of config.json is not true; set it where the head is the table of the embedding",
            _ => "",
        }
    )]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file's naming.
        name: String,
        /// Shape that the model needs.
        expected: Vec<usize>,
    },

    /// A file of weights whose names all begin with something that the model's names do not.
    #[error(
        "{}: tensor {name} is missing, but {found} is there: `{prefix}` is in front of the names, as where a model is saved inside \
         of another (`module.` of data parallel training, `_orig_mod.` of torch.compile, `base_model.model.` of PEFT); save the \
         model itself, or rename the tensors",
        path.display()
    )]
    WrappedNames {
        /// The file.
        path: PathBuf,
        /// Name that the model expects.
        name: String,
        /// Name in the file.
        found: String,
        /// What is in front of it.
        prefix: String,
    },

    /// A tensor of a file of weights that the model does not have.
    #[error("{}: tensor {name} with shape {found:?} is not part of the model{problem}", path.display())]
    UnexpectedTensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file's naming.
        name: String,
        /// Shape of the tensor in the file.
        found: Vec<usize>,
        /// The reason, and what to do, behind a colon or a semicolon.
        problem: String,
    },

    /// A tensor of a file with another shape than the model's.
    #[error("{}: tensor {name} has shape {found:?}, the model expects {expected:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file's naming.
        name: String,
        /// Shape that the model needs.
        expected: Vec<usize>,
        /// Shape of the tensor in the file.
        found: Vec<usize>,
    },

    /// Elements of a parameter that the model has not.
    #[error(
        "elements {range:?} of parameter {parameter} cannot be read: {}",
        match num_elements {
            Some(count) => format!("it has {count}"),
            None => "the model has no such parameter; name it by its path in the module".to_owned(),
        }
    )]
    NoParameter {
        /// Path of the parameter in the module.
        parameter: String,
        /// The elements asked for.
        range: Range<usize>,
        /// Number of its elements, if there is such a parameter.
        num_elements: Option<usize>,
    },

    /// A tensor of a file that is not made of floats of 32 or 16 bits.
    #[error("{}: tensor {name} has type {found}, only F32, F16 and BF16 can be loaded; convert the file first", path.display())]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file's naming.
        name: String,
        /// Type of the tensor in the file.
        found: String,
    },

    /// A parameter of a module that the table of its model lacks, or has in another shape.
    #[error("{}: parameter {parameter} of shape {found:?} is not in the model's table; write a model with whole parameters, as its configuration makes it", path.display())]
    UnexpectedParameter {
        /// The file.
        path: PathBuf,
        /// Path of the parameter in the module.
        parameter: String,
        /// Its shape.
        found: Vec<usize>,
    },

    /// A parameter of the table of its model that a module lacks.
    #[error("{}: the model has no parameter {parameter} of shape {expected:?} to write; write a model with whole parameters, as its configuration makes it", path.display())]
    MissingParameter {
        /// The file.
        path: PathBuf,
        /// Path of the parameter in the module.
        parameter: String,
        /// The shape that it should have.
        expected: Vec<usize>,
    },

    /// A refusal by Burn's store of weights that passed every check above.
    #[error("{}: {problem}", path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// The message of the store.
        problem: String,
    },

    // === Data ===
    /// A path that should hold text, but is neither a regular file nor a folder.
    #[error("{}: neither a regular file nor a folder; give a path that holds text", path.display())]
    NotText {
        /// The path.
        path: PathBuf,
    },

    /// A text that is too short to train on.
    #[error("{}: {found} bytes of text{remarks}; at least {needed} are needed, give a path that holds text", path.display())]
    TooLittleText {
        /// The file or folder that was read.
        path: PathBuf,
        /// Bytes that were read.
        found: usize,
        /// The fewest bytes that can be used.
        needed: usize,
        /// Files and folders that were left out.
        remarks: Remarks,
    },

    /// A missing crate among cargo's downloaded sources.
    #[error("{}: cargo has not these sources here to train on; name a file or folder of text instead", path.display())]
    NoCrateSources {
        /// The folder that was looked for.
        path: PathBuf,
    },

    /// A file that is no tokenizer.
    #[error("{}: not a tokenizer: {problem}; give the tokenizer.json of a model", path.display())]
    NotATokenizer {
        /// The file.
        path: PathBuf,
        /// The message of the reader.
        problem: String,
    },

    /// A text, or ids, that a tokenizer refuses.
    #[error("{}: the tokenizer cannot do this text: {problem}", path.display())]
    Tokenize {
        /// The file of the tokenizer.
        path: PathBuf,
        /// The message of the tokenizer.
        problem: String,
    },

    /// A tokenizer with ids that a model has no tokens for.
    #[error(
        "{}: its ids go up to {}, but the model has {vocab} tokens; give the tokenizer of this model, or a model of at least \
         {num_ids} tokens",
        path.display(),
        num_ids - 1
    )]
    TooManyIds {
        /// The file of the tokenizer.
        path: PathBuf,
        /// The smallest number larger than all ids.
        num_ids: usize,
        /// Number of tokens of the model.
        vocab: usize,
    },

    /// A vocabulary without room for all bytes, as which text is read.
    #[error(
        "text needs a vocabulary of at least 256 tokens, one per byte; got {vocab}; choose a larger one, or give a tokenizer"
    )]
    VocabTooSmall {
        /// Size of the vocabulary asked for.
        vocab: usize,
    },
}

/// Returns the error of a message of Burn's store.
pub(crate) fn store_error(path: &Path, problem: &impl ToString) -> ModelError {
    ModelError::Store {
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}
