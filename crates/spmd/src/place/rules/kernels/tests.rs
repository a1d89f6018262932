//! Tests of the kernels' signatures against the kernels' results: on operands sharded along a letter, kernels compute
//! parts or addends of the results.

use burn::tensor::{DType, Shape, TensorData};
use burn_flex::FlexTensor;
use burn_fsdp_kernels::FusedOperation;
use burn_ir::{CustomOpIr, ScalarIr, TensorId, TensorIr, TensorStatus};

use super::signature;
use crate::place::signature::{Letter, Operand, Signature};

const EPSILON: f64 = 1e-5;

/// The operands of a kernel, and the shapes of its results.
struct Case {
    kernel: FusedOperation,
    inputs: Vec<FlexTensor>,
    outputs: Vec<Vec<usize>>,
    scalars: Vec<ScalarIr>,
}

fn floats(shape: &[usize], seed: usize) -> FlexTensor {
    let len = shape.iter().product();
    let value = |at: usize| (((at + 31 * seed) * 7919 % 1013) as f32 - 506.0) / 307.0;
    let values: Vec<f32> = (0..len).map(value).collect();
    FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
}

fn classes(shape: &[usize]) -> FlexTensor {
    let len = shape.iter().product();
    let values: Vec<i64> = (0..len).map(|at: usize| (at * 5 % 7) as i64).collect();
    FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
}

fn mask(shape: &[usize]) -> FlexTensor {
    let len = shape.iter().product();
    let values: Vec<bool> = (0..len).map(|at: usize| at % 3 == 1).collect();
    FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
}

fn cases() -> Vec<Case> {
    use FusedOperation as Op;
    let rows = vec![4, 6, 8];
    let case = |kernel, inputs, outputs: &[&[usize]], scalars: &[f64]| Case {
        kernel,
        inputs,
        outputs: outputs.iter().map(|shape| shape.to_vec()).collect(),
        scalars: scalars
            .iter()
            .map(|scalar| ScalarIr::Float(*scalar))
            .collect(),
    };
    let of = |count: usize| {
        (0..count)
            .map(|seed| floats(&rows, seed))
            .collect::<Vec<_>>()
    };
    let mut all = Vec::new();
    for kernel in [Op::Gelu, Op::Silu, Op::Softmax, Op::LogSoftmax] {
        all.push(case(kernel, of(1), &[&rows], &[]));
    }
    let gradients = [Op::GeluBackward, Op::SiluBackward, Op::SoftmaxBackward];
    for kernel in gradients
        .into_iter()
        .chain([Op::LogSoftmaxBackward, Op::SwiGlu])
    {
        all.push(case(kernel, of(2), &[&rows], &[]));
    }
    all.push(case(Op::SwiGluBackward, of(3), &[&rows, &rows], &[]));
    let (gamma, beta) = (floats(&[8], 7), floats(&[8], 8));
    let norm = |with: &[&FlexTensor], count| {
        let mut inputs = of(count);
        let behind = inputs.split_off(1);
        inputs.extend(with.iter().map(|tensor| (*tensor).clone()));
        inputs.extend(behind);
        inputs
    };
    all.push(case(
        Op::LayerNorm,
        norm(&[&gamma, &beta], 1),
        &[&rows],
        &[EPSILON],
    ));
    let both = norm(&[&gamma], 2);
    all.push(case(
        Op::LayerNormBackward,
        both.clone(),
        &[&rows, &[8], &[8]],
        &[EPSILON],
    ));
    all.push(case(Op::RmsNorm, norm(&[&gamma], 1), &[&rows], &[EPSILON]));
    all.push(case(Op::RmsNormBackward, both, &[&rows, &[8]], &[EPSILON]));
    let chosen = vec![floats(&rows, 1), classes(&[4, 6, 1])];
    all.push(case(
        Op::LogLikelihood,
        chosen.clone(),
        &[&[4, 6, 1], &[4, 6, 2]],
        &[],
    ));
    let kept = [floats(&[4, 6, 2], 2), floats(&[4, 6, 1], 3)];
    let inputs = chosen.into_iter().chain(kept).collect();
    all.push(case(Op::LogLikelihoodBackward, inputs, &[&rows], &[]));
    let operands = [
        floats(&[4, 6, 2, 8], 1),
        floats(&[4, 4, 2, 8], 2),
        floats(&[4, 4, 2, 6], 3),
    ];
    let masks = [&[4, 2, 6, 4][..], &[4, 1, 1, 4], &[1, 1, 6, 4]];
    for shape in masks {
        let mask = mask(shape);
        let factors = floats(&[4, 2, 6, 4], 4);
        let inputs = operands.iter().cloned();
        let inputs = inputs.chain([mask.clone(), factors.clone()]).collect();
        all.push(case(
            Op::Attention,
            inputs,
            &[&[4, 6, 2, 6]],
            &[0.4, -1e9, 1.25],
        ));
        let inputs = operands.iter().cloned();
        let inputs = inputs
            .chain([floats(&[4, 6, 2, 6], 5), mask, factors])
            .collect();
        let shapes = [&[4, 6, 2, 8][..], &[4, 4, 2, 8], &[4, 4, 2, 6]];
        all.push(case(
            Op::AttentionBackward,
            inputs,
            &shapes,
            &[0.4, -1e9, 1.25],
        ));
    }
    all
}

fn call(case: &Case, inputs: &[FlexTensor], outputs: &[Vec<usize>]) -> CustomOpIr {
    let tensor = |id: usize, shape: Shape, dtype: DType| TensorIr {
        id: TensorId::new(id as u64),
        shape,
        status: TensorStatus::ReadOnly,
        dtype,
    };
    let of_inputs = inputs.iter().enumerate();
    let of_outputs = outputs.iter().enumerate();
    CustomOpIr {
        id: case.kernel.name().to_owned(),
        inputs: of_inputs
            .map(|(id, input)| tensor(id, input.layout().shape().clone(), input.dtype()))
            .collect(),
        outputs: of_outputs
            .map(|(id, shape)| tensor(100 + id, Shape::from(shape.clone()), DType::F32))
            .collect(),
        scalars: case.scalars.clone(),
    }
}

/// Returns a rank's half of a tensor along a letter, or the whole tensor if it lacks the letter.
fn part(tensor: &FlexTensor, operand: &Operand, letter: Letter, rank: usize) -> FlexTensor {
    match operand.dim_of(letter) {
        Some(dim) => {
            let half = operand.shape[dim] / 2;
            tensor.narrow(dim, rank * half, half)
        }
        None => tensor.clone(),
    }
}

fn values(tensor: &FlexTensor) -> Vec<f32> {
    let data = tensor.to_contiguous().into_data();
    data.try_to_vec().expect("32-bit floats")
}

/// Runs a kernel on the parts of two ranks along a letter, and compares the combined results with `whole`.
fn check(case: &Case, whole: &[FlexTensor], of: &Signature, letter: Letter) {
    let results = [0, 1].map(|rank| {
        let operands = case.inputs.iter().zip(&of.inputs);
        let inputs: Vec<FlexTensor> = operands
            .map(|(tensor, operand)| part(tensor, operand, letter, rank))
            .collect();
        let shapes = of.outputs.iter().map(|operand| {
            let mut shape = operand.shape.clone();
            if let Some(dim) = operand.dim_of(letter) {
                shape[dim] /= 2;
            }
            shape
        });
        let shapes: Vec<Vec<usize>> = shapes.collect();
        let call = call(case, &inputs, &shapes);
        case.kernel.run(&call, inputs)
    });
    for (index, (whole, operand)) in whole.iter().zip(&of.outputs).enumerate() {
        let what = format!("{} along {letter}, result {index}", case.kernel.name());
        let parts = [0, 1].map(|rank| values(&results[rank][index]));
        if operand.dim_of(letter).is_some() {
            for (rank, got) in parts.iter().enumerate() {
                assert_close(&what, got, &values(&part(whole, operand, letter, rank)));
            }
            continue;
        }
        assert!(
            of.contracted.contains_key(&letter),
            "{what}: no operand provides it"
        );
        let sums: Vec<f32> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();
        assert_close(&what, &sums, &values(whole));
    }
}

#[track_caller]
fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        let difference = (got - expected).abs();
        assert!(
            difference <= 1e-4 * expected.abs().max(1.0),
            "{what}: {got} for {expected}"
        );
    }
}

#[test]
fn kernels_run_on_the_parts_in_their_signatures() {
    let mut num_letters = 0;
    for case in cases() {
        let call = call(&case, &case.inputs, &case.outputs);
        let of = signature(&call).expect("a signature");
        assert_eq!(of.fault(), None, "{}", case.kernel.name());
        let whole = case.kernel.run(&call, case.inputs.clone());
        for letter in of.letters() {
            check(&case, &whole, &of, letter);
            num_letters += 1;
        }
    }
    assert!(num_letters > 50, "{num_letters}");
}

#[test]
fn gradients_are_linear_in_their_addends() {
    for case in cases() {
        let call = call(&case, &case.inputs, &case.outputs);
        let of = signature(&call).expect("a signature");
        for linear in &of.linear {
            let whole = case.kernel.run(&call, case.inputs.clone());
            let addend = |seed: usize| {
                let inputs = case.inputs.iter().zip(&of.inputs);
                let inputs = inputs.map(|(tensor, operand)| {
                    if !linear.contains(&operand.id) {
                        return tensor.clone();
                    }
                    let other = values(&floats(&operand.shape, 11));
                    let own = values(tensor).into_iter().zip(other);
                    let addend = own.map(|(own, other)| match seed {
                        0 => other,
                        _ => own - other,
                    });
                    let addend: Vec<f32> = addend.collect();
                    FlexTensor::from_data(TensorData::new(addend, operand.shape.clone()))
                });
                case.kernel.run(&call, inputs.collect())
            };
            let (first, second) = (addend(0), addend(1));
            for (index, whole) in whole.iter().enumerate() {
                let pairs = values(&first[index])
                    .into_iter()
                    .zip(values(&second[index]));
                let sums: Vec<f32> = pairs.map(|(a, b)| a + b).collect();
                assert_close(case.kernel.name(), &sums, &values(whole));
            }
        }
    }
    let has_linear = |case: &Case| {
        let call = call(case, &case.inputs, &case.outputs);
        signature(&call).is_some_and(|of| !of.linear.is_empty())
    };
    assert!(cases().iter().filter(|case| has_linear(case)).count() >= 9);
}
