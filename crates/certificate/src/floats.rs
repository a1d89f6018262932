//! Checks kernels against their composed forms in 64-bit floats.
//!
//! In the field, the composed form replaces a kernel. This module checks the replacement on random operands in the
//! shapes of the kernel's call. The kernel runs in 32 or 16 bits, as in the step, and its composed form in 64 bits.

use std::collections::BTreeMap;

use burn::tensor::{DType, TensorData, bf16};
use burn_flex::FlexTensor;
use burn_fsdp_kernels::{Array as Tensor, FormCall, FormScalar, FusedOperation, Logarithms, takes};
use burn_ir::{CustomOpIr, OperationIr, ScalarIr, TensorIr};

use super::field::Hash;
use burn_fsdp_spmd::graph::{Flops, Graph, Node};

/// Maximum difference due to 32-bit rounding, relative to the largest result or one, whichever is larger.
const ROUNDING: f64 = 2e-5;

/// Maximum difference of 16-bit results, which are rounded once, relative to the largest result. [`ROUNDING`] is
/// added to it.
const ROUNDING_OF_HALVES: f64 = 1.0 / 256.0;

/// Additional difference allowed, as a multiple of the change in a result when its operands change by [`NUDGE`].
const STEEPNESS: f64 = 32.0;

/// The relative change of operands that imitates 32-bit rounding.
const NUDGE: f64 = 4.0 * f32::EPSILON as f64;

/// A kernel that differs from its composed form.
pub(super) struct Difference {
    pub(super) node: usize,
    pub(super) reason: String,
}

/// Maximum [`work`] of a call that is checked at its own shapes. Larger calls are checked at the twin's shapes.
const MOST_WORK: u64 = 1 << 21;

/// Checks every kernel of a graph, once for each combination of shapes and scalars, except 16-bit fused programs.
/// Shapes are the graph's, or its twin's if the check would take long. The twin may be the graph itself. Returns the
/// number of checks of each kernel.
pub(super) fn check(graph: &Graph, twin: &Graph) -> Result<BTreeMap<String, usize>, Difference> {
    let mut forms: BTreeMap<String, Vec<CustomOpIr>> = BTreeMap::new();
    for (index, pair) in graph.nodes().iter().zip(twin.nodes()).enumerate() {
        let node = if work(pair.0) > MOST_WORK {
            pair.1
        } else {
            pair.0
        };
        let Some((kernel, call)) = kernel_of(node) else {
            continue;
        };
        let known = forms.entry(call.id.clone()).or_default();
        if known.iter().any(|other| is_alike(other, &call)) {
            continue;
        }
        compare(kernel, &call).map_err(|reason| Difference {
            node: index,
            reason,
        })?;
        known.push(call);
    }
    Ok(forms
        .into_iter()
        .map(|(name, of)| (name, of.len()))
        .collect())
}

/// Returns the multiplications plus the elements of a call. Matrix products count as zero, because they are shrunk
/// before the check.
fn work(node: &Node) -> u64 {
    let elements = node.operation.nodes().into_iter();
    let elements: u64 = elements
        .map(|tensor| tensor.shape.num_elements() as u64)
        .sum();
    match kernel_of(node) {
        Some((kernel, _)) if kernel.record().check.is_uniform => 0,
        _ => elements + Flops::of_node(node).total() / 2,
    }
}

/// Returns the kernel that a node calls, and the call with a fixed number in place of scalars that change from step to
/// step.
fn kernel_of(node: &Node) -> Option<(FusedOperation, CustomOpIr)> {
    const ANY: f64 = 0.75;
    let OperationIr::Custom(call) = &node.operation else {
        return None;
    };
    let kernel = FusedOperation::named(&call.id)?;
    let mut call = call.clone();
    if kernel.record().check.is_uniform {
        clip(&mut call);
    }
    for slot in &node.scalars {
        if let Some(numbers) = call.scalars.get_mut(slot.first..slot.first + slot.len) {
            numbers.fill(ScalarIr::Float(ANY));
        }
    }
    Some((kernel, call))
}

/// Shrinks a matrix product, which takes long in 64 bits if it is large. A small product is enough, because all rows,
/// columns and terms are computed alike.
fn clip(call: &mut CustomOpIr) {
    const LARGEST: usize = 48;
    const LARGEST_BATCH: usize = 3;
    for tensor in call.inputs.iter_mut().chain(&mut call.outputs) {
        let batch = tensor.shape.rank().saturating_sub(2);
        for dim in 0..tensor.shape.rank() {
            let largest = if dim < batch { LARGEST_BATCH } else { LARGEST };
            tensor.shape[dim] = tensor.shape[dim].min(largest);
        }
    }
}

fn is_alike(a: &CustomOpIr, b: &CustomOpIr) -> bool {
    let shapes = |call: &CustomOpIr| -> Vec<_> {
        let tensors = call.inputs.iter().chain(&call.outputs);
        tensors
            .map(|tensor| (tensor.shape.to_vec(), tensor.dtype))
            .collect()
    };
    a.scalars == b.scalars && shapes(a) == shapes(b)
}

fn compare(kernel: FusedOperation, call: &CustomOpIr) -> Result<(), String> {
    let inputs: Vec<Tensor<f64>> = call
        .inputs
        .iter()
        .enumerate()
        .map(|(number, input)| drawn(kernel, call, number, input))
        .collect();
    // Rounding at every step may change a sign.
    let is_half = call.outputs[0].dtype == DType::BF16;
    if is_half && kernel.record().check.rounds_steps {
        return Ok(());
    }
    // The kernels do not support other float types.
    if call
        .inputs
        .iter()
        .any(|input| input.dtype.is_float() && !takes(input.dtype))
    {
        return Ok(());
    }
    let nudged: Vec<Tensor<f64>> = inputs
        .iter()
        .zip(&call.inputs)
        .map(|(input, of)| {
            if of.dtype.is_float() {
                nudged(input)
            } else {
                input.clone()
            }
        })
        .collect();
    let expected = composed(kernel, call, &inputs)?;
    let beside = composed(kernel, call, &nudged)?;
    let tensors = inputs
        .iter()
        .zip(&call.inputs)
        .map(|(input, of)| in_its_type(input, of));
    let got = kernel.run(call, tensors.collect());
    for (number, (got, expected)) in got.into_iter().zip(&expected).enumerate() {
        let is_half = got.dtype() == DType::BF16;
        let got: Vec<f32> = got
            .into_data()
            .convert::<f32>()
            .try_to_vec()
            .map_err(|error| format!("{error:?}"))?;
        let beside = beside.get(number).map(|tensor| tensor.elements.as_slice());
        let beside = beside.unwrap_or_default();
        let scale = expected.elements.iter().filter(|of| of.is_finite());
        let largest = scale.fold(0.0, |scale: f64, of| scale.max(of.abs()));
        let rounding = if is_half {
            ROUNDING_OF_HALVES * largest + ROUNDING
        } else {
            ROUNDING * largest.max(1.0)
        };
        for (at, expected) in expected.elements.iter().enumerate() {
            let steep = beside
                .get(at)
                .map_or(0.0, |beside| (beside - expected).abs());
            let allowed = rounding + STEEPNESS * steep;
            let difference = (f64::from(got[at]) - expected).abs();
            // A NaN, or a result too large for 32 bits, proves nothing.
            let is_number = expected.is_finite() && allowed.is_finite();
            if is_number && (difference > allowed || difference.is_nan()) {
                return Err(format!(
                    "it computes {}, but its composed form is {expected:.8} (element {at} of result {number})",
                    got[at]
                ));
            }
        }
    }
    Ok(())
}

/// Computes probabilities from their logarithms, instead of recording them.
#[derive(Debug)]
struct Plain;

impl Logarithms<f64> for Plain {
    fn keep(&self, _: f64, _: f64) {}

    fn probability(&self, logarithm: f64) -> f64 {
        logarithm.exp()
    }
}

fn composed(
    kernel: FusedOperation,
    call: &CustomOpIr,
    inputs: &[Tensor<f64>],
) -> Result<Vec<Tensor<f64>>, String> {
    let scalars = call.scalars.iter().copied().map(FormScalar::Number);
    kernel.composed(&FormCall {
        call,
        inputs,
        scalars: &scalars.collect::<Vec<_>>(),
        logarithms: &Plain,
    })
}

/// Returns random numbers for an operand, all representable in its type.
fn drawn(
    kernel: FusedOperation,
    call: &CustomOpIr,
    number: usize,
    input: &TensorIr,
) -> Tensor<f64> {
    let (lowest, range) = (kernel.record().check.drawn)(number);
    let mut seed = Hash::named(kernel.name());
    seed.write(number as u64);
    let classes = call.inputs[0].shape.as_slice().last().copied().unwrap_or(1);
    let (kind, shape) = (input.dtype, input.shape.as_slice());
    let number = |at| {
        let mut hash = seed;
        hash.write(at as u64);
        let word = hash.finish();
        let unit = (word % (1 << 20)) as f64 / f64::from(1 << 20);
        if kind.is_bool() {
            f64::from(u8::from(unit < 0.3))
        } else if !kind.is_float() {
            (word % classes.max(1) as u64) as f64
        } else {
            f64::from((lowest + range * unit) as f32)
        }
    };
    Tensor::from_fn(shape, |at| match kind {
        DType::BF16 => bf16::from_f64(number(at)).to_f64(),
        _ => number(at),
    })
}

fn nudged(input: &Tensor<f64>) -> Tensor<f64> {
    let of = |at: usize| {
        let sign = if at.is_multiple_of(2) { 1.0 } else { -1.0 };
        input.elements[at] * (1.0 + sign * NUDGE)
    };
    Tensor::from_fn(&input.shape, of)
}

fn in_its_type(input: &Tensor<f64>, of: &TensorIr) -> FlexTensor {
    let elements = input.elements.iter();
    let shape = input.shape.clone();
    let data = match of.dtype {
        dtype if dtype.is_bool() => TensorData::new(
            elements
                .map(|element| *element == 1.0)
                .collect::<Vec<bool>>(),
            shape,
        ),
        dtype if dtype.is_float() => {
            let floats = elements.map(|element| *element as f32);
            TensorData::new(floats.collect::<Vec<f32>>(), shape).convert_dtype(dtype)
        }
        dtype => {
            let data = TensorData::new(
                elements
                    .map(|element| *element as i64)
                    .collect::<Vec<i64>>(),
                shape,
            );
            data.convert_dtype(dtype)
        }
    };
    FlexTensor::from_data(data)
}
