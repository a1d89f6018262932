//! The record of a kernel: everything that the passes, the placement, the certificate and the plan must know of it.

use burn_flex::FlexTensor;
use burn_ir::{CustomOpIr, OperationIr, ScalarIr, TensorIr};

use crate::form::{Array, FormCall, Number};
use crate::pattern::{Patterns, Steps};

/// A kernel: its record, and its composed form.
pub trait FusedKernel {
    /// The record.
    const RECORD: KernelRecord;

    /// Evaluates the composed form, on which the kernel's results are checked.
    ///
    /// # Errors
    ///
    /// What is wrong with the operands or the scalars.
    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N>;
}

/// The results of a composed form.
pub type Composed<N> = Result<Vec<Array<N>>, String>;

/// The record of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct KernelRecord {
    /// The name in captured graphs.
    pub name: &'static str,
    /// Computes a call on Burn's CPU backend.
    pub run: fn(&CustomOpIr, Vec<FlexTensor>) -> Vec<FlexTensor>,
    /// Returns the input that a call's first output overwrites.
    pub written_over: fn(&CustomOpIr) -> Option<usize>,
    /// True if the kernel costs little more than reading and writing its operands.
    pub is_cheap: bool,
    /// Returns the work of a call.
    pub cost: fn(&CustomOpIr) -> FusedCost,
    /// How the kernel runs on parts of its operands.
    pub placement: KernelPlacement,
    /// The operations that the kernel replaces.
    pub pattern: KernelPattern,
    /// Returns the single operation of Burn that a call stands for; `None` if there is none.
    pub plain: fn(&CustomOpIr) -> Option<OperationIr>,
    /// How the kernel is compared with its composed form.
    pub check: KernelCheck,
}

impl KernelRecord {
    /// Returns the record of a kernel that overwrites nothing, needs whole operands, does about one operation on each
    /// element of its largest tensor, and is in no pattern.
    pub const fn new(
        name: &'static str,
        run: fn(&CustomOpIr, Vec<FlexTensor>) -> Vec<FlexTensor>,
    ) -> Self {
        Self {
            name,
            run,
            written_over: |_| None,
            is_cheap: false,
            cost: FusedCost::of_elements,
            placement: KernelPlacement::Whole,
            pattern: KernelPattern::None,
            plain: |_| None,
            check: KernelCheck::DEFAULT,
        }
    }
}

/// The work of a fused operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FusedCost {
    /// Floating-point operations in matrix products. A multiplication and an addition count as two.
    pub matmul: u64,
    /// Other floating-point operations: one per element of the largest tensor, times the steps of a program; none for
    /// a matrix product.
    pub pointwise: u64,
}

impl FusedCost {
    /// Returns the work of one operation on each element of a call's largest tensor.
    pub fn of_elements(call: &CustomOpIr) -> Self {
        let tensors = call.inputs.iter().chain(&call.outputs);
        let largest = tensors.map(|tensor| tensor.shape.num_elements()).max();
        Self {
            matmul: 0,
            pointwise: largest.unwrap_or(0) as u64,
        }
    }

    /// Adds matrix products with this number of multiplications.
    pub(crate) fn with_products(self, multiplications: usize) -> Self {
        Self {
            matmul: multiplications as u64 * 2,
            ..self
        }
    }
}

/// How a kernel runs on parts of its operands.
#[derive(Debug, Clone, Copy)]
pub enum KernelPlacement {
    /// On whole operands only.
    Whole,
    /// On parts of any dims, and on addends if the steps of its [program](crate::PointwiseProgram) allow it.
    Program,
    /// On parts of the dims that have letters.
    Dims(KernelDims),
}

/// The dims of a kernel's operands and results, named as in an einsum. Dims with the same letter correspond.
#[derive(Debug, Clone, Copy)]
pub struct KernelDims {
    /// The dims of each input. The last entry is for all further inputs.
    pub inputs: &'static [Letters],
    /// The dims of each output. The last entry is for all further outputs.
    pub outputs: &'static [Letters],
    /// The letters over which results that lack them are summed, as in the first input.
    pub sums: Letters,
    /// The input in which the results are linear, such as a gradient.
    pub linear_in: Option<usize>,
}

impl KernelDims {
    /// Each element of a result depends only on elements at the same position.
    pub const ELEMENTS: Self = Self::of(&[Letters::Each], &[Letters::Each]);
    /// Each row along the last dim depends only on the same row of the operands, and on vectors.
    pub const ROWS: Self = Self::of(&[Letters::Rows], &[Letters::Rows]);

    /// Names the dims of inputs and outputs.
    pub const fn of(inputs: &'static [Letters], outputs: &'static [Letters]) -> Self {
        Self {
            inputs,
            outputs,
            sums: Letters::Named(""),
            linear_in: None,
        }
    }

    /// Declares that results are linear in an input.
    pub const fn linear_in(self, input: usize) -> KernelPlacement {
        KernelPlacement::Dims(Self {
            linear_in: Some(input),
            ..self
        })
    }

    /// Declares that results are sums over letters.
    pub const fn summed(self, sums: Letters) -> Self {
        Self { sums, ..self }
    }
}

/// The letters of a tensor's dims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Letters {
    /// Each dim has its own letter.
    Each,
    /// Each dim except the last has its own letter.
    Rows,
    /// One letter per dim, or `.` for a dim that is always whole.
    Named(&'static str),
    /// As [`Named`](Self::Named), except that dims with another size than the letter's in earlier inputs are whole.
    Fitting(&'static str),
}

/// The operations that a kernel replaces.
#[derive(Debug, Clone, Copy)]
pub enum KernelPattern {
    /// None: models or passes create the kernel.
    None,
    /// One operation of Burn.
    One(fn(&OperationIr) -> Option<Replaced>),
    /// One operation of Burn after collectives are placed. The number is that of the elements of the operand, at the
    /// shapes of the run.
    Placed(fn(&OperationIr, usize) -> Option<Replaced>),
    /// A list of operations, and another for the gradient.
    Steps(&'static Steps),
    /// Operations that a function finds.
    Found(fn(&mut Patterns)),
}

/// The operands, result and scalars of a kernel that replaces one operation.
#[derive(Debug, Clone)]
pub struct Replaced {
    /// The operands.
    pub inputs: Vec<TensorIr>,
    /// The result.
    pub output: TensorIr,
    /// The scalars.
    pub scalars: Vec<ScalarIr>,
}

impl Replaced {
    /// Replaces an operation without scalars.
    pub(crate) fn of<const N: usize>(inputs: [&TensorIr; N], output: &TensorIr) -> Option<Self> {
        Self::with(inputs, output, Vec::new())
    }

    /// Replaces an operation by a kernel with these scalars.
    pub(crate) fn with<const N: usize>(
        inputs: [&TensorIr; N],
        output: &TensorIr,
        scalars: Vec<ScalarIr>,
    ) -> Option<Self> {
        Some(Self {
            inputs: inputs.map(TensorIr::clone).into(),
            output: output.clone(),
            scalars,
        })
    }
}

/// How a kernel is compared with its composed form.
#[derive(Debug, Clone, Copy)]
pub struct KernelCheck {
    /// Returns the lowest number that is drawn for an input, and the range of numbers above it.
    pub drawn: fn(usize) -> (f64, f64),
    /// Returns an input that contains indices, and their number.
    pub indices: fn(&CustomOpIr) -> Option<(usize, usize)>,
    /// True if scalars say what is computed, and not just how large it is.
    pub has_code: bool,
    /// True if all rows, columns and terms are computed alike, so that a few are enough.
    pub is_uniform: bool,
    /// True if every step is rounded to the type of the results, so that 16-bit results may differ much.
    pub rounds_steps: bool,
}

impl KernelCheck {
    /// Numbers of either sign, and scalars that are sizes or numbers.
    pub const DEFAULT: Self = Self {
        drawn: |_| (-1.5, 3.0),
        indices: |_| None,
        has_code: false,
        is_uniform: false,
        rounds_steps: false,
    };
}

/// Returns the inputs of a call.
///
/// # Panics
///
/// If there are more or fewer.
pub(crate) fn taken<const N: usize>(inputs: Vec<FlexTensor>) -> [FlexTensor; N] {
    inputs
        .try_into()
        .unwrap_or_else(|all: Vec<_>| panic!("a call has {} inputs instead of {N}", all.len()))
}

/// Returns the scalar of a call that is a size.
pub(crate) fn size(call: &CustomOpIr, index: usize) -> usize {
    call.scalars[index].elem::<u64>() as usize
}
