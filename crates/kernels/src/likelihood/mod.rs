//! Log probabilities of selected classes, with their gradient.

mod cpu;
mod pattern;

use crate::contract::{
    Composed, FusedKernel, KernelDims, KernelPattern, KernelPlacement, KernelRecord, taken,
};
use crate::form::{Array, FormCall, Logarithms, Number, Softmax, each_row, log_softmax, softmax};

/// Inputs: logits, classes `[.., 1]`. Outputs: log probabilities of the classes `[.., 1]`, 32-bit numbers kept for each
/// row `[.., 2]`.
pub(crate) struct LogLikelihood;

impl FusedKernel for LogLikelihood {
    const RECORD: KernelRecord = KernelRecord {
        placement: KernelPlacement::Dims(KernelDims::ROWS),
        pattern: KernelPattern::Found(pattern::replace),
        ..KernelRecord::new(pattern::LIKELIHOOD, |_, inputs| {
            let [logits, classes] = taken(inputs);
            cpu::forward(&logits, &classes).into()
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [logits, classes] = call.operands()?;
        Ok(log_likelihood(logits, classes, call.logarithms))
    }
}

/// Inputs: logits, classes, kept numbers, gradient of the log probabilities. Outputs: gradient of the logits.
pub(crate) struct LogLikelihoodBackward;

impl FusedKernel for LogLikelihoodBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        placement: KernelDims::ROWS.linear_in(3),
        ..KernelRecord::new(pattern::GRADIENT, |_, inputs| {
            let [logits, classes, kept, grad] = taken(inputs);
            vec![cpu::backward(logits, &classes, kept, grad)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [logits, classes, kept, grad] = call.operands()?;
        let all = [logits, classes, kept, grad];
        Ok(vec![log_likelihood_gradient(all, call.logarithms)])
    }
}

/// Returns the log-probabilities of the classes. Also returns, for each row, the largest logit, and the logarithm of
/// the sum of exponentials of the row minus that logit.
fn log_likelihood<N: Number>(
    logits: &Array<N>,
    classes: &Array<N>,
    known: &dyn Logarithms<N>,
) -> Vec<Array<N>> {
    let of_row = |(row, class): (&[N], &N)| {
        let Softmax { shifted, total, .. } = softmax(row);
        let largest = row[0].sub(shifted[0]);
        let at = class.index().min(row.len() - 1);
        let chosen = log_softmax(row, known)[at];
        (chosen, [largest, N::function("log", total)])
    };
    let rows = logits.rows().zip(classes.elements.iter());
    let (chosen, kept): (Vec<N>, Vec<[N; 2]>) = rows.map(of_row).unzip();
    let mut shape = classes.shape.clone();
    let chosen = Array::new(shape.clone(), chosen);
    if let Some(last) = shape.last_mut() {
        *last = 2;
    }
    vec![chosen, Array::new(shape, kept.concat())]
}

fn log_likelihood_gradient<N: Number>(
    [logits, classes, kept, grad]: [&Array<N>; 4],
    known: &dyn Logarithms<N>,
) -> Array<N> {
    let chosen = classes.elements.iter().zip(grad.elements.iter());
    let mut given = chosen.zip(kept.rows());
    each_row(logits, |row| {
        let Some(((class, grad), &[largest, log])) = given.next() else {
            return Vec::new();
        };
        let of = |(at, x): (usize, &N)| {
            let probability = known.probability(x.sub(largest).sub(log));
            let own = if at == class.index() {
                *grad
            } else {
                N::default()
            };
            own.sub(grad.mul(probability))
        };
        row.iter().enumerate().map(of).collect()
    })
}
