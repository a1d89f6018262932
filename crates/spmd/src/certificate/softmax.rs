//! The softmax of rows, generic over the number type.

use super::lanes::rows;
use super::number::Number;
use super::tensor::Tensor;

/// The softmax of a row.
pub(super) struct Softmax<N> {
    /// The row minus its largest element.
    pub(super) shifted: Vec<N>,
    pub(super) probabilities: Vec<N>,
    /// The sum of the exponentials of `shifted`.
    pub(super) total: N,
}

pub(super) fn softmax<N: Number>(row: &[N]) -> Softmax<N> {
    let higher = |a: N, b: &N| if b.is_above(a) { *b } else { a };
    let first = row.first().copied().unwrap_or_default();
    let largest = row.iter().fold(first, higher);
    let shifted: Vec<N> = row.iter().map(|of| of.sub(largest)).collect();
    let powers: Vec<N> = shifted.iter().map(|of| N::function("exp", *of)).collect();
    let total = sum(&powers);
    let rate = total.inverse();
    Softmax {
        shifted,
        probabilities: powers.iter().map(|power| power.mul(rate)).collect(),
        total,
    }
}

/// Returns the gradient of a softmax's input from its result and the result's gradient.
pub(super) fn softmax_gradient<N: Number>(y: &Tensor<N>, grad: &Tensor<N>) -> Tensor<N> {
    two_rows(y, grad, |y, grad| {
        let along = dot(y, grad);
        let pairs = y.iter().zip(grad);
        pairs.map(|(y, grad)| y.mul(grad.sub(along))).collect()
    })
}

pub(super) fn sum<N: Number>(lane: &[N]) -> N {
    lane.iter()
        .fold(N::default(), |sum, element| sum.add(*element))
}

pub(super) fn dot<N: Number>(a: &[N], b: &[N]) -> N {
    let products = a.iter().zip(b).map(|(a, b)| a.mul(*b));
    products.fold(N::default(), N::add)
}

pub(super) fn each_row<N: Copy>(x: &Tensor<N>, of: impl FnMut(&[N]) -> Vec<N>) -> Tensor<N> {
    Tensor::new(x.shape.clone(), rows(x).flat_map(of).collect())
}

pub(super) fn two_rows<N: Copy>(
    a: &Tensor<N>,
    b: &Tensor<N>,
    mut of: impl FnMut(&[N], &[N]) -> Vec<N>,
) -> Tensor<N> {
    let pairs = rows(a).zip(rows(b));
    let elements = pairs.flat_map(|(a, b)| of(a, b)).collect();
    Tensor::new(a.shape.clone(), elements)
}
