//! The composed forms of kernels, generic over the number type.

use burn_fsdp_kernels::{FusedOperation, PointwiseOperand, PointwiseProgram};
use burn_ir::CustomOpIr;

use super::attention::{Attention, Causal};
use super::lanes::rows;
use super::number::Number;
use super::pointwise::map;
use super::scalar::Scalar;
use super::softmax::{Softmax, dot, each_row, softmax, softmax_gradient, sum, two_rows};
use super::tensor::Tensor;

/// A call of a kernel.
pub(super) struct KernelCall<'a, N> {
    pub(super) kernel: FusedOperation,
    pub(super) call: &'a CustomOpIr,
    pub(super) inputs: &'a [&'a Tensor<N>],
    pub(super) scalars: &'a [Scalar],
}

/// Converts logarithms of probabilities back to the probabilities.
pub(super) trait Logarithms<N> {
    /// Records a probability under its logarithm.
    fn keep(&self, logarithm: N, probability: N);
    /// Returns the probability with this logarithm.
    fn probability(&self, logarithm: N) -> N;
}

impl<N: Number> KernelCall<'_, N> {
    /// Evaluates the composed form of the kernel; `None` if the kernel does not accept these operands.
    pub(super) fn results(
        &self,
        known: &impl Logarithms<N>,
    ) -> Result<Option<Vec<Tensor<N>>>, String> {
        use FusedOperation as Op;
        Ok(Some(match (self.kernel, self.inputs) {
            (Op::Pointwise, _) => vec![self.program()?],
            (Op::Gelu, [x]) => vec![map(&x.shape, &[x], |a| N::function("gelu", a[0]))?],
            (Op::GeluBackward, [x, grad]) => {
                let of = |a: &[N]| a[1].mul(N::function("gelu gradient", a[0]));
                vec![map(&x.shape, &[x, grad], of)?]
            }
            (Op::Silu, [x]) => vec![map(&x.shape, &[x], |a| silu(a[0]))?],
            (Op::SiluBackward, [x, grad]) => {
                vec![map(&x.shape, &[x, grad], |a| silu_gradient(a[0], a[1]))?]
            }
            (Op::SwiGlu, [gate, values]) => {
                vec![map(&gate.shape, &[gate, values], |a| silu(a[0]).mul(a[1]))?]
            }
            (Op::SwiGluBackward, [gate, values, grad]) => {
                let all = [*gate, *values, *grad];
                let of_gate = |a: &[N]| silu_gradient(a[0], a[2].mul(a[1]));
                let of_values = |a: &[N]| a[2].mul(silu(a[0]));
                let shape = &gate.shape;
                vec![map(shape, &all, of_gate)?, map(shape, &all, of_values)?]
            }
            (Op::Softmax, [x]) => vec![each_row(x, |row| softmax(row).probabilities)],
            (Op::SoftmaxBackward, [y, grad]) => vec![softmax_gradient(y, grad)],
            (Op::LogSoftmax, [x]) => vec![each_row(x, |row| log_softmax(row, known))],
            (Op::LogSoftmaxBackward, [y, grad]) => {
                let of = |y: &[N], grad: &[N]| log_softmax_gradient(y, grad, known);
                vec![two_rows(y, grad, of)]
            }
            (Op::LayerNorm, [x, gamma, beta]) => vec![self.layer_norm(x, gamma, beta)?],
            (Op::LayerNormBackward, [x, gamma, grad]) => {
                self.norm_gradients(x, gamma, grad, Middle::Mean)?.into()
            }
            (Op::RmsNorm, [x, gamma]) => {
                let epsilon = self.scalar(0)?;
                let normal = each_row(x, |row| Normal::of(row, Middle::Zero, epsilon).row);
                vec![map(&x.shape, &[&normal, gamma], |a| a[0].mul(a[1]))?]
            }
            (Op::RmsNormBackward, [x, gamma, grad]) => {
                let [of_x, of_gamma, _] = self.norm_gradients(x, gamma, grad, Middle::Zero)?;
                vec![of_x, of_gamma]
            }
            (Op::Attention, [queries, keys, values, behind @ ..]) => {
                vec![self.attention([queries, keys, values], behind)?.result()?]
            }
            (Op::AttentionBackward, [queries, keys, values, grad, behind @ ..]) => {
                let attention = self.attention([queries, keys, values], behind)?;
                attention.gradients(grad)?.into()
            }
            (Op::CausalAttention, [qkv, positions @ ..]) => {
                vec![self.causal(qkv, positions)?.result(qkv)?]
            }
            (Op::CausalAttentionBackward, [qkv, grad, positions @ ..]) => {
                vec![self.causal(qkv, positions)?.gradient(qkv, grad)?]
            }
            (Op::CrossEntropy, [logits, targets]) => cross_entropy(logits, targets),
            (Op::CrossEntropyBackward, [grad, factor]) => {
                let factor = factor.elements[0];
                vec![map(&grad.shape, &[grad], |a| a[0].mul(factor))?]
            }
            (Op::LogLikelihood, [logits, classes]) => log_likelihood(logits, classes, known),
            (Op::LogLikelihoodBackward, &[logits, classes, kept, grad]) => {
                let all = [logits, classes, kept, grad];
                vec![log_likelihood_gradient(all, known)]
            }
            (Op::Matmul, [a, b]) => {
                vec![N::matmul(a, b, self.call.outputs[0].shape.as_slice())?]
            }
            (Op::SumDim, [x]) => vec![self.sums(x)?],
            (Op::Cast, [x]) => vec![Tensor::clone(x)],
            _ => return Ok(None),
        }))
    }

    fn scalar(&self, index: usize) -> Result<N, String> {
        let scalar = self.scalars.get(index).copied();
        scalar
            .map(N::of_scalar)
            .ok_or_else(|| format!("it has no scalar {index}"))
    }

    /// Returns the sums along the dim that the call's scalar specifies.
    fn sums(&self, x: &Tensor<N>) -> Result<Tensor<N>, String> {
        let dim = self
            .call
            .scalars
            .first()
            .map(|dim| dim.elem::<u64>() as usize);
        let dim = dim.filter(|dim| *dim < x.shape.len());
        let dim = dim.ok_or("its scalar is not a dim")?;
        let (rows, columns) = (x.shape[dim], x.shape[dim + 1..].iter().product::<usize>());
        let mut shape = x.shape.clone();
        shape[dim] = 1;
        Ok(Tensor::from_fn(&shape, |at| {
            let (matrix, column) = (at / columns, at % columns);
            let addends = (0..rows).map(|row| x.elements[(matrix * rows + row) * columns + column]);
            addends.fold(N::default(), N::add)
        }))
    }

    fn program(&self) -> Result<Tensor<N>, String> {
        let program = PointwiseProgram::from_scalars(&self.call.scalars);
        let program = program.ok_or("its scalars are not a program")?;
        let shape = self.call.outputs[0].shape.as_slice();
        map(shape, self.inputs, |elements| {
            let mut results: Vec<N> = Vec::with_capacity(program.len());
            for (operation, first, second) in program.parts() {
                let operand = |operand: PointwiseOperand| match operand {
                    PointwiseOperand::Input(index) => (elements[index], None),
                    PointwiseOperand::Step(index) => (results[index], None),
                    PointwiseOperand::Number(index) => {
                        let scalar = self.scalars[program.place_of(index)];
                        (N::of_scalar(scalar), Some(scalar))
                    }
                };
                let result = N::step(operation, operand(first), operand(second));
                results.push(result);
            }
            results.last().copied().unwrap_or_default()
        })
    }

    fn layer_norm(
        &self,
        x: &Tensor<N>,
        gamma: &Tensor<N>,
        beta: &Tensor<N>,
    ) -> Result<Tensor<N>, String> {
        let epsilon = self.scalar(0)?;
        let normal = each_row(x, |row| Normal::of(row, Middle::Mean, epsilon).row);
        let of = |a: &[N]| a[0].mul(a[1]).add(a[2]);
        map(&x.shape, &[&normal, gamma, beta], of)
    }

    /// Returns the gradients of input and gamma, and the sum of the rows of `grad`, which is the gradient of beta.
    fn norm_gradients(
        &self,
        x: &Tensor<N>,
        gamma: &Tensor<N>,
        grad: &Tensor<N>,
        middle: Middle,
    ) -> Result<[Tensor<N>; 3], String> {
        let epsilon = self.scalar(0)?;
        let width = gamma.len();
        let share = N::of_integer(width as i64).inverse();
        let mut of_gamma = vec![N::default(); width];
        let mut of_beta = of_gamma.clone();
        let of_x = two_rows(x, grad, |row, grad| {
            let Normal { row, rate } = Normal::of(row, middle, epsilon);
            let pairs = grad.iter().zip(gamma.elements.iter());
            let scaled: Vec<N> = pairs.map(|(grad, gamma)| grad.mul(*gamma)).collect();
            let along = dot(&scaled, &row).mul(share);
            let mean = middle.of(&scaled);
            for index in 0..width {
                of_gamma[index] = of_gamma[index].add(grad[index].mul(row[index]));
                of_beta[index] = of_beta[index].add(grad[index]);
            }
            let both = scaled.iter().zip(&row);
            let of = |(scaled, normal): (&N, &N)| {
                let rest = scaled.sub(mean).sub(normal.mul(along));
                rest.mul(rate)
            };
            both.map(of).collect()
        });
        Ok([
            of_x,
            Tensor::new(gamma.shape.clone(), of_gamma),
            Tensor::new(gamma.shape.clone(), of_beta),
        ])
    }

    /// Creates the call of attention from its operands and from `behind`, the masks and factors that follow them.
    fn attention<'a>(
        &self,
        operands: [&'a Tensor<N>; 3],
        behind: &'a [&'a Tensor<N>],
    ) -> Result<Attention<'a, N>, String> {
        let inputs = &self.call.inputs[self.inputs.len() - behind.len()..];
        let num_masks = inputs.iter().take_while(|input| input.dtype.is_bool());
        let (masks, factors) = behind.split_at(num_masks.count());
        let factors = match factors {
            [] => None,
            [factors] => Some((*factors, self.scalar(masks.len() + 1)?)),
            _ => return Err("it has more operands than an attention".to_owned()),
        };
        let fills = masks.iter().zip(1..);
        let fills = fills.map(|(mask, number)| Ok((*mask, self.scalar(number)?)));
        let fills = fills.collect::<Result<Vec<_>, String>>()?;
        Attention::of(operands, self.scalar(0)?, fills, factors)
    }

    /// `positions` are those of the tokens in their documents, if the sequences have several.
    fn causal(&self, qkv: &Tensor<N>, positions: &[&Tensor<N>]) -> Result<Causal<N>, String> {
        let size = |index: usize| {
            let number = self.scalars.get(index).and_then(|scalar| scalar.number());
            number
                .map(|number| number as usize)
                .filter(|size| *size > 0)
        };
        let sizes = size(0)
            .zip(size(1))
            .ok_or("it does not specify its number of heads")?;
        let [positions] = positions else {
            return Causal::of(qkv, sizes, None);
        };
        let &[_, time] = positions.shape.as_slice() else {
            return Err(format!("{:?} are not positions", positions.shape));
        };
        let most = size(2).map_or(usize::MAX, |reach| reach - 1);
        let positions = positions.elements.iter().enumerate();
        let firsts = positions.map(|(index, position)| {
            let before = position.index().min(most);
            (index % time).saturating_sub(before)
        });
        Causal::of(qkv, sizes, Some(&firsts.collect::<Vec<_>>()))
    }
}

/// Returns two results: the gradient of the logits, and the loss, which is the mean negative log-probability of the
/// targets.
fn cross_entropy<N: Number>(logits: &Tensor<N>, targets: &Tensor<N>) -> Vec<Tensor<N>> {
    let share = N::of_integer(targets.len() as i64).inverse();
    let mut loss = N::default();
    let mut targets = targets.elements.iter();
    let gradient = each_row(logits, |row| {
        let target = targets.next().map_or(0, |target| target.index());
        let Softmax {
            shifted,
            mut probabilities,
            total,
        } = softmax(row);
        let log = N::function("log", total);
        if let (Some(of), Some(probability)) = (shifted.get(target), probabilities.get_mut(target))
        {
            loss = loss.sub(of.sub(log));
            *probability = probability.sub(N::ONE);
        }
        probabilities.iter().map(|of| of.mul(share)).collect()
    });
    vec![gradient, Tensor::new([1], vec![loss.mul(share)])]
}

/// Returns the log-probabilities of the classes. Also returns, for each row, the largest logit, and the logarithm of
/// the sum of exponentials of the row minus that logit.
fn log_likelihood<N: Number>(
    logits: &Tensor<N>,
    classes: &Tensor<N>,
    known: &impl Logarithms<N>,
) -> Vec<Tensor<N>> {
    let of_row = |(row, class): (&[N], &N)| {
        let Softmax { shifted, total, .. } = softmax(row);
        let largest = row[0].sub(shifted[0]);
        let at = class.index().min(row.len() - 1);
        let chosen = log_softmax(row, known)[at];
        (chosen, [largest, N::function("log", total)])
    };
    let rows = rows(logits).zip(classes.elements.iter());
    let (chosen, kept): (Vec<N>, Vec<[N; 2]>) = rows.map(of_row).unzip();
    let mut shape = classes.shape.clone();
    let chosen = Tensor::new(shape.clone(), chosen);
    if let Some(last) = shape.last_mut() {
        *last = 2;
    }
    vec![chosen, Tensor::new(shape, kept.concat())]
}

fn log_likelihood_gradient<N: Number>(
    [logits, classes, kept, grad]: [&Tensor<N>; 4],
    known: &impl Logarithms<N>,
) -> Tensor<N> {
    let chosen = classes.elements.iter().zip(grad.elements.iter());
    let mut given = chosen.zip(rows(kept));
    each_row(logits, |row| {
        let Some(((class, grad), &[largest, log])) = given.next() else {
            return Vec::new();
        };
        let of = |(at, x): (usize, &N)| {
            let probability = known.probability(x.sub(largest).sub(log));
            let own = if at == class.index() {
                *grad
            } else {
                N::default()
            };
            own.sub(grad.mul(probability))
        };
        row.iter().enumerate().map(of).collect()
    })
}

/// Returns the log-softmax of a row, and records each probability.
fn log_softmax<N: Number>(row: &[N], known: &impl Logarithms<N>) -> Vec<N> {
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

/// Returns the gradient of a log-softmax. The kernel recovers each probability as the exponential of the result, but
/// composed operations keep the probability.
fn log_softmax_gradient<N: Number>(y: &[N], grad: &[N], known: &impl Logarithms<N>) -> Vec<N> {
    let total = sum(grad);
    let pairs = y.iter().zip(grad);
    let of = |(y, grad): (&N, &N)| grad.sub(total.mul(known.probability(*y)));
    pairs.map(of).collect()
}

fn silu<N: Number>(x: N) -> N {
    x.mul(N::function("sigmoid", x))
}

fn silu_gradient<N: Number>(x: N, grad: N) -> N {
    let sigmoid = N::function("sigmoid", x);
    let slope = sigmoid.mul(N::ONE.sub(sigmoid));
    grad.mul(sigmoid.add(x.mul(slope)))
}

/// The value that a norm subtracts from a row before squaring.
#[derive(Clone, Copy)]
enum Middle {
    Mean,
    /// Zero, for a root-mean-square norm.
    Zero,
}

impl Middle {
    fn of<N: Number>(self, row: &[N]) -> N {
        match self {
            Self::Mean => sum(row).mul(N::of_integer(row.len() as i64).inverse()),
            Self::Zero => N::default(),
        }
    }
}

/// A row minus its middle, times `rate`.
struct Normal<N> {
    row: Vec<N>,
    /// `1 / sqrt(mean_square + epsilon)`, where the mean square is that of the row minus its middle.
    rate: N,
}

impl<N: Number> Normal<N> {
    fn of(row: &[N], middle: Middle, epsilon: N) -> Self {
        let share = N::of_integer(row.len() as i64).inverse();
        let mean = middle.of(row);
        let centered: Vec<N> = row.iter().map(|element| element.sub(mean)).collect();
        let variance = dot(&centered, &centered).mul(share);
        let rate = N::function("sqrt", variance.add(epsilon)).inverse();
        Self {
            row: centered.iter().map(|element| element.mul(rate)).collect(),
            rate,
        }
    }
}
