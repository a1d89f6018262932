//! Errors of prompts.

use std::path::PathBuf;

/// A reason why prompts are refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PromptError {
    #[error("{place} is empty, or has no tokens; give at least one character to continue")]
    Empty { place: String },

    #[error("--stop is empty; give the text before which the generated text ends")]
    EmptyStop,

    #[error("cannot read {} of --prompts: {problem}; name a text file, or a JSONL file", path.display())]
    File { path: PathBuf, problem: String },

    #[error(
        "{} of --prompts has no prompts; write one on each line, or as a field of a JSON object on each line",
        path.display()
    )]
    NoPrompts { path: PathBuf },

    #[error("{place}: expected a JSON object, but {problem}; correct or remove the line")]
    Json { place: String, problem: String },

    #[error(
        "{place}: expected the field `{field}`, but found {found}; name the field of the prompts with --prompt-field"
    )]
    MissingField {
        place: String,
        field: String,
        found: String,
    },

    #[error(
        "{place}: expected `{field}` to be a string, but found {found}; correct the value or name another field"
    )]
    FieldType {
        place: String,
        field: String,
        found: &'static str,
    },

    #[error(
        "{place} has {tokens} tokens, but the model sees at most {longest}; shorten it, or use a model with a longer \
         context"
    )]
    TooLong {
        place: String,
        tokens: usize,
        longest: usize,
    },

    #[error(
        "--chat needs a tokenizer with a chat template, but each byte is a token; pass --tokenizer FILE"
    )]
    ChatOfBytes,

    #[error("{place}: {problem}")]
    Chat { place: String, problem: String },
}
