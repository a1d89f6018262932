//! 16-bit halves (`bf16`), which kernels widen to 32 bits and round once at the end.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{Bytes, DType, Shape, bf16};
use burn_flex::{FlexTensor, Layout};
use burn_ir::TensorIr;
use rayon::prelude::*;

use crate::vectors::{Kernel, vectorized};

/// Elements that a thread converts at a time.
const CHUNK: usize = 1 << 14;

/// Returns true for the float types that the kernels support: `f32` and `bf16`.
pub fn takes(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

/// Returns true if all tensors have the same type and the kernels support it.
pub fn are_alike<'a>(tensors: impl IntoIterator<Item = &'a TensorIr>) -> bool {
    let mut types = tensors.into_iter().map(|tensor| tensor.dtype);
    types
        .next()
        .is_none_or(|first| takes(first) && types.all(|other| other == first))
}

/// The elements of a tensor in order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Elements<'a> {
    /// 32-bit floats.
    Full(&'a [f32]),
    /// 16-bit halves.
    Half(&'a [bf16]),
}

impl<'a> Elements<'a> {
    /// Returns the elements of the whole storage of a tensor.
    pub(crate) fn of(tensor: &'a FlexTensor) -> Self {
        match tensor.dtype() {
            DType::BF16 => Self::Half(tensor.storage()),
            _ => Self::Full(tensor.storage()),
        }
    }

    /// Returns a range of the elements as 32-bit floats, widened into `buffer` if necessary. The result is empty if
    /// there are no elements.
    pub(crate) fn part<'b>(self, range: Range<usize>, buffer: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        match self {
            Self::Full([]) => &[],
            Self::Full(elements) => &elements[range],
            Self::Half(elements) => widen(&elements[range], buffer),
        }
    }
}

/// Returns all elements of a tensor in order, as 32-bit floats.
pub(crate) fn floats(tensor: &FlexTensor) -> Cow<'_, [f32]> {
    match Elements::of(tensor) {
        Elements::Full(elements) => Cow::Borrowed(elements),
        Elements::Half(elements) => {
            let mut buffer = Vec::new();
            widen(elements, &mut buffer);
            Cow::Owned(buffer)
        }
    }
}

/// Returns a tensor of floats, rounded to a type that the kernels support.
pub(crate) fn vector(values: Vec<f32>, dtype: DType) -> FlexTensor {
    let layout = Layout::contiguous([values.len()].into());
    if dtype == DType::BF16 {
        let mut halves = vec![bf16::ZERO; values.len()];
        narrow(&values, &mut halves);
        return FlexTensor::new(Bytes::from_elems(halves), layout, dtype);
    }
    FlexTensor::new(Bytes::from_elems(values), layout, dtype)
}

/// Returns a tensor of zeros in memory that is allocated once. Burn's own function copies it to aligned memory.
pub(crate) fn zeros(shape: Shape, dtype: DType) -> FlexTensor {
    let len = shape.num_elements();
    let bytes = match dtype {
        DType::BF16 => Bytes::from_elems(vec![bf16::ZERO; len]),
        _ => Bytes::from_elems(vec![0.0_f32; len]),
    };
    FlexTensor::new(bytes, Layout::contiguous(shape), dtype)
}

/// Casts a tensor to another type that the kernels support. The tensor must be in order.
pub(crate) fn cast(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    let layout = Layout::contiguous(tensor.layout().shape().clone());
    let len = layout.num_elements();
    let bytes = match Elements::of(&tensor) {
        Elements::Full(elements) if dtype == DType::BF16 => {
            let mut halves = vec![bf16::ZERO; len];
            let parts = halves.par_chunks_mut(CHUNK).zip(elements.par_chunks(CHUNK));
            parts.for_each(|(halves, elements)| narrow(elements, halves));
            Bytes::from_elems(halves)
        }
        Elements::Half(elements) if dtype == DType::F32 => {
            let mut floats = vec![0.0_f32; len];
            let parts = floats.par_chunks_mut(CHUNK).zip(elements.par_chunks(CHUNK));
            parts.for_each(|(floats, halves)| vectorized(Widen { halves, floats }));
            Bytes::from_elems(floats)
        }
        _ => return tensor,
    };
    FlexTensor::new(bytes, layout, dtype)
}

/// Widens halves to a tensor `[1, rows, heads, width]` of 32-bit floats. Their rows and heads are `row_step` and
/// `head_step` elements apart, and a head's `width` elements are contiguous.
pub(crate) fn widened_heads(
    halves: &[bf16],
    [rows, heads, width]: [usize; 3],
    [row_step, head_step]: [usize; 2],
) -> FlexTensor {
    let mut floats = vec![0.0_f32; rows * heads * width];
    vectorized(WidenHeads {
        halves,
        floats: &mut floats,
        heads,
        width,
        row_step,
        head_step,
    });
    let layout = Layout::contiguous([1, rows, heads, width].into());
    FlexTensor::new(Bytes::from_elems(floats), layout, DType::F32)
}

struct WidenHeads<'a> {
    halves: &'a [bf16],
    floats: &'a mut [f32],
    heads: usize,
    width: usize,
    row_step: usize,
    head_step: usize,
}

impl Kernel for WidenHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { heads, width, .. } = self;
        let row_len = (heads * width).max(1);
        for (row, floats) in self.floats.chunks_exact_mut(row_len).enumerate() {
            for (head, floats) in floats.chunks_exact_mut(width).enumerate() {
                let start = row * self.row_step + head * self.head_step;
                widen_into(&self.halves[start..start + width], floats);
            }
        }
    }
}

/// Widens halves into a buffer, and returns the part of the buffer that holds them.
pub(crate) fn widen<'b>(halves: &[bf16], buffer: &'b mut Vec<f32>) -> &'b mut [f32] {
    if buffer.len() < halves.len() {
        buffer.resize(halves.len(), 0.0);
    }
    let floats = &mut buffer[..halves.len()];
    vectorized(Widen { halves, floats });
    floats
}

/// Rounds floats to halves.
pub(crate) fn narrow(floats: &[f32], halves: &mut [bf16]) {
    vectorized(Narrow { floats, halves });
}

struct Widen<'a> {
    halves: &'a [bf16],
    floats: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        widen_into(self.halves, self.floats);
    }
}

struct Narrow<'a> {
    floats: &'a [f32],
    halves: &'a mut [bf16],
}

impl Kernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        narrow_into(self.floats, self.halves);
    }
}

/// Widens halves. Call it inside a [`Kernel`].
#[inline(always)]
pub(crate) fn widen_into(halves: &[bf16], floats: &mut [f32]) {
    for (float, half) in floats.iter_mut().zip(halves) {
        *float = widened(*half);
    }
}

/// Rounds floats to halves. Call it inside a [`Kernel`].
#[inline(always)]
pub(crate) fn narrow_into(floats: &[f32], halves: &mut [bf16]) {
    for (half, float) in halves.iter_mut().zip(floats) {
        *half = rounded(*float);
    }
}

/// Rounds floats to numbers that are exact in halves. Call it inside a [`Kernel`].
#[inline(always)]
pub(crate) fn round(floats: &mut [f32]) {
    for float in floats {
        *float = widened(rounded(*float));
    }
}

/// Widens a half, without a function call.
#[inline(always)]
pub(crate) fn widened(half: bf16) -> f32 {
    f32::from_bits(u32::from(half.to_bits()) << 16)
}

/// Returns the nearest half, with ties to even, like [`bf16::from_f32`]. It has no branches, so a loop over it
/// becomes vector instructions.
#[inline(always)]
pub(crate) fn rounded(float: f32) -> bf16 {
    let bits = float.to_bits();
    let nearest = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let not_a_number = (bits >> 16) | 0x40;
    bf16::from_bits(if float.is_nan() {
        not_a_number
    } else {
        nearest
    } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_matches_the_half_type() {
        // All upper halves, with lower halves around the rounding midpoint.
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let float = f32::from_bits(u32::from(upper) << 16 | lower);
                let expected = bf16::from_f32(float).to_bits();
                assert_eq!(rounded(float).to_bits(), expected, "{:x}", float.to_bits());
            }
        }
    }

    #[test]
    fn widening_is_exact() {
        let halves: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let mut buffer = Vec::new();
        for (float, half) in widen(&halves, &mut buffer).iter().zip(&halves) {
            assert!(*float == half.to_f32() || float.is_nan() && half.is_nan());
        }
    }
}
