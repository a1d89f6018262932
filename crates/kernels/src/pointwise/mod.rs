//! Programs of pointwise operations, which read and write memory only once.
//!
//! Separate operations each read and write a tensor, which is often larger than the caches. A program runs all
//! operations while a block of elements is in the first-level cache. Every operation rounds like Burn's CPU backend, so
//! the results have the same bits.

mod program;
mod run;
#[cfg(test)]
mod tests;

use burn_ir::CustomOpIr;

use crate::contract::{
    Composed, FusedCost, FusedKernel, KernelCheck, KernelPlacement, KernelRecord,
};
use crate::form::{FormCall, Number, map};
pub use program::{PointwiseOperand, PointwiseOperation, PointwiseProgram};

/// Inputs: the program's, which broadcast to y. Outputs: y. Scalars: the [program](PointwiseProgram::to_scalars).
pub(crate) struct Pointwise;

impl FusedKernel for Pointwise {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |call| program(call).written_over(),
        is_cheap: true,
        cost: |call| {
            let FusedCost { matmul, pointwise } = FusedCost::of_elements(call);
            FusedCost {
                matmul,
                pointwise: program(call).len() as u64 * pointwise,
            }
        },
        placement: KernelPlacement::Program,
        check: KernelCheck {
            // Positive numbers, which have roots and logarithms.
            drawn: |_| (0.5, 1.0),
            has_code: true,
            rounds_steps: true,
            ..KernelCheck::DEFAULT
        },
        ..KernelRecord::new("models.pointwise", |call, inputs| {
            let shape = &call.outputs[0].shape;
            vec![run::run(&program(call), inputs, shape)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let program = PointwiseProgram::from_scalars(&call.call.scalars);
        let program = program.ok_or("its scalars are not a program")?;
        let inputs: Vec<_> = call.inputs.iter().collect();
        let result = map(call.call.outputs[0].shape.as_slice(), &inputs, |elements| {
            let mut results: Vec<N> = Vec::with_capacity(program.len());
            for (operation, first, second) in program.parts() {
                let operand = |operand: PointwiseOperand| match operand {
                    PointwiseOperand::Input(index) => (elements[index], None),
                    PointwiseOperand::Step(index) => (results[index], None),
                    PointwiseOperand::Number(index) => {
                        let scalar = call.scalars[program.place_of(index)];
                        (N::of_scalar(scalar), Some(scalar))
                    }
                };
                let result = N::step(operation, operand(first), operand(second));
                results.push(result);
            }
            results.last().copied().unwrap_or_default()
        });
        Ok(vec![result?])
    }
}

/// Returns the program of a call.
fn program(call: &CustomOpIr) -> PointwiseProgram {
    let program = PointwiseProgram::from_scalars(&call.scalars);
    program.expect("a call of pointwise operations has the scalars of a program")
}
