//! Softmax and its logarithm over rows, with their gradients.

mod cpu;
pub(crate) mod pattern;

use cpu::Form;

use crate::contract::{
    Composed, FusedKernel, KernelCheck, KernelDims, KernelPattern, KernelPlacement, KernelRecord,
    taken,
};
use crate::form::{
    FormCall, Logarithms, Number, each_row, log_softmax, softmax, softmax_gradient, sum, two_rows,
};

/// Inputs: x. Outputs: y.
pub(crate) struct Softmax;

impl FusedKernel for Softmax {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        placement: KernelPlacement::Dims(KernelDims::ROWS),
        pattern: KernelPattern::Steps(&pattern::SOFTMAX),
        ..KernelRecord::new(pattern::SOFTMAX.kernel.name, |_, inputs| {
            let [x] = taken(inputs);
            vec![cpu::forward(x, Form::Plain)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x] = call.operands()?;
        Ok(vec![each_row(x, |row| softmax(row).probabilities)])
    }
}

/// Inputs: y, gradient of y. Outputs: gradient of x.
pub(crate) struct SoftmaxBackward;

impl FusedKernel for SoftmaxBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(1),
        placement: KernelDims::ROWS.linear_in(1),
        ..KernelRecord::new(pattern::SOFTMAX.gradient.name, |_, inputs| {
            let [y, grad] = taken(inputs);
            vec![cpu::backward(y, grad, Form::Plain)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [y, grad] = call.operands()?;
        Ok(vec![softmax_gradient(y, grad)])
    }
}

/// Inputs: x. Outputs: y.
pub(crate) struct LogSoftmax;

impl FusedKernel for LogSoftmax {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        placement: KernelPlacement::Dims(KernelDims::ROWS),
        pattern: KernelPattern::Steps(&pattern::LOG_SOFTMAX),
        ..KernelRecord::new(pattern::LOG_SOFTMAX.kernel.name, |_, inputs| {
            let [x] = taken(inputs);
            vec![cpu::forward(x, Form::Log)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x] = call.operands()?;
        let of = |row: &[N]| log_softmax(row, call.logarithms);
        Ok(vec![each_row(x, of)])
    }
}

/// Inputs: y, gradient of y. Outputs: gradient of x.
pub(crate) struct LogSoftmaxBackward;

impl FusedKernel for LogSoftmaxBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(1),
        placement: KernelDims::ROWS.linear_in(1),
        check: KernelCheck {
            // Logarithms of probabilities.
            drawn: |input| match input {
                0 => (-0.05, -4.0),
                _ => (KernelCheck::DEFAULT.drawn)(input),
            },
            ..KernelCheck::DEFAULT
        },
        ..KernelRecord::new(pattern::LOG_SOFTMAX.gradient.name, |_, inputs| {
            let [y, grad] = taken(inputs);
            vec![cpu::backward(y, grad, Form::Log)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [y, grad] = call.operands()?;
        let of = |y: &[N], grad: &[N]| log_softmax_gradient(y, grad, call.logarithms);
        Ok(vec![two_rows(y, grad, of)])
    }
}

/// Returns the gradient of a log-softmax. The kernel recovers each probability as the exponential of the result, but
/// composed operations keep the probability.
fn log_softmax_gradient<N: Number>(y: &[N], grad: &[N], known: &dyn Logarithms<N>) -> Vec<N> {
    let total = sum(grad);
    let pairs = y.iter().zip(grad);
    let of = |(y, grad): (&N, &N)| grad.sub(total.mul(known.probability(*y)));
    pairs.map(of).collect()
}
