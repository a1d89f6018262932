//! Queries, keys and values, split into heads and blocks of queries.

use std::ops::Range;

use burn::tensor::{Bytes, DType, Shape, bf16};
use burn_flex::{FlexTensor, Layout};
use rayon::prelude::*;

use super::factors::Factors;
use super::mask::{CausalSoftmax, Codes, Firsts, Mask, MaskedSoftmax, SoftmaxGradient};
use crate::fresh::added_parts;
use crate::halves;
use crate::matmul::cpu::{add_matmul, matmul};
use crate::rows::sum_by;
use crate::vectors::{Kernel, vectorized};

/// Number of queries that are processed together. Under a mask, a block can skip the keys before the first and after
/// the last one that any of its queries attends to. Smaller blocks therefore waste less work, while larger blocks have
/// more efficient matrix products.
pub(super) const BLOCK: usize = 64;

/// Queries, keys and values, each `[batch, time, heads, width]` with any strides.
#[derive(Clone, Debug)]
pub(super) struct Operands {
    parts: [FlexTensor; 3],
    mask: Mask,
    /// The factor that multiplies the scores.
    scale: f32,
    /// The factors that multiply the probabilities, if any.
    factors: Option<Factors>,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Queries = 0,
    Keys = 1,
    Values = 2,
}

/// The attention probabilities of a block's queries to a range of keys, `[heads, queries, keys]`. They are zero for
/// all other keys.
struct Probabilities {
    tensor: FlexTensor,
    keys: Range<usize>,
    codes: Option<Codes>,
}

/// The memory for the gradients of a sequence.
enum Target<'a> {
    /// The three gradients side by side in each row.
    Packed(&'a mut [f32]),
    /// Separate memory for each of the three.
    Apart([&'a mut [f32]; 3]),
}

impl Operands {
    /// Restricts each query to keys from its first one.
    pub(super) fn within(mut self, firsts: Firsts) -> Self {
        self.mask = Mask::Documents(firsts);
        self
    }

    /// Splits the columns of packed operands, `[batch * time, 3 * dim]` in order.
    pub(super) fn packed(qkv: FlexTensor, batch: usize, heads: usize) -> Self {
        let shape = qkv.layout().shape();
        let (rows, width) = (shape[0], shape[1]);
        let (time, dim) = (rows / batch, width / 3);
        let head_dim = dim / heads;
        let part = |part: usize| {
            let strides = [time * width, width, head_dim, 1].map(|stride| stride as isize);
            let shape = Shape::new([batch, time, heads, head_dim]);
            let layout = Layout::new(shape, strides.to_vec(), part * dim);
            qkv.clone().with_layout(layout)
        };
        Self {
            parts: [part(0), part(1), part(2)],
            mask: Mask::Causal,
            scale: 1.0 / (head_dim as f32).sqrt(),
            factors: None,
        }
    }

    pub(super) fn apart(
        parts: [FlexTensor; 3],
        scale: f32,
        mask: Mask,
        factors: Option<Factors>,
    ) -> Self {
        Self {
            parts,
            mask,
            scale,
            factors,
        }
    }

    fn dims(&self, part: Part) -> [usize; 4] {
        dims(&self.parts[part as usize])
    }

    fn batch(&self) -> usize {
        self.dims(Part::Queries)[0]
    }

    fn heads(&self) -> usize {
        self.dims(Part::Queries)[2]
    }

    /// Returns the number of queries and of keys in a sequence.
    fn times(&self) -> [usize; 2] {
        [Part::Queries, Part::Keys].map(|part| self.dims(part)[1])
    }

    /// Returns the widths of a head of queries, keys and values.
    fn widths(&self) -> [usize; 3] {
        [Part::Queries, Part::Keys, Part::Values].map(|part| self.dims(part)[3])
    }

    fn dtype(&self) -> DType {
        self.parts[0].dtype()
    }

    /// Returns the operands of one sequence as 32-bit floats, in a batch of one.
    fn sequence(&self, index: usize) -> Self {
        let parts = self.parts.each_ref();
        Self {
            parts: parts.map(|part| sequence_of(part, index)),
            mask: self.mask.of_sequence(index),
            scale: self.scale,
            factors: self
                .factors
                .as_ref()
                .map(|factors| factors.of_sequence(index)),
        }
    }

    /// Returns the blocks of queries of a sequence.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let [time, _] = self.times();
        let starts = (0..time).step_by(BLOCK);
        starts.map(move |start| start..time.min(start + BLOCK))
    }

    fn part(&self, part: Part, rows: &Range<usize>) -> FlexTensor {
        view(&self.parts[part as usize], rows)
    }

    /// Returns the shape of the attention output.
    pub(super) fn output_dims(&self) -> [usize; 4] {
        let ([time, _], [.., width]) = (self.times(), self.widths());
        [self.batch(), time, self.heads(), width]
    }

    /// Returns the attention output, `[batch, queries, heads, width]`.
    pub(super) fn forward(&self) -> FlexTensor {
        let shape = self.output_dims();
        let leaves_out = self.may_leave_out(&[Part::Values], None);
        let [output] = by_sequence([&shape], self.dtype(), |sequence, [output]| {
            self.sequence(sequence).mix(output, leaves_out);
        });
        output
    }

    /// Adds the attention output of one sequence to `output`.
    fn mix(&self, output: &mut [f32], leaves_out: bool) {
        let width = self.heads() * self.widths()[2];
        for block in self.blocks() {
            let mut seen = self.probabilities(&block, leaves_out);
            if let Some(factors) = &self.factors {
                factors.multiply(&mut seen.tensor, &block, &seen.keys);
            }
            let values = self.part(Part::Values, &seen.keys);
            add_matmul(
                seen.tensor,
                values,
                &mut output[block.start * width..],
                [width, 0],
            );
        }
    }

    /// Returns true if masked keys may be omitted from sums, because the other factors are finite and their products
    /// with zero are zero.
    fn may_leave_out(&self, parts: &[Part], grad: Option<&FlexTensor>) -> bool {
        let operands = parts.iter().map(|part| &self.parts[*part as usize]);
        let is_filled = matches!(&self.mask, Mask::Filled(fills) if !fills.is_empty());
        let factors = self.factors.iter().map(Factors::tensor);
        is_filled && operands.chain(grad).chain(factors).all(is_finite)
    }

    /// Returns the softmax of the scores of a block.
    fn probabilities(&self, block: &Range<usize>, leaves_out: bool) -> Probabilities {
        let fills = match &self.mask {
            Mask::Causal => return self.causal_probabilities(block, None),
            Mask::Documents(firsts) => {
                return self.causal_probabilities(block, Some(firsts.of_queries(block)));
            }
            Mask::Filled(fills) => fills,
        };
        let [_, num_keys] = self.times();
        let all = 0..num_keys;
        let sizes = [self.heads(), num_keys];
        let codes = Codes::of(fills, block, sizes);
        let softmax = |keys: &Range<usize>| {
            let mut tensor = self.scores(block, keys);
            let is_nothing = vectorized(MaskedSoftmax {
                scores: tensor.storage_mut(),
                keys: keys.clone(),
                codes: &codes,
                scale: self.scale,
            });
            (tensor, is_nothing)
        };
        let seen = codes.seen().filter(|seen| leaves_out && *seen != all);
        let part = seen.and_then(|keys| {
            let (tensor, is_nothing) = softmax(&keys);
            is_nothing.then_some((tensor, keys))
        });
        let (tensor, keys) = part.unwrap_or_else(|| (softmax(&all).0, all));
        Probabilities {
            tensor,
            keys,
            codes: Some(codes),
        }
    }

    /// Returns the softmax of the scores of a block, each query's up to its own key. Keys before the first one of every
    /// query are skipped.
    fn causal_probabilities(
        &self,
        block: &Range<usize>,
        firsts: Option<&[usize]>,
    ) -> Probabilities {
        let start = firsts.and_then(|firsts| firsts.iter().min().copied());
        let keys = start.unwrap_or(0)..block.end;
        let mut tensor = self.scores(block, &keys);
        vectorized(CausalSoftmax {
            scores: tensor.storage_mut(),
            queries: block.clone(),
            keys: keys.clone(),
            firsts,
            scale: self.scale,
        });
        Probabilities {
            tensor,
            keys,
            codes: None,
        }
    }

    /// Returns the unscaled scores of a block's queries for some keys: their dot products.
    fn scores(&self, block: &Range<usize>, keys: &Range<usize>) -> FlexTensor {
        let queries = self.part(Part::Queries, block);
        let keys = self.part(Part::Keys, keys);
        matmul(queries, keys.transpose(1, 2))
    }

    /// Returns the gradient of packed operands: `[batch, time, 3 * dim]`.
    pub(super) fn packed_gradient(&self, grad: &FlexTensor) -> FlexTensor {
        let [time, _] = self.times();
        let width = 3 * self.heads() * self.widths()[0];
        let shape = [self.batch(), time, width];
        let [output] = by_sequence([&shape], self.dtype(), |sequence, [output]| {
            let grad = sequence_of(grad, sequence);
            let operands = self.sequence(sequence);
            operands.add_gradients(&grad, Target::Packed(output), false);
        });
        output
    }

    /// Returns the gradients of queries, keys and values, each `[batch, time, heads, width]`.
    pub(super) fn gradients(&self, grad: &FlexTensor) -> [FlexTensor; 3] {
        let shapes = self.parts.each_ref().map(dims);
        let shapes = shapes.each_ref().map(<[usize; 4]>::as_slice);
        let leaves_out = self.may_leave_out(&[Part::Keys, Part::Values], Some(grad));
        by_sequence(shapes, self.dtype(), |sequence, outputs| {
            let grad = sequence_of(grad, sequence);
            let operands = self.sequence(sequence);
            operands.add_gradients(&grad, Target::Apart(outputs), leaves_out);
        })
    }

    /// Adds the gradients of one sequence, block by block.
    fn add_gradients(&self, grad: &FlexTensor, mut target: Target<'_>, leaves_out: bool) {
        for block in self.blocks() {
            let grad = view(grad, &block);
            self.block_gradients(&block, grad, &mut target, leaves_out);
        }
    }

    fn block_gradients(
        &self,
        block: &Range<usize>,
        grad: FlexTensor,
        target: &mut Target<'_>,
        leaves_out: bool,
    ) {
        let Probabilities {
            tensor,
            keys,
            codes,
        } = self.probabilities(block, leaves_out);
        let part = |part, rows| self.part(part, rows);
        let widths = self.widths().map(|width| width * self.heads());
        let mut add = |lhs: FlexTensor, rhs: FlexTensor, part: Part, rows: &Range<usize>| {
            let (matrix, width, first) = target.part(part, widths);
            add_matmul(lhs, rhs, &mut matrix[rows.start * width..], [width, first]);
        };

        let mut multiplied = tensor.clone();
        if let Some(factors) = &self.factors {
            factors.multiply(&mut multiplied, block, &keys);
        }
        let turned = multiplied.transpose(1, 2);
        drop(multiplied);
        add(turned, grad.clone(), Part::Values, &keys);
        let mut scores = matmul(grad, part(Part::Values, &keys).transpose(1, 2));
        if let Some(factors) = &self.factors {
            factors.multiply(&mut scores, block, &keys);
        }
        vectorized(SoftmaxGradient {
            grad: scores.storage_mut(),
            probabilities: tensor.storage(),
            keys: keys.clone(),
            codes: codes.as_ref(),
            scale: self.scale,
        });
        drop(tensor);
        let queries = part(Part::Queries, block);
        add(scores.transpose(1, 2), queries, Part::Keys, &keys);
        add(scores, part(Part::Keys, &keys), Part::Queries, block);
    }
}

impl Target<'_> {
    /// Returns the rows that hold a part, the length of a row, and the part's first column.
    fn part(&mut self, part: Part, widths: [usize; 3]) -> (&mut [f32], usize, usize) {
        let index = part as usize;
        match self {
            Self::Packed(rows) => (rows, widths.iter().sum(), widths[..index].iter().sum()),
            Self::Apart(parts) => (parts[index], widths[index], 0),
        }
    }
}

fn dims(tensor: &FlexTensor) -> [usize; 4] {
    let shape = tensor.layout().shape();
    [shape[0], shape[1], shape[2], shape[3]]
}

/// Returns one sequence of a tensor `[batch, time, heads, width]` as 32-bit floats, `[1, time, heads, width]`.
fn sequence_of(tensor: &FlexTensor, index: usize) -> FlexTensor {
    let sequence = tensor.narrow(0, index, 1);
    if sequence.dtype() != DType::BF16 {
        return sequence;
    }
    let (layout, [_, time, heads, width]) = (sequence.layout(), dims(tensor));
    match layout.strides()[1..] {
        [row, head, 1] if row >= 0 && head >= 0 => {
            let halves = &sequence.storage::<bf16>()[layout.start_offset()..];
            let steps = [row, head].map(|stride| stride as usize);
            halves::widened_heads(halves, [time, heads, width], steps)
        }
        _ => halves::cast(sequence.to_contiguous(), DType::F32),
    }
}

/// Returns some rows of a sequence, `[1, time, heads, width]`, as a view `[heads, rows, width]`.
fn view(tensor: &FlexTensor, rows: &Range<usize>) -> FlexTensor {
    let [_, _, heads, width] = dims(tensor);
    let layout = tensor.layout();
    let strides = layout.strides();
    let shape = Shape::new([heads, rows.len(), width]);
    let start = layout.start_offset() as isize + rows.start as isize * strides[1];
    let view = Layout::new(
        shape,
        vec![strides[2], strides[1], strides[3]],
        start as usize,
    );
    tensor.clone().with_layout(view)
}

/// Returns tensors of these shapes, `[batch, ..]`. Calls `add` for each sequence, in parallel, with the sequence's
/// part of each tensor, filled with zeros. Halves are summed as 32-bit floats and rounded afterwards.
fn by_sequence<const N: usize>(
    shapes: [&[usize]; N],
    dtype: DType,
    add: impl Fn(usize, [&mut [f32]; N]) + Sync,
) -> [FlexTensor; N] {
    let lens = shapes.map(|shape| shape.iter().product());
    let batch = shapes.first().map_or(0, |shape| shape[0]);
    let bytes = match dtype {
        DType::BF16 => added_parts(lens, batch, |sequence, halves: [&mut [bf16]; N]| {
            let mut floats = halves.each_ref().map(|halves| vec![0.0; halves.len()]);
            add(sequence, floats.each_mut().map(Vec::as_mut_slice));
            for (floats, halves) in floats.iter().zip(halves) {
                halves::narrow(floats, halves);
            }
        })
        .map(Bytes::from_elems),
        _ => added_parts(lens, batch, add).map(Bytes::from_elems),
    };
    let mut shapes = shapes.into_iter();
    bytes.map(|bytes| {
        let shape = Shape::from(shapes.next().unwrap_or_default().to_vec());
        FlexTensor::new(bytes, Layout::contiguous(shape), dtype)
    })
}

/// Returns true if all elements of a tensor are finite. The tensor must be in order.
fn is_finite(tensor: &FlexTensor) -> bool {
    if tensor.dtype() == DType::BF16 {
        let elements = tensor.as_slice::<bf16>();
        return elements.is_some_and(|elements| elements.iter().all(|half| half.is_finite()));
    }
    tensor.as_slice::<f32>().is_some_and(|elements| {
        let chunks = elements.par_chunks(1 << 14);
        chunks.map(|chunk| vectorized(Finite(chunk))).all(|is| is)
    })
}

struct Finite<'a>(&'a [f32]);

impl Kernel for Finite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        // The product of zero and a non-finite number is NaN.
        sum_by(self.0, |x| x * 0.0) == 0.0
    }
}
