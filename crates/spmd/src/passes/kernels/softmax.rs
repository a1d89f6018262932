//! Replaces softmax and its logarithm with kernels.

use std::collections::BTreeSet;

use burn_fsdp_kernels::FusedOperation;
use burn_ir::TensorId;

use super::pattern::{Kind, Patterns};
use super::walk::Walk;
use crate::error::Error;
use crate::graph::Phase;

/// `y`, the softmax of `x` along the last dim, or its logarithm.
struct Forward {
    x: TensorId,
    y: TensorId,
    /// The input minus its maximum.
    shifted: TensorId,
    exp: TensorId,
    sum: TensorId,
    is_log: bool,
    /// The nodes; the last one computes `y`.
    nodes: BTreeSet<usize>,
    at: usize,
}

/// The gradient of a softmax.
struct Backward {
    /// Gradient of `y`.
    grad: TensorId,
    /// The node that computes the gradient of `x`.
    at: usize,
    nodes: BTreeSet<usize>,
}

/// Replaces every softmax whose gradient, if any, is recognized.
pub(super) fn replace(patterns: &mut Patterns) -> Result<(), Error> {
    for index in 0..patterns.len() {
        let Some(forward) = forward(patterns, index) else {
            continue;
        };
        let gradient = if forward.is_log {
            log_backward(patterns, &forward)
        } else {
            backward(patterns, &forward)
        };
        let mut nodes = forward.nodes.clone();
        nodes.extend(gradient.iter().flat_map(|gradient| &gradient.nodes));
        let mut operands = vec![forward.x];
        operands.extend(gradient.iter().map(|gradient| gradient.grad));
        let mut results = vec![forward.y];
        results.extend(gradient.iter().map(|gradient| patterns.output(gradient.at)));
        if !patterns.is_closed(&nodes, &operands, &results) {
            continue;
        }
        let (of, gradient_of) = if forward.is_log {
            (
                FusedOperation::LogSoftmax,
                FusedOperation::LogSoftmaxBackward,
            )
        } else {
            (FusedOperation::Softmax, FusedOperation::SoftmaxBackward)
        };
        let (x, y) = (forward.x, forward.y);
        patterns.insert_kernel(forward.at, of, (&[x], &[y]), Vec::new())?;
        if let Some(Backward { grad, at, .. }) = gradient {
            let out = patterns.output(at);
            patterns.insert_kernel(at, gradient_of, (&[y, grad], &[out]), Vec::new())?;
        }
        patterns.remove(&nodes);
    }
    Ok(())
}

/// Returns the softmax whose last node is `at`, if there is one.
fn forward(patterns: &Patterns, at: usize) -> Option<Forward> {
    let phase = patterns.phase(at);
    let y = patterns.output(at);
    let last = patterns.shape(y).len().checked_sub(1)?;
    let inputs = patterns.inputs(at);
    let mut nodes = BTreeSet::from([at]);
    let (exp, sum, is_log) = match patterns.kind(at)? {
        Kind::Div => (inputs[0], inputs[1], false),
        Kind::Sub => {
            let log = patterns.made_by(inputs[1], Kind::Log)?;
            nodes.insert(log);
            let sum = patterns.inputs(log)[0];
            let total = patterns.made_by(sum, Kind::SumDim(last))?;
            (patterns.inputs(total)[0], sum, true)
        }
        _ => return None,
    };
    let total = patterns.made_by(sum, Kind::SumDim(last))?;
    if patterns.inputs(total) != [exp] {
        return None;
    }
    let power = patterns.made_by(exp, Kind::Exp)?;
    let shifted = patterns.inputs(power)[0];
    let shift = patterns.made_by(shifted, Kind::Sub)?;
    let of = patterns.inputs(shift);
    let x = of[0];
    let max = patterns.made_by(of[1], Kind::MaxDim(last))?;
    if patterns.inputs(max) != [x] || is_log && inputs[0] != shifted {
        return None;
    }
    nodes.extend([total, power, shift, max]);
    let one_phase = nodes.iter().all(|node| patterns.phase(*node) == phase);
    (one_phase && patterns.shape(x) == patterns.shape(y)).then_some(Forward {
        x,
        y,
        shifted,
        exp,
        sum,
        is_log,
        nodes,
        at,
    })
}

fn backward(patterns: &Patterns, forward: &Forward) -> Option<Backward> {
    let &Forward {
        exp, sum, shifted, ..
    } = forward;
    let last = patterns.shape(exp).len() - 1;
    let mut walk = Walk::new(patterns);
    let inverse = walk.step(Kind::Recip, &[sum])?;
    let negative = walk.step(Kind::Neg, &[exp])?;
    let square = walk.step(Kind::Mul, &[sum, sum])?;
    let slope = walk.step(Kind::Div, &[negative, square])?;
    // The gradient of y is multiplied by the slope and by the inverse.
    let (grad, through) = walk.product_by(slope)?;
    let direct = walk.step(Kind::Mul, &[grad, inverse])?;
    let of_sum = walk.sum(through, last)?;
    let spread = walk.spread(of_sum, 1.0)?;
    let both = walk.step(Kind::Add, &[spread, direct])?;
    let again = walk.step(Kind::Exp, &[shifted]).unwrap_or(exp);
    let at = patterns.find_node(Kind::Mul, &[both, again], Phase::Backward)?;
    walk.nodes.insert(at);
    Some(Backward {
        grad,
        at,
        nodes: walk.nodes,
    })
}

fn log_backward(patterns: &Patterns, forward: &Forward) -> Option<Backward> {
    let &Forward {
        exp, sum, shifted, ..
    } = forward;
    let last = patterns.shape(exp).len() - 1;
    let mut walk = Walk::new(patterns);
    let inverse = walk.step(Kind::Recip, &[sum])?;
    let (total, product) = walk.product_by(inverse)?;
    let total = patterns.made_by(total, Kind::SumDim(last))?;
    let negative = patterns.made_by(patterns.inputs(total)[0], Kind::Neg)?;
    let grad = patterns.inputs(negative)[0];
    walk.nodes.extend([total, negative]);
    // Burn then also sums over a dim with one element, which changes nothing.
    let number = walk.step(Kind::SumDim(last), &[product]);
    let spread = walk.spread(number.unwrap_or(product), 1.0)?;
    let again = walk.step(Kind::Exp, &[shifted]).unwrap_or(exp);
    let product = walk.step(Kind::Mul, &[spread, again])?;
    let at = patterns.find_node(Kind::Add, &[product, grad], Phase::Backward)?;
    walk.nodes.insert(at);
    Some(Backward {
        grad,
        at,
        nodes: walk.nodes,
    })
}
