//! Blocks, the units in which files are read, and the walk over them.

use crate::config::Format;
use crate::document::Document;
use crate::files::{self, SourceFile};
use crate::jsonl::Lines;
use crate::order::Draws;
use crate::place::Place;
use crate::plain::{self, TEXT_BYTES};
use crate::rows::{self, Rows};
use crate::{DataConfig, DataError};

/// All files, divided into blocks: documents of plain text, ranges of JSONL, row groups of Parquet.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) files: Vec<SourceFile>,
    /// For each file, the number of its last block plus one.
    ends: Vec<u64>,
    block_bytes: u64,
}

/// A document and its origin.
#[derive(Debug)]
pub(crate) struct Located {
    pub(crate) document: Document,
    pub(crate) file: usize,
    pub(crate) place: Place,
}

impl Blocks {
    pub(crate) fn find(config: &DataConfig) -> Result<Self, DataError> {
        let files = files::find(config)?;
        let block_bytes = config.shuffle.unwrap_or_default().block_bytes;
        let (mut ends, mut end) = (Vec::new(), 0);
        for file in &files {
            end += match file.format {
                Format::Text => file.print.bytes.div_ceil(TEXT_BYTES),
                Format::Jsonl => file.print.bytes.div_ceil(block_bytes),
                Format::Parquet => rows::num_row_groups(file, &config.fields)?,
            };
            ends.push(end);
        }
        Ok(Self {
            files,
            ends,
            block_bytes,
        })
    }

    pub(crate) fn count(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn open(&self, block: u64, config: &DataConfig) -> Result<Open, DataError> {
        let file = self.ends.partition_point(|end| *end <= block);
        let first = if file == 0 { 0 } else { self.ends[file - 1] };
        let (source, index) = (&self.files[file], block - first);
        let reader = match source.format {
            Format::Text => Reader::Text(Some(plain::document(source, index)?)),
            Format::Jsonl => {
                let start = index * self.block_bytes;
                let end = start
                    .saturating_add(self.block_bytes)
                    .min(source.print.bytes);
                Reader::Jsonl(Lines::open(source, start, end)?)
            }
            Format::Parquet => {
                Reader::Parquet(Box::new(Rows::open(source, &config.fields, index)?))
            }
        };
        Ok(Open { file, reader })
    }
}

/// A block that is being read.
#[derive(Debug)]
struct Open {
    file: usize,
    reader: Reader,
}

#[derive(Debug)]
enum Reader {
    Text(Option<(Document, Place)>),
    Jsonl(Lines),
    Parquet(Box<Rows>),
}

impl Open {
    fn next(&mut self, blocks: &Blocks, config: &DataConfig) -> Result<Option<Located>, DataError> {
        let (file, source) = (self.file, &blocks.files[self.file]);
        let next = match &mut self.reader {
            Reader::Text(document) => document.take(),
            Reader::Jsonl(lines) => lines.next(source, &config.fields)?,
            Reader::Parquet(rows) => rows.next(source, &config.fields)?,
        };
        Ok(next.map(|(document, place)| Located {
            document,
            file,
            place,
        }))
    }

    fn skip(&mut self, blocks: &Blocks) -> Result<bool, DataError> {
        let source = &blocks.files[self.file];
        match &mut self.reader {
            Reader::Text(document) => Ok(document.take().is_some()),
            Reader::Jsonl(lines) => lines.skip(source),
            Reader::Parquet(rows) => rows.skip(source),
        }
    }
}

/// A walk over the documents of one epoch, block by block.
#[derive(Debug)]
pub(crate) struct Walk {
    /// The place of the current block in the epoch's order.
    block: u64,
    /// Number of documents of this block that were read.
    document: u64,
    open: Option<Open>,
}

impl Walk {
    /// Starts at a document of a block.
    pub(crate) fn from([block, document]: [u64; 2]) -> Self {
        Self {
            block,
            document,
            open: None,
        }
    }

    /// Returns the place of the next document.
    pub(crate) fn at(&self) -> [u64; 2] {
        [self.block, self.document]
    }

    /// Returns the next document of the epoch, of both parts.
    pub(crate) fn next(
        &mut self,
        blocks: &Blocks,
        config: &DataConfig,
        draws: Draws,
    ) -> Result<Option<Located>, DataError> {
        while self.block < blocks.count() {
            let open = match &mut self.open {
                Some(open) => open,
                None => {
                    let block = match config.shuffle {
                        Some(_) => draws.permuted(self.block, blocks.count()),
                        None => self.block,
                    };
                    let mut open = blocks.open(block, config)?;
                    for _ in 0..self.document {
                        if !open.skip(blocks)? {
                            let problem = format!(
                                "block {} has fewer than {} documents",
                                self.block, self.document
                            );
                            return Err(DataError::Position { problem });
                        }
                    }
                    self.open.insert(open)
                }
            };
            if let Some(located) = open.next(blocks, config)? {
                self.document += 1;
                return Ok(Some(located));
            }
            *self = Self::from([self.block + 1, 0]);
        }
        Ok(None)
    }
}
