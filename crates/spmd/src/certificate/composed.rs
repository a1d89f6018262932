//! Kernels as what they are composed of, on numbers of any kind.

use burn_fsdp_kernels::{FusedOperation, PointwiseOperand, PointwiseProgram};
use burn_ir::{CustomOpIr, ScalarIr};

use super::lanes::rows;
use super::number::Number;
use super::pointwise::map;
use super::products::transposed;
use super::scalar::Scalar;
use super::tensor::Tensor;

/// A call of a kernel.
pub(super) struct KernelCall<'a, N> {
    pub(super) kernel: FusedOperation,
    pub(super) call: &'a CustomOpIr,
    pub(super) inputs: &'a [&'a Tensor<N>],
    pub(super) scalars: &'a [Scalar],
}

/// What is known of logarithms of probabilities.
pub(super) trait Logarithms<N> {
    /// Keeps which probability a logarithm is of.
    fn keep(&self, logarithm: N, probability: N);
    /// Returns the probability whose logarithm a number is.
    fn probability(&self, logarithm: N) -> N;
}

impl<N: Number> KernelCall<'_, N> {
    /// Returns the results of the composed form; `None` for a call of another form than the kernel's.
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
            (Op::Attention, [queries, keys, values, masks @ ..]) => {
                let probabilities = self.probabilities(queries, keys, masks)?;
                vec![by_time(&product(&probabilities, &by_head(values))?)]
            }
            (Op::AttentionBackward, [queries, keys, values, grad, masks @ ..]) => {
                self.attention_gradients([queries, keys, values, grad], masks)?
            }
            (Op::CausalAttention, [qkv]) => vec![self.causal(qkv)?.result(qkv)?],
            (Op::CausalAttentionBackward, [qkv, grad]) => {
                vec![self.causal(qkv)?.gradient(qkv, grad)?]
            }
            (Op::CrossEntropy, [logits, targets]) => cross_entropy(logits, targets),
            (Op::CrossEntropyBackward, [grad, factor]) => {
                let factor = factor.elements[0];
                vec![map(&grad.shape, &[grad], |a| a[0].mul(factor))?]
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
            .ok_or_else(|| format!("it has no number {index}"))
    }

    /// Returns the sums along the dim that the call's number is.
    fn sums(&self, x: &Tensor<N>) -> Result<Tensor<N>, String> {
        let dim = self
            .call
            .scalars
            .first()
            .map(|dim| dim.elem::<u64>() as usize);
        let dim = dim.filter(|dim| *dim < x.shape.len());
        let dim = dim.ok_or("its number is no dim")?;
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
        let program = program.ok_or("its numbers are of no program")?;
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

    /// Returns the gradients of input and gamma, and the sum of the rows of `grad`.
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

    /// Returns the probabilities of an attention, `[batch, heads, queries, keys]`.
    fn probabilities(
        &self,
        queries: &Tensor<N>,
        keys: &Tensor<N>,
        masks: &[&Tensor<N>],
    ) -> Result<Tensor<N>, String> {
        let factor = self.scalar(0)?;
        let scores = product(&by_head(queries), &transposed(&by_head(keys)))?;
        let shape = scores.shape.clone();
        let mut scores = map(&shape, &[&scores], |a| a[0].mul(factor))?;
        for (number, mask) in masks.iter().enumerate() {
            let fill = self.scalar(number + 1)?;
            let choose = |a: &[N]| if is_set(a[1]) { fill } else { a[0] };
            scores = map(&shape, &[&scores, mask], choose)?;
        }
        Ok(each_row(&scores, |row| softmax(row).probabilities))
    }

    fn attention_gradients(
        &self,
        [queries, keys, values, grad]: [&Tensor<N>; 4],
        masks: &[&Tensor<N>],
    ) -> Result<Vec<Tensor<N>>, String> {
        let factor = self.scalar(0)?;
        let probabilities = self.probabilities(queries, keys, masks)?;
        let all = gradients(
            &probabilities,
            [queries, keys, values, grad],
            |mut of_scores| {
                let shape = of_scores.shape.clone();
                for mask in masks {
                    let keep = |a: &[N]| if is_set(a[1]) { N::default() } else { a[0] };
                    of_scores = map(&shape, &[&of_scores, mask], keep)?;
                }
                map(&shape, &[&of_scores], |a| a[0].mul(factor))
            },
        )?;
        Ok(all.into())
    }

    fn causal(&self, qkv: &Tensor<N>) -> Result<Causal<N>, String> {
        let size = |index: usize| {
            let number = self.scalars.get(index).and_then(|scalar| scalar.number());
            number
                .map(|number| number as usize)
                .filter(|size| *size > 0)
        };
        let sizes = size(0)
            .zip(size(1))
            .ok_or("it does not say of how many heads it is")?;
        Causal::of(qkv, sizes)
    }
}

/// An attention of every position to those before it and itself, of queries, keys and values that are one tensor.
struct Causal<N> {
    /// Queries, keys, values: `[batch, time, heads, width]`.
    parts: [Tensor<N>; 3],
    factor: N,
    /// `[batch, heads, queries, keys]`.
    probabilities: Tensor<N>,
}

impl<N: Number> Causal<N> {
    fn of(qkv: &Tensor<N>, (batch, heads): (usize, usize)) -> Result<Self, String> {
        let &[rows, columns] = qkv.shape.as_slice() else {
            return Err(format!("{:?} is no matrix", qkv.shape));
        };
        let (time, dim) = (rows / batch, columns / 3);
        let part = |index: usize| {
            let view = qkv.view().sliced(1, index * dim..(index + 1) * dim, 1);
            qkv.taken(&view)
                .reshaped(&[batch, time, heads, dim / heads])
        };
        let parts = [part(0)?, part(1)?, part(2)?];
        let scale = ((dim / heads) as f64).sqrt().recip();
        let factor = N::of_scalar(Scalar::Number(ScalarIr::Float(scale)));
        let scores = product(&by_head(&parts[0]), &transposed(&by_head(&parts[1])))?;
        let mut query = 0;
        let probabilities = each_row(&scores, |row| {
            let seen: Vec<N> = row[..=query % time]
                .iter()
                .map(|score| score.mul(factor))
                .collect();
            query += 1;
            let mut probabilities = softmax(&seen).probabilities;
            probabilities.resize(row.len(), N::default());
            probabilities
        });
        Ok(Self {
            parts,
            factor,
            probabilities,
        })
    }

    fn result(&self, qkv: &Tensor<N>) -> Result<Tensor<N>, String> {
        let mixed = by_time(&product(&self.probabilities, &by_head(&self.parts[2]))?);
        mixed.reshaped(&[qkv.shape[0], qkv.shape[1] / 3])
    }

    /// Returns the gradient of queries, keys and values, side by side.
    fn gradient(&self, qkv: &Tensor<N>, grad: &Tensor<N>) -> Result<Tensor<N>, String> {
        let [queries, keys, values] = &self.parts;
        let grad = grad.reshaped(&queries.shape)?;
        let scaled = |of_scores: Tensor<N>| {
            let shape = of_scores.shape.clone();
            map(&shape, &[&of_scores], |a| a[0].mul(self.factor))
        };
        let all = gradients(&self.probabilities, [queries, keys, values, &grad], scaled)?;
        let dim = qkv.shape[1] / 3;
        let rows = (0..qkv.shape[0]).flat_map(|row| {
            let own = all
                .iter()
                .flat_map(move |of| &of.elements[row * dim..][..dim]);
            own.copied()
        });
        Ok(Tensor::new(qkv.shape.clone(), rows.collect()))
    }
}

/// Returns the gradients of queries, keys and values from that of an attention's result; `through` brings the gradient of
/// the scaled scores to that of the scores.
fn gradients<N: Number>(
    probabilities: &Tensor<N>,
    [queries, keys, values, grad]: [&Tensor<N>; 4],
    through: impl FnOnce(Tensor<N>) -> Result<Tensor<N>, String>,
) -> Result<[Tensor<N>; 3], String> {
    let grad = by_head(grad);
    let of_values = product(&transposed(probabilities), &grad)?;
    let of_probabilities = product(&grad, &transposed(&by_head(values)))?;
    let of_scores = through(softmax_gradient(probabilities, &of_probabilities))?;
    let of_queries = product(&of_scores, &by_head(keys))?;
    let of_keys = product(&transposed(&of_scores), &by_head(queries))?;
    Ok([of_queries, of_keys, of_values].map(|of| by_time(&of)))
}

/// Returns the gradient of the logits and the loss, the mean of minus the logarithms of the targets' probabilities.
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

/// Returns the logarithms of probabilities, and notes of which.
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

/// The kernel takes the exponential of its result, which is the probability that composed operations still have.
fn log_softmax_gradient<N: Number>(y: &[N], grad: &[N], known: &impl Logarithms<N>) -> Vec<N> {
    let total = sum(grad);
    let pairs = y.iter().zip(grad);
    let of = |(y, grad): (&N, &N)| grad.sub(total.mul(known.probability(*y)));
    pairs.map(of).collect()
}

struct Softmax<N> {
    shifted: Vec<N>,
    probabilities: Vec<N>,
    total: N,
}

fn softmax<N: Number>(row: &[N]) -> Softmax<N> {
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

fn softmax_gradient<N: Number>(y: &Tensor<N>, grad: &Tensor<N>) -> Tensor<N> {
    two_rows(y, grad, |y, grad| {
        let along = dot(y, grad);
        let pairs = y.iter().zip(grad);
        pairs.map(|(y, grad)| y.mul(grad.sub(along))).collect()
    })
}

/// What a norm takes away from a row before it looks at squares.
#[derive(Clone, Copy)]
enum Middle {
    Mean,
    /// Nothing: the norm is one by the root of the mean square.
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

/// A row with its middle at zero and mean square one.
struct Normal<N> {
    row: Vec<N>,
    /// One over the deviation.
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

fn is_set<N: Number>(mask: N) -> bool {
    mask.index() == 1
}

fn sum<N: Number>(lane: &[N]) -> N {
    lane.iter()
        .fold(N::default(), |sum, element| sum.add(*element))
}

fn dot<N: Number>(a: &[N], b: &[N]) -> N {
    let products = a.iter().zip(b).map(|(a, b)| a.mul(*b));
    products.fold(N::default(), N::add)
}

fn each_row<N: Copy>(x: &Tensor<N>, of: impl FnMut(&[N]) -> Vec<N>) -> Tensor<N> {
    Tensor::new(x.shape.clone(), rows(x).flat_map(of).collect())
}

fn two_rows<N: Copy>(
    a: &Tensor<N>,
    b: &Tensor<N>,
    mut of: impl FnMut(&[N], &[N]) -> Vec<N>,
) -> Tensor<N> {
    let pairs = rows(a).zip(rows(b));
    let elements = pairs.flat_map(|(a, b)| of(a, b)).collect();
    Tensor::new(a.shape.clone(), elements)
}

/// Returns the products of matrices of the same batch.
fn product<N: Number>(a: &Tensor<N>, b: &Tensor<N>) -> Result<Tensor<N>, String> {
    let mut shape = a.shape.clone();
    if let (Some(last), Some(columns)) = (shape.last_mut(), b.shape.last()) {
        *last = *columns;
    }
    N::matmul(a, b, &shape)
}

/// Returns `[batch, time, heads, width]` as `[batch, heads, time, width]`.
fn by_head<N: Copy>(tensor: &Tensor<N>) -> Tensor<N> {
    tensor.taken(&tensor.view().swapped(1, 2))
}

/// Returns `[batch, heads, time, width]` as `[batch, time, heads, width]`.
fn by_time<N: Copy>(tensor: &Tensor<N>) -> Tensor<N> {
    by_head(tensor)
}
