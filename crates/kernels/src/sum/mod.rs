//! Sums along a dim.

mod cpu;

use burn::tensor::DType;
use burn_ir::{NumericOperationIr, OperationIr, ReduceDimOpIr, ScalarIr};

use crate::contract::{
    Composed, FusedKernel, KernelCheck, KernelPattern, KernelRecord, Replaced, size, taken,
};
use crate::form::{Array, FormCall, Number};
use crate::halves::takes;
use crate::threads::LARGE;

/// Inputs: x. Outputs: its sums, computed in 32 bits. Scalars: dim.
pub(crate) struct SumDim;

impl FusedKernel for SumDim {
    const RECORD: KernelRecord = KernelRecord {
        pattern: KernelPattern::Placed(replaced),
        plain: |call| {
            let ([input], [out]) = (call.inputs.as_slice(), call.outputs.as_slice()) else {
                return None;
            };
            let sums = ReduceDimOpIr {
                input: input.clone(),
                out: out.clone(),
                axis: call.scalars.first()?.elem::<u64>() as usize,
                accumulator_len: 1,
            };
            let sums = NumericOperationIr::SumDim(sums);
            Some(OperationIr::NumericFloat(out.dtype, sums))
        },
        check: KernelCheck {
            has_code: true,
            ..KernelCheck::DEFAULT
        },
        ..KernelRecord::new("models.sum_dim", |call, inputs| {
            let [x] = taken(inputs);
            vec![cpu::sum_dim(x, size(call, 0))]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x] = call.operands()?;
        let dim = call.call.scalars.first();
        let dim = dim.map(|dim| dim.elem::<u64>() as usize);
        let dim = dim.filter(|dim| *dim < x.shape.len());
        let dim = dim.ok_or("its scalar is not a dim")?;
        let (rows, columns) = (x.shape[dim], x.shape[dim + 1..].iter().product::<usize>());
        let mut shape = x.shape.clone();
        shape[dim] = 1;
        Ok(vec![Array::from_fn(&shape, |at| {
            let (matrix, column) = (at / columns, at % columns);
            let addends = (0..rows).map(|row| x.elements[(matrix * rows + row) * columns + column]);
            addends.fold(N::default(), N::add)
        })])
    }
}

fn replaced(operation: &OperationIr, num_elements: usize) -> Option<Replaced> {
    let OperationIr::NumericFloat(dtype, NumericOperationIr::SumDim(op)) = operation else {
        return None;
    };
    // Sums along the last dim are taken in an order that the vectorized kernel does not use.
    let is_inner = op.axis + 1 < op.input.shape.rank();
    // Burn processes 16-bit floats one by one, and all elements on one thread.
    let is_slow = *dtype == DType::BF16 || num_elements >= LARGE;
    let dim = vec![ScalarIr::UInt(op.axis as u64)];
    Replaced::with([&op.input], &op.out, dim).filter(|_| takes(*dtype) && is_inner && is_slow)
}
