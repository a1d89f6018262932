//! Operations that are not Burn's: kernels as what they are composed of, and the norms of clipping.

use burn_fsdp_kernels::{FusedOperation, PointwiseOperand, PointwiseProgram};
use burn_ir::CustomOpIr;

use super::call::Call;
use super::field::{Element, add, function, inverse, mul, of_integer, sub};
use super::lanes::{extreme, rows, sum};
use super::numeric::gelu_gradient;
use super::pointwise::{Operand, abs, map, step};
use super::products::{matmul, transposed};
use super::scalar::Scalar;
use super::tensor::{Kind, Tensor};
use crate::norm::{COEFFICIENTS, LOCAL_NORM};

impl Call<'_> {
    pub(super) fn custom(&self, call: &CustomOpIr) -> Result<Vec<Tensor>, String> {
        match call.id.as_str() {
            LOCAL_NORM => return self.local_norm(call),
            COEFFICIENTS => return self.coefficients(call),
            _ => {}
        }
        let kernels = FusedOperation::ALL.into_iter();
        let Some(kernel) = kernels.into_iter().find(|kernel| kernel.name() == call.id) else {
            return self.opaque();
        };
        let inputs = call.inputs.iter().map(|input| self.get(input));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        use FusedOperation as Op;
        Ok(match (kernel, inputs.as_slice()) {
            (Op::Pointwise, inputs) => vec![self.program(call, inputs)?],
            (Op::Gelu, [x]) => vec![map(&x.shape, &[x], |a| function("gelu", a))?],
            (Op::GeluBackward, [x, grad]) => {
                vec![map(&x.shape, &[x, grad], |a| gelu_gradient(a[0], a[1]))?]
            }
            (Op::Softmax, [x]) => vec![each_row(x, |row| softmax(row).probabilities)],
            (Op::SoftmaxBackward, [y, grad]) => vec![softmax_gradient(y, grad)],
            (Op::LogSoftmax, [x]) => vec![each_row(x, |row| self.log_softmax(row))],
            (Op::LogSoftmaxBackward, [y, grad]) => {
                vec![two_rows(y, grad, |y, grad| {
                    self.log_softmax_gradient(y, grad)
                })]
            }
            (Op::LayerNorm, [x, gamma, beta]) => vec![self.layer_norm(x, gamma, beta)?],
            (Op::LayerNormBackward, [x, gamma, grad]) => {
                self.layer_norm_gradients(x, gamma, grad)?
            }
            (Op::Attention, [queries, keys, values, masks @ ..]) => {
                let probabilities = self.probabilities(queries, keys, masks)?;
                vec![by_time(&product(&probabilities, &by_head(values))?)]
            }
            (Op::AttentionBackward, [queries, keys, values, grad, masks @ ..]) => {
                self.attention_gradients([queries, keys, values, grad], masks)?
            }
            // They are in graphs that a model records itself, before any pass, and are the same in all of them.
            _ => return self.opaque(),
        })
    }

    fn program(&self, call: &CustomOpIr, inputs: &[&Tensor]) -> Result<Tensor, String> {
        let program = PointwiseProgram::from_scalars(&call.scalars);
        let program = program.ok_or("its numbers are of no program")?;
        let shape = call.outputs[0].shape.as_slice();
        map(shape, inputs, |elements| {
            let mut results: Vec<Element> = Vec::with_capacity(program.len());
            for (operation, first, second) in program.parts() {
                let operand = |operand: PointwiseOperand| -> Operand {
                    match operand {
                        PointwiseOperand::Input(index) => (elements[index], None),
                        PointwiseOperand::Step(index) => (results[index], None),
                        PointwiseOperand::Number(index) => {
                            let scalar = self.scalars[program.place_of(index)];
                            (scalar.element(Kind::Float), Some(scalar))
                        }
                    }
                };
                let result = step(operation, operand(first), operand(second));
                results.push(result);
            }
            results.last().copied().unwrap_or(0)
        })
    }

    /// Returns the logarithms of probabilities, and notes of which.
    fn log_softmax(&self, row: &[Element]) -> Vec<Element> {
        let Softmax {
            shifted,
            probabilities,
            total,
        } = softmax(row);
        let log = function("log", &[total]);
        let logarithms: Vec<Element> = shifted.iter().map(|of| sub(*of, log)).collect();
        let mut known = self.known.logarithms.borrow_mut();
        known.extend(logarithms.iter().copied().zip(probabilities));
        logarithms
    }

    /// The kernel takes the exponential of its result, which is the probability that composed operations still have.
    fn log_softmax_gradient(&self, y: &[Element], grad: &[Element]) -> Vec<Element> {
        let known = self.known.logarithms.borrow();
        let total = sum(Kind::Float, grad);
        let probability = |y: &Element| match known.get(y) {
            Some(probability) => *probability,
            None => function("exp", &[*y]),
        };
        let pairs = y.iter().zip(grad);
        pairs
            .map(|(y, grad)| sub(*grad, mul(total, probability(y))))
            .collect()
    }

    fn epsilon(&self) -> Result<Element, String> {
        Ok(self.scalar(0)?.element(Kind::Float))
    }

    fn layer_norm(&self, x: &Tensor, gamma: &Tensor, beta: &Tensor) -> Result<Tensor, String> {
        let epsilon = self.epsilon()?;
        let normal = each_row(x, |row| Normal::of(row, epsilon).row);
        let of = |a: &[Element]| add(mul(a[0], a[1]), a[2]);
        map(&x.shape, &[&normal, gamma, beta], of)
    }

    fn layer_norm_gradients(
        &self,
        x: &Tensor,
        gamma: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Tensor>, String> {
        let epsilon = self.epsilon()?;
        let width = gamma.len();
        let share = inverse(of_integer(width as i64));
        let (mut of_gamma, mut of_beta) = (vec![0; width], vec![0; width]);
        let of_x = two_rows(x, grad, |row, grad| {
            let Normal { row, rate } = Normal::of(row, epsilon);
            let scaled: Vec<Element> = grad
                .iter()
                .zip(gamma.elements.iter())
                .map(|(grad, gamma)| mul(*grad, *gamma))
                .collect();
            let along = scaled.iter().zip(&row).map(|(a, b)| mul(*a, *b));
            let along = mul(along.fold(0, add), share);
            let mean = mul(sum(Kind::Float, &scaled), share);
            for index in 0..width {
                of_gamma[index] = add(of_gamma[index], mul(grad[index], row[index]));
                of_beta[index] = add(of_beta[index], grad[index]);
            }
            let both = scaled.iter().zip(&row);
            both.map(|(scaled, normal)| {
                let rest = sub(sub(*scaled, mean), mul(*normal, along));
                mul(rest, rate)
            })
            .collect()
        });
        Ok(vec![
            of_x,
            Tensor::new(gamma.shape.clone(), of_gamma),
            Tensor::new(gamma.shape.clone(), of_beta),
        ])
    }

    /// Returns the probabilities of an attention, `[batch, heads, queries, keys]`.
    fn probabilities(
        &self,
        queries: &Tensor,
        keys: &Tensor,
        masks: &[&Tensor],
    ) -> Result<Tensor, String> {
        let factor = self.epsilon()?;
        let scores = product(&by_head(queries), &transposed(&by_head(keys)))?;
        let shape = scores.shape.clone();
        let mut scores = map(&shape, &[&scores], |a| mul(a[0], factor))?;
        for (number, mask) in masks.iter().enumerate() {
            let fill = self.scalar(number + 1)?.element(Kind::Float);
            let choose = |a: &[Element]| if a[1] == 1 { fill } else { a[0] };
            scores = map(&shape, &[&scores, mask], choose)?;
        }
        Ok(each_row(&scores, |row| softmax(row).probabilities))
    }

    fn attention_gradients(
        &self,
        [queries, keys, values, grad]: [&Tensor; 4],
        masks: &[&Tensor],
    ) -> Result<Vec<Tensor>, String> {
        let factor = self.epsilon()?;
        let probabilities = self.probabilities(queries, keys, masks)?;
        let grad = by_head(grad);
        let of_values = product(&transposed(&probabilities), &grad)?;
        let of_probabilities = product(&grad, &transposed(&by_head(values)))?;
        let mut of_scores = softmax_gradient(&probabilities, &of_probabilities);
        let shape = of_scores.shape.clone();
        for mask in masks {
            let keep = |a: &[Element]| if a[1] == 1 { 0 } else { a[0] };
            of_scores = map(&shape, &[&of_scores, mask], keep)?;
        }
        let of_scores = map(&shape, &[&of_scores], |a| mul(a[0], factor))?;
        let of_queries = product(&of_scores, &by_head(keys))?;
        let of_keys = product(&transposed(&of_scores), &by_head(queries))?;
        let all = [of_queries, of_keys, of_values];
        Ok(all.iter().map(by_time).collect())
    }

    /// Returns what stands for the norm of some gradients: the sum from which it is made, as norms are only combined.
    fn local_norm(&self, call: &CustomOpIr) -> Result<Vec<Tensor>, String> {
        let order = self.scalar(1)?;
        let mut total = 0;
        for input in &call.inputs {
            let parts = self.get(input)?.elements.iter();
            let parts = parts.map(|element| measured(*element, order));
            total = parts.fold(total, |total, part| joined(total, part, order));
        }
        Ok(vec![Tensor::full(call.outputs[0].shape.as_slice(), total)])
    }

    fn coefficients(&self, call: &CustomOpIr) -> Result<Vec<Tensor>, String> {
        let (limit, order) = (self.scalar(0)?, self.scalar(1)?);
        let mut total = 0;
        for input in &call.inputs {
            let norms = self.get(input)?.elements.iter();
            total = norms.fold(total, |total, norm| joined(total, *norm, order));
        }
        let [norm, factor] = clipped(total, limit, order);
        let values = std::iter::once(norm).chain(std::iter::repeat(factor));
        let outputs = call.outputs.iter().zip(values);
        Ok(outputs
            .map(|(output, value)| Tensor::full(output.shape.as_slice(), value))
            .collect())
    }
}

/// Returns what an element adds to the sum of a norm of that order.
pub(super) fn measured(element: Element, order: Scalar) -> Element {
    match order.number() {
        // Padding adds nothing to any norm.
        _ if element == 0 => 0,
        Some(2.0) => mul(element, element),
        Some(1.0) | Some(f64::INFINITY) => abs(element),
        _ => function("power", &[abs(element), order.element(Kind::Float)]),
    }
}

/// Returns the combination of two sums of a norm: the larger one for the largest element.
pub(super) fn joined(a: Element, b: Element, order: Scalar) -> Element {
    match order.number() {
        Some(f64::INFINITY) => match Kind::Float.order(a) >= Kind::Float.order(b) {
            true => a,
            false => b,
        },
        _ => add(a, b),
    }
}

/// Returns the norm of that sum, and the factor that brings it below a limit.
pub(super) fn clipped(total: Element, limit: Scalar, order: Scalar) -> [Element; 2] {
    let words = [
        total,
        limit.element(Kind::Float),
        order.element(Kind::Float),
    ];
    ["norm", "clip"].map(|name| function(name, &words))
}

struct Softmax {
    shifted: Vec<Element>,
    probabilities: Vec<Element>,
    total: Element,
}

fn softmax(row: &[Element]) -> Softmax {
    let largest = row.get(extreme(Kind::Float, row, true)).copied();
    let largest = largest.unwrap_or(0);
    let shifted: Vec<Element> = row.iter().map(|element| sub(*element, largest)).collect();
    let powers: Vec<Element> = shifted.iter().map(|of| function("exp", &[*of])).collect();
    let total = sum(Kind::Float, &powers);
    let rate = inverse(total);
    Softmax {
        shifted,
        probabilities: powers.iter().map(|power| mul(*power, rate)).collect(),
        total,
    }
}

fn softmax_gradient(y: &Tensor, grad: &Tensor) -> Tensor {
    two_rows(y, grad, |y, grad| {
        let along = y.iter().zip(grad).map(|(y, grad)| mul(*y, *grad));
        let along = along.fold(0, add);
        let pairs = y.iter().zip(grad);
        pairs.map(|(y, grad)| mul(*y, sub(*grad, along))).collect()
    })
}

/// A row with mean zero and variance one.
struct Normal {
    row: Vec<Element>,
    /// One over the deviation.
    rate: Element,
}

impl Normal {
    fn of(row: &[Element], epsilon: Element) -> Self {
        let share = inverse(of_integer(row.len() as i64));
        let mean = mul(sum(Kind::Float, row), share);
        let centered: Vec<Element> = row.iter().map(|element| sub(*element, mean)).collect();
        let squares = centered.iter().map(|element| mul(*element, *element));
        let variance = mul(squares.fold(0, add), share);
        let rate = inverse(function("sqrt", &[add(variance, epsilon)]));
        Self {
            row: centered.iter().map(|element| mul(*element, rate)).collect(),
            rate,
        }
    }
}

fn each_row(x: &Tensor, of: impl FnMut(&[Element]) -> Vec<Element>) -> Tensor {
    Tensor::new(x.shape.clone(), rows(x).flat_map(of).collect())
}

fn two_rows(
    a: &Tensor,
    b: &Tensor,
    mut of: impl FnMut(&[Element], &[Element]) -> Vec<Element>,
) -> Tensor {
    let pairs = rows(a).zip(rows(b));
    let elements = pairs.flat_map(|(a, b)| of(a, b)).collect();
    Tensor::new(a.shape.clone(), elements)
}

/// Returns the products of matrices of the same batch.
fn product(a: &Tensor, b: &Tensor) -> Result<Tensor, String> {
    let mut shape = a.shape.clone();
    if let (Some(last), Some(columns)) = (shape.last_mut(), b.shape.last()) {
        *last = *columns;
    }
    matmul(a, b, &shape)
}

/// Returns `[batch, time, heads, width]` as `[batch, heads, time, width]`.
fn by_head(tensor: &Tensor) -> Tensor {
    tensor.taken(&tensor.view().swapped(1, 2))
}

/// Returns `[batch, heads, time, width]` as `[batch, time, heads, width]`.
fn by_time(tensor: &Tensor) -> Tensor {
    by_head(tensor)
}
