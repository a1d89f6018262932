//! Tests of kernels on halves: each equals the kernel on the same numbers in 32 bits, with the results rounded once.
//! In 32 bits, each equals its composed form in 64 bits, up to rounding.

use burn::tensor::{DType, TensorData, bf16};
use burn_flex::FlexTensor;
use burn_ir::{CustomOpIr, ScalarIr, TensorId, TensorIr};

use crate::{Array, FormCall, FormScalar, FusedOperation as Op, Logarithms};

/// An operand with numbers that are exact in halves.
#[derive(Clone)]
struct Operand {
    values: Vec<f32>,
    shape: Vec<usize>,
    kind: DType,
}

impl Operand {
    fn floats(shape: &[usize], seed: usize) -> Self {
        let value = |at: usize| (((at + seed) * 7919 % 1013) as f32 - 506.0) / 350.0;
        let len = shape.iter().product();
        Self {
            values: (0..len)
                .map(|at| bf16::from_f32(value(at)).to_f32())
                .collect(),
            shape: shape.to_vec(),
            kind: DType::BF16,
        }
    }

    /// Returns the same operand as 32-bit floats, for calls that mix types.
    fn full(self) -> Self {
        Self {
            kind: DType::F32,
            ..self
        }
    }

    fn with(mut self, at: usize, value: f32) -> Self {
        self.values[at] = bf16::from_f32(value).to_f32();
        self
    }

    fn indices(values: &[i64]) -> Self {
        Self {
            values: values.iter().map(|value| *value as f32).collect(),
            shape: vec![values.len()],
            kind: DType::I64,
        }
    }

    fn tensor(&self, float: DType) -> FlexTensor {
        let kind = if self.kind == DType::BF16 {
            float
        } else {
            self.kind
        };
        let data = TensorData::new(self.values.clone(), self.shape.clone());
        FlexTensor::from_data(data.convert_dtype(kind))
    }
}

fn run(operation: Op, operands: &[Operand], scalars: &[ScalarIr], float: DType) -> Vec<FlexTensor> {
    let tensors: Vec<FlexTensor> = operands.iter().map(|of| of.tensor(float)).collect();
    operation.run(&call_of(operation, &tensors, scalars), tensors)
}

fn call_of(operation: Op, tensors: &[FlexTensor], scalars: &[ScalarIr]) -> CustomOpIr {
    let declared = tensors.iter().map(|tensor| {
        let shape = tensor.layout().shape().clone();
        TensorIr::uninit(TensorId::new(0), shape, tensor.dtype())
    });
    let declared: Vec<TensorIr> = declared.collect();
    CustomOpIr::with_scalars(operation.name(), &declared, &declared, scalars.to_vec())
}

/// Computes probabilities from their logarithms.
#[derive(Debug)]
struct Exponentials;

impl Logarithms<f64> for Exponentials {
    fn keep(&self, _: f64, _: f64) {}

    fn probability(&self, logarithm: f64) -> f64 {
        logarithm.exp()
    }
}

/// Compares results in 32 bits with the composed form in 64 bits, unless an operand is not finite or huge.
#[track_caller]
fn assert_composed(operation: Op, operands: &[Operand], scalars: &[ScalarIr], full: &[FlexTensor]) {
    let values = operands.iter().flat_map(|of| &of.values);
    if values.into_iter().any(|x| x.abs() > 1e30 || x.is_nan()) {
        return;
    }
    let tensors: Vec<FlexTensor> = operands.iter().map(|of| of.tensor(DType::F32)).collect();
    let inputs = operands.iter().map(|of| {
        let elements = of.values.iter().copied().map(f64::from);
        Array::new(of.shape.clone(), elements.collect())
    });
    let numbers = scalars.iter().copied().map(FormScalar::Number);
    let expected = operation.composed(&FormCall {
        call: &call_of(operation, &tensors, scalars),
        inputs: &inputs.collect::<Vec<_>>(),
        scalars: &numbers.collect::<Vec<_>>(),
        logarithms: &Exponentials,
    });
    let expected = expected.expect("a composed form");
    assert_eq!(expected.len(), full.len(), "{operation:?}");
    for (expected, found) in expected.into_iter().zip(full) {
        assert_eq!(found.layout().shape().as_slice(), expected.shape);
        let largest = expected
            .elements
            .iter()
            .fold(1.0, |a: f64, b| a.max(b.abs()));
        for (expected, found) in expected.elements.iter().zip(floats(found.clone())) {
            let difference = (f64::from(found) - expected).abs();
            assert!(
                difference <= 2e-5 * largest,
                "{operation:?}: {found} is not {expected}"
            );
        }
    }
}

fn floats(tensor: FlexTensor) -> Vec<f32> {
    let data = tensor.to_contiguous().into_data().convert_dtype(DType::F32);
    data.try_to_vec().expect("32-bit floats")
}

/// Compares a call on halves with the same call on 32-bit floats.
#[track_caller]
fn assert_rounded(operation: Op, operands: &[Operand], scalars: &[ScalarIr]) {
    let halves = run(operation, operands, scalars, DType::BF16);
    let full = run(operation, operands, scalars, DType::F32);
    assert_eq!(halves.len(), full.len());
    assert_composed(operation, operands, scalars, &full);
    for (number, (half, full)) in halves.into_iter().zip(full).enumerate() {
        assert_eq!(half.layout().shape(), full.layout().shape());
        // A loss has 32 bits, regardless of the type of the logits, and so do the numbers kept for the rows.
        let is_loss = [Op::CrossEntropy, Op::LogLikelihood].contains(&operation) && number == 1;
        assert_eq!(half.dtype(), if is_loss { DType::F32 } else { DType::BF16 });
        for (found, expected) in floats(half).into_iter().zip(floats(full)) {
            let expected = if is_loss {
                expected
            } else {
                bf16::from_f32(expected).to_f32()
            };
            let is_same = found == expected || found.is_nan() && expected.is_nan();
            assert!(is_same, "{operation:?}: {found} is not {expected}");
        }
    }
}

#[test]
fn rows_of_halves_are_computed_in_32_bits() {
    // More rows than a chunk, a width that is not a multiple of the lanes, and special numbers.
    for shape in [&[70, 19][..], &[2, 40, 64], &[1, 1], &[3, 1000], &[0, 4]] {
        let width = shape[shape.len() - 1];
        let len: usize = shape.iter().product();
        for special in [None, Some(f32::NAN), Some(f32::INFINITY), Some(3e38)] {
            let x = match special {
                Some(special) if len > 0 => Operand::floats(shape, 1).with(len / 2, special),
                _ => Operand::floats(shape, 1),
            };
            let grad = Operand::floats(shape, 2);
            let [gamma, beta] = [3, 4].map(|seed| Operand::floats(&[width], seed));
            let epsilon = [ScalarIr::Float(1e-5)];
            let both = [x.clone(), grad.clone()];
            assert_rounded(Op::Gelu, &both[..1], &[]);
            assert_rounded(Op::GeluBackward, &both, &[]);
            assert_rounded(Op::Silu, &both[..1], &[]);
            assert_rounded(Op::SiluBackward, &both, &[]);
            assert_rounded(Op::SwiGlu, &both, &[]);
            let gated = [x.clone(), Operand::floats(shape, 5), grad.clone()];
            assert_rounded(Op::SwiGluBackward, &gated, &[]);
            assert_rounded(Op::Softmax, &both[..1], &[]);
            assert_rounded(Op::SoftmaxBackward, &both, &[]);
            assert_rounded(Op::LogSoftmax, &both[..1], &[]);
            assert_rounded(Op::LogSoftmaxBackward, &both, &[]);
            let norm = [x.clone(), gamma.clone(), beta];
            assert_rounded(Op::LayerNorm, &norm, &epsilon);
            let of_norm = [x, gamma, grad];
            assert_rounded(Op::LayerNormBackward, &of_norm, &epsilon);
            assert_rounded(Op::RmsNorm, &of_norm[..2], &epsilon);
            assert_rounded(Op::RmsNormBackward, &of_norm, &epsilon);
        }
    }
}

#[test]
fn attention_of_halves_is_computed_in_32_bits() {
    for (batch, time, heads) in [(1, 1, 1), (3, 5, 2), (2, 130, 2)] {
        let qkv = Operand::floats(&[batch * time, 3 * 6 * heads], 1);
        let grad = Operand::floats(&[batch * time, 6 * heads], 2);
        let sizes = [batch, heads].map(|size| ScalarIr::UInt(size as u64));
        let both = [qkv, grad];
        assert_rounded(Op::CausalAttention, &both[..1], &sizes);
        assert_rounded(Op::CausalAttentionBackward, &both, &sizes);
        let in_documents: Vec<i64> = (0..batch * time)
            .map(|at| at as i64 % time as i64 % 7)
            .collect();
        let positions = Operand {
            shape: vec![batch, time],
            ..Operand::indices(&in_documents)
        };
        let [qkv, grad] = both;
        for reach in [0, 3] {
            let [batch, heads] = sizes;
            let scalars = [batch, heads, ScalarIr::UInt(reach)];
            let operands = [qkv.clone(), positions.clone()];
            assert_rounded(Op::CausalAttention, &operands, &scalars);
            let operands = [qkv.clone(), grad.clone(), positions.clone()];
            assert_rounded(Op::CausalAttentionBackward, &operands, &scalars);
        }
        let part = |seed| Operand::floats(&[batch, time, heads, 6], seed);
        let mask = Operand {
            kind: DType::Bool(burn::tensor::BoolStore::Native),
            ..Operand::floats(&[1, 1, time, time], 0)
        };
        let ahead = |at: usize| f32::from(u8::from(at % time > at / time));
        let mask = Operand {
            values: (0..time * time).map(ahead).collect(),
            ..mask
        };
        let scalars = [0.4, -1e4].map(ScalarIr::Float);
        let [q, k, v, grad] = [1, 2, 3, 4].map(part);
        let forward = [q.clone(), k.clone(), v.clone(), mask.clone()];
        assert_rounded(Op::Attention, &forward, &scalars);
        let backward = [q, k, v, grad, mask];
        assert_rounded(Op::AttentionBackward, &backward, &scalars);
        let factors = Operand::floats(&[batch, heads, time, time], 9);
        let scalars = [0.4, -1e4, 1.25].map(ScalarIr::Float);
        let forward = [&forward[..], std::slice::from_ref(&factors)].concat();
        let backward = [&backward[..], &[factors]].concat();
        assert_rounded(Op::Attention, &forward, &scalars);
        assert_rounded(Op::AttentionBackward, &backward, &scalars);
    }
}

#[test]
fn cross_entropy_of_halves_is_computed_in_32_bits() {
    let logits = Operand::floats(&[70, 19], 1);
    let targets: Vec<i64> = (0..70).map(|row| row * 7 % 19).collect();
    let targets = Operand::indices(&targets);
    let kept = Operand::floats(&[70, 2], 3).full();
    let grad = Operand::floats(&[70, 1], 4);
    let classes = Operand {
        shape: vec![70, 1],
        ..targets.clone()
    };
    let given = [logits.clone(), classes, kept, grad];
    assert_rounded(Op::LogLikelihood, &given[..2], &[]);
    assert_rounded(Op::LogLikelihoodBackward, &given, &[]);
    assert_rounded(Op::CrossEntropy, &[logits.clone(), targets], &[]);
    for factor in [1.0, 0.3] {
        let factor = Operand::floats(&[1], 0).with(0, factor).full();
        assert_rounded(Op::CrossEntropyBackward, &[logits.clone(), factor], &[]);
    }
}

#[test]
fn casts_round_once() {
    let x = Operand::floats(&[5, 7], 1)
        .full()
        .with(3, 1.003_9)
        .with(4, f32::NAN);
    let full = x.tensor(DType::F32);
    let declared = |dtype| {
        let shape = full.layout().shape().clone();
        [TensorIr::uninit(TensorId::new(0), shape, dtype)]
    };
    let cast = |x: FlexTensor, dtype| {
        let call = CustomOpIr::with_scalars(Op::Cast.name(), &[], &declared(dtype), Vec::new());
        Op::Cast.run(&call, vec![x]).remove(0)
    };
    // Also from a view.
    let halves = cast(full.transpose(0, 1), DType::BF16);
    assert_eq!(halves.dtype(), DType::BF16);
    let expected = floats(full.transpose(0, 1));
    for (found, expected) in floats(cast(halves, DType::F32)).into_iter().zip(expected) {
        let expected = bf16::from_f32(expected).to_f32();
        assert!(found == expected || found.is_nan() && expected.is_nan());
    }
}
