//! Rotary positions.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::RopeScaling;

/// Rotary positions. The two halves of a head are the coordinates of points in planes, and a token's position rotates
/// each plane by a different angle.
#[derive(Debug, Clone)]
pub(crate) struct Rotary {
    /// `[1, time, 1, head_dim / 2]`.
    cos: Tensor<4>,
    /// `[1, time, 1, head_dim / 2]`.
    sin: Tensor<4>,
}

impl Rotary {
    /// Computes the rotations of these positions. Plane `i` of `n` rotates by `base^(-i / n)` per token, before
    /// scaling.
    pub(crate) fn new(
        positions: Range<usize>,
        head_dim: usize,
        base: usize,
        scaling: RopeScaling,
        device: &Device,
    ) -> Self {
        let planes = head_dim / 2;
        let index = |range: Range<usize>, shape: [usize; 4]| {
            Tensor::<1, Int>::arange(range.start as i64..range.end as i64, device)
                .reshape(shape)
                .float()
        };
        let time = positions.len();
        let step = -(base as f64).ln() / planes as f64;
        let speeds = match scaling {
            RopeScaling::None => index(0..planes, [1, 1, 1, planes]).mul_scalar(step).exp(),
            scaling => {
                let speed = |plane: usize| scaling.scaled((step * plane as f64).exp()) as f32;
                let speeds: Vec<_> = (0..planes).map(speed).collect();
                Tensor::from_data(TensorData::new(speeds, [1, 1, 1, planes]), device)
            }
        };
        let angles = index(positions, [1, time, 1, 1]) * speeds;
        Self {
            cos: angles.clone().cos(),
            sin: angles.sin(),
        }
    }

    /// Rotates heads.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, time, heads, head_dim]`
    /// - output: the same
    pub(crate) fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let planes = x.dims()[3] / 2;
        let (left, right) = (
            x.clone().narrow(3, 0, planes),
            x.clone().narrow(3, planes, planes),
        );
        // The rotations have 32 bits, as in transformers. The rotated tensor may have fewer.
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        let (cos, sin) = match x.dtype() == cos.dtype() {
            true => (cos, sin),
            false => (cos.cast(x.dtype()), sin.cast(x.dtype())),
        };
        let turned_left = left.clone() * cos.clone() - right.clone() * sin.clone();
        let turned_right = right * cos + left * sin;
        Tensor::cat(vec![turned_left, turned_right], 3)
    }
}
