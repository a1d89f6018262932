use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::blocks::{Blocks, Walk};
use crate::contents::{Contents, Part};
use crate::encoding::Encoder;
use crate::order::Draws;
use crate::position::{self, FilesPrint};
use crate::{DataConfig, DataError, Position, Stream, Tokenizer};

/// Files of documents, divided into a training and a held-out part.
#[derive(Debug, Clone)]
pub struct Dataset(Arc<Contents>);

/// Prints, for example, `2 files of 7000 bytes with checksum 00112233aabbccdd`. The checksum covers the names of the
/// files, but not the path of their folder.
impl fmt::Display for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.print.described())
    }
}

/// The size of one part of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartSize {
    /// Number of documents that are not empty.
    pub documents: u64,
    /// Bytes of their fields.
    pub bytes: u64,
}

/// The sizes of both parts of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Survey {
    /// The training part.
    pub training: PartSize,
    /// The held-out part.
    pub held_out: PartSize,
    /// Number of empty documents, which are in neither part.
    pub empty: u64,
}

impl Dataset {
    /// Finds the files, and reads samples of them for their checksums. Documents are read later.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, has an unknown extension, or is a Parquet file without the fields, if the tokenizer
    /// lacks a chat template that is needed, or if a setting is impossible.
    pub fn open(config: DataConfig, tokenizer: Arc<dyn Tokenizer>) -> Result<Self, DataError> {
        config.check()?;
        let blocks = Blocks::find(&config)?;
        let settings = position::settings(&config, tokenizer.as_ref());
        let encoder = Encoder::new(&config.fields, tokenizer)?;
        let print = FilesPrint::of(&blocks);
        let contents = Contents {
            config,
            blocks,
            encoder,
            print,
            settings,
        };
        if contents.blocks.count() == 0 {
            return Err(contents.empty(Part::Training));
        }
        Ok(Self(Arc::new(contents)))
    }

    /// Returns the paths of the files, in their order.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.blocks.files.iter().map(|file| file.path.as_path())
    }

    /// Returns the training stream from its start.
    #[must_use]
    pub fn training(&self) -> Stream {
        Stream::new(Arc::clone(&self.0), Part::Training, self.0.start())
    }

    /// Returns the training stream from a position of the same data, on any number of ranks.
    ///
    /// # Errors
    ///
    /// If the position belongs to other files or settings.
    pub fn resume(&self, position: &Position) -> Result<Stream, DataError> {
        position.check(&self.0.start(), &self.0.config.path, &self.0.blocks)?;
        if position.cursor.window[0] > self.0.blocks.count() {
            let problem = format!("there is no block {}", position.cursor.window[0]);
            return Err(DataError::Position { problem });
        }
        Ok(Stream::new(
            Arc::clone(&self.0),
            Part::Training,
            position.clone(),
        ))
    }

    /// Returns the held-out stream, which ends after one epoch.
    #[must_use]
    pub fn held_out(&self) -> Stream {
        Stream::new(Arc::clone(&self.0), Part::HeldOut, self.0.start())
    }

    /// Reads all documents, without tokenizing them, and returns the sizes of both parts.
    ///
    /// # Errors
    ///
    /// If a document cannot be read, or if no document is for training.
    pub fn survey(&self) -> Result<Survey, DataError> {
        let contents = &self.0;
        let draws = Draws {
            seed: contents.config.seed,
            epoch: 0,
        };
        let (mut walk, mut survey) = (Walk::from([0, 0]), Survey::default());
        while let Some(located) = walk.next(&contents.blocks, &contents.config, draws)? {
            let document = located.document;
            if document.is_empty() {
                survey.empty += 1;
                continue;
            }
            let size = match contents.part_of(&document) {
                Part::Training => &mut survey.training,
                Part::HeldOut => &mut survey.held_out,
            };
            size.documents += 1;
            size.bytes += document.num_bytes() as u64;
        }
        if survey.training.documents == 0 {
            return Err(contents.empty(Part::Training));
        }
        Ok(survey)
    }
}
