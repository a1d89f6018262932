//! Layer norms and root mean square norms, with their gradients.
//!
//! - `cpu`: the kernels.
//! - `layer_pattern`, `root_pattern`: the operations that they replace; `scaled`: the operations common to both.

mod cpu;
mod layer_pattern;
mod root_pattern;
mod scaled;

use burn_ir::CustomOpIr;

use crate::contract::{
    Composed, FusedKernel, KernelDims, KernelPattern, KernelPlacement, KernelRecord, Letters, taken,
};
use crate::form::{Array, FormCall, Number, dot, each_row, map, sum, two_rows};

/// Inputs: x, gamma, beta. Outputs: y. Scalars: epsilon.
pub(crate) struct LayerNorm;

impl FusedKernel for LayerNorm {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        is_cheap: true,
        placement: KernelPlacement::Dims(KernelDims::ROWS),
        pattern: KernelPattern::Found(layer_pattern::replace),
        ..KernelRecord::new(layer_pattern::NORM, |call, inputs| {
            let [x, gamma, beta] = taken(inputs);
            vec![cpu::forward(x, gamma, beta, epsilon(call))]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x, gamma, beta] = call.operands()?;
        let epsilon = call.scalar(0)?;
        let normal = each_row(x, |row| Normal::of(row, Middle::Mean, epsilon).row);
        let of = |a: &[N]| a[0].mul(a[1]).add(a[2]);
        Ok(vec![map(&x.shape, &[&normal, gamma, beta], of)?])
    }
}

/// The gradients of a row's scale and shift are sums over rows.
const GRADIENTS: KernelPlacement = KernelDims::ROWS.summed(Letters::Rows).linear_in(2);

/// Inputs: x, gamma, gradient of y. Outputs: gradients of x, gamma, beta. Scalars: epsilon.
pub(crate) struct LayerNormBackward;

impl FusedKernel for LayerNormBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(2),
        placement: GRADIENTS,
        ..KernelRecord::new(layer_pattern::GRADIENT, |call, inputs| {
            let [x, gamma, grad] = taken(inputs);
            cpu::backward(x, gamma, grad, epsilon(call)).into()
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        gradients(call, Middle::Mean)
    }
}

/// Inputs: x, gamma. Outputs: y. Scalars: epsilon.
pub(crate) struct RmsNorm;

impl FusedKernel for RmsNorm {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(0),
        is_cheap: true,
        placement: KernelPlacement::Dims(KernelDims::ROWS),
        pattern: KernelPattern::Found(root_pattern::replace),
        ..KernelRecord::new(root_pattern::NORM, |call, inputs| {
            let [x, gamma] = taken(inputs);
            vec![cpu::root_mean_square(x, gamma, epsilon(call))]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let [x, gamma] = call.operands()?;
        let epsilon = call.scalar(0)?;
        let normal = each_row(x, |row| Normal::of(row, Middle::Zero, epsilon).row);
        let of = |a: &[N]| a[0].mul(a[1]);
        Ok(vec![map(&x.shape, &[&normal, gamma], of)?])
    }
}

/// Inputs: x, gamma, gradient of y. Outputs: gradients of x, gamma. Scalars: epsilon.
pub(crate) struct RmsNormBackward;

impl FusedKernel for RmsNormBackward {
    const RECORD: KernelRecord = KernelRecord {
        written_over: |_| Some(2),
        placement: GRADIENTS,
        ..KernelRecord::new(root_pattern::GRADIENT, |call, inputs| {
            let [x, gamma, grad] = taken(inputs);
            cpu::root_mean_square_gradients(x, gamma, grad, epsilon(call)).into()
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let mut results = gradients(call, Middle::Zero)?;
        results.truncate(2);
        Ok(results)
    }
}

fn epsilon(call: &CustomOpIr) -> f32 {
    call.scalars[0].elem()
}

/// Returns the gradients of input and gamma, and the sum of the rows of `grad`, which is the gradient of beta.
fn gradients<N: Number>(call: &FormCall<'_, N>, middle: Middle) -> Composed<N> {
    let [x, gamma, grad] = call.operands()?;
    let epsilon = call.scalar(0)?;
    let width = gamma.elements.len();
    let share = N::of_integer(width as i64).inverse();
    let mut of_gamma = vec![N::default(); width];
    let mut of_beta = of_gamma.clone();
    let of_x = two_rows(x, grad, |row, grad| {
        let Normal { row, rate } = Normal::of(row, middle, epsilon);
        let pairs = grad.iter().zip(&gamma.elements);
        let scaled: Vec<N> = pairs.map(|(grad, gamma)| grad.mul(*gamma)).collect();
        let along = dot(&scaled, &row).mul(share);
        let mean = middle.of(&scaled);
        for index in 0..width {
            of_gamma[index] = of_gamma[index].add(grad[index].mul(row[index]));
            of_beta[index] = of_beta[index].add(grad[index]);
        }
        let both = scaled.iter().zip(&row);
        let of = |(scaled, normal): (&N, &N)| {
            let rest = scaled.sub(mean).sub(normal.mul(along));
            rest.mul(rate)
        };
        both.map(of).collect()
    });
    let [of_gamma, of_beta] = [of_gamma, of_beta].map(|of| Array::new(gamma.shape.clone(), of));
    Ok(vec![of_x, of_gamma, of_beta])
}

/// The value that a norm subtracts from a row before squaring.
#[derive(Clone, Copy)]
enum Middle {
    Mean,
    /// Zero, for a root-mean-square norm.
    Zero,
}

impl Middle {
    fn of<N: Number>(self, row: &[N]) -> N {
        match self {
            Self::Mean => sum(row).mul(N::of_integer(row.len() as i64).inverse()),
            Self::Zero => N::default(),
        }
    }
}

/// A row minus its middle, times `rate`.
struct Normal<N> {
    row: Vec<N>,
    /// `1 / sqrt(mean_square + epsilon)`, where the mean square is that of the row minus its middle.
    rate: N,
}

impl<N: Number> Normal<N> {
    fn of(row: &[N], middle: Middle, epsilon: N) -> Self {
        let share = N::of_integer(row.len() as i64).inverse();
        let mean = middle.of(row);
        let centered: Vec<N> = row.iter().map(|element| element.sub(mean)).collect();
        let variance = dot(&centered, &centered).mul(share);
        let rate = N::function("sqrt", variance.add(epsilon)).inverse();
        Self {
            row: centered.iter().map(|element| element.mul(rate)).collect(),
            rate,
        }
    }
}
