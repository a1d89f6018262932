//! Queries, keys and values, cut into heads and blocks of queries.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_flex::{FlexTensor, Layout};
use rayon::prelude::*;

use super::mask::{CausalSoftmax, Codes, Mask, MaskedSoftmax, SoftmaxGradient};
use crate::rows::{Kernel, sum_by, vectorized};

/// Queries that are handled together. Under a mask they meet only the keys that one of them sees, so that smaller
/// blocks waste less, and larger ones make better matrix products.
pub(super) const BLOCK: usize = 64;

/// Queries, keys and values, each `[batch, time, heads, width]` with any strides.
#[derive(Clone, Debug)]
pub(super) struct Operands {
    parts: [FlexTensor; 3],
    mask: Mask,
    /// The factor on the scores.
    scale: f32,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Queries = 0,
    Keys = 1,
    Values = 2,
}

/// Some queries of a sequence.
#[derive(Clone, Debug)]
struct Block {
    sequence: usize,
    queries: Range<usize>,
}

/// The attention of each query of a block to some keys, all others having none: `[heads, queries, keys]`.
struct Probabilities {
    tensor: FlexTensor,
    keys: Range<usize>,
    codes: Option<Codes>,
}

/// The memory of the gradients of a sequence.
enum Target<'a> {
    /// All three side by side in each row.
    Packed(&'a mut [f32]),
    /// One after the other, each of its own.
    Apart([&'a mut [f32]; 3]),
}

impl Operands {
    /// Cuts the columns of packed operands, `[batch * time, 3 * dim]` in order.
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
        }
    }

    pub(super) fn apart(parts: [FlexTensor; 3], scale: f32, mask: Mask) -> Self {
        Self { parts, mask, scale }
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

    /// Returns the number of queries, and of keys, of a sequence.
    pub(super) fn times(&self) -> [usize; 2] {
        [Part::Queries, Part::Keys].map(|part| self.dims(part)[1])
    }

    /// Returns the width of a head of queries, keys and values.
    pub(super) fn widths(&self) -> [usize; 3] {
        [Part::Queries, Part::Keys, Part::Values].map(|part| self.dims(part)[3])
    }

    fn blocks(&self, sequence: usize) -> impl Iterator<Item = Block> + use<> {
        let [time, _] = self.times();
        (0..time).step_by(BLOCK).map(move |start| Block {
            sequence,
            queries: start..time.min(start + BLOCK),
        })
    }

    fn part(&self, part: Part, sequence: usize, rows: &Range<usize>) -> FlexTensor {
        view(&self.parts[part as usize], sequence, rows)
    }

    /// Returns the values, mixed: `[batch, queries, heads, width]`.
    pub(super) fn forward(&self) -> FlexTensor {
        let ([time, _], [.., width]) = (self.times(), self.widths());
        let shape = Shape::new([self.batch(), time, self.heads(), width]);
        let mut output = FlexTensor::empty(shape, DType::F32);
        let leaves_out = self.may_leave_out(&[Part::Values], None);
        output
            .storage_mut::<f32>()
            .par_chunks_mut((time * self.heads() * width).max(1))
            .enumerate()
            .for_each(|(sequence, output)| {
                for block in self.blocks(sequence) {
                    let seen = self.probabilities(&block, leaves_out);
                    let values = self.part(Part::Values, sequence, &seen.keys);
                    let mixed = matmul(seen.tensor, values);
                    add_heads(&mixed, (output, self.heads() * width, 0), &block.queries);
                }
            });
        output
    }

    /// Returns true if masked keys may be left out of sums: what they would be multiplied by zero is finite.
    fn may_leave_out(&self, parts: &[Part], grad: Option<&FlexTensor>) -> bool {
        let operands = parts.iter().map(|part| &self.parts[*part as usize]);
        let is_filled = matches!(&self.mask, Mask::Filled(fills) if !fills.is_empty());
        is_filled && operands.chain(grad).all(is_finite)
    }

    /// Returns the softmax of the scores of a block.
    fn probabilities(&self, block: &Block, leaves_out: bool) -> Probabilities {
        let fills = match &self.mask {
            Mask::Causal => {
                let keys = 0..block.queries.end;
                let mut tensor = self.scores(block, &keys);
                vectorized(CausalSoftmax {
                    scores: tensor.storage_mut(),
                    queries: block.queries.clone(),
                    scale: self.scale,
                });
                return Probabilities {
                    tensor,
                    keys,
                    codes: None,
                };
            }
            Mask::Filled(fills) => fills,
        };
        let [_, num_keys] = self.times();
        let all = 0..num_keys;
        let sizes = [self.heads(), num_keys];
        let codes = Codes::of(fills, block.sequence, &block.queries, sizes);
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

    /// Returns the products of the queries of a block with some keys.
    fn scores(&self, block: &Block, keys: &Range<usize>) -> FlexTensor {
        let queries = self.part(Part::Queries, block.sequence, &block.queries);
        let keys = self.part(Part::Keys, block.sequence, keys);
        matmul(queries, keys.transpose(1, 2))
    }

    /// Returns the gradient of packed operands: `[batch, time, 3 * dim]`.
    pub(super) fn packed_gradient(&self, grad: &FlexTensor) -> FlexTensor {
        let [time, _] = self.times();
        let width = 3 * self.heads() * self.widths()[0];
        let shape = Shape::new([self.batch(), time, width]);
        let mut output = FlexTensor::empty(shape, DType::F32);
        output
            .storage_mut::<f32>()
            .par_chunks_mut(time * width)
            .enumerate()
            .for_each(|(sequence, output)| {
                self.sequence_gradients(sequence, grad, Target::Packed(output), false);
            });
        output
    }

    /// Returns the gradients of queries, keys and values, each `[batch, time, heads, width]`.
    pub(super) fn gradients(&self, grad: &FlexTensor) -> [FlexTensor; 3] {
        let shapes = self.parts.each_ref().map(dims);
        let mut outputs = shapes.map(|shape| FlexTensor::empty(Shape::new(shape), DType::F32));
        let lens = shapes.map(|[_, time, heads, width]| (time * heads * width).max(1));
        let leaves_out = self.may_leave_out(&[Part::Keys, Part::Values], Some(grad));
        let [queries, keys, values] = outputs.each_mut().map(|output| output.storage_mut::<f32>());
        queries
            .par_chunks_mut(lens[0])
            .zip(keys.par_chunks_mut(lens[1]))
            .zip(values.par_chunks_mut(lens[2]))
            .enumerate()
            .for_each(|(sequence, ((queries, keys), values))| {
                let target = Target::Apart([queries, keys, values]);
                self.sequence_gradients(sequence, grad, target, leaves_out);
            });
        outputs
    }

    /// Adds the gradients of a sequence, block after block.
    fn sequence_gradients(
        &self,
        sequence: usize,
        grad: &FlexTensor,
        mut target: Target<'_>,
        leaves_out: bool,
    ) {
        for block in self.blocks(sequence) {
            let grad = view(grad, sequence, &block.queries);
            self.block_gradients(&block, grad, &mut target, leaves_out);
        }
    }

    fn block_gradients(
        &self,
        block: &Block,
        grad: FlexTensor,
        target: &mut Target<'_>,
        leaves_out: bool,
    ) {
        let Probabilities {
            tensor,
            keys,
            codes,
        } = self.probabilities(block, leaves_out);
        let part = |part, rows| self.part(part, block.sequence, rows);
        let widths = self.widths().map(|width| width * self.heads());
        let mut add = |gradient: &FlexTensor, part: Part, rows| {
            add_heads(gradient, target.part(part, widths), rows);
        };

        // Each product is freed before the next one is made: that is what the cost says.
        add(
            &matmul(tensor.transpose(1, 2), grad.clone()),
            Part::Values,
            &keys,
        );
        let mut scores = matmul(grad, part(Part::Values, &keys).transpose(1, 2));
        vectorized(SoftmaxGradient {
            grad: scores.storage_mut(),
            probabilities: tensor.storage(),
            keys: keys.clone(),
            codes: codes.as_ref(),
            scale: self.scale,
        });
        drop(tensor);
        add(
            &matmul(scores.clone(), part(Part::Keys, &keys)),
            Part::Queries,
            &block.queries,
        );
        let queries = part(Part::Queries, &block.queries);
        add(&matmul(scores.transpose(1, 2), queries), Part::Keys, &keys);
    }
}

impl Target<'_> {
    /// Returns the rows of a part, their width, and its first column.
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

/// Returns a view of some rows of a sequence of `[batch, time, heads, width]`: `[heads, rows, width]`.
fn view(tensor: &FlexTensor, sequence: usize, rows: &Range<usize>) -> FlexTensor {
    let [_, _, heads, width] = dims(tensor);
    let layout = tensor.layout();
    let strides = layout.strides();
    let start = sequence as isize * strides[0] + rows.start as isize * strides[1];
    let shape = Shape::new([heads, rows.len(), width]);
    let start = layout.start_offset() as isize + start;
    let view = Layout::new(
        shape,
        vec![strides[2], strides[1], strides[3]],
        start as usize,
    );
    tensor.clone().with_layout(view)
}

/// Adds `[heads, rows, width]` to rows of a matrix from a column on, head beside head.
fn add_heads(
    heads: &FlexTensor,
    (matrix, row_len, first_column): (&mut [f32], usize, usize),
    rows: &Range<usize>,
) {
    let [_, num_rows, width] = [0, 1, 2].map(|dim| heads.layout().shape()[dim]);
    let head_len = (num_rows * width).max(1);
    for (head, source) in heads.storage::<f32>().chunks_exact(head_len).enumerate() {
        let column = first_column + head * width;
        for (row, source) in rows.clone().zip(source.chunks_exact(width)) {
            let start = row * row_len + column;
            let target = &mut matrix[start..start + width];
            for (target, source) in target.iter_mut().zip(source) {
                *target += source;
            }
        }
    }
}

/// Returns true if a tensor in order has finite elements alone.
fn is_finite(tensor: &FlexTensor) -> bool {
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
        // Anything else times zero is not a number.
        sum_by(self.0, |x| x * 0.0) == 0.0
    }
}

fn matmul(lhs: FlexTensor, rhs: FlexTensor) -> FlexTensor {
    Flex::float_matmul(lhs, rhs)
}
