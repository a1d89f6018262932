//! Sequences in the rows of one batch, with keys and values in tensors of few shapes.

use std::mem::take;
use std::ops::Range;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

use crate::decoding::{DecodeInputs, Decoded};

/// The numbers of new tokens of a sequence in one step. Fewer tokens are padded.
const TIMES: [usize; 4] = [1, 16, 64, 256];

/// The most tokens of a step that has more than the second of [`TIMES`] of a row, with padding. It limits the memory for
/// activations.
const MAX_TOKENS: usize = 512;

/// The least number of columns.
const MIN_ROOM: usize = 64;

/// Sequences that are continued together, one in each row of a batch, by [`decode`](crate::decode).
///
/// Keys and values are in columns. A step writes those of all rows into the same columns, so it writes each tensor once,
/// and rows of other lengths have empty columns. When no column is free, the columns of each row are moved together. The
/// number of columns is a power of two, and the number of new tokens is one of a few, so there are few shapes, and each
/// graph that is compiled for them runs many steps.
#[derive(Debug)]
pub struct DecodeRows {
    /// The keys and the values of each block, each `[rows, heads, room, head_dim]`.
    kept: Vec<[Tensor<4>; 2]>,
    rows: Vec<Row>,
    /// The first column that is free in all rows.
    column: usize,
    form: RowsForm,
}

/// The form of the keys and values of [`DecodeRows`].
#[derive(Debug, Clone)]
pub struct RowsForm {
    /// The number of rows.
    pub rows: usize,
    /// The number of blocks.
    pub blocks: usize,
    /// The key heads that are kept here: all, or those of one rank.
    pub heads: Range<usize>,
    /// The width of a head.
    pub head_dim: usize,
    /// The number of tokens that a query sees in layers with a sliding window, including its own.
    pub window: Option<usize>,
    /// The device of the keys and values.
    pub device: Device,
}

/// The sequence in a row.
#[derive(Debug, Clone, Default)]
struct Row {
    /// The position of the token in each column, `None` for an empty column.
    positions: Vec<Option<usize>>,
    num_tokens: usize,
}

/// Rows that are continued by one step, and the number of new tokens of each, with padding.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pass {
    rows: Range<usize>,
    time: usize,
}

impl DecodeRows {
    /// Creates empty rows.
    #[must_use]
    pub fn new(form: RowsForm) -> Self {
        Self {
            kept: Vec::new(),
            rows: vec![Row::default(); form.rows],
            column: 0,
            form,
        }
    }

    /// Returns the most columns for sequences of up to `longest` tokens.
    #[must_use]
    pub fn most_columns(longest: usize) -> usize {
        // The longest sequence may be complete when another one begins.
        columns_for(longest + longest.min(TIMES[3]))
    }

    /// Returns the number of tokens in a row.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    #[must_use]
    pub fn num_tokens(&self, row: usize) -> usize {
        self.rows[row].num_tokens
    }

    /// Removes the sequence in a row.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn clear(&mut self, row: usize) {
        let room = self.room();
        self.rows[row] = Row::empty(room);
    }

    /// Returns the number of bytes of all keys and values, with the room for later ones.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let tensors = self.kept.iter().flatten();
        let bytes = tensors.map(|tensor| tensor.shape().num_elements() * tensor.dtype().size());
        bytes.sum()
    }

    /// Adds new tokens to the sequences in the rows, and returns the logits of the token after each, `[vocab]`, on the
    /// host. Returns no logits for a row without new tokens. `run` computes [`decode`](crate::decode), whose new keys and
    /// values have all heads.
    ///
    /// # Errors
    ///
    /// Those of `run`.
    ///
    /// # Panics
    ///
    /// If `new` does not have one list for each row, or `run` returns other shapes than [`decode`](crate::decode).
    pub fn advance<E>(
        &mut self,
        mut new: Vec<Vec<i64>>,
        mut run: impl FnMut(&DecodeInputs) -> Result<Decoded, E>,
    ) -> Result<Vec<Vec<f32>>, E> {
        assert_eq!(
            new.len(),
            self.rows.len(),
            "one list of new tokens for each row"
        );
        let mut logits = vec![Vec::new(); new.len()];
        while let Some(pass) = next_pass(&new) {
            let tokens = new[pass.rows.clone()].iter_mut();
            let tokens: Vec<Vec<i64>> = tokens
                .map(|row| row.drain(..row.len().min(pass.time)).collect())
                .collect();
            let decoded = self.step(&pass, &tokens, &mut run)?;
            let vocab = decoded.dims()[1];
            let values: Vec<f32> = decoded.into_data().iter::<f32>().collect();
            for ((row, tokens), values) in pass.rows.zip(&tokens).zip(values.chunks(vocab.max(1))) {
                if !tokens.is_empty() {
                    logits[row] = values.to_vec();
                }
            }
        }
        Ok(logits)
    }

    /// Runs one step, and returns the logits after the last new token of each row.
    fn step<E>(
        &mut self,
        pass: &Pass,
        tokens: &[Vec<i64>],
        run: &mut impl FnMut(&DecodeInputs) -> Result<Decoded, E>,
    ) -> Result<Tensor<2>, E> {
        let added = tokens.iter().map(Vec::len).max().unwrap_or_default();
        self.make_room(added);
        let inputs = self.inputs(pass, tokens);
        let Decoded { logits, new } = run(&inputs)?;
        // Keys and values are only written in place if nothing else has them.
        drop(inputs);
        let (heads, columns) = (&self.form.heads, self.column..self.column + added);
        for (kept, new) in self.kept.iter_mut().zip(new) {
            for (kept, new) in kept.iter_mut().zip(new) {
                let new = new.narrow(1, heads.start, heads.len()).narrow(2, 0, added);
                let place = [
                    pass.rows.clone(),
                    0..heads.len(),
                    columns.clone(),
                    0..self.form.head_dim,
                ];
                let empty = Tensor::empty([0, 0, 0, 0], &self.form.device);
                let whole = std::mem::replace(kept, empty);
                *kept = whole.slice_assign(place, new);
            }
        }
        for (row, tokens) in self.rows[pass.rows.clone()].iter_mut().zip(tokens) {
            for column in columns.clone().take(tokens.len()) {
                row.positions[column] = Some(row.num_tokens);
                row.num_tokens += 1;
            }
        }
        self.column = columns.end;
        Ok(logits)
    }

    fn inputs(&self, pass: &Pass, tokens: &[Vec<i64>]) -> DecodeInputs {
        let (time, device) = (pass.time, &self.form.device);
        let rows = &self.rows[pass.rows.clone()];
        let num_rows = rows.len();
        let (mut padded, mut positions, mut last) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (row, tokens)) in rows.iter().zip(tokens).enumerate() {
            let padding = time - tokens.len();
            padded.extend(
                tokens
                    .iter()
                    .copied()
                    .chain(std::iter::repeat_n(0, padding)),
            );
            let own = row.num_tokens..row.num_tokens + tokens.len();
            let own = own.map(|position| position as i64);
            positions.extend(own.chain(std::iter::repeat_n(0, padding)));
            last.push((index * time + tokens.len().max(1) - 1) as i64);
        }
        let of_pass = |values: Vec<i64>| {
            Tensor::<2, Int>::from_data(TensorData::new(values, [num_rows, time]), device)
        };
        let hidden = |window: Option<usize>| {
            let lens = tokens.iter().map(Vec::len);
            let hidden: Vec<bool> = rows
                .iter()
                .zip(lens)
                .flat_map(|(row, len)| row.hidden(len, time, window))
                .collect();
            let shape = [num_rows, 1, time, self.room() + time];
            Tensor::<4, Bool>::from_data(TensorData::new(hidden, shape), device)
        };
        let is_all = num_rows == self.rows.len();
        let own = |tensor: &Tensor<4>| {
            if is_all {
                tensor.clone()
            } else {
                tensor.clone().narrow(0, pass.rows.start, num_rows)
            }
        };
        DecodeInputs {
            tokens: of_pass(padded),
            positions: of_pass(positions),
            last: Tensor::from_data(TensorData::new(last, [num_rows]), device),
            hidden: hidden(None),
            hidden_in_window: self.form.window.map(|window| hidden(Some(window))),
            kept: self
                .kept
                .iter()
                .map(|kept| kept.each_ref().map(own))
                .collect(),
        }
    }

    /// Returns the number of columns.
    fn room(&self) -> usize {
        self.kept.first().map_or(0, |[keys, _]| keys.dims()[2])
    }

    /// Makes sure that the next columns are free. If they are not, moves the columns of each row together, with room for
    /// at least a quarter more.
    fn make_room(&mut self, added: usize) {
        let room = self.room();
        if self.column + added <= room {
            return;
        }
        let longest = self.rows.iter().map(|row| row.num_tokens).max();
        let longest = longest.unwrap_or_default();
        let needed = longest + added;
        let wanted = columns_for(needed).max(room);
        let RowsForm {
            heads,
            head_dim,
            device,
            ..
        } = &self.form;
        let zeros =
            |columns: usize| Tensor::<4>::zeros([1, heads.len(), columns, *head_dim], device);
        let columns = self.rows.iter().map(Row::columns).collect::<Vec<_>>();
        if self.kept.is_empty() {
            let whole = || zeros(wanted).repeat_dim(0, self.rows.len());
            self.kept = (0..self.form.blocks).map(|_| [whole(), whole()]).collect();
        } else {
            let moved = |tensor: Tensor<4>| {
                let rows = columns.iter().enumerate().map(|(row, columns)| {
                    let room = zeros(wanted - columns.len());
                    if columns.is_empty() {
                        return room;
                    }
                    let index = Tensor::<1, Int>::from_data(&columns[..], device);
                    let own = tensor.clone().narrow(0, row, 1).select(2, index);
                    Tensor::cat(vec![own, room], 2)
                });
                Tensor::cat(rows.collect(), 0)
            };
            let kept = take(&mut self.kept);
            self.kept = kept.into_iter().map(|kept| kept.map(moved)).collect();
        }
        for row in &mut self.rows {
            row.move_together(wanted);
        }
        self.column = longest;
    }
}

/// Returns the number of columns for sequences that need `needed` at the moment.
fn columns_for(needed: usize) -> usize {
    let with_room = needed.saturating_add(needed / 4);
    with_room
        .checked_next_power_of_two()
        .unwrap_or(with_room)
        .max(MIN_ROOM)
}

/// Returns the next step for these new tokens. If few rows have several tokens, as when one sequence begins while others
/// continue, each of them has a step of its own, so that the others are not padded.
fn next_pass(new: &[Vec<i64>]) -> Option<Pass> {
    let longest = new.iter().map(Vec::len).max().filter(|len| *len > 0)?;
    let time_for = |rows: usize, len: usize| {
        let fits = |time: &usize| *time <= TIMES[1] || rows * time <= MAX_TOKENS;
        let mut allowed = TIMES.into_iter().filter(fits);
        let longest = allowed.clone().max();
        allowed.find(|time| *time >= len).or(longest).unwrap_or(1)
    };
    let several: Vec<_> = (0..new.len()).filter(|row| new[*row].len() > 1).collect();
    match several.first() {
        Some(row) if 2 * several.len() < new.len() => Some(Pass {
            rows: *row..row + 1,
            time: time_for(1, new[*row].len()),
        }),
        _ => Some(Pass {
            rows: 0..new.len(),
            time: time_for(new.len(), longest),
        }),
    }
}

impl Row {
    fn empty(room: usize) -> Self {
        Self {
            positions: vec![None; room],
            num_tokens: 0,
        }
    }

    /// Returns the columns of the sequence, in the order of its tokens.
    fn columns(&self) -> Vec<i64> {
        let columns = self.positions.iter().enumerate();
        let columns = columns.filter(|(_, position)| position.is_some());
        columns.map(|(column, _)| column as i64).collect()
    }

    /// Records that the sequence is now in the first of `room` columns.
    fn move_together(&mut self, room: usize) {
        let positions = (0..room).map(|column| (column < self.num_tokens).then_some(column));
        self.positions = positions.collect();
    }

    /// Returns which keys each of `time` new tokens does not see, of which the first `len` are of the sequence:
    /// `time` times all columns and new tokens.
    fn hidden(&self, len: usize, time: usize, window: Option<usize>) -> Vec<bool> {
        let mut hidden = Vec::with_capacity(time * (self.positions.len() + time));
        for query in 0..time {
            let own = self.num_tokens + query;
            let is_far = |position: usize| window.is_some_and(|window| position + window <= own);
            let earlier = self.positions.iter();
            hidden.extend(earlier.map(|position| position.is_none_or(is_far)));
            hidden.extend((0..time).map(|key| {
                let is_seen = key <= query && key < len && !is_far(self.num_tokens + key);
                // Padding sees itself, so no sum over the keys that it sees is empty.
                !(is_seen || key == query)
            }));
        }
        hidden
    }
}
