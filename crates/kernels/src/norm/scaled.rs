//! Rows divided by the root of their mean square and scaled: the common part of layer norms and root-mean-square norms.

use std::collections::BTreeSet;

use burn_ir::TensorId;

use crate::pattern::{Kind, Patterns, Walk};

/// `rows / sqrt(mean_square(rows) + epsilon) * gamma`.
pub(super) struct Scaled {
    pub(super) rows: TensorId,
    pub(super) gamma: TensorId,
    pub(super) epsilon: f64,
    pub(super) nodes: BTreeSet<usize>,
    /// Gamma with as many dims as the rows.
    gamma_row: TensorId,
    /// The mean square plus epsilon.
    variance: TensorId,
    deviation: TensorId,
    normal: TensorId,
    /// The rows that are squared. In 16 bits, Burn's root-mean-square norm widens them to 32 bits.
    squared: TensorId,
}

/// The addends of the gradient of the rows.
pub(super) struct ScaledGradient {
    /// Gradient of the result.
    pub(super) grad: TensorId,
    /// The addend through the dividend.
    pub(super) direct: TensorId,
    /// The addends through the two factors of the rows' square: one per factor, or one for both.
    pub(super) parts: Vec<TensorId>,
}

impl Scaled {
    /// Returns the scaled rows whose last node is the product `scaling` with gamma.
    pub(super) fn ending_with(patterns: &Patterns, scaling: usize) -> Option<Self> {
        let [normal, gamma_row] = patterns.inputs(scaling)[..] else {
            return None;
        };
        let (gamma, gamma_node) = vector(patterns, gamma_row)?;
        let division = patterns.made_by(normal, Kind::Div)?;
        let [rows, deviation] = patterns.inputs(division)[..] else {
            return None;
        };
        let last = patterns.shape(rows).len().checked_sub(1)?;
        let narrow = patterns.made_by(deviation, Kind::Narrow);
        let of_root = narrow.map_or(deviation, |node| patterns.inputs(node)[0]);
        let root = patterns.made_by(of_root, Kind::Sqrt)?;
        let variance = patterns.inputs(root)[0];
        let (shift, kind) = patterns.maker(variance)?;
        let Kind::AddScalar(epsilon) = kind else {
            return None;
        };
        let mean_square = patterns.made_by(patterns.inputs(shift)[0], Kind::MeanDim(last))?;
        let square = patterns.made_by(patterns.inputs(mean_square)[0], Kind::Mul)?;
        let [squared, again] = patterns.inputs(square)[..] else {
            return None;
        };
        let widen = match narrow {
            Some(_) => Some(patterns.made_by(squared, Kind::Widen)?),
            None => None,
        };
        let of_squares = widen.map_or(squared, |node| patterns.inputs(node)[0]);
        let is_whole = squared == again
            && of_squares == rows
            && patterns.shape(gamma).last() == patterns.shape(rows).last();
        let nodes = [
            scaling,
            gamma_node,
            division,
            root,
            shift,
            mean_square,
            square,
        ];
        is_whole.then_some(Self {
            rows,
            gamma,
            epsilon,
            nodes: nodes.into_iter().chain(narrow).chain(widen).collect(),
            gamma_row,
            variance,
            deviation,
            normal,
            squared,
        })
    }

    /// Returns the nodes of the norm, except the reshape of gamma to a row, which other nodes may read.
    pub(super) fn own_nodes(&self, patterns: &Patterns) -> BTreeSet<usize> {
        let is_own = |node: &usize| patterns.kind(*node) != Some(Kind::Reshape);
        self.nodes.iter().copied().filter(is_own).collect()
    }

    /// Walks from the gradient of the result to the gradient of the rows.
    pub(super) fn gradient(&self, walk: &mut Walk<'_>) -> Option<ScaledGradient> {
        let &Self {
            rows,
            variance,
            deviation,
            gamma_row,
            squared,
            ..
        } = self;
        let is_wide = squared != rows;
        let patterns = walk.patterns;
        let last = patterns.shape(rows).len() - 1;
        let inverse = walk.step(Kind::Recip, &[deviation])?;
        let negative = walk.step(Kind::Neg, &[rows])?;
        let square = walk.step(Kind::Mul, &[deviation, deviation])?;
        let slope = walk.step(Kind::Div, &[negative, square])?;
        // The gradient of the normal rows is multiplied by the slope and by the inverse.
        let (of_normal, through) = walk.product_by(slope)?;
        let direct = walk.step(Kind::Mul, &[of_normal, inverse])?;
        let scaling = patterns.made_by(of_normal, Kind::Mul)?;
        let grad = patterns.inputs(scaling)[0];
        walk.step(Kind::Mul, &[grad, gamma_row])
            .filter(|product| *product == of_normal)?;
        let mut of_deviation = walk.step(Kind::SumDim(last), &[through])?;
        if is_wide {
            of_deviation = walk.step(Kind::Widen, &[of_deviation])?;
        }
        let root = walk.step(Kind::PowfScalar(-0.5), &[variance])?;
        let half = walk.step(Kind::DivScalar(2.0), &[root])?;
        let of_variance = walk.step(Kind::Mul, &[of_deviation, half])?;
        let number = walk.step(Kind::SumDim(last), &[of_variance]);
        let of_squares = walk.spread(number.unwrap_or(of_variance), share(patterns, rows))?;
        let part = walk.step(Kind::Mul, &[of_squares, squared])?;
        let mut parts = vec![part, part];
        if is_wide {
            let sum = walk.step(Kind::Add, &[part, part])?;
            parts = vec![walk.step(Kind::Narrow, &[sum])?];
        }
        Some(ScaledGradient {
            grad,
            direct,
            parts,
        })
    }

    /// Returns the gradient of gamma, a row.
    pub(super) fn of_gamma(&self, walk: &mut Walk<'_>, grad: TensorId) -> Option<TensorId> {
        let product = walk.step(Kind::Mul, &[grad, self.normal])?;
        walk.sum_rows(product)
    }
}

/// Returns the factor of each addend in a mean over the last dim: one over its size.
pub(super) fn share(patterns: &Patterns, x: TensorId) -> f64 {
    let width = patterns.shape(x).last().copied().unwrap_or(1);
    1.0 / width as f64
}

/// Returns the vector that is reshaped to a row, and the node of the reshape. All dims of a row except the last have
/// one element.
pub(super) fn vector(patterns: &Patterns, row: TensorId) -> Option<(TensorId, usize)> {
    let (node, kind) = patterns.maker(row)?;
    let of = *patterns.inputs(node).first()?;
    let (shape, vector) = (patterns.shape(row), patterns.shape(of));
    let (width, others) = shape.split_last()?;
    let is_row = vector == [*width] && others.iter().all(|dim| *dim == 1);
    (kind == Kind::Reshape && is_row).then_some((of, node))
}
