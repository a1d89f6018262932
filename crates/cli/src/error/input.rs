//! The errors in the user's input.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn_fsdp::internals::checkpoint::Step;
use burn_fsdp::internals::device::DeviceNameError;
use burn_fsdp_data::DataError;
use burn_fsdp_models::{ModelConfig, ModelError};
use serde_json::{Value, json};

use super::prompt::PromptError;
use crate::adapters::error::AdapterError;

/// An error in the command line, the files that it names, or the environment.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    #[error("{flag} is 0; it must be at least 1")]
    Zero { flag: &'static str },

    #[error("--config {}: {problem}", path.display())]
    Config { path: PathBuf, problem: String },

    #[error("{flag} is {value}; it must be {expected}")]
    OutOfRange {
        flag: &'static str,
        value: f64,
        expected: &'static str,
    },

    #[error(
        "cannot read the operations of a run at {}: {problem}; name two folders that `train --operations` wrote",
        path.display()
    )]
    Operations { path: PathBuf, problem: String },

    #[error(
        "--init {}: {error}; name a folder or a file on this machine. A model of the hub must be downloaded first, for \
         example with `hf download NAME --local-dir FOLDER`",
        path.display()
    )]
    NoInit {
        path: PathBuf,
        error: std::io::Error,
    },

    #[error("--init {}: {problem}; name the folder in Hugging Face's format that training started from", path.display())]
    Beside { path: PathBuf, problem: String },

    #[error("--overwrite replaces only empty folders, but {} contains files; remove it, or choose another name", path.display())]
    FullFolder { path: PathBuf },

    #[error(transparent)]
    Device(#[from] DeviceNameError),

    #[error(
        "{ranks} ranks do not divide a batch of {batch} sequences; \
         choose a --batch that is a multiple of --ranks"
    )]
    RanksDoNotDivideBatch { ranks: usize, batch: usize },

    #[error(
        "{accumulate} micro-batches do not divide the {rows} sequences of a rank; \
         choose an --accumulate that divides --batch / --ranks"
    )]
    MicroBatchesDoNotDivide { accumulate: usize, rows: usize },

    #[error("--replicate-size {replicas} does not divide the {ranks} ranks; choose a divisor")]
    ReplicasDoNotDivideRanks { replicas: usize, ranks: usize },

    #[error(
        "--replicate-size host needs the same number of ranks on each machine, but {here} of the {ranks} ranks are \
         on this one; start equally many on each"
    )]
    UnevenHosts { ranks: usize, here: usize },

    #[error(transparent)]
    Step(#[from] burn_fsdp::internals::checkpoint::Error),

    #[error("{} is {format}, and not a checkpoint: {remedy}", path.display())]
    NotACheckpoint {
        path: PathBuf,
        format: &'static str,
        remedy: &'static str,
    },

    #[error("{} is not a model that this command supports: {problem}", path.display())]
    UnknownModel { path: PathBuf, problem: String },

    #[error(
        "the model of {} has no table of names ({model}); write it with --names burn",
        path.display()
    )]
    NoTable { path: PathBuf, model: String },

    #[error(
        "{}: a {model} of these sizes has {expected}, but the step has {found}; write it unchanged with --names burn",
        path.display()
    )]
    OtherTensors {
        path: PathBuf,
        model: &'static str,
        expected: String,
        found: String,
    },

    #[error(
        "{} was saved by a model of {found}, but this command has {expected}; pass the same sizes, or the model's own \
         folder with --init",
        path.display()
    )]
    OtherModel {
        path: PathBuf,
        expected: String,
        found: String,
    },

    #[error(
        "step {step} was trained with --optimizer {found}, whose states {expected} does not have; pass --optimizer \
         {found}, or train from --init without --resume"
    )]
    OtherOptimizer {
        step: u64,
        found: String,
        expected: String,
    },

    #[error(
        "--model {model} takes its sizes from config.json in the --init folder; pass --init FOLDER, as downloaded \
         from the hub"
    )]
    NeedsFolder { model: &'static str },

    #[error("--model is {asked}, but --init has a {found}; pass --model {found}, or leave it out")]
    OtherKind {
        asked: &'static str,
        found: &'static str,
    },

    #[error("{flag} does not apply to the model of --init, whose sizes are in {}; leave out {flag}", path.display())]
    SizeOfFolder { flag: &'static str, path: PathBuf },

    #[error(
        "{} was trained on the tokens of {found}, not of {given}; pass that tokenizer with --tokenizer",
        path.display()
    )]
    OtherTokenizer {
        path: PathBuf,
        found: String,
        given: String,
    },

    #[error(
        "{}: unsupported tokenizer format, and there is no tokenizer.json next to it; pass one with --tokenizer \
         FILE (in transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER) writes it), or pass \
         --tokenizer bytes to read byte b as token b",
        path.display()
    )]
    OtherTokenizerForm { path: PathBuf },

    #[error(
        "{} has steps; pass --resume to continue from the newest, pass --overwrite to remove them, or choose \
         another folder",
        path.display()
    )]
    HasSteps { path: PathBuf },

    #[error(transparent)]
    Prompt(#[from] PromptError),

    #[error("there is no model to generate with; name a step, or pass --init FOLDER")]
    NoModel,

    #[error(
        "{}: transformers does not have this command's {model}; write it with --format safetensors",
        path.display()
    )]
    NotInTransformers { path: PathBuf, model: &'static str },

    #[error("--batch, --seq and the number of steps are too large together; choose smaller ones")]
    TooManyTokens,

    #[error(
        "{params} parameters on {ranks} ranks need at least {needed:.2} GiB of memory, but this process may use \
         {available:.2} GiB; choose a smaller model or batch"
    )]
    TooLittleMemory {
        params: usize,
        ranks: usize,
        needed: f64,
        available: f64,
    },

    #[error(
        "{source_name} has {found} {tokens} to train on, but one step needs {needed} (--batch {batch} x --seq \
         {seq}, plus one){left_out}; give more text, or choose a smaller --batch or --seq"
    )]
    TextShorterThanStep {
        source_name: String,
        found: usize,
        /// The unit: `bytes`, or `tokens` of a tokenizer.
        tokens: &'static str,
        needed: usize,
        batch: usize,
        seq: usize,
        /// A list of skipped files and folders, as part of a message.
        left_out: String,
    },

    #[error("{flag} {}: {problem}", path.display())]
    Output {
        flag: &'static str,
        path: PathBuf,
        problem: String,
    },

    #[error("{first} and {second} name the same file, {}; give each its own file", path.display())]
    SameFile {
        first: &'static str,
        second: &'static str,
        path: PathBuf,
    },

    #[error("there is no {what} \"{name}\"; there are {known}")]
    UnknownName {
        what: &'static str,
        name: String,
        known: String,
    },

    #[error("{flag} cannot be used with compiled steps: {reason}; leave out {flag} or --compile")]
    NotCompiled {
        flag: &'static str,
        reason: &'static str,
    },

    #[error("--weights placed cannot be used: {reason}; use --weights whole or --weights sharded")]
    NotPlaced { reason: &'static str },

    #[error(
        "--seq {seq} is longer than the {longest} positions of this model; choose a shorter one"
    )]
    TooLongSequence { seq: usize, longest: usize },

    #[error("{flag} {value} is too large to plan for; choose at most {most}")]
    TooLarge {
        flag: &'static str,
        value: usize,
        most: usize,
    },

    #[error(transparent)]
    Launch(#[from] Box<burn_fsdp::internals::collectives::LaunchError>),

    #[error(transparent)]
    Plan(Box<burn_fsdp::internals::compile::Error>),

    #[error("{first} cannot be used with {second}: {reason}; leave out one of them")]
    Excludes {
        first: &'static str,
        second: &'static str,
        reason: &'static str,
    },

    #[error("--memory-budget: {0}")]
    Budget(Box<burn_fsdp::internals::plan::BudgetError>),

    #[error("{problem}")]
    Restart { problem: &'static str },

    #[error("cannot run {program}: {problem}")]
    CannotRun { program: String, problem: String },

    #[error(transparent)]
    Run(#[from] burn_fsdp_runs::Error),

    #[error("BURN_FSDP_FAULT: {problem}")]
    Fault { problem: String },

    #[error(
        "--chat-field needs the chat template of a tokenizer, but each byte is a token here; pass --init with a folder \
         that has a tokenizer.json, or --tokenizer with the file"
    )]
    ChatOfBytes,

    #[error(
        "--packing is {given}, but was {was} when step {step} was saved, and the sequences differ; \
         omit --packing, or train from --init without --resume"
    )]
    OtherPacking {
        given: &'static str,
        was: &'static str,
        step: u64,
    },

    #[error("{}: {problem}; --chat-field and --chat need the chat template of a model for chats", path.display())]
    ChatFile { path: PathBuf, problem: String },

    #[error(transparent)]
    Adapter(#[from] AdapterError),

    #[error(transparent)]
    Model(#[from] ModelError),

    #[error(transparent)]
    Data(#[from] DataError),
}

impl InputError {
    /// Returns the error for a step whose model differs from the `expected` one in sizes or kind.
    pub(crate) fn other_model(
        step: &Step,
        expected: &ModelConfig,
        found: Option<&ModelConfig>,
    ) -> Self {
        let sizes = |model: &ModelConfig| leaves(&json!(model));
        let own = sizes(expected);
        let Some(found) = found.map(sizes) else {
            return Self::OtherModel {
                path: step.path().to_owned(),
                expected: json!(own).to_string(),
                found: "another kind".to_owned(),
            };
        };
        // Only what differs.
        let differing = |of: &BTreeMap<String, Value>, other: &BTreeMap<String, Value>| {
            let all = of
                .iter()
                .filter(|(name, size)| other.get(*name) != Some(*size));
            json!(all.collect::<BTreeMap<_, _>>()).to_string()
        };
        Self::OtherModel {
            path: step.path().to_owned(),
            expected: differing(&own, &found),
            found: differing(&found, &own),
        }
    }
}

/// Returns the values that are no objects, by their paths, such as `variant.rope.kind`.
fn leaves(value: &Value) -> BTreeMap<String, Value> {
    let Value::Object(entries) = value else {
        return BTreeMap::from([(String::new(), value.clone())]);
    };
    let below = entries.iter().flat_map(|(key, value)| {
        leaves(value).into_iter().map(move |(path, value)| {
            let path = match path.as_str() {
                "" => key.clone(),
                path => format!("{key}.{path}"),
            };
            (path, value)
        })
    });
    below.collect()
}

impl From<burn_fsdp::internals::compile::Error> for InputError {
    fn from(error: burn_fsdp::internals::compile::Error) -> Self {
        Self::Plan(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_named_by_their_paths() {
        let found = leaves(&json!({"a": {"b": 1, "c": {"d": null}}, "e": [{}], "f": {}}));
        let expected = [
            ("a.b", json!(1)),
            ("a.c.d", json!(null)),
            ("e", json!([{}])),
        ];
        let expected = expected.map(|(path, value)| (path.to_owned(), value));
        assert_eq!(found, BTreeMap::from(expected));
    }
}
