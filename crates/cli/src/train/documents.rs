//! Documents in files of any size. All ranks of a process share one stream, so each document is tokenized once.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn_fsdp::internals::checkpoint::TrainingState;
use burn_fsdp_data::{
    DataConfig, DataError, Dataset, Fields, Format, Packing, Position, Sequence, Stream,
};
use burn_fsdp_models::{ModelConfig, Rows, TextCodec};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};

use crate::args::{DataArgs, DataFormat, PackingArg, TrainArgs};
use crate::error::InputError;
use crate::output;
use crate::train::chat_files::ChatFiles;
use crate::train::codec_tokenizer::CodecTokenizer;
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
    fields: Fields,
    pub(crate) packing: PackingArg,
    batch: usize,
    shared: Mutex<Shared>,
}

/// The tensors of a batch beside the tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BesideTokens {
    /// The positions of the inputs in their documents.
    pub(crate) positions: bool,
    /// The weights of the targets.
    pub(crate) weights: bool,
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

/// Returns true if the data is to be read as documents: files with their extensions, a glob, or any path together with
/// a flag for documents.
pub(crate) fn are_meant(args: &DataArgs) -> bool {
    let Some(path) = &args.data else {
        return false;
    };
    let is_glob = || path.to_string_lossy().contains(['*', '?', '[']) && !path.exists();
    let names_a_field = [
        &args.text_field,
        &args.prompt_field,
        &args.completion_field,
        &args.chat_field,
    ];
    let has_flag = args.data_format.is_some()
        || args.packing.is_some()
        || names_a_field.iter().any(|field| field.is_some());
    has_flag || has_extension(path) || is_glob()
}

/// Returns the fields of a document.
fn fields_of(args: &DataArgs) -> Fields {
    match (&args.prompt_field, &args.completion_field, &args.chat_field) {
        (Some(prompt), Some(completion), _) => Fields::Completion {
            prompt: prompt.clone(),
            completion: completion.clone(),
        },
        (_, _, Some(messages)) => Fields::Chat(messages.clone()),
        _ => Fields::Text(args.text_field.clone().unwrap_or_else(|| "text".to_owned())),
    }
}

impl Documents {
    pub(crate) fn open(
        args: &TrainArgs,
        path: &Path,
        codec: TextCodec,
        mut warnings: Vec<String>,
    ) -> Result<Self, InputError> {
        let fields = fields_of(&args.data);
        let mut config = DataConfig::new(path, args.model.seq);
        config.format = args.data.data_format.map(|format| match format {
            DataFormat::Text => Format::Text,
            DataFormat::Jsonl => Format::Jsonl,
            DataFormat::Parquet => Format::Parquet,
        });
        config.fields = fields.clone();
        let packing = chosen(&args.data);
        config.packing = packing_of(packing, &fields);
        config.seed = args.model.seed;
        config.held_out = HELD_OUT;
        let end = end_of_text(args)?;
        if end.is_none() && matches!(fields, Fields::Completion { .. }) {
            warnings.push(
                "the end of a completion is not learned, because no token ends a text: bytes have none, and a tokenizer's \
                 is `eos_token_id` in the folder of --init"
                    .to_owned(),
            );
        }
        if end.is_none() && matches!(fields, Fields::Text(_)) && args.model.init.is_some() {
            warnings.push(
                "texts have no token at their end, because the folder of --init has no `eos_token_id`"
                    .to_owned(),
            );
        }
        let tokenizer = CodecTokenizer {
            codec: codec.clone(),
            end,
            chat: match &fields {
                Fields::Chat(_) => Some(ChatFiles::of(&codec)?),
                _ => None,
            },
        };
        let dataset = Dataset::open(config, Arc::new(tokenizer))?;
        refuse_own(args, path, &dataset)?;
        let batch = args.training.batch;
        let most = args.data.eval_batches.saturating_mul(batch).max(1);
        let held_out = held_out(&dataset, most)?;
        if held_out.is_empty() && args.data.eval_batches > 0 {
            warnings.push(format!(
                "there is no evaluation: a document is held out if the hash of its text is among the lowest {:.0} %, and \
                 the held-out documents of this data do not fill a sequence",
                100.0 * HELD_OUT
            ));
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
        let documents = Self {
            dataset,
            codec,
            held_out,
            warnings,
            fields,
            packing,
            batch,
            shared: Mutex::new(shared),
        };
        // Without anything to learn, the input is wrong, and no rank should start.
        documents.rows(0, 0..0)?;
        Ok(documents)
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
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
        shared.recent.clear();
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
        let found = found.and_then(|(_, sequences)| Some((sequences, sequences.get(rows)?)));
        let (all, own) = found.ok_or_else(|| DataError::Position {
            problem: format!("the rows of step {step} are no longer in memory"),
        })?;
        Ok(rows_of(own, self.weight_in(all), self.packing))
    }

    /// Returns the rows of an evaluation. Their weights make the loss a mean over the learned targets of these rows.
    pub(crate) fn held_out_rows(&self, rows: Range<usize>) -> Rows {
        // Ranks without a row of their own evaluate another one.
        let last = self.held_out.len().saturating_sub(rows.len());
        let start = rows.start.min(last);
        let found = &self.held_out[start..(start + rows.len()).min(self.held_out.len())];
        rows_of(found, self.weight_in(found), self.packing)
    }

    /// Returns the weight of each learned target, if not all targets are learned. The loss is a mean over the targets of
    /// equal parts of `sequences`, so this weight makes it the mean over the learned targets of all of them.
    fn weight_in(&self, sequences: &[Sequence]) -> Option<f32> {
        if !self.has_weights() {
            return None;
        }
        let (mut all, mut learned) = (0, 0);
        for sequence in sequences {
            all += sequence.learned.len();
            learned += sequence.learned.iter().filter(|learned| **learned).count();
        }
        Some((all as f64 / learned.max(1) as f64) as f32)
    }

    /// Returns true if the targets have weights, because only some are learned.
    fn has_weights(&self) -> bool {
        packing_of(self.packing, &self.fields) != Packing::FullSequences
    }

    /// Returns the tensors of a batch beside the tokens.
    pub(crate) fn beside_tokens(&self) -> BesideTokens {
        BesideTokens {
            positions: self.packing == PackingArg::Documents,
            weights: self.has_weights(),
        }
    }

    /// Returns the position after a number of steps.
    pub(crate) fn position_after(&self, steps: usize) -> Option<Value> {
        let shared = self.shared();
        let found = shared.positions.iter().find(|(number, _)| *number == steps);
        found.map(|(_, position)| json!(position))
    }

    /// Returns the start of a held-out document for a sample: at most the tokens before the first that is learned.
    pub(crate) fn prompt(&self, len: usize) -> Option<Vec<i64>> {
        let row = self.held_out.first()?;
        let learned = row.learned.iter().position(|learned| *learned)?;
        let is_text = matches!(self.fields, Fields::Text(_));
        let document = row.segments[learned];
        let is_joined = self.packing == PackingArg::Joined;
        let prompt = row.inputs.iter().enumerate().filter(|(index, _)| {
            let is_own = is_joined || row.segments[*index] == document;
            is_own && (is_text || *index <= learned)
        });
        let prompt = prompt.map(|(_, token)| i64::from(*token));
        Some(prompt.take(len).collect())
    }

    /// Identifies the files and the field, but not their paths.
    pub(crate) fn identity(&self) -> String {
        format!("documents in {}, {}", self.dataset, named(&self.fields))
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

/// Returns at most this many held-out sequences.
fn held_out(dataset: &Dataset, most: usize) -> Result<Vec<Sequence>, InputError> {
    let mut stream = dataset.held_out();
    let mut held_out = Vec::new();
    // One by one, so a high limit does not reserve memory for sequences that do not exist.
    while held_out.len() < most {
        match stream.next_batch(1, 0..1)?.pop() {
            Some(row) => held_out.push(row),
            None => break,
        }
    }
    Ok(held_out)
}

/// Returns how documents share sequences.
fn chosen(args: &DataArgs) -> PackingArg {
    args.packing.unwrap_or(PackingArg::Documents)
}

/// Rejects a packing that the documents or the model do not support.
pub(crate) fn check_packing(
    args: &DataArgs,
    model: &ModelConfig,
    seq: usize,
) -> Result<(), InputError> {
    let (packing, fields) = (chosen(args), fields_of(args));
    let second = match fields {
        Fields::Completion { .. } => "--prompt-field",
        Fields::Chat(_) => "--chat-field",
        _ => "",
    };
    if packing == PackingArg::Joined && !second.is_empty() {
        return Err(InputError::Excludes {
            first: "--packing joined",
            second,
            reason: "an answer would depend on other documents; use --packing documents or single",
        });
    }
    if packing == PackingArg::Documents && model.depends_on_length(seq) {
        return Err(InputError::Excludes {
            first: "--packing documents",
            second: "this --seq and `rope_scaling` in config.json of --init",
            reason: "sequences within its `original_max_position_embeddings` are rotated unlike longer ones; use a --seq \
                     up to that number, or --packing single or joined",
        });
    }
    Ok(())
}

/// Returns how the stream packs documents. A text may continue in the next sequence, and nothing is padded. Where only a
/// part of a document is learned, the rest of an answer would lose its prompt, so only documents longer than a sequence
/// are divided.
fn packing_of(packing: PackingArg, fields: &Fields) -> Packing {
    match (packing, fields) {
        (PackingArg::Single, _) => Packing::OneDocument,
        (_, Fields::Text(_)) => Packing::FullSequences,
        _ => Packing::WholeDocuments,
    }
}

/// Returns the fields as text, for the identity of the data in a saved step.
fn named(fields: &Fields) -> String {
    match fields {
        Fields::Text(field) => format!("field {field}"),
        Fields::Completion { prompt, completion } => {
            format!("prompts in field {prompt}, completions in field {completion}")
        }
        Fields::Chat(field) => format!("chats in field {field}"),
        other => format!("{other:?}"),
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
pub(crate) fn end_of_text(args: &TrainArgs) -> Result<Option<u32>, InputError> {
    match args.model.init.as_deref().filter(|path| path.is_dir()) {
        Some(folder) => Ok(ModelConfig::ends_of_text(folder)?.first().copied()),
        None => Ok(None),
    }
}

/// Converts sequences. `weight` is the weight of each learned target; if it is `None`, all targets count alike.
fn rows_of(sequences: &[Sequence], weight: Option<f32>, packing: PackingArg) -> Rows {
    let all = |part: fn(&Sequence) -> &[u32]| -> Vec<i64> {
        sequences
            .iter()
            .flat_map(part)
            .map(|token| i64::from(*token))
            .collect()
    };
    let rows = Rows::new(
        all(|row| &row.inputs),
        all(|row| &row.targets),
        sequences.len(),
    );
    let rows = match packing {
        PackingArg::Documents => rows.in_documents(all(|row| &row.positions)),
        PackingArg::Joined | PackingArg::Single => rows,
    };
    let Some(weight) = weight else {
        return rows;
    };
    let learned = sequences.iter().flat_map(|row| &row.learned);
    rows.weighted(
        learned
            .map(|learned| if *learned { weight } else { 0.0 })
            .collect(),
    )
}
