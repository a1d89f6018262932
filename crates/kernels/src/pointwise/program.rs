//! The steps of a program, and its encoding in a call.

use burn_ir::ScalarIr;

/// A program on the elements of tensors. After broadcasting, every element of its result depends only on the elements
/// at the same position.
///
/// ```
/// use burn_fsdp_kernels::{PointwiseOperand, PointwiseOperation, PointwiseProgram};
///
/// // x * 2 + y
/// let mut program = PointwiseProgram::default();
/// let (x, y) = (PointwiseOperand::Input(0), PointwiseOperand::Input(1));
/// let two = program.number(2.0);
/// let twice = program.push(PointwiseOperation::Mul, x, Some(two));
/// program.push(PointwiseOperation::Add, twice, Some(y));
/// let scalars = program.to_scalars();
/// assert_eq!(PointwiseProgram::from_scalars(&scalars), Some(program));
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PointwiseProgram {
    /// The steps. The last one computes the result.
    steps: Vec<Step>,
    /// The numbers that the steps use as operands.
    numbers: Vec<f64>,
    /// Index of the input whose memory receives the result, if possible.
    written_over: Option<usize>,
}

/// One operation of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) operation: PointwiseOperation,
    pub(crate) first: PointwiseOperand,
    /// Equals [`first`](Self::first) for unary operations.
    pub(crate) second: PointwiseOperand,
}

/// An operand of a step of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PointwiseOperand {
    /// The elements of the input with this index.
    Input(usize),
    /// The result of the earlier step with this index.
    Step(usize),
    /// The number with this index.
    Number(usize),
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// An operation of a program, on 32-bit floats or on halves. With halves, every result and number is rounded to
        /// a half. Each operation is bit-identical to Burn's on its CPU backend.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum PointwiseOperation { $($(#[$doc])* $name),+ }

        impl PointwiseOperation {
            /// All operations.
            pub const ALL: &[Self] = &[$(Self::$name),+];
        }
    };
}

operations! {
    /// The sum of both operands.
    Add,
    /// The first operand minus the second.
    Sub,
    /// The product of both operands.
    Mul,
    /// The first operand divided by the second.
    Div,
    /// The first operand to the power of the second.
    Powf,
    /// The negative of the operand.
    Neg,
    /// The absolute value of the operand.
    Abs,
    /// The reciprocal of the operand.
    Recip,
    /// The square root of the operand.
    Sqrt,
    /// The exponential of the operand.
    Exp,
    /// The natural logarithm of the operand.
    Log,
    /// The hyperbolic tangent of the operand.
    Tanh,
    /// The first operand if it is above zero or NaN, and otherwise zero.
    Relu,
    /// The second operand if the first, a result of [`Relu`](Self::Relu), is above zero or NaN, and otherwise zero.
    ReluBackward,
    /// The logistic sigmoid, `1 / (1 + exp(-x))`.
    Sigmoid,
    /// The gradient of [`Sigmoid`](Self::Sigmoid): the first operand is its result, and the second is the gradient of
    /// that result.
    SigmoidBackward,
}

impl PointwiseOperation {
    /// Returns true for an operation with two operands.
    pub fn is_binary(self) -> bool {
        matches!(
            self,
            Self::Add
                | Self::Sub
                | Self::Mul
                | Self::Div
                | Self::Powf
                | Self::ReluBackward
                | Self::SigmoidBackward
        )
    }
}

/// Number of operand kinds. An operand is encoded as a number whose remainder modulo this is its kind.
const KINDS: u64 = 3;

impl PointwiseOperand {
    fn to_scalar(self) -> ScalarIr {
        let (kind, index) = match self {
            Self::Input(index) => (0, index),
            Self::Step(index) => (1, index),
            Self::Number(index) => (2, index),
        };
        ScalarIr::UInt(index as u64 * KINDS + kind)
    }

    fn from_scalar(scalar: &ScalarIr) -> Option<Self> {
        let ScalarIr::UInt(code) = scalar else {
            return None;
        };
        let index = usize::try_from(code / KINDS).ok()?;
        Some(match code % KINDS {
            0 => Self::Input(index),
            1 => Self::Step(index),
            _ => Self::Number(index),
        })
    }
}

impl PointwiseProgram {
    /// Adds a step and returns its result as an operand. `second` is `None` for unary operations.
    ///
    /// # Panics
    ///
    /// If the operation needs a different number of operands.
    pub fn push(
        &mut self,
        operation: PointwiseOperation,
        first: PointwiseOperand,
        second: Option<PointwiseOperand>,
    ) -> PointwiseOperand {
        assert_eq!(operation.is_binary(), second.is_some(), "{operation:?}");
        let second = second.unwrap_or(first);
        self.steps.push(Step {
            operation,
            first,
            second,
        });
        PointwiseOperand::Step(self.steps.len() - 1)
    }

    /// Adds a number and returns it as an operand.
    pub fn number(&mut self, number: f64) -> PointwiseOperand {
        self.numbers.push(number);
        PointwiseOperand::Number(self.numbers.len() - 1)
    }

    /// Sets the input that the result overwrites, if that input is not shared and has all elements in order.
    pub fn write_over(&mut self, input: Option<usize>) {
        self.written_over = input;
    }

    /// Returns the index of the input that [`write_over`](Self::write_over) set.
    pub fn written_over(&self) -> Option<usize> {
        self.written_over
    }

    /// Returns the number of steps.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns true if there are no steps and therefore no result.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the position of number `number` among the scalars of a call.
    pub fn place_of(&self, number: usize) -> usize {
        HEADER + 3 * self.steps.len() + number
    }

    /// Returns the steps: each operation with its two operands. For a unary operation, both are the same.
    pub fn parts(
        &self,
    ) -> impl Iterator<Item = (PointwiseOperation, PointwiseOperand, PointwiseOperand)> + '_ {
        let steps = self.steps.iter();
        steps.map(|step| (step.operation, step.first, step.second))
    }

    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    pub(crate) fn numbers(&self) -> impl Iterator<Item = f32> + '_ {
        // Burn's CPU backend converts the same way.
        self.numbers.iter().map(|number| *number as f32)
    }

    /// Encodes the program as the scalars of a call: the number of steps, the index of the overwritten input plus
    /// one, three numbers for each step, and the numbers that steps use.
    pub fn to_scalars(&self) -> Vec<ScalarIr> {
        let over = self.written_over.map_or(0, |input| input as u64 + 1);
        let header = [self.steps.len() as u64, over].map(ScalarIr::UInt);
        let steps = self.steps.iter().flat_map(|step| {
            let operation = ScalarIr::UInt(step.operation as u64);
            [operation, step.first.to_scalar(), step.second.to_scalar()]
        });
        let numbers = self.numbers.iter().map(|number| ScalarIr::Float(*number));
        header.into_iter().chain(steps).chain(numbers).collect()
    }

    /// Decodes a program from the scalars of a call. Returns `None` if they do not encode one.
    pub fn from_scalars(scalars: &[ScalarIr]) -> Option<Self> {
        let [ScalarIr::UInt(num_steps), ScalarIr::UInt(over), rest @ ..] = scalars else {
            return None;
        };
        let num_steps = usize::try_from(*num_steps).ok()?;
        let (steps, numbers) = rest.split_at_checked(num_steps.checked_mul(3)?)?;
        let step = |(index, step): (usize, &[ScalarIr])| {
            let [ScalarIr::UInt(operation), first, second] = step else {
                return None;
            };
            let operation = *PointwiseOperation::ALL.get(usize::try_from(*operation).ok()?)?;
            let operand = |scalar| {
                let operand = PointwiseOperand::from_scalar(scalar)?;
                let is_known = match operand {
                    PointwiseOperand::Input(_) => true,
                    PointwiseOperand::Step(earlier) => earlier < index,
                    PointwiseOperand::Number(number) => number < numbers.len(),
                };
                is_known.then_some(operand)
            };
            Some(Step {
                operation,
                first: operand(first)?,
                second: operand(second)?,
            })
        };
        Some(Self {
            steps: steps
                .chunks(3)
                .enumerate()
                .map(step)
                .collect::<Option<_>>()?,
            numbers: numbers.iter().map(|number| number.elem()).collect(),
            written_over: over.checked_sub(1).map(|input| input as usize),
        })
    }
}

/// Number of scalars before a program's steps.
const HEADER: usize = 2;
