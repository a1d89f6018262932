//! Rotary positions.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::LlamaConfig;
use crate::positions::Positions;
use crate::rope_scaling::RopeScaling;

/// Rotary positions. The two halves of the rotated part of a head are the coordinates of points in planes, and a
/// token's position rotates each plane by a different angle.
#[derive(Debug, Clone)]
pub(crate) struct Rotary {
    /// `[batch or 1, time, 1, rotated_dim / 2]`.
    cos: Tensor<4>,
    /// `[batch or 1, time, 1, rotated_dim / 2]`.
    sin: Tensor<4>,
}

impl Rotary {
    /// Computes the rotations of these positions. Plane `i` of `n` rotates by `base^(-i / n)` per token, before scaling.
    pub(crate) fn new(config: &LlamaConfig, positions: Positions<'_>, device: &Device) -> Self {
        let (base, scaling) = (config.rope_base, config.variant.rope_scaling);
        Self::of(config, (base, scaling), positions, device)
    }

    /// Computes the rotations in layers with a sliding window, if they differ.
    pub(crate) fn local(
        config: &LlamaConfig,
        positions: Positions<'_>,
        device: &Device,
    ) -> Option<Self> {
        let plain = (config.variant.local_rope_base?, RopeScaling::None);
        Some(Self::of(config, plain, positions, device))
    }

    fn of(
        config: &LlamaConfig,
        (base, scaling): (usize, RopeScaling),
        positions: Positions<'_>,
        device: &Device,
    ) -> Self {
        let planes = config.rotated_dim() / 2;
        let index = |range: &Range<usize>, shape: [usize; 4]| {
            Tensor::<1, Int>::arange(range.start as i64..range.end as i64, device)
                .reshape(shape)
                .float()
        };
        let speeds = |length: usize| match scaling {
            RopeScaling::None => {
                let step = -(base as f64).ln() / planes as f64;
                index(&(0..planes), [1, 1, 1, planes])
                    .mul_scalar(step)
                    .exp()
            }
            scaling => {
                let speeds = scaling.speeds(base as f64, planes, [length, config.seq]);
                let speeds: Vec<_> = speeds.into_iter().map(|speed| speed as f32).collect();
                Tensor::from_data(TensorData::new(speeds, [1, 1, 1, planes]), device)
            }
        };
        // The speeds may depend on the length of the sequence.
        let of_each = |positions: &Tensor<2, Int>, length: usize| {
            let [batch, time] = positions.dims();
            positions.clone().reshape([batch, time, 1, 1]).float() * speeds(length)
        };
        let angles = match positions {
            Positions::Runs(parts) => {
                let angles =
                    |part: &Range<usize>| index(part, [1, part.len(), 1, 1]) * speeds(part.end);
                Tensor::cat(parts.iter().map(angles).collect(), 1)
            }
            Positions::Documents(positions) => of_each(positions, positions.dims()[1]),
            Positions::Cached(positions) => of_each(positions, 1),
        };
        let (cos, sin) = (angles.clone().cos(), angles.sin());
        let amplitude = scaling.amplitude();
        if amplitude == 1.0 {
            return Self { cos, sin };
        }
        Self {
            cos: cos.mul_scalar(amplitude),
            sin: sin.mul_scalar(amplitude),
        }
    }

    /// Rotates heads.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, time, heads, head_dim]`
    /// - output: the same
    pub(crate) fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let (planes, head_dim) = (self.cos.dims()[3], x.dims()[3]);
        let (left, right) = (
            x.clone().narrow(3, 0, planes),
            x.clone().narrow(3, planes, planes),
        );
        // The rotations have 32 bits, as in transformers. The rotated tensor may have fewer.
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        let (cos, sin) = if x.dtype() == cos.dtype() {
            (cos, sin)
        } else {
            (cos.cast(x.dtype()), sin.cast(x.dtype()))
        };
        let turned_left = left.clone() * cos.clone() - right.clone() * sin.clone();
        let turned_right = right * cos + left * sin;
        let mut parts = vec![turned_left, turned_right];
        if 2 * planes < head_dim {
            parts.push(x.narrow(3, 2 * planes, head_dim - 2 * planes));
        }
        Tensor::cat(parts, 3)
    }
}
