//! Programs: their steps, and how a call holds them.

use burn_ir::ScalarIr;

/// A program on the elements of tensors: every element of its result depends on the elements at its own place alone,
/// after broadcasting.
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
    /// The steps, of which the last makes the result.
    steps: Vec<Step>,
    /// Numbers that steps take.
    numbers: Vec<f64>,
    /// Index of the input in whose memory the result is written, if it can be.
    written_over: Option<usize>,
}

/// One operation of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) operation: PointwiseOperation,
    pub(crate) first: PointwiseOperand,
    /// [`first`](Self::first) again for operations of one operand.
    pub(crate) second: PointwiseOperand,
}

/// What a step of a program takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PointwiseOperand {
    /// The elements of the input of that index.
    Input(usize),
    /// The result of the step of that index, which is earlier.
    Step(usize),
    /// The number of that index.
    Number(usize),
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// An operation of a program, on 32-bit floats, or on halves, to which every result and number is rounded. Each is
        /// Burn's on its CPU backend, to the bit.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum PointwiseOperation { $($(#[$doc])* $name),+ }

        impl PointwiseOperation {
            /// All operations.
            pub const ALL: &[Self] = &[$(Self::$name),+];
        }
    };
}

operations! {
    /// The sum of two.
    Add,
    /// The first without the second.
    Sub,
    /// The product of two.
    Mul,
    /// The first over the second.
    Div,
    /// The first to the power of the second.
    Powf,
    /// Minus the first.
    Neg,
    /// The first without its sign.
    Abs,
    /// One over the first.
    Recip,
    /// The square root.
    Sqrt,
    /// The exponential function.
    Exp,
    /// The natural logarithm.
    Log,
    /// The hyperbolic tangent.
    Tanh,
    /// The first where it is above zero, or not a number, and else zero.
    Relu,
    /// The second where the first, a result of [`Relu`](Self::Relu), is above zero, or not a number, and else zero.
    ReluBackward,
    /// One over one and the exponential of minus the first.
    Sigmoid,
    /// The gradient of [`Sigmoid`](Self::Sigmoid), whose result is the first, and the gradient of that the second.
    SigmoidBackward,
}

impl PointwiseOperation {
    /// Returns true for an operation of two operands.
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

/// Numbers that an operand is written as: its kind is the remainder by as many as there are kinds.
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
    /// Adds a step, and returns its result as an operand. An operation of one operand takes no second.
    ///
    /// # Panics
    ///
    /// If the number of operands is not that of the operation.
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

    /// Adds a number, and returns it as an operand.
    pub fn number(&mut self, number: f64) -> PointwiseOperand {
        self.numbers.push(number);
        PointwiseOperand::Number(self.numbers.len() - 1)
    }

    /// Lets the result be written in the memory of an input, if nobody else holds it and it has all elements in order.
    pub fn write_over(&mut self, input: Option<usize>) {
        self.written_over = input;
    }

    /// Returns the input in whose memory the result is written, if it can be.
    pub fn written_over(&self) -> Option<usize> {
        self.written_over
    }

    /// Returns the number of steps.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns true if there is no step, and so no result.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the place of a number among the scalars of a call.
    pub fn place_of(&self, number: usize) -> usize {
        HEADER + 3 * self.steps.len() + number
    }

    /// Returns the steps: each operation with its operands, of which the second is the first again where there is one.
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
        // As Burn's CPU backend does.
        self.numbers.iter().map(|number| *number as f32)
    }

    /// Returns the program as the scalars of a call: the number of steps, the input that is written over and one more,
    /// three numbers for each step, and the numbers that steps take.
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

    /// Returns the program of the scalars of a call; `None` if they are of none.
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

/// Scalars in front of a program's steps.
const HEADER: usize = 2;
