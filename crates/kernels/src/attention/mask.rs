//! The keys that a query attends to.

use std::ops::Range;
use std::sync::Arc;

use burn_flex::FlexTensor;

use crate::exp::exp_or_zero;
use crate::rows::{exp_row, max, scale, sum_by, sum_pairs_by};
use crate::vectors::Kernel;

/// The keys that a query attends to.
#[derive(Clone, Debug)]
pub(super) enum Mask {
    /// A query attends to the keys up to its own position.
    Causal,
    /// A query attends to the keys from its first one up to its own position.
    Documents(Firsts),
    /// Masks that are applied in order. Where a mask is set, its number replaces the score.
    Filled(Vec<Fill>),
}

/// The first key that each query of a batch attends to, sequence after sequence. It is at most the query's own.
#[derive(Clone, Debug)]
pub(super) struct Firsts {
    keys: Arc<[usize]>,
    /// The first query of the sequence.
    start: usize,
    time: usize,
}

impl Firsts {
    /// Returns the first keys of queries at these positions in their documents. `reach` is the number of keys that a
    /// query attends to at most, including its own. The tensor may hold integers of any type.
    pub(super) fn of(positions: &FlexTensor, time: usize, reach: Option<usize>) -> Self {
        let data = positions.clone().into_data();
        let before = reach.map_or(i64::MAX, |reach| reach.saturating_sub(1) as i64);
        let first = |(index, position): (usize, i64)| {
            let query = index % time.max(1);
            query.saturating_sub(position.clamp(0, before) as usize)
        };
        Self {
            keys: data.iter::<i64>().enumerate().map(first).collect(),
            start: 0,
            time,
        }
    }

    fn of_sequence(&self, index: usize) -> Self {
        let keys = self.keys.clone();
        let (start, time) = (index * self.time, self.time);
        Self { keys, start, time }
    }

    /// Returns the first keys of some queries of the sequence.
    pub(super) fn of_queries(&self, queries: &Range<usize>) -> &[usize] {
        &self.keys[self.start + queries.start..self.start + queries.end]
    }
}

/// A mask and the number that replaces the scores where it is set.
#[derive(Clone, Debug)]
pub(crate) struct Fill {
    /// Bools, `[batch or 1, heads or 1, queries or 1, keys or 1]`.
    pub(crate) mask: FlexTensor,
    pub(crate) value: f32,
}

/// The masks of a block of queries. The code of a query and a key is zero if no mask is set there, or the one-based
/// index of the last mask that is set.
pub(super) struct Codes {
    codes: Vec<u8>, // [heads or 1, queries, keys]
    planes: usize,
    queries: usize,
    keys: usize,
    values: Vec<f32>,
}

/// An omitted score contributes nothing if it is below the row's maximum by more than this, because `exp` of the
/// difference is zero.
const NOTHING: f32 = 104.0;

impl Mask {
    /// Returns the mask of one sequence.
    pub(super) fn of_sequence(&self, index: usize) -> Self {
        match self {
            Self::Causal => Self::Causal,
            Self::Documents(firsts) => Self::Documents(firsts.of_sequence(index)),
            Self::Filled(fills) => Self::Filled(fills.iter().map(|fill| fill.of(index)).collect()),
        }
    }
}

impl Codes {
    /// Reads the masks of a sequence for some of its queries.
    pub(super) fn of(fills: &[Fill], queries: &Range<usize>, [heads, keys]: [usize; 2]) -> Self {
        let has_planes = |fill: &Fill| fill.mask.layout().shape()[1] > 1;
        let planes = if fills.iter().any(has_planes) {
            heads
        } else {
            1
        };
        let mut codes = vec![0; planes * queries.len() * keys];
        let mut rows = codes.chunks_exact_mut(keys.max(1));
        for plane in 0..planes {
            for query in queries.clone() {
                let Some(row) = rows.next() else { break };
                for (number, fill) in (1..).zip(fills) {
                    fill.mark(row, [plane, query], number);
                }
            }
        }
        Self {
            codes,
            planes,
            queries: queries.len(),
            keys,
            values: fills.iter().map(|fill| fill.value).collect(),
        }
    }

    /// Returns the range from the first to the last key that any query attends to, or `None` if some query attends to
    /// no key.
    pub(super) fn seen(&self) -> Option<Range<usize>> {
        let mut seen = self.keys..0;
        for row in self.codes.chunks_exact(self.keys.max(1)) {
            let first = row.iter().position(|code| *code == 0)?;
            let last = row.iter().rposition(|code| *code == 0)?;
            seen = seen.start.min(first)..seen.end.max(last + 1);
        }
        (!seen.is_empty()).then_some(seen)
    }

    /// Returns the codes of a row of scores for some keys.
    #[inline(always)]
    fn row(&self, head: usize, query: usize, keys: &Range<usize>) -> &[u8] {
        let plane = if self.planes > 1 { head } else { 0 };
        let start = (plane * self.queries + query) * self.keys;
        &self.codes[start + keys.start..start + keys.end]
    }

    /// Returns the largest fill value of the masks, or NaN if any is NaN.
    fn highest(&self) -> f32 {
        let larger = |a: f32, b: f32| if a > b || a.is_nan() { a } else { b };
        let values = self.values.iter().copied();
        values.fold(f32::NEG_INFINITY, larger)
    }
}

impl Fill {
    /// Returns the mask of one sequence.
    fn of(&self, sequence: usize) -> Self {
        let is_shared = self.mask.layout().shape()[0] == 1;
        Self {
            mask: self.mask.narrow(0, if is_shared { 0 } else { sequence }, 1),
            value: self.value,
        }
    }

    /// Sets the code of every key whose mask is set for the query to `number`.
    fn mark(&self, row: &mut [u8], [plane, query]: [usize; 2], number: u8) {
        let (shape, strides) = (self.mask.layout().shape(), self.mask.layout().strides());
        let at = [0, plane, query];
        let steps = (1..3).filter(|dim| shape[*dim] > 1);
        let offset: isize = steps.map(|dim| at[dim] as isize * strides[dim]).sum();
        let start = self.mask.layout().start_offset() as isize + offset;
        let bytes = self.mask.bytes();
        let step = if shape[3] > 1 { strides[3] } else { 0 };
        if step == 1 {
            let bytes = &bytes[start as usize..start as usize + row.len()];
            for (code, byte) in row.iter_mut().zip(bytes) {
                *code = if *byte != 0 { number } else { *code };
            }
            return;
        }
        for (key, code) in row.iter_mut().enumerate() {
            if bytes[(start + key as isize * step) as usize] != 0 {
                *code = number;
            }
        }
    }
}

/// Softmax of rows of scores, each up to the query's own key.
pub(super) struct CausalSoftmax<'a> {
    pub(super) scores: &'a mut [f32], // [heads, queries, keys]
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    /// The first key of each query, if it is not the first of all.
    pub(super) firsts: Option<&'a [usize]>,
    pub(super) scale: f32,
}

impl Kernel for CausalSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (start, width) = (self.keys.start, self.keys.len());
        for head in self.scores.chunks_exact_mut(self.queries.len() * width) {
            let rows = head.chunks_exact_mut(width);
            for (number, (row, query)) in rows.zip(self.queries.clone()).enumerate() {
                let (row, future) = row.split_at_mut(query + 1 - start);
                let first = self.firsts.map_or(0, |firsts| firsts[number] - start);
                let (before, past) = row.split_at_mut(first);
                let sum = exp_row(past, max(past), self.scale);
                scale(past, 1.0 / sum);
                before.fill(0.0);
                future.fill(0.0);
            }
        }
    }
}

/// Softmax of rows of scores under masks. Running it returns true if omitting the other keys does not change the
/// result.
pub(super) struct MaskedSoftmax<'a> {
    pub(super) scores: &'a mut [f32], // [heads, queries, keys]
    pub(super) keys: Range<usize>,
    pub(super) codes: &'a Codes,
    pub(super) scale: f32,
}

impl Kernel for MaskedSoftmax<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let highest = self.codes.highest();
        let width = self.keys.len();
        let mut is_nothing = true;
        let queries = self.codes.queries;
        for (number, row) in self.scores.chunks_exact_mut(width).enumerate() {
            let codes = self
                .codes
                .row(number / queries, number % queries, &self.keys);
            for x in &mut *row {
                *x *= self.scale;
            }
            for (number, value) in (1_u8..).zip(&self.codes.values) {
                for (x, code) in row.iter_mut().zip(codes) {
                    *x = if *code == number { *value } else { *x };
                }
            }
            let max = max(row);
            for x in &mut *row {
                *x = exp_or_zero(*x - max);
            }
            let sum = sum_by(row, |x| x);
            scale(row, 1.0 / sum);
            is_nothing &= max.is_finite() && max - highest > NOTHING && !sum.is_nan();
        }
        is_nothing
    }
}

/// Replaces the probabilities' gradient with the gradient of the unscaled scores, which is zero for masked scores.
pub(super) struct SoftmaxGradient<'a> {
    pub(super) grad: &'a mut [f32],
    pub(super) probabilities: &'a [f32],
    pub(super) keys: Range<usize>,
    pub(super) codes: Option<&'a Codes>,
    pub(super) scale: f32,
}

impl Kernel for SoftmaxGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.keys.len();
        let rows = self.grad.chunks_exact_mut(width);
        let rows = rows.zip(self.probabilities.chunks_exact(width)).enumerate();
        for (number, (row, probabilities)) in rows {
            let mean = sum_pairs_by(row, probabilities, |g, p| g * p);
            for (grad, p) in row.iter_mut().zip(probabilities) {
                *grad = (*grad - mean) * p * self.scale;
            }
            if let Some(codes) = self.codes {
                let row_codes =
                    codes.row(number / codes.queries, number % codes.queries, &self.keys);
                for (grad, code) in row.iter_mut().zip(row_codes) {
                    *grad = if *code == 0 { *grad } else { 0.0 };
                }
            }
        }
    }
}
