//! Layer norms.

use std::collections::BTreeSet;

use burn_fsdp_kernels::FusedOperation;
use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, ScalarIr, TensorId};

use super::pattern::{Kind, Patterns};
use super::walk::Walk;
use crate::error::Error;
use crate::graph::{Node, Phase};

/// A layer norm: `y` of `x`.
struct Forward {
    x: TensorId,
    y: TensorId,
    gamma: TensorId,
    beta: TensorId,
    /// Gamma with as many dims as `x`.
    gamma_row: TensorId,
    centered: TensorId,
    /// The variance and epsilon.
    variance: TensorId,
    deviation: TensorId,
    normal: TensorId,
    epsilon: f64,
    nodes: BTreeSet<usize>,
    at: usize,
}

/// The gradients of a layer norm.
struct Backward {
    /// Gradient of `y`.
    grad: TensorId,
    /// The first of its nodes.
    at: usize,
    /// The node that adds the two parts of the gradient of `x`, and what else is added there.
    sum: usize,
    rest: Option<TensorId>,
    /// Gradients of gamma and beta, each a row.
    gamma: Option<TensorId>,
    beta: Option<TensorId>,
    nodes: BTreeSet<usize>,
}

/// Replaces every layer norm whose gradients are all known, too.
pub(super) fn replace(patterns: &mut Patterns) -> Result<(), Error> {
    for index in 0..patterns.len() {
        let Some(forward) = forward(patterns, index) else {
            continue;
        };
        let gradient = backward(patterns, &forward);
        let mut nodes = forward.nodes.clone();
        let mut results = vec![forward.y];
        if let Some(gradient) = &gradient {
            nodes.extend(&gradient.nodes);
            results.push(patterns.output(gradient.sum));
            results.extend(gradient.gamma.iter().chain(&gradient.beta));
        }
        let inner = nodes.iter().map(|node| patterns.output(*node));
        let inner: Vec<TensorId> = inner.filter(|id| !results.contains(id)).collect();
        // Rows of gamma and beta may be read by others, and are left to them.
        let is_shared = |id: &TensorId| patterns.made_by(*id, Kind::Reshape).is_some();
        if !inner
            .iter()
            .all(|id| patterns.is_read_by(*id, &nodes) || is_shared(id))
        {
            continue;
        }
        nodes.retain(|node| !is_shared(&patterns.output(*node)));
        put(patterns, &forward, gradient)?;
        patterns.remove(&nodes);
    }
    Ok(())
}

fn put(
    patterns: &mut Patterns,
    forward: &Forward,
    gradient: Option<Backward>,
) -> Result<(), Error> {
    let &Forward {
        x, y, gamma, beta, ..
    } = forward;
    let epsilon = vec![ScalarIr::Float(forward.epsilon)];
    patterns.insert_kernel(
        forward.at,
        FusedOperation::LayerNorm,
        (&[x, gamma, beta], &[y]),
        epsilon.clone(),
    )?;
    let Some(gradient) = gradient else {
        return Ok(());
    };
    let total = patterns.output(gradient.sum);
    let shape = patterns.shape(x);
    let width = patterns.shape(gamma);
    let own = match gradient.rest {
        Some(_) => patterns.value(shape, x),
        None => total,
    };
    let rows = [patterns.value(width.clone(), x), patterns.value(width, x)];
    patterns.insert_kernel(
        gradient.at,
        FusedOperation::LayerNormBackward,
        (&[x, gamma, gradient.grad], &[own, rows[0], rows[1]]),
        epsilon,
    )?;
    for (row, result) in rows.into_iter().zip([gradient.gamma, gradient.beta]) {
        if let Some(result) = result {
            patterns.insert_reshape(gradient.at, row, result)?;
        }
    }
    if let Some(rest) = gradient.rest {
        let lhs = patterns.graph.read(own)?;
        let dtype = lhs.dtype;
        let operation = NumericOperationIr::Add(BinaryOpIr {
            lhs,
            rhs: patterns.graph.read(rest)?,
            out: patterns.graph.write(total)?,
        });
        let operation = OperationIr::NumericFloat(dtype, operation);
        patterns.insert(gradient.sum, Node::new(operation, Phase::Backward));
    }
    Ok(())
}

/// Returns what a mean over the last dim of a value multiplies its addends by.
fn scale(patterns: &Patterns, x: TensorId) -> f64 {
    let width = patterns.shape(x).last().copied().unwrap_or(1);
    1.0 / width as f64
}

/// Returns the vector that a row of ones in all dims but the last is made of.
fn vector(patterns: &Patterns, row: TensorId) -> Option<(TensorId, usize)> {
    let (node, kind) = patterns.maker(row)?;
    let of = *patterns.inputs(node).first()?;
    let (shape, vector) = (patterns.shape(row), patterns.shape(of));
    let (width, others) = shape.split_last()?;
    let is_row = vector == [*width] && others.iter().all(|dim| *dim == 1);
    (kind == Kind::Reshape && is_row).then_some((of, node))
}

/// Returns the layer norm that ends with a node.
fn forward(patterns: &Patterns, at: usize) -> Option<Forward> {
    if patterns.kind(at)? != Kind::Add {
        return None;
    }
    let phase = patterns.phase(at);
    let y = patterns.output(at);
    let last = patterns.shape(y).len().checked_sub(1)?;
    let [scaled, beta_row] = patterns.inputs(at)[..] else {
        return None;
    };
    let (beta, beta_node) = vector(patterns, beta_row)?;
    let scaling = patterns.made_by(scaled, Kind::Mul)?;
    let [normal, gamma_row] = patterns.inputs(scaling)[..] else {
        return None;
    };
    let (gamma, gamma_node) = vector(patterns, gamma_row)?;
    let division = patterns.made_by(normal, Kind::Div)?;
    let [centered, deviation] = patterns.inputs(division)[..] else {
        return None;
    };
    let root = patterns.made_by(deviation, Kind::Sqrt)?;
    let variance = patterns.inputs(root)[0];
    let (shift, kind) = patterns.maker(variance)?;
    let Kind::AddScalar(epsilon) = kind else {
        return None;
    };
    let mean_square = patterns.made_by(patterns.inputs(shift)[0], Kind::MeanDim(last))?;
    let square = patterns.made_by(patterns.inputs(mean_square)[0], Kind::Mul)?;
    if patterns.inputs(square) != [centered, centered] {
        return None;
    }
    let center = patterns.made_by(centered, Kind::Sub)?;
    let [x, mean] = patterns.inputs(center)[..] else {
        return None;
    };
    let mean = patterns.made_by(mean, Kind::MeanDim(last))?;
    let nodes = [
        at,
        beta_node,
        scaling,
        gamma_node,
        division,
        root,
        shift,
        mean_square,
        square,
        center,
        mean,
    ];
    let is_whole = patterns.inputs(mean) == [x]
        && patterns.shape(x) == patterns.shape(y)
        && patterns.shape(gamma).last() == patterns.shape(x).last()
        && patterns.shape(beta) == patterns.shape(gamma)
        && nodes.iter().all(|node| patterns.phase(*node) == phase);
    is_whole.then_some(Forward {
        x,
        y,
        gamma,
        beta,
        gamma_row,
        centered,
        variance,
        deviation,
        normal,
        epsilon,
        nodes: nodes.into(),
        at,
    })
}

fn backward(patterns: &Patterns, forward: &Forward) -> Option<Backward> {
    let mut walk = Walk::new(patterns);
    let (grad, of_centered) = of_centered(&mut walk, forward)?;
    let (sum, rest) = of_input(&mut walk, forward, of_centered)?;
    let gamma = of_gamma(&mut walk, grad, forward.normal);
    let beta = walk.step(Kind::SumDims, &[grad]);
    // The kernel makes all three gradients at once, where the first of them is made.
    let readers = patterns.readers(grad);
    let at = readers.filter(|node| walk.nodes.contains(node)).min()?;
    let results = gamma.iter().chain(&beta);
    let is_later = |id: &TensorId| patterns.first_reader(*id) > at;
    results.clone().all(is_later).then_some(Backward {
        grad,
        at,
        sum,
        rest,
        gamma,
        beta,
        nodes: walk.nodes,
    })
}

/// Walks from the gradient of `y` to that of the centered rows, and returns both.
fn of_centered(walk: &mut Walk<'_>, forward: &Forward) -> Option<(TensorId, TensorId)> {
    let &Forward {
        centered,
        variance,
        deviation,
        gamma_row,
        ..
    } = forward;
    let patterns = walk.patterns;
    let last = patterns.shape(forward.x).len() - 1;
    let inverse = walk.step(Kind::Recip, &[deviation])?;
    let negative = walk.step(Kind::Neg, &[centered])?;
    let square = walk.step(Kind::Mul, &[deviation, deviation])?;
    let slope = walk.step(Kind::Div, &[negative, square])?;
    // The gradient of the normal rows is what is multiplied by both.
    let (of_normal, through) = walk.product_by(slope)?;
    let direct = walk.step(Kind::Mul, &[of_normal, inverse])?;
    let scaling = patterns.made_by(of_normal, Kind::Mul)?;
    let grad = patterns.inputs(scaling)[0];
    walk.step(Kind::Mul, &[grad, gamma_row])
        .filter(|product| *product == of_normal)?;
    let of_deviation = walk.step(Kind::SumDim(last), &[through])?;
    let root = walk.step(Kind::PowfScalar(-0.5), &[variance])?;
    let half = walk.step(Kind::DivScalar(2.0), &[root])?;
    let of_variance = walk.step(Kind::Mul, &[of_deviation, half])?;
    let number = walk.step(Kind::SumDim(last), &[of_variance]);
    let of_squares = walk.spread(number.unwrap_or(of_variance), scale(patterns, forward.x))?;
    // A square has two factors, and each has a part.
    let part = walk.step(Kind::Mul, &[of_squares, centered])?;
    let some = walk.step(Kind::Add, &[part, direct])?;
    let of_centered = walk.step(Kind::Add, &[part, some])?;
    Some((grad, of_centered))
}

/// Walks from the gradient of the centered rows to that of `x`. Returns the node that adds its last part, and what
/// else it adds.
fn of_input(
    walk: &mut Walk<'_>,
    forward: &Forward,
    of_centered: TensorId,
) -> Option<(usize, Option<TensorId>)> {
    let patterns = walk.patterns;
    let last = patterns.shape(forward.x).len() - 1;
    let minus = walk.step(Kind::Neg, &[of_centered])?;
    let of_mean = walk.sum(minus, last)?;
    let of_mean = walk.spread(of_mean, scale(patterns, forward.x))?;
    let sum = patterns
        .readers(of_mean)
        .find(|node| patterns.kind(*node) == Some(Kind::Add))?;
    walk.nodes.insert(sum);
    let other = the_other(&patterns.inputs(sum), of_mean)?;
    if other == of_centered {
        return Some((sum, None));
    }
    // What came to x from elsewhere was added to one part before the other came.
    let before = patterns.made_by(other, Kind::Add)?;
    walk.nodes.insert(before);
    let rest = the_other(&patterns.inputs(before), of_centered)?;
    Some((sum, Some(rest)))
}

/// Returns the one of two operands that is not this one.
fn the_other(operands: &[TensorId], this: TensorId) -> Option<TensorId> {
    match *operands {
        [first, second] if first == this && second != this => Some(second),
        [first, second] if second == this && first != this => Some(first),
        _ => None,
    }
}

/// Returns the gradient of gamma, a row.
fn of_gamma(walk: &mut Walk<'_>, grad: TensorId, normal: TensorId) -> Option<TensorId> {
    let product = walk.step(Kind::Mul, &[grad, normal])?;
    walk.step(Kind::SumDims, &[product])
}
