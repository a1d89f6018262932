//! Norms by the root of the mean square.

use std::collections::BTreeSet;

use burn_fsdp_kernels::FusedOperation;
use burn_ir::{ScalarIr, TensorId};

use super::pattern::{Kind, Patterns};
use super::scaled::{Scaled, ScaledGradient, the_other};
use super::walk::Walk;
use crate::error::Error;

/// The gradients of a norm.
struct Backward {
    /// Gradient of the result.
    grad: TensorId,
    /// The first of its nodes.
    at: usize,
    of_rows: OfRows,
    /// Gradient of gamma, a row.
    gamma: Option<TensorId>,
    nodes: BTreeSet<usize>,
}

/// The gradient of the rows, which Burn adds up from three parts.
struct OfRows {
    /// The node that adds the last part.
    sum: usize,
    /// What else is added.
    rest: Option<TensorId>,
}

/// Replaces every norm whose gradients are all known, too.
pub(super) fn replace(patterns: &mut Patterns) -> Result<(), Error> {
    for index in 0..patterns.len() {
        let Some(norm) = norm(patterns, index) else {
            continue;
        };
        let gradient = backward(patterns, &norm);
        let mut nodes = norm.nodes.clone();
        let mut results = vec![patterns.output(index)];
        if let Some(gradient) = &gradient {
            nodes.extend(&gradient.nodes);
            results.push(patterns.output(gradient.of_rows.sum));
            results.extend(gradient.gamma);
        }
        // The row of gamma may be read by others, and is left to them.
        nodes.retain(|node| patterns.kind(*node) != Some(Kind::Reshape));
        let inner = nodes.iter().map(|node| patterns.output(*node));
        let mut inner = inner.filter(|id| !results.contains(id));
        if !inner.all(|id| patterns.is_read_by(id, &nodes)) {
            continue;
        }
        put(patterns, &norm, index, gradient)?;
        patterns.remove(&nodes);
    }
    Ok(())
}

/// Returns the norm that ends with a node.
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
    let of_rows = of_rows(&mut walk, &gradient)?;
    let grad = gradient.grad;
    let gamma = norm.of_gamma(&mut walk, grad);
    // The kernel makes both gradients at once, where the first of them is made.
    let readers = patterns.readers(grad);
    let at = readers.filter(|node| walk.nodes.contains(node)).min()?;
    gamma
        .iter()
        .all(|id| patterns.first_reader(*id) > at)
        .then_some(Backward {
            grad,
            at,
            of_rows,
            gamma,
            nodes: walk.nodes,
        })
}

/// Walks along the sums of the parts, between which one other gradient of the rows may come.
fn of_rows(walk: &mut Walk<'_>, gradient: &ScaledGradient) -> Option<OfRows> {
    let patterns = walk.patterns;
    let &ScaledGradient { direct, part, .. } = gradient;
    let (mut total, mut parts_left, mut rest) = (direct, 2, None);
    loop {
        let mut sums = patterns.readers(total);
        let sum = sums.find(|node| patterns.kind(*node) == Some(Kind::Add))?;
        walk.nodes.insert(sum);
        match the_other(&patterns.inputs(sum), total)? {
            other if other == part => parts_left -= 1,
            other if rest.is_none() => rest = Some(other),
            _ => return None,
        }
        if parts_left == 0 {
            return Some(OfRows { sum, rest });
        }
        total = patterns.output(sum);
    }
}

fn put(
    patterns: &mut Patterns,
    norm: &Scaled,
    at: usize,
    gradient: Option<Backward>,
) -> Result<(), Error> {
    let &Scaled {
        rows,
        gamma,
        epsilon,
        ..
    } = norm;
    let epsilon = vec![ScalarIr::Float(epsilon)];
    let result = patterns.output(at);
    patterns.insert_kernel(
        at,
        FusedOperation::RmsNorm,
        (&[rows, gamma], &[result]),
        epsilon.clone(),
    )?;
    let Some(gradient) = gradient else {
        return Ok(());
    };
    let OfRows { sum, rest } = gradient.of_rows;
    let total = patterns.output(sum);
    let own = match rest {
        Some(_) => patterns.value(patterns.shape(rows), rows),
        None => total,
    };
    let of_gamma = patterns.value(patterns.shape(gamma), rows);
    patterns.insert_kernel(
        gradient.at,
        FusedOperation::RmsNormBackward,
        (&[rows, gamma, gradient.grad], &[own, of_gamma]),
        epsilon,
    )?;
    if let Some(result) = gradient.gamma {
        patterns.insert_reshape(gradient.at, of_gamma, result)?;
    }
    if let Some(rest) = rest {
        patterns.insert_sum(sum, (own, rest), total)?;
    }
    Ok(())
}
