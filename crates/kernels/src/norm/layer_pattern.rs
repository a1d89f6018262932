//! Replaces layer norms with kernels.

use std::collections::BTreeSet;

use burn_ir::{ScalarIr, TensorId};

use super::scaled::{Scaled, ScaledGradient, share, vector};
use crate::pattern::{Kind, Patterns, Total, Walk};

/// The name of layer norms.
pub(super) const NORM: &str = "models.layer_norm";
/// The name of their gradients.
pub(super) const GRADIENT: &str = "models.layer_norm_backward";

/// A layer norm with input `x` and result `y`.
struct Forward {
    x: TensorId,
    y: TensorId,
    beta: TensorId,
    /// The scaling of the rows of `x` minus their means.
    scaled: Scaled,
    nodes: BTreeSet<usize>,
    at: usize,
}

/// The gradients of a layer norm.
struct Backward {
    /// Gradient of `y`.
    grad: TensorId,
    /// The first node of the gradients that reads `grad`.
    at: usize,
    /// Gradient of `x`.
    of_x: Total,
    /// Gradient of gamma, a row.
    gamma: Option<TensorId>,
    /// Gradient of beta, a row.
    beta: Option<TensorId>,
    nodes: BTreeSet<usize>,
}

/// Replaces every layer norm whose gradients, if any, are all recognized.
pub(super) fn replace(patterns: &mut Patterns) {
    for index in 0..patterns.num_nodes() {
        let Some(forward) = forward(patterns, index) else {
            continue;
        };
        let gradient = backward(patterns, &forward);
        // Other nodes may read rows of gamma and beta, so these rows stay.
        let mut nodes = forward.nodes.clone();
        let mut operands = vec![forward.x, forward.scaled.gamma, forward.beta];
        let mut results = vec![forward.y];
        if let Some(gradient) = &gradient {
            nodes.extend(&gradient.nodes);
            operands.push(gradient.grad);
            operands.extend(gradient.of_x.rests());
            results.push(gradient.of_x.value(patterns));
            results.extend(gradient.gamma.iter().chain(&gradient.beta));
        }
        if patterns.is_closed(&nodes, &operands, &results) {
            put(patterns, &forward, gradient);
            patterns.remove(&nodes);
        }
    }
}

fn put(patterns: &mut Patterns, forward: &Forward, gradient: Option<Backward>) {
    let &Forward { x, y, beta, .. } = forward;
    let Scaled { gamma, epsilon, .. } = forward.scaled;
    let epsilon = vec![ScalarIr::Float(epsilon)];
    patterns.insert_kernel(forward.at, NORM, (&[x, gamma, beta], &[y]), epsilon.clone());
    let Some(gradient) = gradient else {
        return;
    };
    let parts = gradient.of_x.of_parts(patterns);
    let width = patterns.shape(gamma);
    let rows = [patterns.value(width.clone(), x), patterns.value(width, x)];
    patterns.insert_kernel(
        gradient.at,
        GRADIENT,
        (&[x, gamma, gradient.grad], &[parts, rows[0], rows[1]]),
        epsilon,
    );
    for (row, result) in rows.into_iter().zip([gradient.gamma, gradient.beta]) {
        if let Some(result) = result {
            patterns.insert_reshape(gradient.at, row, result);
        }
    }
    gradient.of_x.add_rests(patterns, parts);
}

/// Returns the layer norm whose last node is `at`, if there is one.
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
    let (beta, _) = vector(patterns, beta_row)?;
    let scaled = Scaled::ending_with(patterns, patterns.made_by(scaled, Kind::Mul)?)?;
    let center = patterns.made_by(scaled.rows, Kind::Sub)?;
    let [x, mean] = patterns.inputs(center)[..] else {
        return None;
    };
    let mean = patterns.made_by(mean, Kind::MeanDim(last))?;
    let mut nodes = BTreeSet::from([at, center, mean]);
    nodes.extend(scaled.own_nodes(patterns));
    let is_whole = patterns.inputs(mean) == [x]
        && patterns.shape(x) == patterns.shape(y)
        && patterns.shape(beta) == patterns.shape(scaled.gamma)
        && nodes.iter().all(|node| patterns.phase(*node) == phase);
    is_whole.then_some(Forward {
        x,
        y,
        beta,
        scaled,
        nodes,
        at,
    })
}

fn backward(patterns: &Patterns, forward: &Forward) -> Option<Backward> {
    let mut walk = Walk::new(patterns);
    let (grad, of_centered) = of_centered(&mut walk, forward)?;
    let of_x = of_input(&mut walk, forward, of_centered)?;
    let gamma = forward.scaled.of_gamma(&mut walk, grad);
    // A one-row gradient is already beta's gradient, and nothing is summed.
    let beta = walk.sum_rows(grad).filter(|beta| *beta != grad);
    let at = walk.first_reader(grad)?;
    let is_later = |id: &TensorId| patterns.first_reader(*id) > at;
    let mut results = gamma.iter().chain(&beta);
    results.all(is_later).then_some(Backward {
        grad,
        at,
        of_x,
        gamma,
        beta,
        nodes: walk.nodes,
    })
}

/// Walks from the gradient of `y` to the gradient of the centered rows, and returns both.
fn of_centered(walk: &mut Walk<'_>, forward: &Forward) -> Option<(TensorId, TensorId)> {
    let ScaledGradient {
        grad,
        direct,
        parts,
    } = forward.scaled.gradient(walk)?;
    let [part, _] = parts[..] else {
        return None;
    };
    let some = walk.step(Kind::Add, &[part, direct])?;
    let of_centered = walk.step(Kind::Add, &[part, some])?;
    Some((grad, of_centered))
}

/// Walks from the gradient of the centered rows to the gradient of `x`, which includes the part through the mean.
fn of_input(walk: &mut Walk<'_>, forward: &Forward, of_centered: TensorId) -> Option<Total> {
    let patterns = walk.patterns;
    let last = patterns.shape(forward.x).len() - 1;
    let minus = walk.step(Kind::Neg, &[of_centered])?;
    let of_mean = walk.sum(minus, last)?;
    let of_mean = walk.spread(of_mean, share(patterns, forward.x))?;
    walk.total(of_centered, &[of_mean])
}
