//! The files of a data set with everything that determines their streams.

use std::collections::BTreeMap;

use crate::blocks::{Blocks, Located, Walk};
use crate::document::Document;
use crate::encoding::Encoder;
use crate::order::Draws;
use crate::position::{Cursor, FilesPrint};
use crate::{DataConfig, DataError, Position};

/// Held-out data, or data for training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Training,
    HeldOut,
}

impl Part {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::HeldOut => "held-out",
        }
    }
}

#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) config: DataConfig,
    pub(crate) blocks: Blocks,
    pub(crate) encoder: Encoder,
    pub(crate) print: FilesPrint,
    pub(crate) settings: BTreeMap<String, String>,
}

impl Contents {
    pub(crate) fn start(&self) -> Position {
        Position::new(
            0,
            Cursor::start_of(0),
            self.print.clone(),
            self.settings.clone(),
        )
    }

    pub(crate) fn part_of(&self, document: &Document) -> Part {
        // 2^64 is exact, and a fraction below 1 stays below it.
        let threshold = (self.config.held_out * 2f64.powi(64)) as u64;
        if document.hash() < threshold {
            Part::HeldOut
        } else {
            Part::Training
        }
    }

    pub(crate) fn empty(&self, part: Part) -> DataError {
        let problem = match self.blocks.count() {
            0 => "all files are empty; add documents".to_owned(),
            _ if self.config.held_out > 0.0 => {
                format!(
                    "each is empty, too short, without anything to learn, or in the held-out {} % of the data, or all are less than \
                     a sequence; add documents, or shorten the sequences",
                    100.0 * self.config.held_out
                )
            }
            _ => "all are empty, too short or have only prompts; add documents".to_owned(),
        };
        DataError::Empty {
            path: self.config.path.clone(),
            part: part.name(),
            problem,
        }
    }

    /// Reads a window of one part, in its shuffled order.
    pub(crate) fn window(
        &self,
        walk: &mut Walk,
        cursor: Cursor,
        part: Part,
    ) -> Result<Vec<Option<Located>>, DataError> {
        let (blocks, config) = (&self.blocks, &self.config);
        let draws = Draws {
            seed: config.seed,
            epoch: cursor.epoch,
        };
        let (most_documents, most_bytes) = match config.shuffle {
            Some(shuffle) => (shuffle.window_documents, shuffle.window_bytes),
            None => (1, 1),
        };
        let (mut window, mut bytes) = (Vec::new(), 0);
        while window.len() < most_documents && bytes < most_bytes {
            let Some(located) = walk.next(blocks, config, draws)? else {
                break;
            };
            if !located.document.is_empty() && self.part_of(&located.document) == part {
                bytes += located.document.num_bytes();
                window.push(Some(located));
            }
        }
        if config.shuffle.is_some() {
            draws.shuffle(cursor.window, &mut window);
        }
        Ok(window)
    }
}
