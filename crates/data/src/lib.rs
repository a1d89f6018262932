//! Training data from files of any size: read, shuffled, packed into sequences, and resumed exactly.
//!
//! | word | meaning |
//! |---|---|
//! | document | a text, a prompt with its completion, or a chat: a row of Parquet, a line of JSONL, or a piece of plain text |
//! | block | what is read from a file in one go: a row group, the lines of some bytes, or a document of plain text |
//! | window | documents in memory at once, which are shuffled |
//! | [`Sequence`] | tokens of one or more documents, with targets, segments and positions |
//! | [`Position`] | a place in the training stream, independent of the number of ranks |
//! | held-out part | the documents whose hash is below a fraction of all hashes; never trained on |
//!
//! [`Dataset`] opens files, and [`Stream`] returns their sequences in batches. A [`Tokenizer`] is supplied by the
//! caller. Memory does not depend on the size of the files, only on [`Shuffle`] and on the longest document.
//!
//! `README.md` next to the code defines the order of the stream, and explains why a position is exact.
//!
//! The crate does not depend on Burn or on communication. Files are untrusted: regardless of their contents, the worst
//! outcome is a [`DataError`].
//!
//! ```
//! use std::sync::Arc;
//!
//! use burn_fsdp_data::{DataConfig, Dataset, Tokenizer};
//!
//! struct Bytes;
//!
//! impl Tokenizer for Bytes {
//!     fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
//!         Ok(text.bytes().map(u32::from).collect())
//!     }
//!
//!     fn eos(&self) -> Option<u32> {
//!         Some(256)
//!     }
//!
//!     fn identity(&self) -> String {
//!         "bytes".to_owned()
//!     }
//! }
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("notes.jsonl");
//! std::fs::write(&path, "{\"text\": \"one\"}\n{\"text\": \"two\"}\n")?;
//! let data = Dataset::open(DataConfig::new(&path, 4), Arc::new(Bytes))?;
//! // The first of two ranks trains on the first half of each batch ...
//! let mut stream = data.training();
//! assert_eq!(stream.next_batch(2, 0..1)?.len(), 1);
//! // ... and a single rank continues with the whole second batch.
//! let mut stream = data.resume(stream.position())?;
//! assert_eq!(stream.next_batch(2, 0..2)?.len(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod blocks;
mod chat;
mod chat_prompt;
mod config;
mod contents;
mod dataset;
mod document;
mod encoding;
mod error;
mod files;
mod json;
mod jsonl;
mod order;
mod place;
mod plain;
mod position;
mod python;
mod rows;
mod sequence;
mod stream;
mod tokenizer;

pub use chat_prompt::{ChatPrompt, ChatPrompts};
pub use config::{DataConfig, Fields, Format, Packing, Shuffle};
pub use dataset::{Dataset, PartSize, Survey};
pub use error::DataError;
pub use position::Position;
pub use sequence::Sequence;
pub use stream::Stream;
pub use tokenizer::Tokenizer;
