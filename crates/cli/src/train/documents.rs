//! Documents in files of any size. All ranks of a process share one stream, so each document is tokenized once.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_fsdp::internals::checkpoint::TrainingState;
use burn_fsdp_data::{
    DataConfig, DataError, Dataset, Fields, Format, Packing, Position, Sequence, Stream, Tokenizer,
};
use burn_fsdp_models::{ModelConfig, Rows, TextCodec};
use serde_json::{Value, json};

use crate::args::{DataArgs, DataFormat, TrainArgs};
use crate::codec;
use crate::error::InputError;
use crate::output;
use crate::train::own_files::OwnFiles;

/// Name of the section of a saved step that contains the position.
pub(crate) const SECTION: &str = "documents";

/// The part of the documents that is held out for evaluation.
const HELD_OUT: f64 = 0.05;

/// Number of steps whose sequences and positions are kept: ranks differ by less than two steps.
const KEPT: usize = 3;

/// Files of documents.
pub(crate) struct Documents {
    dataset: Dataset,
    pub(crate) codec: TextCodec,
    pub(crate) held_out: Vec<Sequence>,
    /// Warnings about the tokens.
    pub(crate) warnings: Vec<String>,
    field: String,
    batch: usize,
    shared: Mutex<Shared>,
}

/// The training stream, which is read by the first rank that needs a step.
struct Shared {
    stream: Stream,
    is_resumed: bool,
    /// The next step to read.
    next: usize,
    /// Newest steps with their sequences.
    recent: VecDeque<(usize, Vec<Sequence>)>,
    /// Numbers of completed steps with the positions after them.
    positions: VecDeque<(usize, Position)>,
}

impl fmt::Debug for Documents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Documents")
            .field("dataset", &self.dataset)
            .finish_non_exhaustive()
    }
}

/// A codec with the token that ends a document.
struct CodecTokenizer {
    codec: TextCodec,
    end: Option<u32>,
}

impl Tokenizer for CodecTokenizer {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.codec {
            TextCodec::Bytes => Ok(text.bytes().map(u32::from).collect()),
            TextCodec::Tokenizer(tokenizer) => tokenizer
                .encode(text, false)
                .map_err(|error| error.to_string()),
        }
    }

    fn bos(&self) -> Option<u32> {
        match &self.codec {
            TextCodec::Bytes => None,
            TextCodec::Tokenizer(tokenizer) => tokenizer.encode("", true).ok()?.first().copied(),
        }
    }

    fn eos(&self) -> Option<u32> {
        self.end
    }

    fn identity(&self) -> String {
        codec::identity(&self.codec).unwrap_or_else(|| "bytes".to_owned())
    }
}

/// Returns true if the data is to be read as documents: files with their extensions, a glob, or any path together with
/// a flag for documents.
pub(crate) fn are_meant(args: &DataArgs) -> bool {
    let Some(path) = &args.data else {
        return false;
    };
    let is_glob = || path.to_string_lossy().contains(['*', '?', '[']) && !path.exists();
    args.data_format.is_some() || args.text_field.is_some() || has_extension(path) || is_glob()
}

impl Documents {
    pub(crate) fn open(
        args: &TrainArgs,
        path: &Path,
        codec: TextCodec,
        warnings: Vec<String>,
    ) -> Result<Self, InputError> {
        let field = args
            .data
            .text_field
            .clone()
            .unwrap_or_else(|| "text".to_owned());
        let mut config = DataConfig::new(path, args.model.seq);
        config.format = args.data.data_format.map(|format| match format {
            DataFormat::Text => Format::Text,
            DataFormat::Jsonl => Format::Jsonl,
            DataFormat::Parquet => Format::Parquet,
        });
        config.fields = Fields::Text(field.clone());
        // The models have no mask for padding.
        config.packing = Packing::FullSequences;
        config.seed = args.model.seed;
        config.held_out = HELD_OUT;
        let tokenizer = CodecTokenizer {
            codec: codec.clone(),
            end: end_of_text(args)?,
        };
        let dataset = Dataset::open(config, Arc::new(tokenizer))?;
        refuse_own(args, path, &dataset)?;
        let batch = args.training.batch;
        let most = args.data.eval_batches.saturating_mul(batch).max(1);
        let mut stream = dataset.held_out();
        let mut held_out = Vec::new();
        // Batch by batch, so a high limit does not reserve memory for sequences that do not exist.
        while held_out.len() < most {
            let some = stream.next_batch(1, 0..1)?;
            if some.is_empty() {
                break;
            }
            held_out.extend(some);
        }
        let stream = dataset.training();
        let start = stream.position().clone();
        let shared = Shared {
            stream,
            is_resumed: false,
            next: 0,
            recent: VecDeque::new(),
            positions: VecDeque::from([(0, start)]),
        };
        Ok(Self {
            dataset,
            codec,
            held_out,
            warnings,
            field,
            batch,
            shared: Mutex::new(shared),
        })
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Continues after a saved step. Each rank calls this, and the first call takes effect.
    pub(crate) fn resume(&self, saved: &TrainingState, first_step: usize) -> Result<(), DataError> {
        let mut shared = self.shared();
        if shared.is_resumed {
            return Ok(());
        }
        let value = saved.sections.get(SECTION).cloned().unwrap_or(Value::Null);
        let position: Option<Position> =
            serde_json::from_value(value).map_err(|error| DataError::Position {
                problem: error.to_string(),
            })?;
        let position = position.ok_or_else(|| DataError::Position {
            problem: format!("step {} was saved without one", saved.step),
        })?;
        shared.stream = self.dataset.resume(&position)?;
        shared.positions = VecDeque::from([(first_step, position)]);
        shared.next = first_step;
        shared.is_resumed = true;
        Ok(())
    }

    /// Returns some rows of a step's batch. Steps are read in order.
    pub(crate) fn rows(&self, step: usize, rows: Range<usize>) -> Result<Rows, DataError> {
        let mut shared = self.shared();
        let shared = &mut *shared;
        while shared.next <= step {
            let sequences = shared.stream.next_batch(self.batch, 0..self.batch)?;
            let position = shared.stream.position().clone();
            shared.recent.push_back((shared.next, sequences));
            shared.next += 1;
            shared.positions.push_back((shared.next, position));
            if shared.recent.len() > KEPT {
                shared.recent.pop_front();
                shared.positions.pop_front();
            }
        }
        let found = shared.recent.iter().find(|(number, _)| *number == step);
        let found = found.and_then(|(_, sequences)| sequences.get(rows));
        let found = found.ok_or_else(|| DataError::Position {
            problem: format!("the rows of step {step} are no longer in memory"),
        })?;
        Ok(rows_of(found))
    }

    /// Returns the position after a number of steps.
    pub(crate) fn position_after(&self, steps: usize) -> Option<Value> {
        let shared = self.shared();
        let found = shared.positions.iter().find(|(number, _)| *number == steps);
        found.map(|(_, position)| json!(position))
    }

    /// Returns the start of a held-out document for a sample.
    pub(crate) fn prompt(&self, len: usize) -> Option<Vec<i64>> {
        let inputs = &self.held_out.first()?.inputs;
        Some(
            inputs
                .iter()
                .take(len)
                .map(|token| i64::from(*token))
                .collect(),
        )
    }

    /// Identifies the files and the field, but not their paths.
    pub(crate) fn identity(&self) -> String {
        format!("documents in {}, field {}", self.dataset, self.field)
    }
}

impl fmt::Display for Documents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = HELD_OUT * 100.0;
        write!(
            f,
            "documents in {}, {percent:.0} % of them held out",
            self.dataset
        )
    }
}

/// Checks that no file of this run, and no saved step, would be read as a document, now or when the run is resumed.
fn refuse_own(args: &TrainArgs, path: &Path, dataset: &Dataset) -> Result<(), InputError> {
    if path.is_file() {
        return Ok(());
    }
    let folder = path.ancestors().find(|path| path.is_dir());
    let own = OwnFiles::of(args, folder.unwrap_or(Path::new(".")));
    let refused = |flag, path: &Path| {
        Err(InputError::Output {
            flag,
            path: path.to_owned(),
            problem: "this would be read as documents of --data; write the run's files to another folder, or name the \
                      documents by a glob"
                .to_owned(),
        })
    };
    for (flag, path) in own.inside() {
        if has_extension(path) {
            return refused(flag, path);
        }
    }
    let is_own = |path: &&Path| output::identity(path).ancestors().any(|path| own.has(path));
    match dataset.paths().find(is_own) {
        Some(path) => refused("--data", path),
        None => Ok(()),
    }
}

/// Returns true for the extension of a file with documents. Other files are read as one text unless a flag requests
/// documents.
fn has_extension(path: &Path) -> bool {
    matches!(Format::of(path), Some(Format::Jsonl | Format::Parquet))
}

/// Returns the model's token for the end of a text, if the tokens are those of its folder.
fn end_of_text(args: &TrainArgs) -> Result<Option<u32>, InputError> {
    match args.model.init.as_deref().filter(|path| path.is_dir()) {
        Some(folder) => Ok(ModelConfig::ends_of_text(folder)?.first().copied()),
        None => Ok(None),
    }
}

pub(crate) fn rows_of(sequences: &[Sequence]) -> Rows {
    let all = |part: fn(&Sequence) -> &[u32]| -> Vec<i64> {
        sequences
            .iter()
            .flat_map(part)
            .map(|token| i64::from(*token))
            .collect()
    };
    Rows::new(
        all(|row| &row.inputs),
        all(|row| &row.targets),
        sequences.len(),
    )
}
