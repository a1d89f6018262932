//! Arithmetic and memory traffic of the operations of a step.

use burn_ir::{FloatOperationIr, ModuleOperationIr as M, OperationIr, TensorIr};

use super::Graph;
use super::flops::Flops;
use super::node::Node;
use super::storage::{Storage, storage_of};
use crate::error::Error;

impl Flops {
    /// Counts the arithmetic of a graph on a rank. Nodes that only other ranks run, for parameters that they own, are
    /// excluded.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] for a rank outside the graph's mesh.
    pub fn of_graph(graph: &Graph, rank: usize) -> Result<Self, Error> {
        let absent = graph.absent_on(rank)?;
        let mut sum = Self::default();
        for node in graph.nodes().iter().filter(|node| !absent.skips(node)) {
            sum += Self::of_node(node);
        }
        Ok(sum)
    }

    /// Counts the arithmetic of one node: none for views, drops and collectives.
    pub fn of_node(node: &Node) -> Self {
        if node.collective.is_some() || !matches!(storage_of(node), Storage::New) {
            return Self::default();
        }
        if let Some(custom) = &node.custom {
            return custom.flops;
        }
        let matmul = |multiplications: u64| Self {
            matmul: multiplications.saturating_mul(2),
            ..Self::default()
        };
        let convolution = |multiplications: u64| Self {
            convolution: 2 * multiplications,
            ..Self::default()
        };
        match &node.operation {
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) => {
                matmul(elements(&op.out) * last(&op.lhs))
            }
            OperationIr::Module(op) => match op {
                M::Linear(op) => {
                    let bias = op.bias.as_ref().map_or(0, |_| elements(&op.out));
                    Self {
                        pointwise: bias,
                        ..matmul(elements(&op.out) * last(&op.x))
                    }
                }
                M::LinearXBackward(op) => matmul(elements(&op.out) * last(&op.output_grad)),
                M::LinearWeightBackward(op) => matmul(elements(&op.x) * last(&op.output_grad)),
                M::Attention(op) => matmul(
                    elements(&op.query) / last(&op.query).max(1)
                        * (elements(&op.key) / rows(&op.key)).max(1)
                        / last(&op.key).max(1)
                        * (last(&op.query) + last(&op.value)),
                ),
                M::Conv1d(op) => convolution(elements(&op.out) * per_channel(&op.weight)),
                M::Conv2d(op) => convolution(elements(&op.out) * per_channel(&op.weight)),
                M::Conv3d(op) => convolution(elements(&op.out) * per_channel(&op.weight)),
                M::Conv1dXBackward(op) => backward(&op.output_grad, &op.weight),
                M::Conv2dXBackward(op) => backward(&op.output_grad, &op.weight),
                M::Conv3dXBackward(op) => backward(&op.output_grad, &op.weight),
                M::Conv1dWeightBackward(op) => backward(&op.output_grad, &op.weight),
                M::Conv2dWeightBackward(op) => backward(&op.output_grad, &op.weight),
                M::Conv3dWeightBackward(op) => backward(&op.output_grad, &op.weight),
                M::ConvTranspose1d(op) => convolution(elements(&op.x) * per_channel(&op.weight)),
                M::ConvTranspose2d(op) => convolution(elements(&op.x) * per_channel(&op.weight)),
                M::ConvTranspose3d(op) => convolution(elements(&op.x) * per_channel(&op.weight)),
                _ => pointwise(&node.operation),
            },
            operation => pointwise(operation),
        }
    }
}

/// Counts the bytes that a node reads and writes in memory: every operand and result once, and none for views, drops
/// and collectives.
pub fn touched_bytes(node: &Node) -> u64 {
    if node.collective.is_some() || !matches!(storage_of(node), Storage::New) {
        return 0;
    }
    let tensors = node.operation.inputs().chain(node.operation.outputs());
    tensors
        .map(|tensor| elements(tensor) * tensor.dtype.size() as u64)
        .sum()
}

fn pointwise(operation: &OperationIr) -> Flops {
    let tensors = operation.inputs().chain(operation.outputs());
    Flops {
        pointwise: tensors.map(elements).max().unwrap_or(0),
        ..Flops::default()
    }
}

fn backward(gradient: &TensorIr, weight: &TensorIr) -> Flops {
    Flops {
        convolution: 2 * elements(gradient) * per_channel(weight),
        ..Flops::default()
    }
}

/// Returns the number of weights for each channel of the first dim: an output channel, or an input channel of a
/// transposed convolution.
fn per_channel(weight: &TensorIr) -> u64 {
    let channels = weight.shape.to_vec().first().copied().unwrap_or(1);
    elements(weight) / channels.max(1) as u64
}

fn elements(tensor: &TensorIr) -> u64 {
    tensor.shape.num_elements() as u64
}

/// Returns the size of the last dim.
fn last(tensor: &TensorIr) -> u64 {
    tensor.shape.to_vec().last().copied().unwrap_or(1) as u64
}

/// Returns batch times heads of `[batch, heads, time, width]`.
fn rows(tensor: &TensorIr) -> u64 {
    let shape = tensor.shape.to_vec();
    let leading = shape.len().saturating_sub(2);
    shape[..leading].iter().product::<usize>().max(1) as u64
}
