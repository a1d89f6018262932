//! Burn's numeric, float, int and bool operations, and activations.

use burn_ir::{
    ActivationOperationIr, BinaryOpIr, BoolOperationIr, FloatOperationIr, IntOperationIr,
    NumericOperationIr, ReduceDimOpIr, ReduceOpIr, ScalarOpIr, TensorIr, UnaryOpIr,
};

use super::call::Call;
use super::field::{Element, function, inverse, mul, neg, of_integer};
use super::lanes::{along, extreme, mean, product, reduced, sum};
use super::pointwise::{Arithmetic, abs, map, power_of, sigmoid_gradient, sign, where_above};
use super::products::matmul;
use super::tensor::{Kind, Tensor};

impl Call<'_> {
    pub(super) fn numeric(&self, operation: &NumericOperationIr) -> Result<Vec<Tensor>, String> {
        use NumericOperationIr as Op;
        let one = match operation {
            Op::Add(op) => self.arithmetic(op, Arithmetic::Add)?,
            Op::Sub(op) => self.arithmetic(op, Arithmetic::Sub)?,
            Op::Mul(op) => self.arithmetic(op, Arithmetic::Mul)?,
            Op::Div(op) => self.arithmetic(op, Arithmetic::Div)?,
            Op::Rem(op) => self.arithmetic(op, Arithmetic::Rem)?,
            Op::AddScalar(op) => self.with_number(op, Arithmetic::Add)?,
            Op::SubScalar(op) => self.with_number(op, Arithmetic::Sub)?,
            Op::MulScalar(op) => self.with_number(op, Arithmetic::Mul)?,
            Op::DivScalar(op) => self.with_number(op, Arithmetic::Div)?,
            Op::RemScalar(op) => self.with_number(op, Arithmetic::Rem)?,
            Op::Abs(op) => self.unary(op, |kind, a| match kind {
                Kind::Float => abs(a),
                _ => (a as i64).wrapping_abs() as u64,
            })?,
            Op::Neg(op) => self.unary(op, |kind, a| match kind {
                Kind::Float => neg(a),
                _ => (a as i64).wrapping_neg() as u64,
            })?,
            Op::Sign(op) => self.unary(op, |kind, a| match kind {
                Kind::Float => sign(a),
                _ => (a as i64).signum() as u64,
            })?,
            Op::Full(op) => {
                let value = self.scalar(0)?.element(Kind::of(op.out.dtype));
                Tensor::full(op.out.shape.as_slice(), value)
            }
            Op::Clamp(op) => {
                let kind = Kind::of(op.tensor.dtype);
                let [min, max] = [self.scalar(0)?, self.scalar(1)?].map(|of| of.element(kind));
                let clamp = |a: &[Element]| lower(kind, higher(kind, a[0], min), max);
                map(op.out.shape.as_slice(), &[self.get(&op.tensor)?], clamp)?
            }
            Op::ClampMin(op) => self.chosen(op, higher)?,
            Op::ClampMax(op) => self.chosen(op, lower)?,
            Op::Powi(op) => self.powers(op)?,
            Op::PowiScalar(op) => self.power(op)?,
            Op::IntRandom(_) => return self.drawn(),
            _ => return self.ordered_or_reduced(operation),
        };
        Ok(vec![one])
    }

    /// Returns the results of comparisons, reductions and operations along dims.
    fn ordered_or_reduced(&self, operation: &NumericOperationIr) -> Result<Vec<Tensor>, String> {
        use NumericOperationIr as Op;
        let one = match operation {
            Op::Greater(op) => self.ordered(op, |a, b| a > b)?,
            Op::GreaterEqual(op) => self.ordered(op, |a, b| a >= b)?,
            Op::Lower(op) => self.ordered(op, |a, b| a < b)?,
            Op::LowerEqual(op) => self.ordered(op, |a, b| a <= b)?,
            Op::GreaterElem(op) => self.ordered_number(op, |a, b| a > b)?,
            Op::GreaterEqualElem(op) => self.ordered_number(op, |a, b| a >= b)?,
            Op::LowerElem(op) => self.ordered_number(op, |a, b| a < b)?,
            Op::LowerEqualElem(op) => self.ordered_number(op, |a, b| a <= b)?,
            Op::Mean(op) => self.of_all(op, mean)?,
            Op::Sum(op) => self.of_all(op, sum)?,
            Op::Prod(op) => self.of_all(op, product)?,
            Op::Max(op) => self.of_all(op, |kind, lane| lane[extreme(kind, lane, true)])?,
            Op::Min(op) => self.of_all(op, |kind, lane| lane[extreme(kind, lane, false)])?,
            Op::MaxAbs(op) => self.of_all(op, largest)?,
            Op::MeanDim(op) => self.of_dim(op, mean)?,
            Op::SumDim(op) => self.of_dim(op, sum)?,
            Op::ProdDim(op) => self.of_dim(op, product)?,
            Op::MaxDim(op) => self.of_dim(op, |kind, lane| lane[extreme(kind, lane, true)])?,
            Op::MinDim(op) => self.of_dim(op, |kind, lane| lane[extreme(kind, lane, false)])?,
            Op::MaxAbsDim(op) => self.of_dim(op, largest)?,
            Op::ArgMax(op) => self.of_dim(op, |kind, lane| extreme(kind, lane, true) as u64)?,
            Op::ArgMin(op) => self.of_dim(op, |kind, lane| extreme(kind, lane, false) as u64)?,
            Op::SumDims(op) => {
                let (input, kind) = (self.get(&op.input)?, Kind::of(op.input.dtype));
                let shape = op.out.shape.as_slice();
                reduced(input, &op.axes, shape, |lane| sum(kind, lane))
            }
            Op::MaxDimWithIndices(op) | Op::MinDimWithIndices(op) => {
                let largest = matches!(operation, Op::MaxDimWithIndices(_));
                let (input, kind) = (self.get(&op.tensor)?, Kind::of(op.tensor.dtype));
                let shape = op.out.shape.as_slice();
                let index = |lane: &[Element]| extreme(kind, lane, largest);
                let values = reduced(input, &[op.dim], shape, |lane| lane[index(lane)]);
                let indices = reduced(input, &[op.dim], shape, |lane| index(lane) as u64);
                return Ok(vec![values, indices]);
            }
            Op::CumSum(op) | Op::CumProd(op) => {
                let (input, kind) = (self.get(&op.input)?, Kind::of(op.input.dtype));
                let (begin, combine) = match operation {
                    Op::CumSum(_) => (0, Arithmetic::Add),
                    _ => (1, Arithmetic::Mul),
                };
                along(input, op.axis, op.out.shape.as_slice(), |lane| {
                    let scanned = lane.iter().scan(begin, |total, element| {
                        *total = combine.of(kind, *total, *element);
                        Some(*total)
                    });
                    scanned.collect()
                })
            }
            _ => return self.opaque(),
        };
        Ok(vec![one])
    }

    pub(super) fn float(&self, operation: &FloatOperationIr) -> Result<Vec<Tensor>, String> {
        use FloatOperationIr as Op;
        let one = match operation {
            Op::Exp(op) => self.function("exp", op)?,
            Op::Log(op) => self.function("log", op)?,
            Op::Sqrt(op) => self.function("sqrt", op)?,
            Op::Tanh(op) => self.function("tanh", op)?,
            Op::Log1p(op) => self.function("log1p", op)?,
            Op::Erf(op) => self.function("erf", op)?,
            Op::Cos(op) => self.function("cos", op)?,
            Op::Cosh(op) => self.function("cosh", op)?,
            Op::Sin(op) => self.function("sin", op)?,
            Op::Sinh(op) => self.function("sinh", op)?,
            Op::Tan(op) => self.function("tan", op)?,
            Op::ArcCos(op) => self.function("acos", op)?,
            Op::ArcCosh(op) => self.function("acosh", op)?,
            Op::ArcSin(op) => self.function("asin", op)?,
            Op::ArcSinh(op) => self.function("asinh", op)?,
            Op::ArcTan(op) => self.function("atan", op)?,
            Op::ArcTanh(op) => self.function("atanh", op)?,
            Op::Round(op) => self.function("round", op)?,
            Op::Floor(op) => self.function("floor", op)?,
            Op::Ceil(op) => self.function("ceil", op)?,
            Op::Trunc(op) => self.function("trunc", op)?,
            Op::ArcTan2(op) => self.function_of_two("atan2", op)?,
            Op::Hypot(op) => self.function_of_two("hypot", op)?,
            Op::Powf(op) => self.powers(op)?,
            Op::PowfScalar(op) => self.power(op)?,
            Op::Recip(op) => self.unary(op, |_, a| inverse(a))?,
            // An element of the field is never NaN or infinite.
            Op::IsNan(op) | Op::IsInf(op) => self.unary(op, |_, _| 0)?,
            Op::IntoInt(op) => {
                let input = self.get(&op.input)?;
                let into = |a: &[Element]| function("integer", a) % 1024;
                map(op.out.shape.as_slice(), &[input], into)?
            }
            Op::Matmul(op) => {
                let (a, b) = (self.get(&op.lhs)?, self.get(&op.rhs)?);
                matmul(a, b, op.out.shape.as_slice())?
            }
            Op::Random(_) => return self.drawn(),
            Op::Cross(_) | Op::Quantize(_) | Op::Dequantize(_) | Op::GridSample2d(_) => {
                return self.opaque();
            }
        };
        Ok(vec![one])
    }

    pub(super) fn int(&self, operation: &IntOperationIr) -> Result<Vec<Tensor>, String> {
        use IntOperationIr as Op;
        let one = match operation {
            Op::IntoFloat(op) => {
                let into = |a: &[Element]| of_integer(a[0] as i64);
                map(op.out.shape.as_slice(), &[self.get(&op.input)?], into)?
            }
            Op::BitwiseAnd(op) => self.two(op, |_, a, b| a & b)?,
            Op::BitwiseOr(op) => self.two(op, |_, a, b| a | b)?,
            Op::BitwiseXor(op) => self.two(op, |_, a, b| a ^ b)?,
            Op::BitwiseNot(op) => self.unary(op, |_, a| !a)?,
            _ => return self.opaque(),
        };
        Ok(vec![one])
    }

    pub(super) fn bool(&self, operation: &BoolOperationIr) -> Result<Vec<Tensor>, String> {
        use BoolOperationIr as Op;
        let one = match operation {
            // Zero and one have the same representation in every type.
            Op::IntoFloat(op) | Op::IntoInt(op) => self.get(&op.input)?.clone(),
            Op::Not(op) => self.unary(op, |_, a| a ^ 1)?,
            Op::And(op) => self.two(op, |_, a, b| a & b)?,
            Op::Or(op) => self.two(op, |_, a, b| a | b)?,
            Op::Xor(op) => self.two(op, |_, a, b| a ^ b)?,
        };
        Ok(vec![one])
    }

    pub(super) fn activation(
        &self,
        operation: &ActivationOperationIr,
    ) -> Result<Vec<Tensor>, String> {
        use ActivationOperationIr as Op;
        let one = match operation {
            Op::Relu(op) => self.unary(op, |_, a| where_above(a, a))?,
            Op::ReluBackward(op) => self.two(op, |_, result, grad| where_above(result, grad))?,
            Op::Gelu(op) => self.function("gelu", op)?,
            Op::GeluBackward(op) => self.two(op, |_, x, grad| gelu_gradient(x, grad))?,
            Op::Sigmoid(op) => self.function("sigmoid", op)?,
            Op::SigmoidBackward(op) => {
                self.two(op, |_, result, grad| sigmoid_gradient(result, grad))?
            }
            Op::LogSigmoid(op) => self.function("log sigmoid", op)?,
            Op::LogSigmoidBackward(op) => {
                let gradient = |_, x, grad| mul(grad, function("log sigmoid gradient", &[x]));
                self.two(op, gradient)?
            }
            _ => return self.opaque(),
        };
        Ok(vec![one])
    }

    fn unary(
        &self,
        op: &UnaryOpIr,
        of: impl Fn(Kind, Element) -> Element,
    ) -> Result<Tensor, String> {
        let kind = Kind::of(op.input.dtype);
        let input = self.get(&op.input)?;
        map(op.out.shape.as_slice(), &[input], |a| of(kind, a[0]))
    }

    fn function(&self, name: &str, op: &UnaryOpIr) -> Result<Tensor, String> {
        self.unary(op, |_, a| function(name, &[a]))
    }

    fn two(
        &self,
        op: &BinaryOpIr,
        of: impl Fn(Kind, Element, Element) -> Element,
    ) -> Result<Tensor, String> {
        let kind = Kind::of(op.lhs.dtype);
        let operands = [self.get(&op.lhs)?, self.get(&op.rhs)?];
        map(op.out.shape.as_slice(), &operands, |a| of(kind, a[0], a[1]))
    }

    fn function_of_two(&self, name: &str, op: &BinaryOpIr) -> Result<Tensor, String> {
        self.two(op, |_, a, b| function(name, &[a, b]))
    }

    fn arithmetic(&self, op: &BinaryOpIr, of: Arithmetic) -> Result<Tensor, String> {
        self.two(op, |kind, a, b| of.of(kind, a, b))
    }

    fn with_number(&self, op: &ScalarOpIr, of: Arithmetic) -> Result<Tensor, String> {
        let (kind, number) = (Kind::of(op.lhs.dtype), self.scalar(0)?);
        // Computes the inverse, which takes sixty multiplications, once instead of per element.
        let (of, number) = match (kind, of) {
            (Kind::Float, Arithmetic::Div) => (Arithmetic::Mul, number.inverse()),
            _ => (of, number.element(kind)),
        };
        let operands = [self.get(&op.lhs)?];
        map(op.out.shape.as_slice(), &operands, |a| {
            of.of(kind, a[0], number)
        })
    }

    fn ordered(&self, op: &BinaryOpIr, holds: impl Fn(i64, i64) -> bool) -> Result<Tensor, String> {
        self.two(op, |kind, a, b| {
            u64::from(holds(kind.order(a), kind.order(b)))
        })
    }

    fn ordered_number(
        &self,
        op: &ScalarOpIr,
        holds: impl Fn(i64, i64) -> bool,
    ) -> Result<Tensor, String> {
        let kind = Kind::of(op.lhs.dtype);
        let number = kind.order(self.scalar(0)?.element(kind));
        let is = |a: &[Element]| u64::from(holds(kind.order(a[0]), number));
        map(op.out.shape.as_slice(), &[self.get(&op.lhs)?], is)
    }

    fn chosen(
        &self,
        op: &ScalarOpIr,
        of: impl Fn(Kind, Element, Element) -> Element,
    ) -> Result<Tensor, String> {
        let kind = Kind::of(op.lhs.dtype);
        let number = self.scalar(0)?.element(kind);
        let operands = [self.get(&op.lhs)?];
        map(op.out.shape.as_slice(), &operands, |a| {
            of(kind, a[0], number)
        })
    }

    fn powers(&self, op: &BinaryOpIr) -> Result<Tensor, String> {
        self.two(op, |_, a, b| function("power", &[a, b]))
    }

    fn power(&self, op: &ScalarOpIr) -> Result<Tensor, String> {
        let exponent = self.scalar(0)?;
        let operands = [self.get(&op.lhs)?];
        let of = |a: &[Element]| match Kind::of(op.lhs.dtype) {
            Kind::Float => power_of(a[0], exponent),
            _ => function("integer power", &[a[0], exponent.element(Kind::Int)]),
        };
        map(op.out.shape.as_slice(), &operands, of)
    }

    fn of_all(
        &self,
        op: &ReduceOpIr,
        of: impl Fn(Kind, &[Element]) -> Element,
    ) -> Result<Tensor, String> {
        let input = self.get(&op.input)?;
        let axes: Vec<usize> = (0..input.shape.len()).collect();
        self.of_axes(input, &axes, (&op.input, &op.out), of)
    }

    fn of_dim(
        &self,
        op: &ReduceDimOpIr,
        of: impl Fn(Kind, &[Element]) -> Element,
    ) -> Result<Tensor, String> {
        let input = self.get(&op.input)?;
        self.of_axes(input, &[op.axis], (&op.input, &op.out), of)
    }

    fn of_axes(
        &self,
        input: &Tensor,
        axes: &[usize],
        (of_input, out): (&TensorIr, &TensorIr),
        of: impl Fn(Kind, &[Element]) -> Element,
    ) -> Result<Tensor, String> {
        let kind = Kind::of(of_input.dtype);
        let shape = out.shape.as_slice();
        Ok(reduced(input, axes, shape, |lane| of(kind, lane)))
    }
}

/// Returns the gradient of a GELU from its operand and the result's gradient.
fn gelu_gradient(x: Element, grad: Element) -> Element {
    mul(grad, function("gelu gradient", &[x]))
}

fn largest(kind: Kind, lane: &[Element]) -> Element {
    let magnitudes: Vec<Element> = lane.iter().map(|element| abs(*element)).collect();
    magnitudes[extreme(kind, &magnitudes, true)]
}

fn higher(kind: Kind, a: Element, b: Element) -> Element {
    if kind.order(a) >= kind.order(b) { a } else { b }
}

fn lower(kind: Kind, a: Element, b: Element) -> Element {
    if kind.order(a) <= kind.order(b) { a } else { b }
}
