//! Reductions, and operations that scan or sort along a dim.

use burn_fsdp_mesh::ReduceOp;
use burn_ir::{NumericOperationIr as Numeric, OperationIr, TensorIr};

use crate::place::signature::{Signature, alphabet};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    let (OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op)) = operation else {
        return None;
    };
    let sum = Some(ReduceOp::Sum);
    // A mean of integers is rounded, so the mean of the parts' means is not the mean of all elements.
    let is_rounded = matches!(operation, OperationIr::NumericInt(..));
    let mean = (!is_rounded).then_some(ReduceOp::Mean);
    Some(match op {
        Numeric::Mean(_) if is_rounded => return None,
        Numeric::Sum(op) => all(&op.input, &op.out, ReduceOp::Sum),
        Numeric::Mean(op) => all(&op.input, &op.out, ReduceOp::Mean),
        Numeric::Max(op) => all(&op.input, &op.out, ReduceOp::Max),
        Numeric::Min(op) => all(&op.input, &op.out, ReduceOp::Min),
        Numeric::MaxAbs(op) => all(&op.input, &op.out, ReduceOp::Max),
        Numeric::SumDim(op) => along(&op.input, &[&op.out], &[op.axis], sum),
        Numeric::SumDims(op) => along(&op.input, &[&op.out], &op.axes, sum),
        Numeric::MeanDim(op) => along(&op.input, &[&op.out], &[op.axis], mean),
        Numeric::MaxDim(op) => along(&op.input, &[&op.out], &[op.axis], Some(ReduceOp::Max)),
        Numeric::MaxAbsDim(op) => along(&op.input, &[&op.out], &[op.axis], Some(ReduceOp::Max)),
        Numeric::MinDim(op) => along(&op.input, &[&op.out], &[op.axis], Some(ReduceOp::Min)),
        // Products, and indices from different ranks, cannot be combined.
        Numeric::ProdDim(op)
        | Numeric::ArgMax(op)
        | Numeric::ArgMin(op)
        | Numeric::ArgTopK(op)
        | Numeric::TopK(op) => along(&op.input, &[&op.out], &[op.axis], None),
        Numeric::MaxDimWithIndices(op) | Numeric::MinDimWithIndices(op) => {
            along(&op.tensor, &[&op.out, &op.out_indices], &[op.dim], None)
        }
        Numeric::TopKWithIndices(op) => {
            along(&op.tensor, &[&op.out, &op.out_indices], &[op.dim], None)
        }
        Numeric::CumSum(op) | Numeric::CumProd(op) | Numeric::CumMin(op) | Numeric::CumMax(op) => {
            along(&op.input, &[&op.out], &[op.axis], None)
        }
        Numeric::Sort(op) | Numeric::ArgSort(op) => along(&op.input, &[&op.out], &[op.dim], None),
        Numeric::SortWithIndices(op) => {
            along(&op.input, &[&op.out, &op.out_indices], &[op.dim], None)
        }
        _ => return None,
    })
}

/// Returns the signature of a reduction to one element.
fn all(input: &TensorIr, out: &TensorIr, op: ReduceOp) -> Signature {
    let letters = alphabet(input.shape.num_dims());
    let signature = Signature::new()
        .input_of(input, letters.clone())
        .output(out, "");
    let signature = letters
        .into_iter()
        .flatten()
        .fold(signature, |s, letter| s.contracts(letter, op));
    linear(signature, input, op)
}

/// Returns the signature of an operation along `dims`, which its outputs keep, possibly with different sizes.
fn along(
    input: &TensorIr,
    outputs: &[&TensorIr],
    dims: &[usize],
    op: Option<ReduceOp>,
) -> Signature {
    let letters = alphabet(input.shape.num_dims());
    let mut kept = letters.clone();
    for dim in dims {
        kept[*dim] = None;
    }
    let given = match op {
        Some(_) => letters.clone(),
        None => kept.clone(),
    };
    let mut signature = Signature::new().input_of(input, given);
    for output in outputs {
        signature = signature.output_of(output, kept.clone());
    }
    let Some(op) = op else {
        return signature;
    };
    for dim in dims {
        if let Some(letter) = letters[*dim] {
            signature = signature.contracts(letter, op);
        }
    }
    linear(signature, input, op)
}

fn linear(signature: Signature, input: &TensorIr, op: ReduceOp) -> Signature {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => signature.linear_in([input]),
        ReduceOp::Max | ReduceOp::Min => signature,
    }
}
