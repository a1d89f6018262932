//! Custom operations: kernels in their composed form, the norms of gradient clipping, and rounded optimizer states.

use burn_fsdp_kernels::{FormCall, FusedOperation, Logarithms};
use burn_fsdp_tensors::StateFormat;
use burn_ir::CustomOpIr;

use super::call::{Call, Known};
use super::field::{Element, add, function, mul, of_integer};
use super::number::FieldNumber;
use super::pointwise::abs;
use super::scalar::Scalar;
use super::tensor::{Kind, Tensor};
use burn_fsdp_spmd::low_bit::{RoundCall, StateOperation};
use burn_fsdp_spmd::norm::{COEFFICIENTS, LOCAL_NORM};

impl Logarithms<FieldNumber> for Known {
    fn keep(&self, logarithm: FieldNumber, probability: FieldNumber) {
        let mut known = self.logarithms.borrow_mut();
        known.insert(logarithm.0, probability.0);
    }

    fn probability(&self, logarithm: FieldNumber) -> FieldNumber {
        let known = self.logarithms.borrow().get(&logarithm.0).copied();
        FieldNumber(known.unwrap_or_else(|| function("exp", &[logarithm.0])))
    }
}

impl Call<'_> {
    pub(super) fn custom(&self, call: &CustomOpIr) -> Result<Vec<Tensor>, String> {
        match call.id.as_str() {
            LOCAL_NORM => return self.local_norm(call),
            COEFFICIENTS => return self.coefficients(call),
            _ => {}
        }
        if let Some(operation) = StateOperation::named(&call.id) {
            return self.state(operation, call);
        }
        let Some(kernel) = FusedOperation::named(&call.id) else {
            return self.opaque();
        };
        let inputs = call.inputs.iter();
        let inputs = inputs.map(|input| Ok(FieldNumber::all_of(self.get(input)?)));
        let scalars = self.scalars.iter().copied().map(FieldNumber::scalar);
        let results = kernel.composed(&FormCall {
            call,
            inputs: &inputs.collect::<Result<Vec<_>, String>>()?,
            scalars: &scalars.collect::<Vec<_>>(),
            logarithms: self.known,
        })?;
        let results = results.into_iter().map(FieldNumber::elements_of);
        Ok(results.collect())
    }

    /// Rounds or widens an optimizer state. A rounded state holds its elements first. Each is an uninterpreted function of
    /// the numbers on which it depends, and padding is zero.
    fn state(&self, operation: StateOperation, call: &CustomOpIr) -> Result<Vec<Tensor>, String> {
        let (Some(input), Some(output)) = (call.inputs.first(), call.outputs.first()) else {
            return Err("it has no state".to_owned());
        };
        let (given, shape) = (self.get(input)?, output.shape.as_slice());
        let StateOperation::Round(format) = operation else {
            return Ok(vec![Tensor::from_fn(shape, |at| given.elements[at])]);
        };
        let RoundCall { len, start, .. } = RoundCall::of(call)?;
        let seed = self.scalar(0)?.element(Kind::Int);
        let own = given.len().min(len.saturating_sub(start));
        let block = match format {
            StateFormat::Bf16 => 1,
            StateFormat::Block8 => StateFormat::BLOCK,
        };
        let values = &given.elements[..own];
        let blocks = values.chunks(block).map(|values| function("block", values));
        let blocks: Vec<Element> = blocks.collect();
        let rounded = Tensor::from_fn(shape, |at| match values.get(at) {
            Some(value) => {
                let place = of_integer((start + at) as i64);
                function("rounded", &[seed, place, *value, blocks[at / block]])
            }
            None => 0,
        });
        Ok(vec![rounded])
    }

    /// Returns the sum under the root of a gradient norm, because norms of parts are combined before the root is taken.
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

/// Returns an element's contribution to the sum of a norm of this order.
pub(super) fn measured(element: Element, order: Scalar) -> Element {
    match order.number() {
        // Padding adds nothing to any norm.
        _ if element == 0 => 0,
        Some(2.0) => mul(element, element),
        Some(1.0) | Some(f64::INFINITY) => abs(element),
        _ => function("power", &[abs(element), order.element(Kind::Float)]),
    }
}

/// Combines two sums of a norm: the larger one for the infinity norm, and otherwise their sum.
pub(super) fn joined(a: Element, b: Element, order: Scalar) -> Element {
    match order.number() {
        Some(f64::INFINITY) => {
            if Kind::Float.order(a) >= Kind::Float.order(b) {
                a
            } else {
                b
            }
        }
        _ => add(a, b),
    }
}

/// Returns the norm with this sum, and the factor that clips it to the limit.
pub(super) fn clipped(total: Element, limit: Scalar, order: Scalar) -> [Element; 2] {
    let words = [
        total,
        limit.element(Kind::Float),
        order.element(Kind::Float),
    ];
    ["norm", "clip"].map(|name| function(name, &words))
}
