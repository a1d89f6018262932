//! The cross entropy of logits on Burn's CPU backend.

use burn::tensor::TensorData;
use burn_flex::FlexTensor;

use crate::rows::{RowKernel, contiguous, exp_row, map_rows, matrix_dims, max, scale};

/// Returns the gradient of the logits, in their memory and type, and the 32-bit loss.
///
/// Logits are the largest tensor of a small model. They are not needed after the loss, and their gradient can be
/// computed together with the loss.
pub(crate) fn forward(logits: FlexTensor, targets: &FlexTensor) -> [FlexTensor; 2] {
    let mut logits = contiguous(logits);
    let [num_rows, vocab] = matrix_dims(&logits);
    let targets = target_indices(targets, vocab);
    let share = 1.0 / num_rows as f32;
    let kernel = Forward {
        vocab,
        targets: &targets,
        share,
    };
    let losses = map_rows(&mut logits, None, &kernel);
    let loss = losses.iter().sum::<f64>() / num_rows as f64;
    let loss = FlexTensor::from_data(TensorData::new(vec![loss as f32], [1]));
    [logits, loss]
}

struct Forward<'a> {
    vocab: usize,
    targets: &'a [usize],
    share: f32,
}

impl RowKernel for Forward<'_> {
    /// Sum of the rows' losses.
    type Output = f64;

    #[inline(always)]
    fn run(&self, first_row: usize, rows: &mut [f32], _: &[f32]) -> f64 {
        let mut sum = 0.0;
        let rows = rows.chunks_exact_mut(self.vocab);
        for (row, &target) in rows.zip(&self.targets[first_row..]) {
            sum += f64::from(replace_row(row, target, self.share));
        }
        sum
    }
}

/// Replaces a row of logits with its gradient times `share`, and returns the loss.
#[inline(always)]
fn replace_row(row: &mut [f32], target: usize, share: f32) -> f32 {
    let (max, logit) = (max(row), row[target]);
    let sum = exp_row(row, max, 1.0);
    scale(row, share / sum);
    row[target] -= share;
    sum.ln() + max - logit
}

pub(crate) fn backward(logits_gradient: FlexTensor, grad: FlexTensor) -> FlexTensor {
    let factor = contiguous(grad).storage::<f32>()[0];
    let mut logits_gradient = logits_gradient;
    // The factor is one unless the loss was scaled or is part of another loss.
    if factor != 1.0 {
        map_rows(&mut logits_gradient, None, &Scale { factor });
    }
    logits_gradient
}

struct Scale {
    factor: f32,
}

impl RowKernel for Scale {
    type Output = ();

    #[inline(always)]
    fn run(&self, _: usize, rows: &mut [f32], _: &[f32]) {
        scale(rows, self.factor);
    }
}

/// Returns the class of each row in order. The tensor may hold integers of any type.
///
/// # Panics
///
/// If a class is negative or not below `num_classes`.
pub(crate) fn target_indices(targets: &FlexTensor, num_classes: usize) -> Vec<usize> {
    let data = targets.clone().into_data();
    let targets = data.iter::<i64>().enumerate();
    let index = |(row, target): (usize, i64)| match usize::try_from(target) {
        Ok(index) if index < num_classes => index,
        _ => panic!(
            "the target of row {row} is class {target}, but the logits have {num_classes} classes; mask invalid \
             targets, or pad with a class that the loss ignores"
        ),
    };
    targets.map(index).collect()
}
