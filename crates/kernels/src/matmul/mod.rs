//! Matrix products.

pub(crate) mod cpu;

use burn_ir::{CustomOpIr, FloatOperationIr, MatmulOpIr, OperationIr};

use crate::contract::{
    Composed, FusedCost, FusedKernel, KernelCheck, KernelPattern, KernelRecord, Replaced, taken,
};
use crate::form::{FormCall, Number};
use crate::halves::takes;

/// The product of matrices, with 32-bit sums. Inputs: lhs, rhs. Outputs: product.
pub(crate) struct Matmul;

impl FusedKernel for Matmul {
    const RECORD: KernelRecord = KernelRecord {
        cost: product_cost,
        pattern: KernelPattern::Placed(|operation, _| match operation {
            OperationIr::Float(dtype, FloatOperationIr::Matmul(op)) if takes(*dtype) => {
                Replaced::of([&op.lhs, &op.rhs], &op.out)
            }
            _ => None,
        }),
        plain: |call| {
            let ([lhs, rhs], [out]) = (call.inputs.as_slice(), call.outputs.as_slice()) else {
                return None;
            };
            let product = MatmulOpIr {
                lhs: lhs.clone(),
                rhs: rhs.clone(),
                out: out.clone(),
            };
            let product = FloatOperationIr::Matmul(product);
            Some(OperationIr::Float(out.dtype, product))
        },
        check: KernelCheck {
            is_uniform: true,
            ..KernelCheck::DEFAULT
        },
        ..KernelRecord::new("models.matmul", |_, inputs| {
            let [lhs, rhs] = taken(inputs);
            vec![cpu::matmul(lhs, rhs)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [a, b] = call.operands()?;
        let shape = call.call.outputs[0].shape.as_slice();
        Ok(vec![N::matmul(a, b, shape)?])
    }
}

fn product_cost(call: &CustomOpIr) -> FusedCost {
    let (lhs, out) = (&call.inputs[0], &call.outputs[0]);
    let addends = match lhs.shape.as_slice() {
        [.., _, addends] => *addends,
        _ => 1,
    };
    let products = (out.shape.num_elements() as u64).saturating_mul(addends as u64);
    FusedCost {
        matmul: products.saturating_mul(2),
        pointwise: 0,
    }
}
