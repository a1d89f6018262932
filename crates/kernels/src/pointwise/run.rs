//! The run of a program, block by block.

use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{FlexTensor, Layout};
use rayon::prelude::*;

use super::program::{PointwiseOperand, PointwiseOperation, PointwiseProgram, Step};
use crate::rows::{Kernel, vectorized};

/// Elements that all steps go over before the next ones: a few results of them fit into the first cache.
const BLOCK: usize = 1024;

/// Elements that a thread takes at a time.
pub(crate) const CHUNK: usize = 16 * BLOCK;

/// Runs a program on inputs that are broadcast to a shape.
///
/// # Panics
///
/// If an input is not one of 32-bit floats that broadcasts to the shape, or there are fewer than the program reads.
pub(crate) fn run(
    program: &PointwiseProgram,
    inputs: Vec<FlexTensor>,
    shape: &Shape,
) -> FlexTensor {
    let num_elements = shape.num_elements();
    if num_elements == 0 {
        return FlexTensor::empty(shape.clone(), DType::F32);
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
        None => {
            let bytes = Bytes::from_elems(vec![0_f32; num_elements]);
            let layout = Layout::contiguous(shape.clone());
            (None, FlexTensor::new(bytes, layout, DType::F32))
        }
    };
    let sources = inputs.iter().enumerate().map(|(index, input)| match input {
        Some(input) => Source::of(input, shape),
        // Its block is copied before it is written over.
        None if over == Some(index) => Source::Result,
        None => panic!("input {index} of a program of pointwise operations is gone"),
    });
    let sources: Vec<Source<'_>> = sources.collect();
    let numbers: Vec<f32> = program.numbers().collect();
    let registers = Registers::of(program);
    let out = &mut result.storage_mut::<f32>()[..num_elements];
    out.par_chunks_mut(CHUNK)
        .enumerate()
        .for_each(|(index, out)| {
            vectorized(Run {
                steps: program.steps(),
                registers: &registers,
                numbers: &numbers,
                sources: &sources,
                start: index * CHUNK,
                out,
            });
        });
    result
}

/// Returns the bytes that a thread takes beside inputs and result, at most.
pub(crate) fn scratch_bytes(program: &PointwiseProgram, num_inputs: usize) -> usize {
    (Registers::of(program).count + num_inputs) * BLOCK * size_of::<f32>()
}

/// Returns true if a tensor may be written over and has the elements of that shape in order.
fn is_whole(tensor: &FlexTensor, shape: &Shape) -> bool {
    let layout = tensor.layout();
    tensor.is_unique()
        && layout.shape() == shape
        && layout.contiguous_offsets() == Some((0, shape.num_elements()))
}

/// Where the elements of an input are.
enum Source<'a> {
    /// One after the other.
    Flat(&'a [f32]),
    /// At the ends of strides: those of each dim of the result, with its size, zero along dims that are broadcast.
    Strided {
        elements: &'a [f32],
        offset: usize,
        dims: Vec<(usize, isize)>,
    },
    /// Where the result is written.
    Result,
}

impl<'a> Source<'a> {
    fn of(tensor: &'a FlexTensor, shape: &Shape) -> Self {
        let (layout, elements) = (tensor.layout(), tensor.storage::<f32>());
        if layout.shape() == shape
            && let Some((start, end)) = layout.contiguous_offsets()
        {
            return Self::Flat(&elements[start..end]);
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
                        "an input of {own:?} does not broadcast to {shape:?}"
                    );
                    0
                }
                None => 0,
            };
            match dims.last_mut() {
                // Both are walked as one.
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

    /// Copies the elements from one on.
    #[inline(always)]
    fn copy(&self, start: usize, block: &mut [f32]) {
        let Self::Strided {
            elements,
            offset,
            dims,
        } = self
        else {
            return;
        };
        let Some((&(width, stride), outer)) = dims.split_last() else {
            return block.fill(elements[*offset]);
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
                0 => part.fill(elements[at as usize]),
                1 => part.copy_from_slice(&elements[at as usize..at as usize + len]),
                _ => {
                    for (index, element) in part.iter_mut().enumerate() {
                        *element = elements[(at + index as isize * stride) as usize];
                    }
                }
            }
            done += len;
            column = 0;
            row += 1;
        }
    }
}

/// Which block the result of each step is in, from when it is made until it is read last.
struct Registers {
    of_step: Vec<usize>,
    count: usize,
}

impl Registers {
    /// Assigns blocks to all steps but the last, which writes the result.
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
            // What this step reads is not free before it has ended.
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

/// The run on a part of the result.
struct Run<'a> {
    steps: &'a [Step],
    registers: &'a Registers,
    numbers: &'a [f32],
    sources: &'a [Source<'a>],
    /// Index of the part's first element.
    start: usize,
    out: &'a mut [f32],
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self {
            steps,
            registers,
            numbers,
            sources,
            start,
            out,
        } = self;
        let Some(last) = steps.len().checked_sub(1) else {
            return;
        };
        let block = || vec![0.0; BLOCK.min(out.len())];
        // Of each input that is not flat.
        let mut copies: Vec<Vec<f32>> = sources
            .iter()
            .map(|source| match source {
                Source::Flat(_) => Vec::new(),
                Source::Strided { .. } | Source::Result => block(),
            })
            .collect();
        let Registers { of_step, count } = registers;
        let mut results: Vec<Vec<f32>> = (0..*count).map(|_| block()).collect();
        for (number, out) in out.chunks_mut(BLOCK).enumerate() {
            let (start, len) = (start + number * BLOCK, out.len());
            for (source, copy) in sources.iter().zip(&mut copies) {
                match source {
                    Source::Flat(_) => {}
                    Source::Strided { .. } => source.copy(start, &mut copy[..len]),
                    Source::Result => copy[..len].copy_from_slice(out),
                }
            }
            for (index, step) in steps.iter().enumerate() {
                let register = (index < last).then(|| of_step[index]);
                // Never one that the step reads.
                let mut own = register.map(|register| std::mem::take(&mut results[register]));
                let operand = |operand| match operand {
                    PointwiseOperand::Input(input) => Operand::Elements(match &sources[input] {
                        Source::Flat(elements) => &elements[start..start + len],
                        Source::Strided { .. } | Source::Result => &copies[input][..len],
                    }),
                    PointwiseOperand::Step(step) => {
                        Operand::Elements(&results[of_step[step]][..len])
                    }
                    PointwiseOperand::Number(number) => Operand::Number(numbers[number]),
                };
                let operands = [operand(step.first), operand(step.second)];
                match &mut own {
                    Some(result) => apply(step.operation, operands, &mut result[..len]),
                    None => apply(step.operation, operands, out),
                }
                if let (Some(register), Some(own)) = (register, own) {
                    results[register] = own;
                }
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

/// As Burn's, which never takes the exponential of what is above zero.
fn sigmoid(x: f32) -> f32 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}
