//! Replaces root-mean-square norms with kernels.

use std::collections::BTreeSet;

use burn_ir::{ScalarIr, TensorId};

use super::scaled::{Scaled, ScaledGradient};
use crate::pattern::{Kind, Patterns, Total, Walk};

/// The name of root-mean-square norms.
pub(super) const NORM: &str = "models.rms_norm";
/// The name of their gradients.
pub(super) const GRADIENT: &str = "models.rms_norm_backward";

/// The gradients of a norm.
struct Backward {
    /// Gradient of the result.
    grad: TensorId,
    /// The first node of the gradients that reads `grad`.
    at: usize,
    of_rows: Total,
    /// Gradient of gamma, a row.
    gamma: Option<TensorId>,
    nodes: BTreeSet<usize>,
}

/// Replaces every norm whose gradients, if any, are all recognized.
pub(super) fn replace(patterns: &mut Patterns) {
    for index in 0..patterns.num_nodes() {
        let Some(norm) = norm(patterns, index) else {
            continue;
        };
        let gradient = backward(patterns, &norm);
        let mut nodes = norm.own_nodes(patterns);
        let mut operands = vec![norm.rows, norm.gamma];
        let mut results = vec![patterns.output(index)];
        if let Some(gradient) = &gradient {
            nodes.extend(&gradient.nodes);
            operands.push(gradient.grad);
            operands.extend(gradient.of_rows.rests());
            results.push(gradient.of_rows.value(patterns));
            results.extend(gradient.gamma);
        }
        if patterns.is_closed(&nodes, &operands, &results) {
            put(patterns, &norm, index, gradient);
            patterns.remove(&nodes);
        }
    }
}

/// Returns the norm whose last node is `at`, if there is one.
fn norm(patterns: &Patterns, at: usize) -> Option<Scaled> {
    patterns.kind(at).filter(|kind| *kind == Kind::Mul)?;
    let norm = Scaled::ending_with(patterns, at)?;
    let phase = patterns.phase(at);
    let is_whole = patterns.shape(norm.rows) == patterns.shape(patterns.output(at))
        && norm.nodes.iter().all(|node| patterns.phase(*node) == phase);
    is_whole.then_some(norm)
}

fn backward(patterns: &Patterns, norm: &Scaled) -> Option<Backward> {
    let mut walk = Walk::new(patterns);
    let gradient = norm.gradient(&mut walk)?;
    let ScaledGradient {
        grad,
        direct,
        parts,
    } = gradient;
    let of_rows = walk.total(direct, &parts)?;
    let gamma = norm.of_gamma(&mut walk, grad);
    let at = walk.first_reader(grad)?;
    let is_later = |id: &TensorId| patterns.first_reader(*id) > at;
    gamma.iter().all(is_later).then_some(Backward {
        grad,
        at,
        of_rows,
        gamma,
        nodes: walk.nodes,
    })
}

fn put(patterns: &mut Patterns, norm: &Scaled, at: usize, gradient: Option<Backward>) {
    let &Scaled {
        rows,
        gamma,
        epsilon,
        ..
    } = norm;
    let epsilon = vec![ScalarIr::Float(epsilon)];
    let result = patterns.output(at);
    patterns.insert_kernel(at, NORM, (&[rows, gamma], &[result]), epsilon.clone());
    let Some(gradient) = gradient else {
        return;
    };
    let parts = gradient.of_rows.of_parts(patterns);
    let of_gamma = patterns.value(patterns.shape(gamma), rows);
    patterns.insert_kernel(
        gradient.at,
        GRADIENT,
        (&[rows, gamma, gradient.grad], &[parts, of_gamma]),
        epsilon,
    );
    if let Some(result) = gradient.gamma {
        patterns.insert_reshape(gradient.at, of_gamma, result);
    }
    gradient.of_rows.add_rests(patterns, parts);
}
