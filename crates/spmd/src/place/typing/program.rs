//! Type inference along the steps of a fused chain of pointwise operations.

use burn_fsdp_kernels::{PointwiseOperand, PointwiseOperation, PointwiseProgram};

use super::SpmdType;

/// Returns the type of a program's result from the types of its inputs; `None` if a step does not accept its operands.
pub(super) fn of_program(program: &PointwiseProgram, inputs: &[SpmdType]) -> Option<SpmdType> {
    let mut results: Vec<SpmdType> = Vec::with_capacity(program.len());
    for (operation, first, second) in program.parts() {
        let of = |operand| match operand {
            PointwiseOperand::Input(index) => inputs.get(index).copied(),
            PointwiseOperand::Step(index) => results.get(index).copied(),
            PointwiseOperand::Number(_) => Some(SpmdType::Replicate),
        };
        let second_of = if operation.is_binary() {
            of(second)?
        } else {
            SpmdType::Replicate
        };
        let is_number = matches!(second, PointwiseOperand::Number(_));
        results.push(step(operation, (of(first)?, second_of), is_number)?);
    }
    results.last().copied()
}

fn step(
    operation: PointwiseOperation,
    (first, second): (SpmdType, SpmdType),
    is_number: bool,
) -> Option<SpmdType> {
    use PointwiseOperation as Op;
    let is_addend = |of: SpmdType| matches!(of, SpmdType::Partial(_));
    if is_addend(first) || is_addend(second) {
        let is_linear = match operation {
            Op::Add | Op::Sub => first == second,
            Op::Neg => true,
            Op::Mul | Op::Div => is_number,
            _ => false,
        };
        return is_linear.then_some(first);
    }
    match (first, second) {
        (one, other) if one == other => Some(one),
        (SpmdType::Replicate, other) | (other, SpmdType::Replicate) => Some(other),
        _ => None,
    }
}
