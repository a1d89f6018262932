//! SiLU and SwiGLU, with their gradients.

mod cpu;
mod pattern;

use crate::contract::{
    Composed, FusedKernel, KernelDims, KernelPattern, KernelPlacement, KernelRecord, taken,
};
use crate::form::{FormCall, Number, map};

/// Inputs: x. Outputs: y.
pub(crate) struct Silu;

impl FusedKernel for Silu {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        is_cheap: true,
        placement: KernelPlacement::Dims(KernelDims::ELEMENTS),
        // It also finds the gates.
        pattern: KernelPattern::Found(pattern::replace),
        ..KernelRecord::new(pattern::SILU, |_, inputs| {
            let [x] = taken(inputs);
            vec![cpu::forward(x)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x] = call.operands()?;
        Ok(vec![map(&x.shape, &[x], |a| silu(a[0]))?])
    }
}

/// Inputs: x, gradient of y. Outputs: gradient of x.
pub(crate) struct SiluBackward;

impl FusedKernel for SiluBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(1),
        placement: KernelDims::ELEMENTS.linear_in(1),
        ..KernelRecord::new(pattern::SILU_GRADIENT, |_, inputs| {
            let [x, grad] = taken(inputs);
            vec![cpu::backward(x, grad)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x, grad] = call.operands()?;
        let of = |a: &[N]| silu_gradient(a[0], a[1]);
        Ok(vec![map(&x.shape, &[x, grad], of)?])
    }
}

/// Inputs: gate, values. Outputs: values times the SiLU of the gate.
pub(crate) struct SwiGlu;

impl FusedKernel for SwiGlu {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        is_cheap: true,
        placement: KernelPlacement::Dims(KernelDims::ELEMENTS),
        ..KernelRecord::new(pattern::GATE, |_, inputs| {
            let [gate, values] = taken(inputs);
            vec![cpu::gated(gate, values)]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [gate, values] = call.operands()?;
        let of = |a: &[N]| silu(a[0]).mul(a[1]);
        Ok(vec![map(&gate.shape, &[gate, values], of)?])
    }
}

/// Inputs: gate, values, gradient of the result. Outputs: gradients of gate, values.
pub(crate) struct SwiGluBackward;

impl FusedKernel for SwiGluBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(2),
        placement: KernelDims::ELEMENTS.linear_in(2),
        ..KernelRecord::new(pattern::GATE_GRADIENT, |_, inputs| {
            let [gate, values, grad] = taken(inputs);
            cpu::gated_gradients(gate, values, grad).into()
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [gate, values, grad] = call.operands()?;
        let (shape, all) = (&gate.shape, [gate, values, grad]);
        let of_gate = |a: &[N]| silu_gradient(a[0], a[2].mul(a[1]));
        let of_values = |a: &[N]| a[2].mul(silu(a[0]));
        Ok(vec![
            map(shape, &all, of_gate)?,
            map(shape, &all, of_values)?,
        ])
    }
}

fn silu<N: Number>(x: N) -> N {
    x.mul(N::function("sigmoid", x))
}

fn silu_gradient<N: Number>(x: N, grad: N) -> N {
    let sigmoid = N::function("sigmoid", x);
    let slope = sigmoid.mul(N::ONE.sub(sigmoid));
    grad.mul(sigmoid.add(x.mul(slope)))
}
