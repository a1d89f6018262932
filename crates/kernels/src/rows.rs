//! Rows of a matrix: their sums, and multithreaded loops over them.

use burn::tensor::{Bytes, DType, Element};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use rayon::prelude::*;

use crate::exp::exp_or_zero;
use crate::fresh::changed_copy;
use crate::halves::{Elements, narrow, widen};
use crate::vectors::{Kernel, vectorized};

/// Number of separate partial sums, which allow vector additions. The widest vectors have this many floats.
const LANES: usize = 16;

/// Number of rows that a thread processes at a time. It is fixed, so sums over rows do not depend on the number of
/// threads.
pub(crate) const CHUNK_ROWS: usize = 32;

/// Returns the tensor in row-major order from the start of its buffer. Copies it only if necessary.
pub(crate) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    let elements = tensor.layout().num_elements();
    match tensor.layout().contiguous_offsets() {
        Some((0, end))
            if end == elements && tensor.bytes().len() == elements * tensor.dtype().size() =>
        {
            tensor
        }
        _ => tensor.to_contiguous(),
    }
}

/// Returns the number of rows and their width. All dims except the last are rows.
pub(crate) fn matrix_dims(tensor: &FlexTensor) -> [usize; 2] {
    let shape = tensor.layout().shape();
    let (width, rows) = shape
        .split_last()
        .map_or((1, &[][..]), |(width, rows)| (*width, rows));
    [rows.iter().product(), width]
}

/// A function that replaces whole rows of 32-bit floats.
///
/// Like [`Kernel::run`], [`run`](Self::run) must be `#[inline(always)]`.
pub(crate) trait RowKernel: Sync {
    type Output: Send;

    /// Computes rows, beginning at row `first_row`. The last argument contains the same rows of a second matrix, if
    /// there is one.
    fn run(&self, first_row: usize, rows: &mut [f32], beside: &[f32]) -> Self::Output;
}

/// Runs a kernel on each chunk of a tensor's rows, on several threads, and returns its results in the order of the
/// rows. The tensor must be contiguous. Halves are widened, and the results rounded, chunk by chunk.
pub(crate) fn map_rows<K: RowKernel>(
    tensor: &mut FlexTensor,
    beside: Option<Elements<'_>>,
    kernel: &K,
) -> Vec<K::Output> {
    let [_, width] = matrix_dims(tensor);
    let len = CHUNK_ROWS * width.max(1);
    let beside = beside.unwrap_or(Elements::Full(&[]));
    let run = |chunk: usize, rows: &mut [f32], buffer: &mut Vec<f32>| {
        let start = chunk * len;
        let beside = beside.part(start..start + rows.len(), buffer);
        vectorized(RunRows {
            kernel,
            first_row: chunk * CHUNK_ROWS,
            rows,
            beside,
        })
    };
    match tensor.dtype() {
        DType::BF16 => map_chunks(tensor, len, |chunk, rows, (floats, buffer)| {
            let floats = widen(rows, floats);
            let output = run(chunk, floats, buffer);
            narrow(floats, rows);
            output
        }),
        _ => map_chunks(tensor, len, run),
    }
}

/// Calls `run` with the index of each chunk of a tensor, the chunk's elements and the thread's scratch, and returns the
/// results in order. If the tensor's memory is shared, writes to a copy.
fn map_chunks<T: Element + Pod + Send + Sync, S: Default, R: Send>(
    tensor: &mut FlexTensor,
    len: usize,
    run: impl Fn(usize, &mut [T], &mut S) -> R + Sync,
) -> Vec<R> {
    if let Some(elements) = tensor.try_storage_mut::<T>() {
        let chunks = elements.par_chunks_mut(len).enumerate();
        let chunks = chunks.map_init(S::default, |scratch, (chunk, rows)| {
            run(chunk, rows, scratch)
        });
        return chunks.collect();
    }
    let (elements, results) = changed_copy(tensor.storage::<T>(), len, run);
    let layout = tensor.layout().clone();
    *tensor = FlexTensor::new(Bytes::from_elems(elements), layout, T::dtype());
    results
}

struct RunRows<'a, K> {
    kernel: &'a K,
    first_row: usize,
    rows: &'a mut [f32],
    beside: &'a [f32],
}

impl<K: RowKernel> Kernel for RunRows<'_, K> {
    type Output = K::Output;

    #[inline(always)]
    fn run(self) -> K::Output {
        self.kernel.run(self.first_row, self.rows, self.beside)
    }
}

/// Returns the sum of `f` over the row.
#[inline(always)]
pub(crate) fn sum_by(row: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|&x| f(x)).sum();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += f(chunk[lane]);
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Returns the sum of `f` over pairs of two rows.
#[inline(always)]
pub(crate) fn sum_pairs_by(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks
        .remainder()
        .iter()
        .zip(b_chunks.remainder())
        .map(|(&a, &b)| f(a, b))
        .sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += f(a[lane], b[lane]);
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Returns the largest value of the row, ignoring NaN.
#[inline(always)]
pub(crate) fn max(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut maxima = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            maxima[lane] = larger(maxima[lane], chunk[lane]);
        }
    }
    maxima
        .iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// Replaces each `x` in a row with `exp(scale * (x - max))` and returns the sum.
#[inline(always)]
pub(crate) fn exp_row(row: &mut [f32], max: f32, scale: f32) -> f32 {
    for x in &mut *row {
        *x = exp_or_zero((*x - max) * scale);
    }
    sum_by(row, |x| x)
}

/// Multiplies every value of a row.
#[inline(always)]
pub(crate) fn scale(row: &mut [f32], factor: f32) {
    for x in row {
        *x *= factor;
    }
}
