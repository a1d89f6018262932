use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::blocks::Blocks;
use crate::files::{FilePrint, is_same};
use crate::{DataConfig, DataError, Tokenizer};

const VERSION: u32 = 1;

/// More epochs or sequences than any run has.
const MOST: u64 = 1 << 53;

/// Number of files that are recorded one by one.
const LISTED_FILES: usize = 64;

/// A position between two sequences of the training stream, with what identifies the data.
///
/// It does not depend on the number of ranks. Its size does not grow with the data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    version: u32,
    /// Number of sequences before this position, in all epochs.
    sequences: u64,
    pub(crate) cursor: Cursor,
    files: FilesPrint,
    settings: BTreeMap<String, String>,
}

/// The state of a stream between two sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cursor {
    pub(crate) epoch: u64,
    /// The start of the current window: a place in the order of blocks, and a document of that block.
    pub(crate) window: [u64; 2],
    /// Number of the window's documents that are finished.
    pub(crate) taken: u64,
    /// Number of pairs of the next document that are finished.
    pub(crate) pairs: u64,
    /// Number of sequences of this epoch.
    pub(crate) sequences: u64,
}

impl Cursor {
    pub(crate) fn start_of(epoch: u64) -> Self {
        Self {
            epoch,
            window: [0, 0],
            taken: 0,
            pairs: 0,
            sequences: 0,
        }
    }
}

/// The identity of the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FilesPrint {
    count: u64,
    bytes: u64,
    /// Checksum of all files' names, sizes and checksums, in hexadecimal.
    checksum: String,
    /// Checksum of all bytes, in hexadecimal; `None` if there are many, and for older positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    contents: Option<String>,
    /// The first files, to name the one that changed.
    listed: Vec<FilePrint>,
}

impl FilesPrint {
    pub(crate) fn of(blocks: &Blocks) -> Self {
        use std::hash::Hasher;
        let prints = || blocks.files.iter().map(|file| &file.print);
        let mut hasher = twox_hash::XxHash3_64::new();
        let mut contents = Some(twox_hash::XxHash3_64::new());
        for print in prints() {
            let line = format!("{}\n{}\n{}\n", print.name, print.bytes, print.checksum);
            hasher.write(line.as_bytes());
            match (&mut contents, &print.contents) {
                (Some(hasher), Some(of_file)) => hasher.write(of_file.as_bytes()),
                _ => contents = None,
            }
        }
        Self {
            count: blocks.files.len() as u64,
            bytes: prints().map(|print| print.bytes).sum(),
            checksum: format!("{:016x}", hasher.finish()),
            contents: contents.map(|hasher| format!("{:016x}", hasher.finish())),
            listed: prints().take(LISTED_FILES).cloned().collect(),
        }
    }

    pub(crate) fn described(&self) -> String {
        let Self {
            count,
            bytes,
            checksum,
            contents,
            listed: _,
        } = self;
        let checksum = contents.as_ref().unwrap_or(checksum);
        let files = if *count == 1 { "file" } else { "files" };
        format!("{count} {files} of {bytes} bytes with checksum {checksum}")
    }

    /// Checks that the files are those of a position, and names the first one that is not.
    fn check(&self, saved: &Self, path: &Path, blocks: &Blocks) -> Result<(), DataError> {
        let is_same_size = (self.count, self.bytes) == (saved.count, saved.bytes);
        let is_sampled = is_same_size && self.checksum == saved.checksum;
        if is_sampled && is_same(&self.contents, &saved.contents) {
            return Ok(());
        }
        let changed = |path: &Path, expected: String, found: String| {
            Err(DataError::Changed {
                path: path.to_owned(),
                expected,
                found,
            })
        };
        for (index, expected) in saved.listed.iter().enumerate() {
            match blocks.files.get(index) {
                Some(file) if file.print.is_of(expected) => {}
                Some(file) if file.print.name == expected.name => {
                    return changed(&file.path, expected.described(), file.print.described());
                }
                Some(file) => {
                    return changed(
                        path,
                        format!("the file `{}`", expected.name),
                        format!("`{}`", file.print.name),
                    );
                }
                None => {
                    return changed(
                        path,
                        format!("the file `{}`", expected.name),
                        "no such file".to_owned(),
                    );
                }
            }
        }
        changed(path, saved.described(), self.described())
    }
}

/// Returns the settings that determine the stream, by name.
pub(crate) fn settings(config: &DataConfig, tokenizer: &dyn Tokenizer) -> BTreeMap<String, String> {
    let DataConfig {
        path: _,
        format,
        fields,
        seq,
        packing,
        shuffle,
        seed,
        held_out,
    } = config;
    let special = [tokenizer.bos(), tokenizer.eos(), Some(tokenizer.padding())];
    let template = tokenizer.chat_template().map_or(0, |template| {
        twox_hash::XxHash3_64::oneshot(
            format!("{template}\n{:?}", tokenizer.special_names()).as_bytes(),
        )
    });
    let all = [
        ("the format", format!("{format:?}")),
        ("the fields", format!("{fields:?}")),
        ("the sequence length", seq.to_string()),
        ("the packing", format!("{packing:?}")),
        ("the shuffle", format!("{shuffle:?}")),
        ("the seed", seed.to_string()),
        ("the held-out fraction", held_out.to_string()),
        ("the tokenizer", tokenizer.identity()),
        ("the special tokens", format!("{special:?}")),
        (
            "the chat template with checksum",
            format!("{template:016x}"),
        ),
    ];
    all.into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

impl Position {
    pub(crate) fn new(
        sequences: u64,
        cursor: Cursor,
        files: FilesPrint,
        settings: BTreeMap<String, String>,
    ) -> Self {
        Self {
            version: VERSION,
            sequences,
            cursor,
            files,
            settings,
        }
    }

    /// Returns the number of sequences before this position, in all epochs.
    #[must_use]
    pub fn num_sequences(&self) -> u64 {
        self.sequences
    }

    /// Returns the current epoch, from 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.cursor.epoch
    }

    /// Checks that a position belongs to this data.
    pub(crate) fn check(
        &self,
        start: &Self,
        path: &Path,
        blocks: &Blocks,
    ) -> Result<(), DataError> {
        if self.version != VERSION {
            let problem = format!("expected version {VERSION}, but found {}", self.version);
            return Err(DataError::Position { problem });
        }
        let counts = [self.cursor.epoch, self.sequences, self.cursor.pairs];
        if counts.iter().any(|count| *count > MOST) || self.cursor.sequences > self.sequences {
            let problem = format!("its counts {counts:?} cannot be right");
            return Err(DataError::Position { problem });
        }
        for (name, given) in &start.settings {
            let saved = self.settings.get(name).map_or("absent", String::as_str);
            if saved != given {
                let (name, saved, given) = (name.clone(), saved.to_owned(), given.clone());
                return Err(DataError::OtherSetting { name, saved, given });
            }
        }
        start.files.check(&self.files, path, blocks)
    }
}
