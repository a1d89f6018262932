//! Two unusual optimizers, to check that nothing depends on how Burn's are created.

use burn::optim::{Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_pack::Scalar;

const EPSILON: f64 = 1e-2;

/// An element-wise optimizer that acts differently in every third step, with a 64-bit moment, and from the second step
/// on an additional tensor in its state.
#[derive(Debug, Clone)]
pub(crate) struct Turns;

#[derive(Debug, Clone)]
pub(crate) struct TurnsState<const D: usize> {
    time: u64,
    moment: Tensor<D>,
    slow: Option<Tensor<D>>,
}

impl<const D: usize> RecordState for TurnsState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_scalar(prefix, "time", Scalar::UInt(self.time));
        out.push_tensor(prefix, "moment", self.moment.to_data());
        if let Some(slow) = &self.slow {
            out.push_tensor(prefix, "slow", slow.to_data());
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let Some(Scalar::UInt(time)) = source.take_scalar(prefix, "time") else {
            return None;
        };
        let wide = (device, DType::F64);
        let moment = source.take_tensor(prefix, "moment")?;
        let slow = source.take_tensor(prefix, "slow");
        Some(Self {
            time,
            moment: Tensor::from_data(moment, wide),
            slow: slow.map(|slow| Tensor::from_data(slow, device)),
        })
    }
}

impl Optimizer for Turns {
    type State<const D: usize> = TurnsState<D>;

    fn step<const D: usize>(
        &self,
        rate: f64,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<TurnsState<D>>,
    ) -> (Tensor<D>, Option<TurnsState<D>>) {
        let wide = gradient.cast(FloatDType::F64);
        let (time, moment, slow) = match state {
            Some(TurnsState { time, moment, slow }) => (
                time,
                moment.mul_scalar(0.7) + wide.mul_scalar(0.3),
                Some(match slow {
                    Some(slow) => slow.mul_scalar(0.5) + tensor.clone().mul_scalar(0.5),
                    None => tensor.clone(),
                }),
            ),
            None => (0, wide.mul_scalar(0.3), None),
        };
        let step = moment.clone().cast(FloatDType::F32);
        let next = match (time % 3, &slow) {
            (2, Some(slow)) => tensor.mul_scalar(0.8) + slow.clone().mul_scalar(0.2),
            _ => tensor - (step.clone() / (step.abs() + EPSILON)).mul_scalar(rate),
        };
        let state = TurnsState {
            time: time + 1,
            moment,
            slow,
        };
        (next, Some(state))
    }

    fn to_device<const D: usize>(state: TurnsState<D>, device: &Device) -> TurnsState<D> {
        TurnsState {
            time: state.time,
            moment: state.moment.to_device(device),
            slow: state.slow.map(|slow| slow.to_device(device)),
        }
    }
}

/// An optimizer of whole tensors: it divides steps by the mean size of a row's gradients, which it keeps as a vector,
/// and by the length of all of them.
#[derive(Debug, Clone)]
pub(crate) struct Rows;

#[derive(Debug, Clone)]
pub(crate) struct RowsState<const D: usize> {
    rows: Tensor<1>,
}

impl<const D: usize> RecordState for RowsState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "rows", self.rows.to_data());
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let rows = source.take_tensor(prefix, "rows")?;
        Some(Self {
            rows: Tensor::from_data(rows, device),
        })
    }
}

impl Optimizer for Rows {
    type State<const D: usize> = RowsState<D>;

    fn step<const D: usize>(
        &self,
        rate: f64,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<RowsState<D>>,
    ) -> (Tensor<D>, Option<RowsState<D>>) {
        let dims = gradient.dims();
        let rest = dims.iter().skip(1).product::<usize>();
        let by_row = gradient.clone().reshape([dims[0], rest]);
        let size = by_row.abs().mean_dim(1).reshape([dims[0]]);
        let rows = match state {
            Some(RowsState { rows }) => rows.mul_scalar(0.6) + size.mul_scalar(0.4),
            None => size,
        };
        let mut ones = [1; D];
        ones[0] = dims[0];
        let divisor = rows.clone().add_scalar(EPSILON).reshape(ones);
        let length = gradient.clone().square().sum().add_scalar(EPSILON).sqrt();
        let step = gradient / divisor / length.reshape([1; D]);
        let next = tensor - step.mul_scalar(0.1 * rate);
        (next, Some(RowsState { rows }))
    }

    fn to_device<const D: usize>(state: RowsState<D>, device: &Device) -> RowsState<D> {
        RowsState {
            rows: state.rows.to_device(device),
        }
    }
}
