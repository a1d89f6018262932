//! Tests that programs are bit-identical to Burn's operations.

use burn::backend::{Backend, Flex};
use burn::tensor::{DType, Shape, TensorData};
use burn_flex::FlexTensor;

use super::run::run;
use super::{PointwiseOperand as Operand, PointwiseOperation as Op, PointwiseProgram};

/// Pseudorandom numbers, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Returns a number, mostly around one, sometimes infinite, a zero of either sign, or NaN.
    fn value(&mut self) -> f32 {
        match self.below(40) {
            0 => f32::INFINITY,
            1 => f32::NEG_INFINITY,
            2 => f32::NAN,
            3 => 0.0,
            4 => -0.0,
            5 => 1e-40,
            6 => 3e38,
            _ => (self.below(4001) as f32 - 2000.0) / 511.0,
        }
    }
}

const SHAPES: [[usize; 3]; 7] = [
    [2, 3, 5],
    [1, 1, 1],
    [4, 7, 33],
    [3, 1, 1000],
    [1, 5, 7001],
    [0, 4, 3],
    [17, 64, 65],
];

/// Returns an input that broadcasts to a shape: flat, with dims of one, with fewer dims, transposed, or a slice of
/// another tensor.
fn input(numbers: &mut Numbers, shape: [usize; 3], dtype: DType) -> FlexTensor {
    let mut own = shape.to_vec();
    match numbers.below(7) {
        0 => own[0] = 1,
        1 => own[2] = 1,
        2 => own = vec![1, 1, shape[2]],
        3 => own = vec![shape[2]],
        4 => own = vec![1],
        _ => {}
    }
    let values = |numbers: &mut Numbers, shape: &[usize]| {
        let len = shape.iter().product();
        let values: Vec<f32> = (0..len).map(|_| numbers.value()).collect();
        FlexTensor::from_data(TensorData::new(values, shape.to_vec()).convert_dtype(dtype))
    };
    match numbers.below(4) {
        0 if own.len() == 3 => {
            own.swap(1, 2);
            values(numbers, &own).transpose(1, 2)
        }
        1 => {
            let (dim, len) = (own.len() - 1, own[own.len() - 1]);
            own[dim] = len + 3;
            values(numbers, &own).narrow(dim, 2, len)
        }
        _ => values(numbers, &own),
    }
}

fn program(numbers: &mut Numbers, num_inputs: usize) -> PointwiseProgram {
    let mut program = PointwiseProgram::default();
    let mut known: Vec<Operand> = (0..num_inputs).map(Operand::Input).collect();
    for _ in 0..=numbers.below(12) {
        let operation = Op::ALL[numbers.below(Op::ALL.len())];
        let first = known[numbers.below(known.len())];
        let second = match numbers.below(3) {
            0 => {
                let number = f64::from(numbers.value());
                program.number(number)
            }
            _ => known[numbers.below(known.len())],
        };
        let second = operation.is_binary().then_some(second);
        known.push(program.push(operation, first, second));
    }
    program.write_over((numbers.below(2) == 0).then(|| numbers.below(num_inputs)));
    program
}

/// Runs the operations of a program one by one.
fn composed<B: Backend>(
    program: &PointwiseProgram,
    inputs: &[B::FloatTensorPrimitive],
    number: impl Fn(f32) -> B::FloatTensorPrimitive,
) -> B::FloatTensorPrimitive {
    let mut results: Vec<B::FloatTensorPrimitive> = Vec::new();
    let all: Vec<f32> = program.numbers().collect();
    for step in program.steps() {
        let operand = |operand| match operand {
            Operand::Input(index) => inputs[index].clone(),
            Operand::Step(index) => results[index].clone(),
            Operand::Number(index) => number(all[index]),
        };
        let (a, b) = (operand(step.first), operand(step.second));
        results.push(match step.operation {
            Op::Add => B::float_add(a, b),
            Op::Sub => B::float_sub(a, b),
            Op::Mul => B::float_mul(a, b),
            Op::Div => B::float_div(a, b),
            Op::Powf => B::float_powf(a, b),
            Op::Neg => B::float_neg(a),
            Op::Abs => B::float_abs(a),
            Op::Recip => B::float_recip(a),
            Op::Sqrt => B::float_sqrt(a),
            Op::Exp => B::float_exp(a),
            Op::Log => B::float_log(a),
            Op::Tanh => B::float_tanh(a),
            Op::Relu => B::relu(a),
            Op::ReluBackward => B::relu_backward(a, b),
            Op::Sigmoid => B::sigmoid(a),
            Op::SigmoidBackward => B::sigmoid_backward(a, b),
        });
    }
    results.pop().expect("a program has a step")
}

fn bits(tensor: FlexTensor) -> Vec<u32> {
    let data = tensor.into_data().convert_dtype(DType::F32);
    let values: Vec<f32> = data.try_to_vec().expect("f32 values");
    // The choice between two NaNs is not specified.
    let bits = |value: f32| if value.is_nan() { f32::NAN } else { value }.to_bits();
    values.into_iter().map(bits).collect()
}

#[test]
fn any_program_matches_burn_bit_for_bit() {
    has_burns_bits(DType::F32);
}

#[test]
fn any_program_on_halves_matches_burn_bit_for_bit() {
    has_burns_bits(DType::BF16);
}

fn has_burns_bits(dtype: DType) {
    let mut num_wide = 0;
    for seed in 1..=400 {
        let mut numbers = Numbers(seed * 0x9E37_79B9_7F4A_7C15);
        let shape = SHAPES[numbers.below(SHAPES.len())];
        let num_inputs = 1 + numbers.below(4);
        let mut inputs: Vec<FlexTensor> = (0..num_inputs)
            .map(|_| input(&mut numbers, shape, dtype))
            .collect();
        let program = program(&mut numbers, num_inputs);
        let expand = |tensor: &FlexTensor| {
            let zeros = FlexTensor::zeros(Shape::from(shape), dtype);
            // Adding minus zero does not change a number.
            expand::<Flex>(tensor.clone(), zeros)
        };
        let wide: Vec<FlexTensor> = inputs.iter().map(expand).collect();
        let number = |number: f32| {
            let values = vec![number; shape.iter().product()];
            FlexTensor::from_data(TensorData::new(values, shape).convert_dtype(dtype))
        };
        let expected = bits(composed::<Flex>(&program, &wide, number));
        let decoded = PointwiseProgram::from_scalars(&program.to_scalars());
        assert_eq!(decoded.as_ref().map(bits_of), Some(bits_of(&program)));
        // Once with shared inputs, and once with unshared ones.
        let held = inputs.clone();
        let found = run(&program, inputs.clone(), &Shape::from(shape));
        assert_eq!(bits(found), expected, "seed {seed}: {program:?}");
        for (held, input) in held.into_iter().zip(&inputs) {
            assert_eq!(
                bits(held),
                bits(input.clone()),
                "seed {seed} wrote over what is held"
            );
        }
        let own = inputs.drain(..).map(|tensor| tensor.to_contiguous());
        let own: Vec<FlexTensor> = own.collect();
        num_wide += usize::from(
            own.iter()
                .all(|input| input.layout().shape().num_dims() == 3),
        );
        let found = run(&program, own, &Shape::from(shape));
        assert_eq!(
            bits(found),
            expected,
            "seed {seed}, its own inputs: {program:?}"
        );
    }
    assert!(num_wide > 50);
}

/// Returns the program as text, in which NaNs compare equal.
fn bits_of(program: &PointwiseProgram) -> String {
    format!("{program:?}")
}

fn expand<B: Backend>(
    tensor: B::FloatTensorPrimitive,
    zeros: B::FloatTensorPrimitive,
) -> B::FloatTensorPrimitive {
    B::float_add(B::float_neg(B::float_neg(tensor)), B::float_neg(zeros))
}

#[test]
fn truncated_programs_are_rejected() {
    let mut program = PointwiseProgram::default();
    let number = program.number(1.5);
    let sum = program.push(Op::Add, Operand::Input(0), Some(number));
    program.push(Op::Mul, sum, Some(sum));
    let scalars = program.to_scalars();
    assert_eq!(program.place_of(0), scalars.len() - 1);
    for len in 0..scalars.len() {
        assert_eq!(
            PointwiseProgram::from_scalars(&scalars[..len]),
            None,
            "{len}"
        );
    }
}

#[test]
fn an_unshared_input_is_overwritten() {
    let mut program = PointwiseProgram::default();
    let number = program.number(2.0);
    program.push(Op::Mul, Operand::Input(0), Some(number));
    program.write_over(Some(0));
    let shape = Shape::from([3, 700]);
    let ones = || FlexTensor::filled_typed(shape.clone(), DType::F32, 1.0_f32);
    let own = ones();
    let address = own.bytes().as_ptr();
    let result = run(&program, vec![own], &shape);
    assert_eq!(result.bytes().as_ptr(), address);
    let held = ones();
    let result = run(&program, vec![held.clone()], &shape);
    assert_ne!(result.bytes().as_ptr(), held.bytes().as_ptr());
    assert!(held.storage::<f32>().iter().all(|value| *value == 1.0));
}
