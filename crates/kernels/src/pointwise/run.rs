//! The execution of a program, block by block.

use burn::tensor::{DType, Shape, bf16};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::program::{PointwiseOperand, PointwiseOperation, PointwiseProgram, Step};
use crate::halves::{self, Elements, narrow_into, round, rounded, widen_into, widened};
use crate::vectors::{Kernel, vectorized};

/// Number of elements that every step processes before the next step begins. A few results of this size fit into the
/// first-level cache.
const BLOCK: usize = 1024;

/// Number of elements that a thread processes at a time.
const CHUNK: usize = 16 * BLOCK;

/// Runs a program on inputs of one type, which are broadcast to `shape`. With halves, the result of every step is
/// rounded to a half.
///
/// # Panics
///
/// If an input does not broadcast to the shape, or the program reads more inputs than there are.
pub(crate) fn run(
    program: &PointwiseProgram,
    inputs: Vec<FlexTensor>,
    shape: &Shape,
) -> FlexTensor {
    let num_elements = shape.num_elements();
    let dtype = inputs.first().map_or(DType::F32, FlexTensor::dtype);
    if num_elements == 0 {
        return halves::zeros(shape.clone(), dtype);
    }
    let mut inputs: Vec<Option<FlexTensor>> = inputs.into_iter().map(Some).collect();
    let over = program.written_over().and_then(|index| {
        let input = inputs.get_mut(index)?;
        input
            .take_if(|input| is_whole(input, shape))
            .map(|tensor| (index, tensor))
    });
    let (over, mut result) = match over {
        Some((index, tensor)) => (Some(index), tensor),
        None => (None, halves::zeros(shape.clone(), dtype)),
    };
    let sources = inputs.iter().enumerate().map(|(index, input)| match input {
        Some(input) => Source::of(input, shape),
        // Each block is copied before it is overwritten.
        None if over == Some(index) => Source::Result,
        None => panic!("input {index} of a pointwise program is missing"),
    });
    let sources: Vec<Source<'_>> = sources.collect();
    let is_half = dtype == DType::BF16;
    let numbers = program.numbers().map(|number| {
        if is_half {
            rounded(number).to_f32()
        } else {
            number
        }
    });
    let numbers: Vec<f32> = numbers.collect();
    let registers = Registers::of(program);
    let run = |index: usize, out| {
        vectorized(Run {
            steps: program.steps(),
            registers: &registers,
            numbers: &numbers,
            sources: &sources,
            is_half,
            start: index * CHUNK,
            out,
        });
    };
    if is_half {
        let out = &mut result.storage_mut::<bf16>()[..num_elements];
        let chunks = out.par_chunks_mut(CHUNK).enumerate();
        chunks.for_each(|(index, out)| run(index, Target::Half(out)));
    } else {
        let out = &mut result.storage_mut::<f32>()[..num_elements];
        let chunks = out.par_chunks_mut(CHUNK).enumerate();
        chunks.for_each(|(index, out)| run(index, Target::Full(out)));
    }
    result
}

/// Returns true if a tensor may be overwritten and has the elements of this shape in order.
fn is_whole(tensor: &FlexTensor, shape: &Shape) -> bool {
    let layout = tensor.layout();
    tensor.is_unique()
        && layout.shape() == shape
        && layout.contiguous_offsets() == Some((0, shape.num_elements()))
}

/// The location of an input's elements.
enum Source<'a> {
    /// Contiguous 32-bit floats.
    Flat(&'a [f32]),
    /// Contiguous 16-bit halves.
    FlatHalves(&'a [bf16]),
    /// Elements with strides. Each dim of the result has a size and a stride, which is zero along broadcast dims.
    Strided {
        elements: Elements<'a>,
        offset: usize,
        dims: Vec<(usize, isize)>,
    },
    /// The memory that receives the result.
    Result,
}

impl<'a> Source<'a> {
    fn of(tensor: &'a FlexTensor, shape: &Shape) -> Self {
        let (layout, elements) = (tensor.layout(), Elements::of(tensor));
        if layout.shape() == shape
            && let Some((start, end)) = layout.contiguous_offsets()
        {
            return match elements {
                Elements::Full(elements) => Self::Flat(&elements[start..end]),
                Elements::Half(elements) => Self::FlatHalves(&elements[start..end]),
            };
        }
        let (own, strides) = (layout.shape(), layout.strides());
        let missing = shape.num_dims().checked_sub(own.num_dims());
        let missing = missing.expect("an input has no more dims than the result");
        let mut dims: Vec<(usize, isize)> = Vec::new();
        for (dim, &size) in shape.iter().enumerate() {
            let stride = match dim.checked_sub(missing) {
                Some(dim) if own[dim] == size => strides[dim],
                Some(dim) => {
                    assert_eq!(
                        own[dim], 1,
                        "an input of shape {own:?} does not broadcast to {shape:?}"
                    );
                    0
                }
                None => 0,
            };
            match dims.last_mut() {
                // Both dims are merged into one.
                Some(outer) if outer.1 == stride * size as isize => {
                    *outer = (outer.0 * size, stride)
                }
                _ if size == 1 => {}
                _ => dims.push((size, stride)),
            }
        }
        Self::Strided {
            elements,
            offset: layout.start_offset(),
            dims,
        }
    }

    /// Copies a block of elements, beginning at element `start`.
    #[inline(always)]
    fn copy(&self, start: usize, block: &mut [f32]) {
        match self {
            Self::Flat(_) | Self::Result => {}
            Self::FlatHalves(halves) => widen_into(&halves[start..start + block.len()], block),
            Self::Strided {
                elements: Elements::Full(elements),
                ..
            } => self.walk(start, block, elements, |element| element),
            Self::Strided {
                elements: Elements::Half(elements),
                ..
            } => self.walk(start, block, elements, widened),
        }
    }

    /// Copies a block of elements with strides.
    #[inline(always)]
    fn walk<T: Copy>(
        &self,
        start: usize,
        block: &mut [f32],
        elements: &[T],
        float: impl Fn(T) -> f32,
    ) {
        let Self::Strided { offset, dims, .. } = self else {
            return;
        };
        let Some((&(width, stride), outer)) = dims.split_last() else {
            return block.fill(float(elements[*offset]));
        };
        let (mut row, mut column) = (start / width, start % width);
        let mut done = 0;
        while done < block.len() {
            let len = (width - column).min(block.len() - done);
            let mut at = *offset as isize + column as isize * stride;
            let mut rest = row;
            for (size, stride) in outer.iter().rev() {
                at += (rest % size) as isize * stride;
                rest /= size;
            }
            let part = &mut block[done..done + len];
            match stride {
                0 => part.fill(float(elements[at as usize])),
                1 => {
                    let row = &elements[at as usize..at as usize + len];
                    for (element, of) in part.iter_mut().zip(row) {
                        *element = float(*of);
                    }
                }
                _ => {
                    for (index, element) in part.iter_mut().enumerate() {
                        *element = float(elements[(at + index as isize * stride) as usize]);
                    }
                }
            }
            done += len;
            column = 0;
            row += 1;
        }
    }
}

/// The block that holds each step's result, from its computation until its last read.
struct Registers {
    of_step: Vec<usize>,
    count: usize,
}

impl Registers {
    /// Assigns blocks to all steps except the last, which writes the result.
    fn of(program: &PointwiseProgram) -> Self {
        let steps = program.steps();
        let mut last_reads = vec![0; steps.len()];
        for (index, step) in steps.iter().enumerate() {
            for operand in [step.first, step.second] {
                if let PointwiseOperand::Step(earlier) = operand {
                    last_reads[earlier] = index;
                }
            }
        }
        let mut free = Vec::new();
        let mut count = 0;
        let mut of_step = Vec::new();
        for index in 0..steps.len().saturating_sub(1) {
            of_step.push(free.pop().unwrap_or_else(|| {
                count += 1;
                count - 1
            }));
            // The operands of this step are not freed before it ends.
            let ended = (0..index + 1).filter(|earlier| last_reads[*earlier] == index);
            free.extend(
                ended
                    .filter(|earlier| *earlier < index)
                    .map(|step| of_step[step]),
            );
        }
        Self { of_step, count }
    }
}

/// The memory for a part of the result.
enum Target<'a> {
    Full(&'a mut [f32]),
    Half(&'a mut [bf16]),
}

/// The execution of a program on a part of the result.
struct Run<'a> {
    steps: &'a [Step],
    registers: &'a Registers,
    numbers: &'a [f32],
    sources: &'a [Source<'a>],
    /// True if the result of every step is rounded to a half.
    is_half: bool,
    /// Index of the part's first element.
    start: usize,
    out: Target<'a>,
}

/// The blocks of elements that a run uses.
struct Blocks {
    /// Blocks for each input that is not flat.
    copies: Vec<Vec<f32>>,
    /// Blocks for the results of steps.
    results: Vec<Vec<f32>>,
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        if self.steps.is_empty() {
            return;
        }
        let len = match &self.out {
            Target::Full(out) => out.len(),
            Target::Half(out) => out.len(),
        };
        let block = || vec![0.0; BLOCK.min(len)];
        let copies = self.sources.iter().map(|source| match source {
            Source::Flat(_) => Vec::new(),
            Source::FlatHalves(_) | Source::Strided { .. } | Source::Result => block(),
        });
        let mut blocks = Blocks {
            copies: copies.collect(),
            results: (0..self.registers.count).map(|_| block()).collect(),
        };
        match std::mem::replace(&mut self.out, Target::Full(&mut [])) {
            Target::Full(out) => {
                for (number, out) in out.chunks_mut(BLOCK).enumerate() {
                    self.block(self.start + number * BLOCK, out, &mut blocks);
                }
            }
            Target::Half(halves) => {
                let mut floats = block();
                let is_input = self.sources.iter().any(|of| matches!(of, Source::Result));
                for (number, halves) in halves.chunks_mut(BLOCK).enumerate() {
                    let floats = &mut floats[..halves.len()];
                    if is_input {
                        widen_into(halves, floats);
                    }
                    self.block(self.start + number * BLOCK, floats, &mut blocks);
                    narrow_into(floats, halves);
                }
            }
        }
    }
}

impl Run<'_> {
    /// Computes one block of the result, beginning at element `start`.
    #[inline(always)]
    fn block(&self, start: usize, out: &mut [f32], blocks: &mut Blocks) {
        let len = out.len();
        let Blocks { copies, results } = blocks;
        for (source, copy) in self.sources.iter().zip(&mut *copies) {
            match source {
                Source::Flat(_) => {}
                Source::FlatHalves(_) | Source::Strided { .. } => {
                    source.copy(start, &mut copy[..len]);
                }
                Source::Result => copy[..len].copy_from_slice(out),
            }
        }
        let Registers { of_step, .. } = self.registers;
        let last = self.steps.len() - 1;
        for (index, step) in self.steps.iter().enumerate() {
            let register = (index < last).then(|| of_step[index]);
            // This is never a block that the step reads.
            let mut own = register.map(|register| std::mem::take(&mut results[register]));
            let operand = |operand| match operand {
                PointwiseOperand::Input(input) => Operand::Elements(match &self.sources[input] {
                    Source::Flat(elements) => &elements[start..start + len],
                    _ => &copies[input][..len],
                }),
                PointwiseOperand::Step(step) => Operand::Elements(&results[of_step[step]][..len]),
                PointwiseOperand::Number(number) => Operand::Number(self.numbers[number]),
            };
            let operands = [operand(step.first), operand(step.second)];
            let to = match &mut own {
                Some(result) => &mut result[..len],
                None => &mut *out,
            };
            apply(step.operation, operands, to);
            // The last step is rounded when it is stored.
            if self.is_half && index < last {
                round(to);
            }
            if let (Some(register), Some(own)) = (register, own) {
                results[register] = own;
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Operand<'a> {
    Elements(&'a [f32]),
    Number(f32),
}

/// Computes one operation on a block.
#[inline(always)]
fn apply(operation: PointwiseOperation, operands: [Operand<'_>; 2], to: &mut [f32]) {
    use PointwiseOperation as Op;
    match operation {
        Op::Add => binary(operands, to, |a, b| a + b),
        Op::Sub => binary(operands, to, |a, b| a - b),
        Op::Mul => binary(operands, to, |a, b| a * b),
        Op::Div => binary(operands, to, |a, b| a / b),
        Op::Powf => binary(operands, to, f32::powf),
        Op::Neg => unary(operands, to, |a| -a),
        Op::Abs => unary(operands, to, f32::abs),
        Op::Recip => unary(operands, to, |a| 1.0 / a),
        Op::Sqrt => unary(operands, to, f32::sqrt),
        Op::Exp => unary(operands, to, f32::exp),
        Op::Log => unary(operands, to, f32::ln),
        Op::Tanh => unary(operands, to, f32::tanh),
        Op::Relu => unary(
            operands,
            to,
            |a| if a.is_nan() || a > 0.0 { a } else { 0.0 },
        ),
        Op::ReluBackward => binary(
            operands,
            to,
            |a, b| {
                if a.is_nan() || a > 0.0 { b } else { 0.0 }
            },
        ),
        Op::Sigmoid => unary(operands, to, sigmoid),
        Op::SigmoidBackward => binary(operands, to, |a, b| b * a * (1.0 - a)),
    }
}

#[inline(always)]
fn unary([first, _]: [Operand<'_>; 2], to: &mut [f32], f: impl Fn(f32) -> f32) {
    match first {
        Operand::Elements(elements) => {
            for (to, a) in to.iter_mut().zip(elements) {
                *to = f(*a);
            }
        }
        Operand::Number(number) => to.fill(f(number)),
    }
}

#[inline(always)]
fn binary(operands: [Operand<'_>; 2], to: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    match operands {
        [Operand::Elements(a), Operand::Elements(b)] => {
            for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
                *to = f(*a, *b);
            }
        }
        [Operand::Elements(a), Operand::Number(b)] => {
            for (to, a) in to.iter_mut().zip(a) {
                *to = f(*a, b);
            }
        }
        [Operand::Number(a), Operand::Elements(b)] => {
            for (to, b) in to.iter_mut().zip(b) {
                *to = f(a, *b);
            }
        }
        [Operand::Number(a), Operand::Number(b)] => to.fill(f(a, b)),
    }
}

/// Matches Burn's sigmoid, which never takes the exponential of a positive number.
fn sigmoid(x: f32) -> f32 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}
