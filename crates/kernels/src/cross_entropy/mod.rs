//! The cross entropy of logits, with its gradient.

pub(crate) mod cpu;

use crate::contract::{Composed, FusedKernel, KernelRecord, taken};
use crate::form::{Array, FormCall, Number, Softmax, each_row, map, softmax};

/// Inputs: logits, targets. Outputs: gradient of the logits, 32-bit loss.
pub(crate) struct CrossEntropy;

impl FusedKernel for CrossEntropy {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        ..KernelRecord::new("models.cross_entropy", |_, inputs| {
            let [logits, targets] = taken(inputs);
            cpu::forward(logits, &targets).into()
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [logits, targets] = call.operands()?;
        Ok(cross_entropy(logits, targets))
    }
}

/// Inputs: gradient of the logits, 32-bit factor `[1]`. Outputs: their product.
pub(crate) struct CrossEntropyBackward;

impl FusedKernel for CrossEntropyBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        ..KernelRecord::new("models.cross_entropy_backward", |_, inputs| {
            let [grad, factor] = taken(inputs);
            vec![cpu::backward(grad, factor)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [grad, factor] = call.operands()?;
        let factor = factor.elements[0];
        Ok(vec![map(&grad.shape, &[grad], |a| a[0].mul(factor))?])
    }
}

/// Returns two results: the gradient of the logits, and the loss, which is the mean negative log-probability of the
/// targets.
fn cross_entropy<N: Number>(logits: &Array<N>, targets: &Array<N>) -> Vec<Array<N>> {
    let share = N::of_integer(targets.elements.len() as i64).inverse();
    let mut loss = N::default();
    let mut targets = targets.elements.iter();
    let gradient = each_row(logits, |row| {
        let target = targets.next().map_or(0, |target| target.index());
        let Softmax {
            shifted,
            mut probabilities,
            total,
        } = softmax(row);
        let log = N::function("log", total);
        if let (Some(of), Some(probability)) = (shifted.get(target), probabilities.get_mut(target))
        {
            loss = loss.sub(of.sub(log));
            *probability = probability.sub(N::ONE);
        }
        probabilities.iter().map(|of| of.mul(share)).collect()
    });
    vec![gradient, Array::new([1], vec![loss.mul(share)])]
}
