//! Tests of the fused operations against the composed ones: values and gradients.

use burn::nn::{LayerNorm, LayerNormConfig, RmsNormConfig};
use burn::tensor::activation;
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use burn_flex::FlexTensor;
use burn_ir::{CustomOpIr, ScalarIr, TensorId, TensorIr};

use crate::{DocumentHeads, FusedOperation, composed, layer_norm, route, supports};

mod halves;

const EPSILON: f64 = 1e-5;

fn norm(dim: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(dim).with_epsilon(EPSILON).init(device)
}

/// Returns two devices: one keeps everything that backward needs, and one recomputes cheap operations.
fn devices() -> [Device; 2] {
    let device = Device::flex().autodiff();
    [device.clone(), device.gradient_checkpointing()]
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device).require_grad()
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32 values")
}

#[track_caller]
fn assert_close<const D: usize>(found: Tensor<D>, expected: Tensor<D>) {
    assert_eq!(found.dims(), expected.dims());
    let expected = values(expected);
    let largest = expected.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    for (found, expected) in values(found).into_iter().zip(expected) {
        // Not `>`, which would accept NaN.
        let is_close = (found - expected).abs() <= 2e-6 + 2e-6 * largest;
        assert!(is_close, "{found} is not {expected}");
    }
}

/// Compares two functions of one matrix, and their gradients.
#[track_caller]
fn assert_same<const D: usize>(
    x: &Tensor<2>,
    fused: impl Fn(Tensor<2>) -> Tensor<D>,
    composed: impl Fn(Tensor<2>) -> Tensor<D>,
) {
    assert!(supports(x));
    let (fused, composed) = (fused(x.clone()), composed(x.clone()));
    let weights = Tensor::random(fused.dims(), Distribution::Normal(0.0, 1.0), &x.device());
    assert_close(fused.clone(), composed.clone());
    let gradient = |y: Tensor<D>| {
        let grads = (y * weights.clone()).sum().backward();
        x.grad(&grads).expect("x has a gradient")
    };
    assert_close(gradient(fused), gradient(composed));
}

#[test]
fn gelu_matches_burn() {
    for device in devices() {
        // More rows than a chunk, and a width that is not a multiple of the lanes.
        let x = random([70, 19], &device);
        assert_same(&x, route::gelu, activation::gelu);
    }
}

#[test]
fn gelu_of_a_view_matches_its_elements() {
    for device in devices() {
        let x = random([12, 9], &device);
        assert_same(
            &x,
            |x| route::gelu(x.transpose().narrow(0, 1, 5)),
            |x| activation::gelu(x.transpose().narrow(0, 1, 5)),
        );
    }
}

#[test]
fn layer_norm_matches_burn() {
    for device in devices() {
        let mut burns = norm(19, &device);
        burns.gamma = burns.gamma.map(|_| random([19], &device));
        burns.beta = burns.beta.map(|beta| beta.map(|_| random([19], &device)));
        let x = random([70, 19], &device);
        let fused = |x| layer_norm(&burns, EPSILON, x);
        assert_same(&x, fused, |x| burns.forward(x));
        let [fused, composed] =
            [fused(x.clone()), burns.forward(x)].map(|y| parameter_gradients(&burns, y));
        assert_close(fused[0].clone(), composed[0].clone());
        assert_close(fused[1].clone(), composed[1].clone());
    }
}

/// Returns the gradients of gamma and beta when each output has a different weight.
fn parameter_gradients(norm: &LayerNorm, output: Tensor<2>) -> [Tensor<1>; 2] {
    let [rows, width] = output.dims();
    let weights = Tensor::<1, Int>::arange(0..(rows * width) as i64, &output.device());
    let weights = weights.float().sin().reshape([rows, width]);
    let grads = (output * weights).sum().backward();
    let beta = norm.beta.as_ref().expect("the norm has a beta");
    [&norm.gamma, beta].map(|param| param.val().grad(&grads).expect("parameters have gradients"))
}

#[test]
fn rms_norm_matches_burn() {
    let device = Device::flex().autodiff();
    for shape in [[70, 19], [1, 1], [5, 64], [3, 1000]] {
        for special in [None, Some(f32::NAN), Some(f32::INFINITY), Some(1e-30)] {
            let mut burns = RmsNormConfig::new(shape[1])
                .with_epsilon(EPSILON)
                .init(&device);
            burns.gamma = burns.gamma.map(|_| random([shape[1]], &device));
            let mut x = random(shape, &device);
            if let Some(special) = special {
                let mut values = values(x);
                values[0] = special;
                x = Tensor::from_data(TensorData::new(values, shape), &device).require_grad();
            }
            let weights: Tensor<2> = random(shape, &device).detach();
            let composed = burns.forward(x.clone());
            let grads = (composed.clone() * weights.clone()).sum().backward();
            let gamma = burns.gamma.val();
            let expected = [
                composed.into_data(),
                x.grad(&grads).expect("x has a gradient").into_data(),
                gamma
                    .grad(&grads)
                    .expect("gamma has a gradient")
                    .into_data(),
            ];
            let inputs = [x.into_data(), gamma.into_data(), weights.into_data()];
            let inputs = inputs.map(FlexTensor::from_data).to_vec();
            let results = |operation: FusedOperation, inputs: &[FlexTensor]| {
                let call = call(operation, inputs, vec![ScalarIr::Float(EPSILON)]);
                operation.run(&call, inputs.to_vec())
            };
            let mut found = results(FusedOperation::RmsNorm, &inputs[..2]);
            found.extend(results(FusedOperation::RmsNormBackward, &inputs));
            for (found, expected) in found.into_iter().zip(expected) {
                let [found, expected] = [found.into_data(), expected]
                    .map(|data| data.try_to_vec::<f32>().expect("32-bit floats"));
                let what = format!("{shape:?} with {special:?}");
                assert_near(&what, &found, &expected, 1e-5);
            }
        }
    }
}

#[test]
fn attention_matches_the_composed_one() {
    for device in devices() {
        // Shorter than a block, one block, several blocks, and a remainder; one head and more.
        for (batch, time, heads) in [(1, 1, 1), (3, 5, 2), (1, 64, 3), (2, 130, 2)] {
            let x = random([batch * time, 3 * 6 * heads], &device);
            assert_same(
                &x,
                |x| route::causal_attention(x, batch, heads),
                |x| composed::causal_attention(&x, batch, heads),
            );
        }
    }
}

/// Lengths of the documents of sequences: alone, short, at the edges of blocks, and over several blocks.
const DOCUMENTS: [&[&[usize]]; 4] = [
    &[&[1], &[1]],
    &[&[5, 2, 1, 2], &[10], &[3, 7]],
    &[&[64, 1, 65], &[130], &[2, 63, 64, 1], &[30, 70, 30]],
    &[&[190, 2, 8], &[2; 100]],
];

/// Returns the positions of tokens in documents of these lengths.
fn positions(documents: &[&[usize]], device: &Device) -> Tensor<2, Int> {
    let lens = documents.iter().flat_map(|lens| lens.iter());
    let positions: Vec<i64> = lens.flat_map(|len| 0..*len as i64).collect();
    let shape = [documents.len(), positions.len() / documents.len()];
    Tensor::from_data(TensorData::new(positions, shape), device)
}

#[test]
fn attention_within_documents_is_that_of_each_document_alone() {
    for device in devices() {
        for documents in DOCUMENTS {
            let positions = positions(documents, &device);
            let [batch, time] = positions.dims();
            for heads in [1, 3] {
                let x = random([batch * time, 3 * 6 * heads], &device);
                let alone = |x: Tensor<2>| {
                    let mut start = 0;
                    let each = documents.iter().flat_map(|lens| lens.iter()).map(|len| {
                        let own = x.clone().narrow(0, start, *len);
                        start += len;
                        composed::causal_attention(&own, 1, heads)
                    });
                    Tensor::cat(each.collect(), 0)
                };
                let form = DocumentHeads { heads, reach: None };
                let fused = |x| route::document_attention(x, positions.clone(), form);
                assert_same(&x, fused, alone);
                let composed = |x| composed::document_attention(&x, positions.clone(), form);
                assert_same(&x, composed, alone);
            }
        }
    }
}

#[test]
fn the_reach_limits_attention_within_documents() {
    let device = Device::flex().autodiff();
    for documents in DOCUMENTS {
        let positions = positions(documents, &device);
        let [batch, time] = positions.dims();
        for reach in [1, 2, 4, 65, 1000] {
            let form = DocumentHeads {
                heads: 2,
                reach: Some(reach),
            };
            let x = random([batch * time, 36], &device);
            let fused = |x| route::document_attention(x, positions.clone(), form);
            let composed = |x| composed::document_attention(&x, positions.clone(), form);
            assert_same(&x, fused, composed);
            if reach == 1 {
                // Each token attends to itself alone, so the result is the values.
                assert_close(fused(x.clone()), x.narrow(1, 24, 12));
            }
        }
    }
}

#[test]
fn cross_entropy_matches_the_composed_one() {
    for device in devices() {
        let x = random([70, 19], &device);
        let targets: Vec<i64> = (0..70).map(|row| row * 7 % 19).collect();
        let targets = Tensor::from_data(TensorData::new(targets, [70]), &device);
        assert_same(
            &x,
            |x| route::cross_entropy(x, targets.clone()),
            |x| composed::cross_entropy(x, targets.clone()),
        );
    }
}

#[test]
fn cross_entropy_leaves_logits_that_others_hold() {
    let device = Device::flex().autodiff();
    let logits = random([4, 9], &device);
    let before = values(logits.clone());
    let targets = Tensor::from_data(TensorData::from([0_i64, 1, 2, 3]), &device);
    let loss = route::cross_entropy(logits.clone(), targets);
    assert!(loss.into_scalar::<f32>() > 0.0);
    assert_eq!(values(logits), before);
}

#[test]
fn large_logits_do_not_overflow() {
    let device = Device::flex().autodiff();
    let logits = Tensor::<2>::from_data([[1000.0, -1000.0, 0.0]], &device).require_grad();
    let targets = Tensor::from_data(TensorData::from([1_i64]), &device);
    let loss = route::cross_entropy(logits, targets).into_scalar::<f32>();
    assert_eq!(loss, 2000.0);
}

#[test]
fn nan_propagates() {
    let device = Device::flex();
    let x = Tensor::<2>::from_data([[f32::NAN, 1.0, 2.0]], &device);
    let targets = Tensor::from_data(TensorData::from([1_i64]), &device);
    assert!(values(route::gelu(x.clone()))[0].is_nan());
    assert!(values(route::causal_attention(x.clone(), 1, 1))[0].is_nan());
    assert!(
        route::cross_entropy(x, targets)
            .into_scalar::<f32>()
            .is_nan()
    );
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("a pool can be built").install(|| {
            let device = Device::flex().autodiff();
            let data: Vec<f32> = (0..200 * 18).map(|i| (i as f32 * 0.37).sin()).collect();
            let x =
                Tensor::<2>::from_data(TensorData::new(data, [200, 18]), &device).require_grad();
            let norm = norm(18, &device);
            let y = route::causal_attention(layer_norm(&norm, EPSILON, x.clone()), 2, 3);
            let grads = route::gelu(y).sum().backward();
            let gamma = norm.gamma.val().grad(&grads).expect("gamma has a gradient");
            (
                values(gamma),
                values(x.grad(&grads).expect("x has a gradient")),
            )
        })
    };
    assert_eq!(run(1), run(3));
}

/// Returns rows of a tensor with three dims. Some contain masked or overflowing elements.
fn rows_of(shape: [usize; 3], special: Option<f32>) -> Vec<f32> {
    let len = shape.iter().product::<usize>();
    let mut values: Vec<f32> = (0..len)
        .map(|index| ((index * 7919 % 1013) as f32 - 506.0) / 97.0)
        .collect();
    if let (Some(special), Some(value)) = (special, values.get_mut(len / 2)) {
        *value = special;
    }
    values
}

fn call(operation: FusedOperation, inputs: &[FlexTensor], scalars: Vec<ScalarIr>) -> CustomOpIr {
    let shape = inputs[0].layout().shape().clone();
    let tensor = TensorIr::uninit(TensorId::new(0), shape, DType::F32);
    CustomOpIr::with_scalars(
        operation.name(),
        std::slice::from_ref(&tensor),
        std::slice::from_ref(&tensor),
        scalars,
    )
}

fn run(operation: FusedOperation, inputs: Vec<FlexTensor>) -> Vec<f32> {
    let call = call(operation, &inputs, Vec::new());
    let outputs = operation.run(&call, inputs);
    outputs[0]
        .clone()
        .into_data()
        .try_to_vec()
        .expect("f32 values")
}

#[track_caller]
fn assert_near(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let is_same = found == expected || found.is_nan() && expected.is_nan();
        let is_close = (found - expected).abs() <= tolerance * (1.0 + expected.abs());
        assert!(is_same || is_close, "{what}: {found} is not {expected}");
    }
}

#[test]
fn softmax_of_any_rows_matches_burn() {
    let device = Device::flex().autodiff();
    for shape in [
        [2, 3, 5],
        [1, 1, 1],
        [4, 7, 33],
        [2, 40, 64],
        [3, 1, 1000],
        [0, 4, 3],
        [2, 3, 0],
    ] {
        let specials = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -1e4, 1e30];
        for special in specials.map(Some).into_iter().chain([None]) {
            let data = TensorData::new(rows_of(shape, special), shape);
            // Composed in 64 bits, because a sequential sum of a thousand addends in 32 bits is not exact to 1e-6.
            let x = Tensor::<3>::from_data(data.clone(), (&device, DType::F64)).require_grad();
            let weights = TensorData::new(rows_of(shape, None), shape);
            for is_log in [false, true] {
                let (of, gradient_of) = if is_log {
                    (
                        FusedOperation::LogSoftmax,
                        FusedOperation::LogSoftmaxBackward,
                    )
                } else {
                    (FusedOperation::Softmax, FusedOperation::SoftmaxBackward)
                };
                let what = format!("{of:?} of {shape:?} with {special:?}");
                if shape.contains(&0) {
                    // Burn has no maximum of an empty tensor.
                    let fused = run(of, vec![FlexTensor::from_data(data.clone())]);
                    assert!(fused.is_empty(), "{what}");
                    continue;
                }
                let y = if is_log {
                    activation::log_softmax(x.clone(), 2)
                } else {
                    activation::softmax(x.clone(), 2)
                };
                let expected = values(y.clone().inner().cast(DType::F32));
                let fused = run(of, vec![FlexTensor::from_data(data.clone())]);
                assert_near(&what, &fused, &expected, 1e-6);
                let grad = Tensor::<3>::from_data(weights.clone(), (&device, DType::F64));
                let gradients = (y * grad).sum().backward();
                let expected = x.grad(&gradients).expect("x has a gradient");
                let expected = values(expected.cast(DType::F32));
                let y = FlexTensor::from_data(TensorData::new(fused, shape));
                let grad = FlexTensor::from_data(weights.clone());
                // Each gradient contains a sum over the row, hence the larger tolerance.
                let found = run(gradient_of, vec![y, grad]);
                assert_near(&what, &found, &expected, 1e-5);
            }
        }
    }
}

#[test]
fn log_likelihoods_of_classes_match_burn() {
    let device = Device::flex().autodiff();
    for shape in [[5, 3], [1, 1], [70, 33], [33, 1000]] {
        let [rows, width] = shape;
        for special in [
            None,
            Some(f32::NEG_INFINITY),
            Some(f32::INFINITY),
            Some(f32::NAN),
            Some(1e4),
        ] {
            let what = format!("{shape:?} with {special:?}");
            let data = TensorData::new(rows_of([1, rows, width], special), shape);
            let logits = Tensor::<2>::from_data(data.clone(), (&device, DType::F64)).require_grad();
            let classes: Vec<i64> = (0..rows).map(|row| (row * 7 % width) as i64).collect();
            let classes = TensorData::new(classes, [rows, 1]);
            let grads = TensorData::new(rows_of([1, rows, 1], None), [rows, 1]);

            let chosen = activation::log_softmax(logits.clone(), 1);
            let chosen = chosen.gather(1, Tensor::<2, Int>::from_data(classes.clone(), &device));
            let grad = Tensor::<2>::from_data(grads.clone(), (&device, DType::F64));
            let gradients = (chosen.clone() * grad).sum().backward();
            let gradient = logits.grad(&gradients).expect("logits have a gradient");

            let fused = |data: &TensorData| FlexTensor::from_data(data.clone());
            let of = FusedOperation::LogLikelihood;
            let inputs = vec![fused(&data), fused(&classes)];
            let mut found = of.run(&call(of, &inputs, Vec::new()), inputs).into_iter();
            let (found, kept) = (
                found.next().expect("a result"),
                found.next().expect("another"),
            );
            let found: Vec<f32> = found.into_data().try_to_vec().expect("32-bit floats");
            assert_near(
                &what,
                &found,
                &values(chosen.inner().cast(DType::F32)),
                1e-6,
            );
            let inputs = vec![fused(&data), fused(&classes), kept, fused(&grads)];
            let found = run(FusedOperation::LogLikelihoodBackward, inputs);
            assert_near(&what, &found, &values(gradient.cast(DType::F32)), 1e-5);
        }
    }
}

#[test]
fn gelu_of_any_rows_matches_burn() {
    let device = Device::flex().autodiff();
    for shape in [[2, 3, 5], [1, 1, 1], [4, 7, 33]] {
        for special in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 0.0] {
            let data = TensorData::new(rows_of(shape, Some(special)), shape);
            let x = Tensor::<3>::from_data(data.clone(), &device);
            let expected = values(activation::gelu(x).inner());
            let fused = run(FusedOperation::Gelu, vec![FlexTensor::from_data(data)]);
            assert_near(
                &format!("{shape:?} with {special}"),
                &fused,
                &expected,
                1e-6,
            );
        }
    }
}

#[test]
fn silu_and_swiglu_match_burn() {
    let device = Device::flex().autodiff();
    // The last shape has more elements than one thread processes at a time.
    for shape in [[2, 3, 5], [1, 1, 1], [4, 7, 33], [0, 3, 2], [3, 41, 67]] {
        let specials = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 0.0, -95.0, 3e38];
        for special in specials {
            let what = format!("{shape:?} with {special}");
            let tensor = |special| {
                let data = TensorData::new(rows_of(shape, special), shape);
                Tensor::<3>::from_data(data, &device)
            };
            let gate = tensor(Some(special)).require_grad();
            // Distinct gradients, so exchanged rows are detected.
            let up = tensor(None).sin().require_grad();
            let grad = tensor(None).cos();
            let fused = |of: Tensor<3>| FlexTensor::from_data(of.inner().into_data());

            let y = activation::silu(gate.clone());
            let found = run(FusedOperation::Silu, vec![fused(gate.clone())]);
            assert_near(&what, &found, &values(y.clone().inner()), 1e-6);
            let gradients = (y * grad.clone()).sum().backward();
            let expected = values(gate.grad(&gradients).expect("a gradient"));
            let inputs = vec![fused(gate.clone()), fused(grad.clone())];
            let found = run(FusedOperation::SiluBackward, inputs);
            assert_near(&what, &found, &expected, 1e-6);

            let y = activation::silu(gate.clone()) * up.clone();
            let inputs = vec![fused(gate.clone()), fused(up.clone())];
            let found = run(FusedOperation::SwiGlu, inputs.clone());
            assert_near(&what, &found, &values(y.clone().inner()), 1e-6);
            let gradients = (y * grad.clone()).sum().backward();
            let inputs = [inputs, vec![fused(grad)]].concat();
            let of = FusedOperation::SwiGluBackward;
            let found = of.run(&call(of, &inputs, Vec::new()), inputs);
            for (found, of) in found.into_iter().zip([&gate, &up]) {
                let found: Vec<f32> = found.into_data().try_to_vec().expect("32-bit floats");
                let expected = values(of.grad(&gradients).expect("a gradient"));
                assert_near(&what, &found, &expected, 1e-6);
            }
        }
    }
}
