//! Burn's module operations, such as linear layers, embeddings and convolutions.

use burn_ir::{BatchNormOpIr, ModuleOperationIr, TensorIr};

use super::base::wrapped;
use super::call::Call;
use super::field::{Element, add, div, function, mul, sub};
use super::lanes::{reduced, rows, sum};
use super::pointwise::map;
use super::products::{Convolution, accumulate, as_matrix, matmul, transposed};
use super::tensor::{Kind, Tensor};

/// Converts one of Burn's convolutions to a [`Convolution`].
macro_rules! convolution {
    ($op:expr, $x:expr, $weight:expr, $y:expr, $before:expr) => {
        Convolution {
            x: $x,
            weight: $weight,
            y: $y,
            stride: $op.options.stride.to_vec(),
            padding: $op.options.padding.iter().map($before).collect(),
            dilation: $op.options.dilation.to_vec(),
            groups: $op.options.groups,
        }
    };
}

/// Returns the results of a convolution, or of one of its gradients.
macro_rules! convolved {
    ($call:expr, forward $op:expr, $before:expr) => {{
        let y = $op.out.shape.as_slice();
        let (x, weight) = ($call.get(&$op.x)?, $call.get(&$op.weight)?);
        let geometry = convolution!($op, &x.shape, &weight.shape, y, $before);
        let bias = $op.bias.as_ref().map(|bias| $call.get(bias)).transpose()?;
        convolved(&geometry, x, weight, bias)
    }};
    ($call:expr, x $op:expr, $before:expr) => {{
        let x = $op.out.shape.as_slice();
        let (weight, grad) = ($call.get(&$op.weight)?, $call.get(&$op.output_grad)?);
        let geometry = convolution!($op, x, &weight.shape, &grad.shape, $before);
        x_gradient(&geometry, weight, grad)
    }};
    ($call:expr, weight $op:expr, $before:expr) => {{
        let weight = $op.out.shape.as_slice();
        let (x, grad) = ($call.get(&$op.x)?, $call.get(&$op.output_grad)?);
        let geometry = convolution!($op, &x.shape, weight, &grad.shape, $before);
        weight_gradient(&geometry, x, grad)
    }};
}

impl Call<'_> {
    pub(super) fn module(&self, operation: &ModuleOperationIr) -> Result<Vec<Tensor>, String> {
        use ModuleOperationIr as Op;
        let one = match operation {
            Op::Linear(op) => {
                let product = matmul(
                    &as_matrix(self.get(&op.x)?)?,
                    self.get(&op.weight)?,
                    &matrix_of(&op.out),
                )?;
                let product = product.reshaped(op.out.shape.as_slice())?;
                match &op.bias {
                    Some(bias) => {
                        let operands = [&product, self.get(bias)?];
                        map(&product.shape, &operands, |a| add(a[0], a[1]))?
                    }
                    None => product,
                }
            }
            Op::LinearXBackward(op) => {
                let grad = as_matrix(self.get(&op.output_grad)?)?;
                let weight = transposed(self.get(&op.weight)?);
                let product = matmul(&grad, &weight, &matrix_of(&op.out))?;
                product.reshaped(op.out.shape.as_slice())?
            }
            Op::LinearWeightBackward(op) => {
                let x = transposed(&as_matrix(self.get(&op.x)?)?);
                let grad = as_matrix(self.get(&op.output_grad)?)?;
                let shape = [x.shape[0], grad.shape[1]];
                matmul(&x, &grad, &shape)?.reshaped(op.out.shape.as_slice())?
            }
            Op::LinearBiasBackward(op) => {
                let grad = as_matrix(self.get(&op.output_grad)?)?;
                let total = |lane: &[Element]| sum(Kind::Float, lane);
                reduced(&grad, &[0], op.out.shape.as_slice(), total)
            }
            Op::Embedding(op) => {
                let (weights, indices) = (self.get(&op.weights)?, self.get(&op.indices)?);
                let table: Vec<&[Element]> = rows(weights).collect();
                let chosen = indices.elements.iter();
                let chosen = chosen.flat_map(|index| table[wrapped(*index, table.len())]);
                Tensor::new(op.out.shape.as_slice(), chosen.copied().collect())
            }
            Op::EmbeddingBackward(op) => {
                let (grad, indices) = (self.get(&op.out_grad)?, self.get(&op.indices)?);
                let shape = op.out.shape.as_slice();
                let (num_rows, width) = (shape[0], shape[1]);
                let mut elements = vec![0; num_rows * width];
                for (index, row) in indices.elements.iter().zip(rows(grad)) {
                    let first = wrapped(*index, num_rows) * width;
                    let into = &mut elements[first..][..width];
                    into.iter_mut()
                        .zip(row)
                        .for_each(|(sum, element)| *sum = add(*sum, *element));
                }
                Tensor::new(shape, elements)
            }
            Op::BatchNorm(op) => self.batch_norm(op)?,
            _ => return self.of_images(operation),
        };
        Ok(vec![one])
    }

    /// Returns the results of convolutions and pooling.
    fn of_images(&self, operation: &ModuleOperationIr) -> Result<Vec<Tensor>, String> {
        use ModuleOperationIr as Op;
        let first = |padding: &(usize, usize)| padding.0;
        let one = match operation {
            Op::Conv1d(op) => convolved!(self, forward op, first),
            Op::Conv2d(op) => convolved!(self, forward op, first),
            Op::Conv3d(op) => convolved!(self, forward op, |before: &usize| *before),
            Op::Conv1dXBackward(op) => convolved!(self, x op, first),
            Op::Conv2dXBackward(op) => convolved!(self, x op, first),
            Op::Conv3dXBackward(op) => convolved!(self, x op, |before: &usize| *before),
            Op::Conv1dWeightBackward(op) => convolved!(self, weight op, first),
            Op::Conv2dWeightBackward(op) => convolved!(self, weight op, first),
            Op::Conv3dWeightBackward(op) => convolved!(self, weight op, |before: &usize| *before),
            Op::Conv1dBiasBackward(op) => self.bias_gradient(&op.output_grad, &op.out)?,
            Op::Conv2dBiasBackward(op) => self.bias_gradient(&op.output_grad, &op.out)?,
            Op::Conv3dBiasBackward(op) => self.bias_gradient(&op.output_grad, &op.out)?,
            Op::AvgPool1d(_)
            | Op::AvgPool2d(_)
            | Op::AvgPool1dBackward(_)
            | Op::AvgPool2dBackward(_)
            | Op::AdaptiveAvgPool1d(_)
            | Op::AdaptiveAvgPool2d(_)
            | Op::AdaptiveAvgPool3d(_)
            | Op::AdaptiveAvgPool1dBackward(_)
            | Op::AdaptiveAvgPool2dBackward(_)
            | Op::AdaptiveAvgPool3dBackward(_)
            | Op::MaxPool1d(_)
            | Op::MaxPool2d(_)
            | Op::MaxPool1dWithIndices(_)
            | Op::MaxPool2dWithIndices(_)
            | Op::MaxPool1dWithIndicesBackward(_)
            | Op::MaxPool2dWithIndicesBackward(_)
            | Op::Interpolate(_)
            | Op::InterpolateBackward(_) => return self.by_plane(),
            _ => return self.opaque(),
        };
        Ok(vec![one])
    }

    /// Normalizes the input with the given statistics of each channel.
    fn batch_norm(&self, op: &BatchNormOpIr) -> Result<Tensor, String> {
        let epsilon = self.scalar(0)?.element(Kind::Float);
        let x = self.get(&op.x)?;
        let mut row = vec![1; x.shape.len()];
        row[1] = x.shape[1];
        let of_channel = |tensor| self.get(tensor)?.reshaped(&row);
        let (gamma, beta) = (of_channel(&op.gamma)?, of_channel(&op.beta)?);
        let (mean, variance) = (of_channel(&op.mean)?, of_channel(&op.variance)?);
        let rate = |a: &[Element]| div(a[0], function("sqrt", &[add(a[1], epsilon)]));
        let rate = map(&row, &[&gamma, &variance], rate)?;
        let of = |a: &[Element]| add(mul(sub(a[0], a[1]), a[2]), a[3]);
        map(&x.shape, &[x, &mean, &rate, &beta], of)
    }

    /// Returns the gradient of a bias: sums over all dims except the channels.
    fn bias_gradient(&self, grad: &TensorIr, out: &TensorIr) -> Result<Tensor, String> {
        let grad = self.get(grad)?;
        let axes: Vec<usize> = (0..grad.shape.len()).filter(|axis| *axis != 1).collect();
        let total = |lane: &[Element]| sum(Kind::Float, lane);
        Ok(reduced(grad, &axes, out.shape.as_slice(), total))
    }
}

/// Returns the shape of a tensor as one matrix: all dims but the last are rows.
fn matrix_of(tensor: &TensorIr) -> [usize; 2] {
    let shape = tensor.shape.as_slice();
    let width = shape.last().copied().unwrap_or(1);
    [shape.iter().product::<usize>() / width.max(1), width]
}

fn convolved(
    geometry: &Convolution<'_>,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Tensor {
    let in_channel: usize = geometry.y[2..].iter().product();
    let channels = geometry.y[1];
    let first = |at: usize| {
        let channel = at / in_channel.max(1) % channels.max(1);
        bias.map_or(0, |bias| bias.elements[channel])
    };
    let mut y = Tensor::from_fn(geometry.y, first).elements.to_vec();
    geometry.visit(|at| {
        accumulate(&mut y[at.y], x.elements[at.x], weight.elements[at.weight]);
    });
    Tensor::new(geometry.y, y)
}

fn x_gradient(geometry: &Convolution<'_>, weight: &Tensor, grad: &Tensor) -> Tensor {
    let mut x = vec![0; geometry.x.iter().product()];
    geometry.visit(|at| {
        accumulate(
            &mut x[at.x],
            grad.elements[at.y],
            weight.elements[at.weight],
        );
    });
    Tensor::new(geometry.x, x)
}

fn weight_gradient(geometry: &Convolution<'_>, x: &Tensor, grad: &Tensor) -> Tensor {
    let mut weight = vec![0; geometry.weight.iter().product()];
    geometry.visit(|at| {
        accumulate(
            &mut weight[at.weight],
            x.elements[at.x],
            grad.elements[at.y],
        );
    });
    Tensor::new(geometry.weight, weight)
}
