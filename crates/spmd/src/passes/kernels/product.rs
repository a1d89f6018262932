//! Replaces products of a batch of matrices and one matrix with a single product.

use std::collections::BTreeSet;

use burn_fsdp_kernels::{Kind, Patterns};
use burn_ir::TensorId;

/// Replaces products that Burn computes separately for each matrix of a batch.
pub(super) fn replace(patterns: &mut Patterns) {
    for index in 0..patterns.num_nodes() {
        match patterns.kind(index) {
            Some(Kind::SumDim(0)) => weight_gradient(patterns, index),
            Some(Kind::Matmul) => one_product(patterns, index),
            _ => {}
        }
    }
}

/// Returns the sizes of a tensor as a matrix: the product of all dims except the last, and the last dim.
fn matrix(shape: &[usize]) -> Option<[usize; 2]> {
    let (width, rows) = shape.split_last()?;
    Some([rows.iter().product(), *width])
}

/// `a [.., m, k]` times `w [1, .., k, n]` is the product of `[.. * m, k]` and `[k, n]`.
fn one_product(patterns: &mut Patterns, at: usize) {
    let [a, w] = patterns.inputs(at)[..] else {
        return;
    };
    let out = patterns.output(at);
    let (of_a, of_w) = (patterns.shape(a), patterns.shape(w));
    let is_one = of_w.len() > 2 && of_w[..of_w.len() - 2].iter().all(|dim| *dim == 1);
    let is_batch = of_a.len() > 2 && of_a[..of_a.len() - 2].iter().any(|dim| *dim > 1);
    if !is_one || !is_batch || !patterns.is_in_order(a) {
        return;
    }
    let rank = of_w.len();
    // A transposed weight is transposed after its dims of size one are removed, which copies nothing.
    let turned = patterns.made_by(w, Kind::SwapDims(rank - 2, rank - 1));
    let source = turned.map_or(w, |node| patterns.inputs(node)[0]);
    if turned.is_none() && !patterns.is_in_order(w) || !patterns.is_in_order(source) {
        return;
    }
    let Some(rows) = matrix(&of_a) else {
        return;
    };
    let of_source = patterns.shape(source);
    let flat = patterns.value(of_source[rank - 2..].to_vec(), w);
    patterns.insert_reshape(at, source, flat);
    let weight = match turned {
        None => flat,
        Some(_) => insert_turned(patterns, at, flat),
    };
    let left = patterns.value(rows.to_vec(), a);
    patterns.insert_reshape(at, a, left);
    let product = insert_product(patterns, at, left, weight);
    patterns.insert_reshape(at, product, out);
    patterns.remove(&BTreeSet::from([at]));
}

/// The sum over a batch of the transposed `x [b, t, k]` times `g [b, t, n]` is the product of the transposed
/// `[b * t, k]` and `[b * t, n]`.
fn weight_gradient(patterns: &mut Patterns, at: usize) {
    let summed = patterns.inputs(at)[0];
    let out = patterns.output(at);
    let Some(product) = patterns.made_by(summed, Kind::Matmul) else {
        return;
    };
    let [turned, grad] = patterns.inputs(product)[..] else {
        return;
    };
    let Some(turn) = patterns.made_by(turned, Kind::SwapDims(1, 2)) else {
        return;
    };
    let x = patterns.inputs(turn)[0];
    let (of_x, of_grad) = (patterns.shape(x), patterns.shape(grad));
    let is_one_batch = of_x.len() == 3 && of_grad.len() == 3 && of_x[..2] == of_grad[..2];
    let is_alone = patterns.is_read_by(summed, &BTreeSet::from([at]));
    if !is_one_batch || !is_alone || !patterns.is_in_order(x) || !patterns.is_in_order(grad) {
        return;
    }
    let (Some(rows), Some(columns)) = (matrix(&of_x), matrix(&of_grad)) else {
        return;
    };
    let left = patterns.value(rows.to_vec(), x);
    patterns.insert_reshape(at, x, left);
    let left = insert_turned(patterns, at, left);
    let right = patterns.value(columns.to_vec(), grad);
    patterns.insert_reshape(at, grad, right);
    let result = insert_product(patterns, at, left, right);
    patterns.insert_reshape(at, result, out);
    patterns.remove(&BTreeSet::from([at, product]));
}

fn insert_turned(patterns: &mut Patterns, at: usize, of: TensorId) -> TensorId {
    let shape = patterns.shape(of);
    let turned = patterns.value(vec![shape[1], shape[0]], of);
    patterns.insert_swap(at, (of, turned), (0, 1));
    turned
}

fn insert_product(patterns: &mut Patterns, at: usize, lhs: TensorId, rhs: TensorId) -> TensorId {
    let shape = vec![patterns.shape(lhs)[0], patterns.shape(rhs)[1]];
    let product = patterns.value(shape, lhs);
    patterns.insert_product(at, [lhs, rhs], product);
    product
}
