//! The stream in its plainest form: all documents in memory, packed in loops. It follows README.md, not the crate.

use std::hash::Hasher;

use burn_fsdp_data::{Packing, Sequence, Shuffle};
use siphasher::sip::SipHasher13;
use twox_hash::XxHash3_64;

use crate::files::Parts;
use crate::tokenizers::{BOS, EOS};

/// All blocks of all files, each a list of documents.
pub(crate) type AllBlocks = Vec<Vec<Parts>>;

#[derive(Debug, Clone)]
pub(crate) struct Oracle {
    pub(crate) blocks: AllBlocks,
    pub(crate) seq: usize,
    pub(crate) packing: Packing,
    pub(crate) shuffle: Option<Shuffle>,
    pub(crate) seed: u64,
    pub(crate) held_out: f64,
}

fn draw(seed: u64, epoch: u64, words: [u64; 3]) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(seed, epoch);
    words
        .iter()
        .for_each(|word| hasher.write(&word.to_le_bytes()));
    hasher.finish()
}

/// Returns the place of a block in an epoch.
fn permuted(seed: u64, epoch: u64, index: u64, count: u64) -> u64 {
    let mut half = 1;
    while 1u64 << (2 * half) < count {
        half += 1;
    }
    let size = 1u64 << half;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value / size, value % size);
        for round in 0..6 {
            let next = left ^ (draw(seed, epoch, [0, round, right]) % size);
            (left, right) = (right, next);
        }
        value = left * size + right;
        if value < count {
            return value;
        }
    }
}

pub(crate) fn is_held_out(parts: &Parts, fraction: f64) -> bool {
    let mut bytes = Vec::new();
    for part in parts.iter().map(String::as_str).chain([""]).take(2) {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part.as_bytes());
    }
    (XxHash3_64::oneshot(&bytes) as f64) < fraction * 2f64.powi(64)
}

/// Returns the lines of JSONL by block.
pub(crate) fn jsonl_blocks(text: &str, documents: &[Parts], block_bytes: u64) -> AllBlocks {
    let mut blocks = vec![Vec::new(); text.len().div_ceil(block_bytes as usize)];
    let (mut start, mut index) = (0, 0);
    for line in text.split_inclusive('\n') {
        if !line.trim().is_empty() {
            blocks[start / block_bytes as usize].push(documents[index].clone());
            index += 1;
        }
        start += line.len();
    }
    blocks
}

/// Returns the documents of plain text, one per block.
pub(crate) fn text_blocks(text: &str) -> AllBlocks {
    const SIZE: usize = 64 << 10;
    let mut cuts = vec![0];
    for multiple in (SIZE..text.len()).step_by(SIZE) {
        // The first line that ends at or past the multiple, or else the first character.
        let end = (multiple - 1 + SIZE).min(text.len());
        let line = text.as_bytes()[multiple - 1..end]
            .iter()
            .position(|byte| *byte == b'\n');
        cuts.push(match line {
            Some(line) => multiple + line,
            None => (multiple..)
                .find(|cut| text.is_char_boundary(*cut))
                .expect("there is one"),
        });
    }
    if !text.is_empty() {
        cuts.push(text.len());
    }
    cuts.windows(2)
        .map(|cut| vec![vec![text[cut[0]..cut[1]].to_owned()]])
        .collect()
}

impl Oracle {
    /// Returns the documents of one part of an epoch, in order.
    pub(crate) fn documents(&self, epoch: u64, held_out: bool) -> Vec<Parts> {
        let count = self.blocks.len() as u64;
        let mut places = Vec::new();
        for place in 0..count {
            let block = match self.shuffle {
                Some(_) => permuted(self.seed, epoch, place, count),
                None => place,
            };
            for (index, document) in self.blocks[block as usize].iter().enumerate() {
                places.push(([place, index as u64], document));
            }
        }
        let Some(shuffle) = self.shuffle else {
            let all = places.into_iter().map(|(_, document)| document);
            let own = all.filter(|document| self.is_in(document, held_out));
            return own.cloned().collect();
        };
        let (mut ordered, mut rest) = (Vec::new(), &places[..]);
        let mut start = [0, 0];
        loop {
            let (mut window, mut bytes, mut read) = (Vec::new(), 0, 0);
            for (_, document) in rest {
                if window.len() >= shuffle.window_documents || bytes >= shuffle.window_bytes {
                    break;
                }
                read += 1;
                if self.is_in(document, held_out) {
                    bytes += document.iter().map(String::len).sum::<usize>();
                    window.push((*document).clone());
                }
            }
            let key = draw(self.seed, epoch, [1, start[0], start[1]]);
            for index in (1..window.len()).rev() {
                let drawn = u128::from(draw(self.seed, epoch, [2, key, index as u64]));
                window.swap(index, ((drawn * (index as u128 + 1)) / (1 << 64)) as usize);
            }
            ordered.extend(window);
            if read == rest.len() {
                return ordered;
            }
            // The next window begins after the last document of this one.
            start = rest[read - 1].0;
            start[1] += 1;
            rest = &rest[read..];
        }
    }

    fn is_in(&self, document: &Parts, held_out: bool) -> bool {
        let is_empty = document.last().is_none_or(String::is_empty);
        !is_empty && is_held_out(document, self.held_out) == held_out
    }

    /// Returns the sequences of an epoch.
    pub(crate) fn sequences(&self, epoch: u64, held_out: bool) -> Vec<Sequence> {
        let mut rows: Vec<Sequence> = Vec::new();
        let mut is_open = false;
        for document in self.documents(epoch, held_out) {
            let prompt = if document.len() == 2 {
                document[0].len()
            } else {
                0
            };
            let text = document.concat();
            let tokens: Vec<u32> = [BOS]
                .into_iter()
                .chain(text.bytes().map(u32::from))
                .chain([EOS])
                .collect();
            let mut previous = None;
            for pair in 0..tokens.len() - 1 {
                let left = tokens.len() - 1 - pair;
                let room = rows
                    .last()
                    .filter(|_| is_open)
                    .map_or(0, |row| self.seq - row.inputs.len());
                let is_next = match self.packing {
                    Packing::Continuous | Packing::FullSequences => false,
                    Packing::WholeDocuments => pair == 0 && left > room,
                    _ => pair == 0,
                };
                if room == 0 || is_next {
                    rows.push(Sequence::default());
                }
                is_open = true;
                let number = rows.len();
                let row = rows.last_mut().expect("there is one");
                let continues = previous == Some(number);
                let (segment, position) = match row.segments.last() {
                    Some(segment) if continues => {
                        (*segment, row.positions.last().map_or(0, |last| last + 1))
                    }
                    last => (last.map_or(1, |segment| segment + 1), 0),
                };
                previous = Some(number);
                row.inputs.push(tokens[pair]);
                row.targets.push(tokens[pair + 1]);
                row.learned.push(pair >= prompt);
                row.segments.push(segment);
                row.positions.push(position);
            }
        }
        if self.packing == Packing::FullSequences {
            rows.retain(|row| row.inputs.len() == self.seq);
        }
        for row in &mut rows {
            for position in 0..self.seq - row.inputs.len() {
                row.inputs.push(EOS);
                row.targets.push(EOS);
                row.learned.push(false);
                row.segments.push(0);
                row.positions.push(position as u32);
            }
        }
        rows.retain(|row| row.learned.contains(&true));
        rows
    }

    /// Returns the first sequences of the training stream, over as many epochs as it takes; fewer if there are none.
    pub(crate) fn training(&self, count: usize) -> Vec<Sequence> {
        let mut all = Vec::new();
        for epoch in 0.. {
            let rows = self.sequences(epoch, false);
            if rows.is_empty() || all.len() >= count {
                break;
            }
            all.extend(rows);
        }
        all.truncate(count);
        all
    }
}
