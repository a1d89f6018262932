use std::ops::Range;
use std::sync::Arc;

use crate::blocks::{Located, Walk};
use crate::contents::{Contents, Part};
use crate::encoding::Encoded;
use crate::position::Cursor;
use crate::{DataError, Packing, Position, Sequence};

/// A stream of sequences. The training stream is endless, and the held-out stream ends after one epoch.
///
/// All ranks read the same stream, and each keeps its own rows.
#[derive(Debug)]
pub struct Stream {
    contents: Arc<Contents>,
    part: Part,
    cursor: Cursor,
    walk: Walk,
    window: Option<Vec<Option<Located>>>,
    current: Option<Encoded>,
    /// Number of sequences before the next one, in all epochs.
    sequences: u64,
    position: Position,
}

impl Stream {
    pub(crate) fn new(contents: Arc<Contents>, part: Part, position: Position) -> Self {
        Self {
            cursor: position.cursor,
            walk: Walk::from(position.cursor.window),
            window: None,
            current: None,
            sequences: position.num_sequences(),
            contents,
            part,
            position,
        }
    }

    /// Returns the position after the last batch.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Returns some rows of the next global batch of `batch` sequences. Every rank must pass the same `batch`. Rank `r`
    /// of `n` passes the rows `r * batch / n..(r + 1) * batch / n`, or any others.
    ///
    /// The held-out stream has a shorter last batch, and then empty ones.
    ///
    /// # Errors
    ///
    /// If a document cannot be read, rendered or tokenized, or if an epoch has nothing to learn. The position then
    /// remains after the last batch, and the stream should be opened again from there.
    pub fn next_batch(
        &mut self,
        batch: usize,
        rows: Range<usize>,
    ) -> Result<Vec<Sequence>, DataError> {
        if rows.start > rows.end || rows.end > batch {
            return Err(DataError::Setting {
                name: "the range of rows",
                found: format!("{rows:?}"),
                expected: format!("in 0..{batch}"),
            });
        }
        let mut own = Vec::with_capacity(rows.len());
        for row in 0..batch {
            let Some(sequence) = self.next_sequence()? else {
                break;
            };
            if rows.contains(&row) {
                own.push(sequence);
            }
        }
        let (files, settings) = (self.contents.print.clone(), self.contents.settings.clone());
        self.position = Position::new(self.sequences, self.cursor, files, settings);
        Ok(own)
    }

    fn next_sequence(&mut self) -> Result<Option<Sequence>, DataError> {
        loop {
            let sequence = self.pack()?;
            if sequence.len() > 0 {
                if sequence.is_useful() {
                    self.cursor.sequences += 1;
                    self.sequences += 1;
                    return Ok(Some(sequence));
                }
            } else if self.part == Part::HeldOut {
                return Ok(None);
            } else if self.cursor.sequences == 0 {
                return Err(self.contents.empty(self.part));
            } else {
                self.cursor = Cursor::start_of(self.cursor.epoch + 1);
                self.walk = Walk::from([0, 0]);
                self.window = None;
            }
        }
    }

    /// Packs the next sequence. It is empty at the end of an epoch.
    fn pack(&mut self) -> Result<Sequence, DataError> {
        let (seq, packing) = (self.contents.config.seq, self.contents.config.packing);
        let mut sequence = Sequence::default();
        while sequence.len() < seq {
            let Some(document) = self.load()? else {
                break;
            };
            let (start, end) = (self.cursor.pairs as usize, document.num_pairs());
            let room = seq - sequence.len();
            let is_begun = sequence.len() > 0;
            let starts_next = match packing {
                Packing::Continuous | Packing::FullSequences => false,
                Packing::WholeDocuments => end - start > room,
                Packing::OneDocument => true,
            };
            if is_begun && starts_next {
                self.current = Some(document);
                break;
            }
            let taken = (end - start).min(room);
            sequence.push(&document, start..start + taken);
            if start + taken == end {
                self.cursor.taken += 1;
                self.cursor.pairs = 0;
            } else {
                self.cursor.pairs = (start + taken) as u64;
                self.current = Some(document);
            }
        }
        if packing == Packing::FullSequences && sequence.len() < seq {
            return Ok(Sequence::default());
        }
        if sequence.len() > 0 {
            sequence.pad(seq, self.contents.encoder.tokenizer.padding());
        }
        Ok(sequence)
    }

    /// Returns the document of the cursor, or the next one with something to learn.
    fn load(&mut self) -> Result<Option<Encoded>, DataError> {
        if let Some(current) = self.current.take() {
            return Ok(Some(current));
        }
        loop {
            let taken = self.cursor.taken as usize;
            let is_resumed = self.window.is_none();
            let window = match &mut self.window {
                Some(window) => window,
                None => {
                    let window = self
                        .contents
                        .window(&mut self.walk, self.cursor, self.part)?;
                    self.window.insert(window)
                }
            };
            if is_resumed && taken > window.len() {
                let problem = format!("the window has {} documents, not {taken}", window.len());
                return Err(DataError::Position { problem });
            }
            if window.is_empty() {
                return Ok(None);
            }
            let Some(located) = window.get_mut(taken) else {
                self.cursor.window = self.walk.at();
                self.cursor.taken = 0;
                self.window = None;
                continue;
            };
            if let Some(located) = located.take() {
                let (contents, pairs) = (&self.contents, self.cursor.pairs);
                let encoded = contents.encoder.encode(&located, &contents.blocks)?;
                let found = encoded.num_pairs();
                if pairs > 0 && (pairs >= found as u64 || !encoded.is_useful()) {
                    let problem = format!("the document has {found} pairs of tokens, not {pairs}");
                    return Err(DataError::Position { problem });
                }
                if encoded.is_useful() {
                    return Ok(Some(encoded));
                }
            }
            self.cursor.taken += 1;
        }
    }
}
