//! Everything that can go wrong in this crate.

use std::path::PathBuf;

/// What can go wrong with a model, its weights or its data.
///
/// Every message names the thing at fault, says what was expected and what was
/// found, and ends with what to do about it where that is not obvious.
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

    /// The attention heads do not divide the width of the model.
    #[error("{heads} heads do not divide dim {dim}; choose a dim that is a multiple of heads")]
    HeadsDoNotDivideDim {
        /// Number of heads asked for.
        heads: usize,
        /// Width of the model asked for.
        dim: usize,
    },

    /// The key and value heads do not divide the query heads.
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

    /// Rotary positions turn pairs of elements, and a head has an odd number of them.
    #[error(
        "a head has {head_dim} elements, an odd number; choose a dim of an even number for each head"
    )]
    OddHeadDim {
        /// Elements of a head: `dim / heads`.
        head_dim: usize,
    },

    /// The sizes are so large that the parameters cannot be counted.
    #[error("the model has more parameters than this machine can count; choose smaller sizes")]
    TooManyParameters,

    // === Weights ===
    /// A file could not be opened, read, or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason given by the operating system.
        source: std::io::Error,
    },

    /// A file is not a well-formed safetensors file.
    #[error("{}: not a valid safetensors file: {problem}", path.display())]
    MalformedWeights {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// A file of weights lacks a tensor of the model.
    #[error("{}: tensor {name} is missing; the model expects it with shape {expected:?}", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file's naming.
        name: String,
        /// Shape that the model needs.
        expected: Vec<usize>,
    },

    /// A file of weights has a tensor that the model does not have.
    #[error("{}: tensor {name} with shape {found:?} is not part of the model; was the file written for another configuration?", path.display())]
    UnexpectedTensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file's naming.
        name: String,
        /// Shape of the tensor in the file.
        found: Vec<usize>,
    },

    /// A tensor of a file has another shape than the model's.
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

    /// A tensor of a file is not made of 32-bit floats.
    #[error("{}: tensor {name} has type {found}, only F32 can be loaded; convert the file first", path.display())]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file's naming.
        name: String,
        /// Type of the tensor in the file.
        found: String,
    },

    /// A module has a parameter that the table of its model lacks, or has in another shape.
    #[error("{}: parameter {parameter} of shape {found:?} is not in the model's table; write a model with whole parameters, as its configuration makes it", path.display())]
    UnexpectedParameter {
        /// The file.
        path: PathBuf,
        /// Path of the parameter in the module.
        parameter: String,
        /// Its shape.
        found: Vec<usize>,
    },

    /// A module lacks a parameter of the table of its model.
    #[error("{}: the model has no parameter {parameter} of shape {expected:?} to write; write a model with whole parameters, as its configuration makes it", path.display())]
    MissingParameter {
        /// The file.
        path: PathBuf,
        /// Path of the parameter in the module.
        parameter: String,
        /// The shape that it should have.
        expected: Vec<usize>,
    },

    /// Burn's store refused weights that passed every check above.
    #[error("{}: {problem}", path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// What the store said.
        problem: String,
    },

    // === Data ===
    /// A path that should hold text is neither a regular file nor a folder.
    #[error("{}: neither a regular file nor a folder; give a path that holds text", path.display())]
    NotText {
        /// The path.
        path: PathBuf,
    },

    /// There is too little text to train on.
    #[error("{}: {found} bytes of text, at least {needed} are needed ({num_skipped} entries could not be read)", path.display())]
    TooLittleText {
        /// The file or folder that was read.
        path: PathBuf,
        /// Bytes that were read.
        found: usize,
        /// The fewest bytes that can be used.
        needed: usize,
        /// Files and folders that could not be read.
        num_skipped: usize,
    },

    /// Cargo's folder of downloaded sources is not there.
    #[error("{}: no downloaded crate sources here to train on; name a file or folder of text instead", path.display())]
    NoCrateSources {
        /// The folder that was looked for.
        path: PathBuf,
    },

    /// Text is read as bytes, and the vocabulary has no room for all of them.
    #[error("text needs a vocabulary of at least 256 tokens, one per byte; got {vocab}")]
    VocabTooSmall {
        /// Size of the vocabulary asked for.
        vocab: usize,
    },
}
