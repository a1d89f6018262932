//! Log probabilities of selected classes: the part of a softmax that the cross entropy of logits needs.

use std::ops::Range;

use burn::tensor::DType;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::cross_entropy::cpu::target_indices;
use crate::exp::exp_or_zero;
use crate::halves::{Elements, floats, vector};
use crate::rows::{CHUNK_ROWS, RowKernel, contiguous, map_rows, matrix_dims, max, sum_by};
use crate::vectors::{Kernel, vectorized};

/// Numbers kept for each row: its maximum logit, and the logarithm of the sum of `exp(logit - maximum)`.
const KEPT: usize = 2;

/// Returns the log probability of one class of each row, `[.., 1]`, and the 32-bit numbers kept for the rows,
/// `[.., 2]`.
///
/// # Panics
///
/// If a class is negative, or not below the width of a row.
pub(crate) fn forward(logits: &FlexTensor, classes: &FlexTensor) -> [FlexTensor; 2] {
    let logits = contiguous(logits.clone());
    let [rows, width] = matrix_dims(&logits);
    let classes = target_indices(classes, width);
    let mut chosen = vec![0.0; rows];
    let mut kept = vec![0.0; rows * KEPT];
    let elements = Elements::of(&logits);
    let chunks = chosen.par_chunks_mut(CHUNK_ROWS);
    let chunks = chunks.zip(kept.par_chunks_mut(CHUNK_ROWS * KEPT));
    chunks
        .enumerate()
        .for_each_init(Vec::new, |buffer, (chunk, (chosen, kept))| {
            let rows = part(chunk, chosen.len());
            let classes = &classes[rows.clone()];
            let logits = elements.part(rows.start * width..rows.end * width, buffer);
            vectorized(Forward {
                logits,
                classes,
                chosen,
                kept,
            });
        });
    let shape = |last: usize| {
        let mut shape = logits.layout().shape().to_vec();
        shape.pop();
        shape.push(last);
        shape
    };
    [
        vector(chosen, logits.dtype()).reshape(shape(1).into()),
        vector(kept, DType::F32).reshape(shape(KEPT).into()),
    ]
}

/// Returns the rows of a chunk.
fn part(chunk: usize, rows: usize) -> Range<usize> {
    chunk * CHUNK_ROWS..chunk * CHUNK_ROWS + rows
}

struct Forward<'a> {
    logits: &'a [f32],
    classes: &'a [usize],
    chosen: &'a mut [f32],
    kept: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let width = self.logits.len() / self.chosen.len().max(1);
        let rows = self.logits.chunks_exact(width.max(1)).zip(self.classes);
        let results = self.chosen.iter_mut().zip(self.kept.chunks_exact_mut(KEPT));
        for ((row, &class), (chosen, kept)) in rows.zip(results) {
            let max = max(row);
            let log = sum_by(row, |x| exp_or_zero(x - max)).ln();
            *chosen = (row[class] - max) - log;
            kept.copy_from_slice(&[max, log]);
        }
    }
}

/// Returns the gradient of the logits, in their memory, from the gradient of the log probabilities, `[.., 1]`.
pub(crate) fn backward(
    logits: FlexTensor,
    classes: &FlexTensor,
    kept: FlexTensor,
    grad: FlexTensor,
) -> FlexTensor {
    let mut logits = contiguous(logits);
    let [_, width] = matrix_dims(&logits);
    let (kept, grad) = (contiguous(kept), contiguous(grad));
    let kernel = Gradient {
        width,
        classes: &target_indices(classes, width),
        kept: kept.storage(),
        grads: &floats(&grad),
    };
    map_rows(&mut logits, None, &kernel);
    logits
}

/// Replaces logits with their gradient.
struct Gradient<'a> {
    width: usize,
    classes: &'a [usize],
    kept: &'a [f32],
    grads: &'a [f32],
}

impl RowKernel for Gradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run(&self, first_row: usize, rows: &mut [f32], _: &[f32]) {
        let kept = self.kept[first_row * KEPT..].chunks_exact(KEPT);
        let chosen = self.classes[first_row..]
            .iter()
            .zip(&self.grads[first_row..]);
        let rows = rows.chunks_exact_mut(self.width).zip(kept).zip(chosen);
        for ((row, kept), (&class, &grad)) in rows {
            let (max, log) = (kept[0], kept[1]);
            for x in &mut *row {
                *x = -grad * exp_or_zero((*x - max) - log);
            }
            row[class] += grad;
        }
    }
}
