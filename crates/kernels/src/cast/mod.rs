//! Casts between the types of floats that kernels support.

use burn::tensor::DType;
use burn_ir::{BaseOperationIr, CastOpIr, OperationIr};

use crate::contract::{Composed, FusedKernel, KernelPattern, KernelRecord, Replaced, taken};
use crate::form::{FormCall, Number};
use crate::halves::cast;
use crate::rows::contiguous;

/// Inputs: x of either type. Outputs: x of the other type.
pub(crate) struct Cast;

impl FusedKernel for Cast {
    const RECORD: KernelRecord = KernelRecord {
        is_cheap: true,
        pattern: KernelPattern::Placed(|operation, _| {
            let OperationIr::BaseFloat(BaseOperationIr::Cast(op)) = operation else {
                return None;
            };
            let types = [op.input.dtype, op.out.dtype];
            let is_known = types.contains(&DType::F32) && types.contains(&DType::BF16);
            Replaced::of([&op.input], &op.out).filter(|_| is_known)
        }),
        plain: |call| {
            let cast = CastOpIr {
                input: call.inputs.first()?.clone(),
                out: call.outputs.first()?.clone(),
            };
            Some(OperationIr::BaseFloat(BaseOperationIr::Cast(cast)))
        },
        ..KernelRecord::new("models.cast", |call, inputs| {
            let [x] = taken(inputs);
            vec![cast(contiguous(x), call.outputs[0].dtype)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        Ok(call.inputs.to_vec())
    }
}
