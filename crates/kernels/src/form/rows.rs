//! The softmax of rows, generic over the number type.

use super::array::Array;
use super::call::Logarithms;
use super::number::Number;

/// The softmax of a row.
pub(crate) struct Softmax<N> {
    /// The row minus its largest element.
    pub(crate) shifted: Vec<N>,
    pub(crate) probabilities: Vec<N>,
    /// The sum of the exponentials of `shifted`.
    pub(crate) total: N,
}

pub(crate) fn softmax<N: Number>(row: &[N]) -> Softmax<N> {
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
pub(crate) fn softmax_gradient<N: Number>(y: &Array<N>, grad: &Array<N>) -> Array<N> {
    two_rows(y, grad, |y, grad| {
        let along = dot(y, grad);
        let pairs = y.iter().zip(grad);
        pairs.map(|(y, grad)| y.mul(grad.sub(along))).collect()
    })
}

pub(crate) fn sum<N: Number>(lane: &[N]) -> N {
    lane.iter()
        .fold(N::default(), |sum, element| sum.add(*element))
}

pub(crate) fn dot<N: Number>(a: &[N], b: &[N]) -> N {
    let products = a.iter().zip(b).map(|(a, b)| a.mul(*b));
    products.fold(N::default(), N::add)
}

pub(crate) fn each_row<N: Copy>(x: &Array<N>, of: impl FnMut(&[N]) -> Vec<N>) -> Array<N> {
    Array::new(x.shape.clone(), x.rows().flat_map(of).collect())
}

pub(crate) fn two_rows<N: Copy>(
    a: &Array<N>,
    b: &Array<N>,
    mut of: impl FnMut(&[N], &[N]) -> Vec<N>,
) -> Array<N> {
    let pairs = a.rows().zip(b.rows());
    let elements = pairs.flat_map(|(a, b)| of(a, b)).collect();
    Array::new(a.shape.clone(), elements)
}

/// Returns the log-softmax of a row, and records each probability.
pub(crate) fn log_softmax<N: Number>(row: &[N], known: &dyn Logarithms<N>) -> Vec<N> {
    let Softmax {
        shifted,
        probabilities,
        total,
    } = softmax(row);
    let log = N::function("log", total);
    let logarithms: Vec<N> = shifted.iter().map(|of| of.sub(log)).collect();
    let pairs = logarithms.iter().zip(probabilities);
    pairs.for_each(|(logarithm, probability)| known.keep(*logarithm, probability));
    logarithms
}
