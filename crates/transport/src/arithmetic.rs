//! Combining the tensors of several ranks into one, element by element.
//!
//! The result is computed block by block, which keeps the accumulator in the fastest cache. Within a block it is
//! computed rank by rank, so every pass is a plain loop over slices. The result of an element does not depend on the
//! blocks or on the threads that share them.

use std::borrow::Cow;

use burn_fsdp_mesh::ReduceOp;
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use burn_fsdp_rendezvous::{ElementType, Reduction};

/// Elements of a block: an `f32` accumulator and its scratch are 8 KiB each.
const BLOCK: usize = 2048;

/// The number of bytes above which the other threads of the rank's pool share the work. For fewer bytes, waking them
/// costs more than it saves.
const SHARED_WORK: usize = 1 << 20;

/// The number of bytes or elements that one thread takes at a time (a multiple of [`BLOCK`]).
const PIECE: usize = 1 << 18;

/// Copies `from` over `to`, which must have the same length.
#[inline]
pub fn copy(from: &[u8], to: &mut [u8]) {
    if is_shared(from.len()) {
        let pieces = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
        pieces.for_each(|(to, from)| to.copy_from_slice(from));
    } else {
        to.copy_from_slice(from);
    }
}

/// The number of bytes to show to a reader at a time, while they are in the core's cache. Reading them again from memory
/// would cost as much as moving them.
const NEAR: usize = 1 << 15;

/// Like [`copy`], but also shows the copied bytes to `read`, stretch by stretch and in order.
pub fn copy_and_read(from: &[u8], to: &mut [u8], mut read: impl FnMut(&[u8])) {
    if is_shared(from.len()) {
        copy(from, to);
        return read(to);
    }
    for (to, from) in to.chunks_mut(NEAR).zip(from.chunks(NEAR)) {
        to.copy_from_slice(from);
        read(to);
    }
}

/// Like [`reduce`], but also shows the addends and the result to `read`, stretch by stretch and each in order. `read` gets
/// the index of the addend, or the number of addends for the result.
pub fn reduce_and_read(
    reduction: &Reduction,
    input: ElementType,
    addends: &[&[u8]],
    out: &mut [u8],
    mut read: impl FnMut(usize, &[u8]),
) {
    let output = reduction.output_of(input);
    let num_elements = if is_shared(out.len()) {
        out.len().max(1)
    } else {
        NEAR / input.size().max(output.size())
    };
    let size = num_elements * input.size();
    for (piece, out) in out.chunks_mut(num_elements * output.size()).enumerate() {
        let near = addends.iter().map(|addend| {
            let end = addend.len().min((piece + 1) * size);
            &addend[piece * size..end]
        });
        let near: Vec<&[u8]> = near.collect();
        near.iter()
            .enumerate()
            .for_each(|(rank, near)| read(rank, near));
        reduce(reduction, input, &near, out);
        read(addends.len(), out);
    }
}

/// Combines the addends, one byte slice of `input` elements per rank in rank order, into `out`. `out` must be aligned
/// for its elements and have the same number of elements.
///
/// [`Reduction::objection`] must return `None` for `input`.
pub fn reduce(reduction: &Reduction, input: ElementType, addends: &[&[u8]], out: &mut [u8]) {
    use ElementType::*;
    let recipe = Recipe::new(reduction, addends.len());
    match (input, reduction.output_of(input)) {
        (F32, F32) => recipe.run::<f32, f32>(addends, out),
        (F32, F16) => recipe.run::<f32, f16>(addends, out),
        (F32, BF16) => recipe.run::<f32, bf16>(addends, out),
        (F16, F32) => recipe.run::<f16, f32>(addends, out),
        (F16, F16) => recipe.run::<f16, f16>(addends, out),
        (F16, BF16) => recipe.run::<f16, bf16>(addends, out),
        (BF16, F32) => recipe.run::<bf16, f32>(addends, out),
        (BF16, F16) => recipe.run::<bf16, f16>(addends, out),
        (BF16, BF16) => recipe.run::<bf16, bf16>(addends, out),
        (F64, _) => recipe.run::<f64, f64>(addends, out),
        (I64, _) => recipe.run::<i64, i64>(addends, out),
        (I32, _) => recipe.run::<i32, i32>(addends, out),
        (I16, _) => recipe.run::<i16, i16>(addends, out),
        (I8, _) => recipe.run::<i8, i8>(addends, out),
        (U64, _) => recipe.run::<u64, u64>(addends, out),
        (U32, _) => recipe.run::<u32, u32>(addends, out),
        (U16, _) => recipe.run::<u16, u16>(addends, out),
        (U8, _) => recipe.run::<u8, u8>(addends, out),
        (input, output) => {
            unreachable!("the conversion of {input} to {output} is rejected before this call")
        }
    }
}

/// Returns true if the threads of the rank's pool share the work. MPI's thread is not in a pool and works alone: the
/// rank's pool may be busy indefinitely, and rayon's global pool does not belong to the rank.
fn is_shared(num_bytes: usize) -> bool {
    num_bytes > SHARED_WORK
        && rayon::current_thread_index().is_some()
        && rayon::current_num_threads() > 1
}

/// A reduction over a known number of ranks.
#[derive(Clone, Copy)]
struct Recipe {
    op: ReduceOp,
    pre: f64,
    post: f64,
}

impl Recipe {
    fn new(reduction: &Reduction, num_ranks: usize) -> Self {
        let share = if reduction.op == ReduceOp::Mean {
            1.0 / num_ranks as f64
        } else {
            1.0
        };
        let Reduction {
            op,
            pre_scale,
            post_scale,
            ..
        } = *reduction;
        Self {
            op,
            pre: pre_scale,
            post: post_scale * share,
        }
    }

    fn run<E: Element, O: FromWide<E::Wide>>(self, addends: &[&[u8]], out: &mut [u8]) {
        let addends: Vec<_> = addends.iter().map(|bytes| elements::<E>(bytes)).collect();
        let out: &mut [O] = bytemuck::cast_slice_mut(out);
        if is_shared(size_of_val(out)) {
            let pieces = out.par_chunks_mut(PIECE).enumerate();
            pieces.for_each(|(index, out)| self.run_piece(&addends, index * PIECE, out));
        } else {
            self.run_piece(&addends, 0, out);
        }
    }

    /// Combines the elements from index `start` into `out`.
    fn run_piece<E: Element, O: FromWide<E::Wide>>(
        self,
        addends: &[Cow<'_, [E]>],
        start: usize,
        out: &mut [O],
    ) {
        let (pre, post) = (E::Wide::factor(self.pre), E::Wide::factor(self.post));
        let mut sum = [E::Wide::ZERO; BLOCK];
        let mut scratch = [[E::Wide::ZERO; BLOCK]; 2];
        for (index, out) in out.chunks_mut(BLOCK).enumerate() {
            let at = start + index * BLOCK;
            let block = at..at + out.len();
            let [one, two] = scratch.each_mut().map(|scratch| &mut scratch[..out.len()]);
            let sum = &mut sum[..out.len()];
            match addends {
                [] => {}
                [only] => scale(E::widen(&only[block], one), pre, sum),
                [first, second, rest @ ..] => {
                    let pair = [
                        E::widen(&first[block.clone()], one),
                        E::widen(&second[block.clone()], two),
                    ];
                    combine_pair(self.op, pair, pre, sum);
                    for addend in rest {
                        let one = &mut scratch[0][..out.len()];
                        combine(self.op, E::widen(&addend[block.clone()], one), pre, sum);
                    }
                }
            }
            O::from_wide(sum, post, out);
        }
    }
}

/// Returns the elements in the bytes. Copies only if the bytes are not aligned for them.
fn elements<E: Pod>(bytes: &[u8]) -> Cow<'_, [E]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => {
            let elements = bytes
                .chunks_exact(size_of::<E>())
                .map(bytemuck::pod_read_unaligned);
            Cow::Owned(elements.collect())
        }
    }
}

fn scale<W: Wide>(block: &[W], factor: W, out: &mut [W]) {
    for (out, x) in out.iter_mut().zip(block) {
        *out = x.scaled(factor);
    }
}

/// Combines the first two addends in one pass, instead of two passes of [`scale`] and [`combine`].
fn combine_pair<W: Wide>(op: ReduceOp, [a, b]: [&[W]; 2], factor: W, sum: &mut [W]) {
    let each = sum
        .iter_mut()
        .zip(a)
        .zip(b)
        .map(|((sum, a), b)| (sum, a.scaled(factor), b.scaled(factor)));
    match op {
        ReduceOp::Sum | ReduceOp::Mean => each.for_each(|(sum, a, b)| *sum = a.plus(b)),
        ReduceOp::Max => each.for_each(|(sum, a, b)| *sum = a.larger(b)),
        ReduceOp::Min => each.for_each(|(sum, a, b)| *sum = a.smaller(b)),
    }
}

/// Combines one more addend into the sum.
fn combine<W: Wide>(op: ReduceOp, block: &[W], factor: W, sum: &mut [W]) {
    let each = sum
        .iter_mut()
        .zip(block)
        .map(|(sum, x)| (sum, x.scaled(factor)));
    match op {
        ReduceOp::Sum | ReduceOp::Mean => each.for_each(|(sum, x)| *sum = sum.plus(x)),
        ReduceOp::Max => each.for_each(|(sum, x)| *sum = sum.larger(x)),
        ReduceOp::Min => each.for_each(|(sum, x)| *sum = sum.smaller(x)),
    }
}

/// A type that results are accumulated in.
trait Wide: Copy + Send + Sync + 'static {
    const ZERO: Self;
    /// Returns the factor in this type. Integers are never scaled and do not use the factor.
    fn factor(factor: f64) -> Self;
    fn scaled(self, factor: Self) -> Self;
    fn plus(self, other: Self) -> Self;
    /// Returns the larger value, or NaN if one is NaN.
    fn larger(self, other: Self) -> Self;
    /// Returns the smaller value, or NaN if one is NaN.
    fn smaller(self, other: Self) -> Self;
}

/// A type of the elements that are combined.
trait Element: Pod + Send + Sync {
    type Wide: Wide;
    /// Returns the block widened, in `scratch` unless it is already wide.
    fn widen<'a>(block: &'a [Self], scratch: &'a mut [Self::Wide]) -> &'a [Self::Wide];
}

/// A type of the elements of a result.
trait FromWide<W>: Pod + Send + Sync {
    /// Scales and rounds the block into `out`, which has the same length. May overwrite the block.
    fn from_wide(block: &mut [W], factor: W, out: &mut [Self]);
}

macro_rules! wide_float {
    ($float:ty) => {
        impl Wide for $float {
            const ZERO: Self = 0.0;
            fn factor(factor: f64) -> Self {
                factor as $float
            }
            #[inline]
            fn scaled(self, factor: Self) -> Self {
                self * factor
            }
            #[inline]
            fn plus(self, other: Self) -> Self {
                self + other
            }
            #[inline]
            fn larger(self, other: Self) -> Self {
                if self >= other || self.is_nan() {
                    self
                } else {
                    other
                }
            }
            #[inline]
            fn smaller(self, other: Self) -> Self {
                if self <= other || self.is_nan() {
                    self
                } else {
                    other
                }
            }
        }
        itself!($float);
    };
}

macro_rules! wide_integer {
    ($integer:ty) => {
        impl Wide for $integer {
            const ZERO: Self = 0;
            fn factor(_: f64) -> Self {
                1
            }
            #[inline]
            fn scaled(self, _: Self) -> Self {
                self
            }
            #[inline]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline]
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
        }
        itself!($integer);
    };
}

/// Implements the traits for a type whose results are accumulated in the same type.
macro_rules! itself {
    ($own:ty) => {
        impl Element for $own {
            type Wide = $own;
            fn widen<'a>(block: &'a [$own], _: &'a mut [$own]) -> &'a [$own] {
                block
            }
        }
        impl FromWide<$own> for $own {
            fn from_wide(block: &mut [$own], factor: $own, out: &mut [$own]) {
                scale(block, factor, out);
            }
        }
    };
}

macro_rules! half_float {
    ($half:ty) => {
        impl Element for $half {
            type Wide = f32;
            fn widen<'a>(block: &'a [$half], scratch: &'a mut [f32]) -> &'a [f32] {
                block.convert_to_f32_slice(scratch);
                scratch
            }
        }
        impl FromWide<f32> for $half {
            fn from_wide(block: &mut [f32], factor: f32, out: &mut [$half]) {
                block.iter_mut().for_each(|x| *x *= factor);
                out.convert_from_f32_slice(block);
            }
        }
    };
}

wide_float!(f32);
wide_float!(f64);
wide_integer!(i64);
wide_integer!(i32);
wide_integer!(i16);
wide_integer!(i8);
wide_integer!(u64);
wide_integer!(u32);
wide_integer!(u16);
wide_integer!(u8);
half_float!(f16);
half_float!(bf16);
