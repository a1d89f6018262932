//! Causal self-attention.

use std::ops::Range;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Shape};
use burn_flex::{FlexTensor, Layout};
use rayon::prelude::*;

use crate::backend::Kernels;
use crate::rows::{Kernel, contiguous, exp_row, matrix_dims, max, scale, sum_pairs_by, vectorized};

/// Queries that are handled together. They meet only the keys before the last of
/// them, so that smaller blocks waste less on the future, and larger ones make
/// better matrix products.
const BLOCK: usize = 64;

#[derive(Debug)]
struct CausalAttention;

/// The input and the sizes that the backward pass needs.
#[derive(Clone, Debug)]
struct Saved<T> {
    qkv: T,
    batch: usize,
    heads: usize,
}

impl<B: Kernels> Backward<B, 1> for CausalAttention {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Saved { qkv, batch, heads } = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::causal_attention_gradient(qkv, grad, batch, heads)
        });
    }
}

pub(crate) fn tracked<B: Kernels, C: CheckpointStrategy>(
    qkv: FloatTensor<Autodiff<B, C>>,
    batch: usize,
    heads: usize,
) -> FloatTensor<Autodiff<B, C>> {
    let prepared = Backward::<B, 1>::prepare::<C>(CausalAttention, [qkv.node()])
        .compute_bound()
        .stateful();
    let qkv = qkv.into_primitive();
    let output = B::causal_attention_kernel(qkv.clone(), batch, heads);
    match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(Saved { qkv, batch, heads }, output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}

pub(crate) fn forward(qkv: FlexTensor, batch: usize, heads: usize) -> FlexTensor {
    Packed::new(qkv, batch, heads).forward()
}

pub(crate) fn backward(
    qkv: FlexTensor,
    grad: FlexTensor,
    batch: usize,
    heads: usize,
) -> FlexTensor {
    Packed::new(qkv, batch, heads).backward(&contiguous(grad))
}

/// Returns the bytes of the scores that one sequence takes at once, in forward.
pub(crate) fn scores_bytes(time: usize, heads: usize) -> usize {
    heads * BLOCK.min(time) * time * size_of::<f32>()
}

/// Queries, keys and values of all heads side by side, one row per token.
#[derive(Clone, Debug)]
struct Packed {
    qkv: FlexTensor, // [batch * time, 3 * dim]
    batch: usize,
    heads: usize,
}

/// A third of the columns.
#[derive(Clone, Copy, Debug)]
enum Part {
    Queries = 0,
    Keys = 1,
    Values = 2,
}

/// Some queries of a sequence with the keys that they may look at.
#[derive(Clone, Debug)]
struct Block {
    sequence: usize,
    queries: Range<usize>,
}

impl Block {
    fn keys(&self) -> Range<usize> {
        0..self.queries.end
    }
}

impl Packed {
    fn new(qkv: FlexTensor, batch: usize, heads: usize) -> Self {
        Self {
            qkv: contiguous(qkv),
            batch,
            heads,
        }
    }

    fn dim(&self) -> usize {
        matrix_dims(&self.qkv)[1] / 3
    }

    fn time(&self) -> usize {
        matrix_dims(&self.qkv)[0] / self.batch
    }

    fn head_dim(&self) -> usize {
        self.dim() / self.heads
    }

    /// Returns the factor on the scores.
    fn scale(&self) -> f32 {
        1.0 / (self.head_dim() as f32).sqrt()
    }

    fn blocks(&self, sequence: usize) -> impl Iterator<Item = Block> + use<> {
        let time = self.time();
        (0..time).step_by(BLOCK).map(move |start| Block {
            sequence,
            queries: start..time.min(start + BLOCK),
        })
    }

    /// Returns a view of some rows of a sequence: `[heads, rows, head_dim]`.
    fn heads(&self, part: Part, sequence: usize, rows: &Range<usize>) -> FlexTensor {
        self.view(&self.qkv, part as usize * self.dim(), sequence, rows)
    }

    fn view(
        &self,
        matrix: &FlexTensor,
        first_column: usize,
        sequence: usize,
        rows: &Range<usize>,
    ) -> FlexTensor {
        let [_, width] = matrix_dims(matrix);
        let head_dim = self.head_dim();
        let layout = Layout::new(
            Shape::new([self.heads, rows.len(), head_dim]),
            vec![head_dim as isize, width as isize, 1],
            (sequence * self.time() + rows.start) * width + first_column,
        );
        matrix.clone().with_layout(layout)
    }

    fn forward(&self) -> FlexTensor {
        let (time, dim) = (self.time(), self.dim());
        let mut output = FlexTensor::empty(Shape::new([self.batch * time, dim]), DType::F32);
        output
            .storage_mut::<f32>()
            .par_chunks_mut(time * dim)
            .enumerate()
            .for_each(|(sequence, output)| {
                for block in self.blocks(sequence) {
                    let values = self.heads(Part::Values, sequence, &block.keys());
                    let mixed = matmul(self.probabilities(&block), values);
                    self.add_heads(&mixed, output, dim, 0, &block.queries);
                }
            });
        output
    }

    /// Returns the attention of each query of a block to each key, the softmax of the scores: `[heads, queries, keys]`.
    fn probabilities(&self, block: &Block) -> FlexTensor {
        let queries = self.heads(Part::Queries, block.sequence, &block.queries);
        let keys = self.heads(Part::Keys, block.sequence, &block.keys());
        let mut scores = matmul(queries, keys.transpose(1, 2));
        vectorized(CausalSoftmax {
            scores: scores.storage_mut(),
            queries: block.queries.clone(),
            scale: self.scale(),
        });
        scores
    }

    fn backward(&self, grad: &FlexTensor) -> FlexTensor {
        let (time, dim) = (self.time(), self.dim());
        let mut output = FlexTensor::empty(Shape::new([self.batch * time, 3 * dim]), DType::F32);
        output
            .storage_mut::<f32>()
            .par_chunks_mut(time * 3 * dim)
            .enumerate()
            .for_each(|(sequence, output)| {
                for block in self.blocks(sequence) {
                    let grad = self.view(grad, 0, sequence, &block.queries);
                    self.backward_block(&block, grad, output);
                }
            });
        output
    }

    /// Adds a block's gradients to those of its sequence, `[time, 3 * dim]`.
    fn backward_block(&self, block: &Block, grad: FlexTensor, output: &mut [f32]) {
        let keys = block.keys();
        let part = |part, rows| self.heads(part, block.sequence, rows);
        let mut add = |gradient: &FlexTensor, part: Part, rows| {
            let dim = self.dim();
            self.add_heads(gradient, output, 3 * dim, part as usize * dim, rows);
        };

        let probabilities = self.probabilities(block);
        let values = matmul(probabilities.transpose(1, 2), grad.clone());
        add(&values, Part::Values, &keys);

        let looking = matmul(grad, part(Part::Values, &keys).transpose(1, 2));
        let scores = self.scores_gradient(&probabilities, looking);
        let queries = matmul(scores.clone(), part(Part::Keys, &keys));
        add(&queries, Part::Queries, &block.queries);
        let queries = part(Part::Queries, &block.queries);
        add(&matmul(scores.transpose(1, 2), queries), Part::Keys, &keys);
    }

    /// Returns the gradient of the unscaled scores from that of the probabilities.
    fn scores_gradient(&self, probabilities: &FlexTensor, grad: FlexTensor) -> FlexTensor {
        let mut grad = grad;
        let num_keys = grad.layout().shape()[2];
        vectorized(SoftmaxGradient {
            grad: grad.storage_mut(),
            probabilities: probabilities.storage(),
            num_keys,
            scale: self.scale(),
        });
        grad
    }

    /// Adds `[heads, rows, head_dim]` to rows of a matrix, head beside head.
    fn add_heads(
        &self,
        heads: &FlexTensor,
        matrix: &mut [f32],
        width: usize,
        first_column: usize,
        rows: &Range<usize>,
    ) {
        let head_dim = self.head_dim();
        let head_len = rows.len() * head_dim;
        for (head, source) in heads.storage::<f32>().chunks_exact(head_len).enumerate() {
            let column = first_column + head * head_dim;
            for (row, source) in rows.clone().zip(source.chunks_exact(head_dim)) {
                let start = row * width + column;
                let target = &mut matrix[start..start + head_dim];
                for (target, source) in target.iter_mut().zip(source) {
                    *target += source;
                }
            }
        }
    }
}

/// Softmax of rows of scores, each up to its query's own key.
struct CausalSoftmax<'a> {
    scores: &'a mut [f32], // [heads, queries, keys]
    queries: Range<usize>,
    scale: f32,
}

impl Kernel for CausalSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let num_keys = self.queries.end;
        for head in self.scores.chunks_exact_mut(self.queries.len() * num_keys) {
            let rows = head.chunks_exact_mut(num_keys);
            for (row, query) in rows.zip(self.queries.clone()) {
                let (past, future) = row.split_at_mut(query + 1);
                let sum = exp_row(past, max(past), self.scale);
                scale(past, 1.0 / sum);
                future.fill(0.0);
            }
        }
    }
}

/// Gradient of the unscaled scores, in place of that of the probabilities.
struct SoftmaxGradient<'a> {
    grad: &'a mut [f32],
    probabilities: &'a [f32],
    num_keys: usize,
    scale: f32,
}

impl Kernel for SoftmaxGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rows = self.grad.chunks_exact_mut(self.num_keys);
        for (row, probabilities) in rows.zip(self.probabilities.chunks_exact(self.num_keys)) {
            let mean = sum_pairs_by(row, probabilities, |g, p| g * p);
            for (grad, p) in row.iter_mut().zip(probabilities) {
                *grad = (*grad - mean) * p * self.scale;
            }
        }
    }
}

fn matmul(lhs: FlexTensor, rhs: FlexTensor) -> FlexTensor {
    Flex::float_matmul(lhs, rhs)
}
