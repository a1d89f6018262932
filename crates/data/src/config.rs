use std::path::PathBuf;

use crate::DataError;

/// The source of the data, and how it is shuffled and packed.
#[derive(Debug, Clone, PartialEq)]
pub struct DataConfig {
    /// A file, a folder with its sub-folders, or a glob such as `data/**/*.jsonl`.
    pub path: PathBuf,
    /// The format of all files; by their extensions if `None`.
    pub format: Option<Format>,
    /// The fields of a document.
    pub fields: Fields,
    /// Tokens of a sequence.
    pub seq: usize,
    /// How documents share sequences.
    pub packing: Packing,
    /// The extent of the shuffle; the order of the files if `None`.
    pub shuffle: Option<Shuffle>,
    /// The seed of the shuffle.
    pub seed: u64,
    /// The fraction of documents that are held out, from 0 to less than 1. A document is held out if the hash of its
    /// contents is below this fraction of all hashes, so equal documents are in the same part.
    pub held_out: f64,
}

impl DataConfig {
    /// Returns a configuration for sequences of `seq` tokens from the field `text`, shuffled, without a held-out part.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, seq: usize) -> Self {
        Self {
            path: path.into(),
            format: None,
            fields: Fields::Text("text".to_owned()),
            seq,
            packing: Packing::Continuous,
            shuffle: Some(Shuffle::default()),
            seed: 0,
            held_out: 0.0,
        }
    }

    pub(crate) fn check(&self) -> Result<(), DataError> {
        let refuse = |name, found: String, expected: &str| {
            let expected = expected.to_owned();
            Err(DataError::Setting {
                name,
                found,
                expected,
            })
        };
        if self.seq == 0 || u32::try_from(self.seq).is_err() {
            return refuse(
                "the sequence length",
                self.seq.to_string(),
                "from 1 to 4294967295",
            );
        }
        if !(0.0..1.0).contains(&self.held_out) {
            return refuse(
                "the held-out fraction",
                self.held_out.to_string(),
                "at least 0 and less than 1",
            );
        }
        let Some(Shuffle {
            block_bytes,
            window_documents,
            window_bytes,
        }) = self.shuffle
        else {
            return Ok(());
        };
        if block_bytes == 0 || window_documents == 0 || window_bytes == 0 {
            let found = format!(
                "{block_bytes} bytes a block, {window_documents} documents and {window_bytes} bytes a window"
            );
            return refuse("the shuffle", found, "at least 1 of each");
        }
        Ok(())
    }
}

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// UTF-8 text. A file of at most 64 KiB is one document. A longer one is divided after the first line that ends
    /// past each multiple of 64 KiB.
    Text,
    /// A JSON object on each line.
    Jsonl,
    /// Apache Parquet, a document in each row.
    Parquet,
}

/// The fields of a document in JSONL or Parquet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fields {
    /// A field with text, all of which is learned. Ignored for plain text.
    Text(String),
    /// A prompt, and a completion that is learned.
    Completion {
        /// The field with the prompt.
        prompt: String,
        /// The field with the completion.
        completion: String,
    },
    /// A field with a list of messages, each with a `role`. The tokenizer's chat template renders them, and only what
    /// the assistant writes is learned.
    Chat(String),
}

impl Fields {
    pub(crate) fn names(&self) -> Vec<&str> {
        match self {
            Self::Text(name) | Self::Chat(name) => vec![name],
            Self::Completion { prompt, completion } => vec![prompt, completion],
        }
    }
}

/// How documents share sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Packing {
    /// Documents follow each other without gaps. One that does not fit continues in the next sequence.
    Continuous,
    /// Like `Continuous`, but the pairs that do not fill the last sequence of an epoch are left out, so there is no
    /// padding. If everything is learned, `learned` is then always true.
    FullSequences,
    /// A document that does not fit in the rest of a sequence starts the next one. Only documents longer than a
    /// sequence are divided.
    WholeDocuments,
    /// A sequence contains only one document, or a part of it.
    OneDocument,
}

/// The extent of the shuffle. Larger windows shuffle better and need more memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shuffle {
    /// Bytes of JSONL that stay together until they are in a window. For Parquet, these are row groups instead, and
    /// for plain text, documents.
    pub block_bytes: u64,
    /// Maximum number of documents of a window.
    pub window_documents: usize,
    /// A window ends with the document that reaches this number of bytes.
    pub window_bytes: usize,
}

impl Default for Shuffle {
    fn default() -> Self {
        Self {
            block_bytes: 1 << 20,
            window_documents: 1 << 14,
            window_bytes: 16 << 20,
        }
    }
}
