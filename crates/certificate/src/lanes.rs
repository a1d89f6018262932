//! Operations along dims. A lane is a sequence of elements along these dims.

use super::field::{Element, add, inverse, mul, of_integer};
use super::tensor::{Kind, Tensor, View};

/// Reduces every lane along `axes` to one element with `of`.
pub(super) fn reduced(
    input: &Tensor,
    axes: &[usize],
    shape: &[usize],
    mut of: impl FnMut(&[Element]) -> Element,
) -> Tensor {
    let len: usize = axes.iter().map(|axis| input.shape[*axis]).product();
    let lanes = in_lanes(input, axes);
    let elements: Vec<Element> = match len {
        // An empty lane is also reduced to one element.
        0 => (0..shape.iter().product()).map(|_| of(&[])).collect(),
        len => lanes.elements.chunks_exact(len).map(of).collect(),
    };
    Tensor::new(shape, elements)
}

/// Applies `of` to every lane along `axis`, for a result of shape `shape`.
pub(super) fn along(
    input: &Tensor,
    axis: usize,
    shape: &[usize],
    of: impl FnMut(&[Element]) -> Vec<Element>,
) -> Tensor {
    let lanes = in_lanes(input, &[axis]);
    let elements: Vec<Element> = match input.shape[axis] {
        0 => Vec::new(),
        len => lanes.elements.chunks_exact(len).flat_map(of).collect(),
    };
    // The axis is last here, and moves back to its position.
    let mut moved = shape.to_vec();
    let len = moved.remove(axis);
    moved.push(len);
    let mut back: Vec<usize> = (0..shape.len() - 1).collect();
    back.insert(axis, shape.len() - 1);
    let turned = Tensor::new(moved, elements);
    turned.taken(&turned.view().permuted(&back))
}

/// Returns the tensor with `axes` moved after all other dims.
fn in_lanes(input: &Tensor, axes: &[usize]) -> Tensor {
    let others = (0..input.shape.len()).filter(|axis| !axes.contains(axis));
    let permutation: Vec<usize> = others.chain(axes.iter().copied()).collect();
    input.taken(&input.view().permuted(&permutation))
}

pub(super) fn sum(kind: Kind, lane: &[Element]) -> Element {
    match kind {
        Kind::Float => lane.iter().fold(0, |sum, element| add(sum, *element)),
        Kind::Int | Kind::Bool => {
            let lane = lane.iter().map(|element| *element as i64);
            lane.fold(0i64, i64::wrapping_add) as u64
        }
    }
}

pub(super) fn mean(kind: Kind, lane: &[Element]) -> Element {
    let (total, len) = (sum(kind, lane), lane.len() as i64);
    match kind {
        Kind::Float => mul(total, inverse(of_integer(len))),
        Kind::Int | Kind::Bool => (total as i64).checked_div(len).unwrap_or(0) as u64,
    }
}

pub(super) fn product(kind: Kind, lane: &[Element]) -> Element {
    match kind {
        Kind::Float => lane
            .iter()
            .fold(1, |product, element| mul(product, *element)),
        Kind::Int | Kind::Bool => {
            let lane = lane.iter().map(|element| *element as i64);
            lane.fold(1i64, i64::wrapping_mul) as u64
        }
    }
}

/// Returns the index of the first largest element, or of the first smallest if `largest` is false.
pub(super) fn extreme(kind: Kind, lane: &[Element], largest: bool) -> usize {
    let mut best = 0;
    for (index, element) in lane.iter().enumerate() {
        let (new, old) = (kind.order(*element), kind.order(lane[best]));
        if (largest && new > old) || (!largest && new < old) {
            best = index;
        }
    }
    best
}

/// Returns the rows along the last dim.
pub(super) fn rows<E>(tensor: &Tensor<E>) -> impl Iterator<Item = &[E]> {
    let width = tensor.shape.last().copied().unwrap_or(1).max(1);
    tensor.elements.chunks_exact(width)
}

/// Returns the flat indices of the elements that indices along a dim select. `index_of` returns the index along the dim
/// for an element of the result.
pub(super) fn places_along(
    shape: &[usize],
    view: &View,
    dim: usize,
    mut index_of: impl FnMut(usize) -> usize,
) -> Vec<usize> {
    // A view with stride 0 along this dim yields the offset in the other dims.
    let mut still = view.clone();
    still.shape = shape.to_vec();
    still.strides[dim] = 0;
    let places = still.places().into_iter().enumerate();
    places
        .map(|(flat, place)| {
            (place as isize + index_of(flat) as isize * view.strides[dim]) as usize
        })
        .collect()
}
