//! GELU and its gradient.

mod cpu;

use burn_ir::{ActivationOperationIr, OperationIr};

use crate::contract::{
    Composed, FusedKernel, KernelDims, KernelPattern, KernelPlacement, KernelRecord, Replaced,
    taken,
};
use crate::form::{FormCall, Number, map};

/// Inputs: x. Outputs: y.
pub(crate) struct Gelu;

impl FusedKernel for Gelu {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        is_cheap: true,
        placement: KernelPlacement::Dims(KernelDims::ELEMENTS),
        pattern: KernelPattern::One(|operation| match operation {
            OperationIr::Activation(ActivationOperationIr::Gelu(op)) => {
                Replaced::of([&op.input], &op.out)
            }
            _ => None,
        }),
        ..KernelRecord::new("models.gelu", |_, inputs| {
            let [x] = taken(inputs);
            vec![cpu::forward(x)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x] = call.operands()?;
        Ok(vec![map(&x.shape, &[x], |a| N::function("gelu", a[0]))?])
    }
}

/// Inputs: x, gradient of y. Outputs: gradient of x.
pub(crate) struct GeluBackward;

impl FusedKernel for GeluBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(1),
        placement: KernelDims::ELEMENTS.linear_in(1),
        pattern: KernelPattern::One(|operation| match operation {
            OperationIr::Activation(ActivationOperationIr::GeluBackward(op)) => {
                Replaced::of([&op.lhs, &op.rhs], &op.out)
            }
            _ => None,
        }),
        ..KernelRecord::new("models.gelu_backward", |_, inputs| {
            let [x, grad] = taken(inputs);
            vec![cpu::backward(x, grad)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x, grad] = call.operands()?;
        let of = |a: &[N]| a[1].mul(N::function("gelu gradient", a[0]));
        Ok(vec![map(&x.shape, &[x, grad], of)?])
    }
}
