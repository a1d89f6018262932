//! An optimizer whose states are sealed between steps.

use std::sync::Arc;

use burn::optim::{Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp_collectives::{At, Keeper, Label, ProcessGroup, RestKind};
use burn_fsdp_tensors::is_host;

use crate::error::Error;
use crate::parameter::current::{Current, current};
use crate::thrown::throw;

/// A Burn optimizer that seals its states of sharded parameters. If ranks compare bytes
/// ([`Check::Agreement`](burn_fsdp_collectives::Check::Agreement)), each step checks that the states still have the
/// bytes that the previous step wrote; otherwise it only steps the inner optimizer. A state that has changed ends the
/// step with [`AlteredAtRest`](burn_fsdp_collectives::Error::AlteredAtRest), which [`catch`](crate::catch) turns into a
/// value.
///
/// Records contain only the inner optimizer's state. States are sealed from the first step that writes them, so a state
/// loaded from a record is not sealed until its first step. States on devices with their own memory are never sealed.
///
/// ```
/// use burn::optim::{AdamWConfig, ModuleOptimizer};
/// use burn_fsdp_shard::SealedOptimizer;
///
/// let optimizer: ModuleOptimizer = SealedOptimizer::new(AdamWConfig::new().build()).into();
/// ```
#[derive(Debug, Clone)]
pub struct SealedOptimizer<O>(O);

impl<O: Optimizer> SealedOptimizer<O> {
    /// Wraps `optimizer`, to seal its states.
    pub fn new(optimizer: O) -> Self {
        Self(optimizer)
    }
}

/// The state of a [`SealedOptimizer`]: its inner optimizer's state, split and sealed between steps.
#[derive(Debug, Clone)]
pub struct SealedState<S>(Form<S>);

#[derive(Debug, Clone)]
enum Form<S> {
    /// A whole state: after loading a record, or if ranks do not compare bytes.
    Whole(S),
    /// Tensors, which are sealed.
    Apart {
        tensors: Vec<(String, TensorData)>,
        seals: Arc<Keeper>,
        /// The scalars of the state.
        rest: Arc<StateSink>,
    },
}

impl<O: Optimizer> Optimizer for SealedOptimizer<O> {
    type State<const D: usize> = SealedState<O::State<D>>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let device = grad.device();
        let current = current().filter(|current| current.sealed_in.is_some() && is_host(&device));
        let state = state.and_then(|state| {
            let whole = state.checked(current.as_ref(), &device);
            whole.unwrap_or_else(|error| throw(error))
        });
        let (tensor, state) = self.0.step(lr, tensor, grad, state);
        let state = state.map(|state| SealedState::of(state, current.as_ref()));
        (tensor, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        match state.0 {
            Form::Whole(state) => SealedState(Form::Whole(O::to_device(state, device))),
            // The state is reassembled on the step's device.
            apart => SealedState(apart),
        }
    }
}

impl<S: RecordState> SealedState<S> {
    /// Splits a state into sealed tensors if ranks compare bytes; otherwise keeps it whole.
    fn of(state: S, current: Option<&Current>) -> Self {
        let sealed_in = current.and_then(|current| Some((current, current.sealed_in.as_ref()?)));
        let Some((current, group)) = sealed_in else {
            return Self(Form::Whole(state));
        };
        let mut sink = StateSink::default();
        state.state_flatten("", &mut sink);
        let tensors: Vec<_> = std::mem::take(&mut sink.tensors).into_iter().collect();
        let seals = group.keeper();
        for (index, (name, data)) in tensors.iter().enumerate() {
            let path = &current.slot().path;
            let what = || Label::from(format!("the optimizer's state `{name}` of `{path}`"));
            let seal = group.seal(data.as_bytes());
            seals.keep((index as u64, RestKind::State), seal, what);
        }
        Self(Form::Apart {
            tensors,
            seals: Arc::new(seals),
            rest: Arc::new(sink),
        })
    }

    /// Returns the inner optimizer's state after checking the seals; `None` if it cannot be reassembled.
    fn checked(self, current: Option<&Current>, device: &Device) -> Result<Option<S>, Error> {
        let (tensors, seals, rest) = match self.0 {
            Form::Whole(state) => return Ok(Some(state)),
            Form::Apart {
                tensors,
                seals,
                rest,
            } => (tensors, seals, rest),
        };
        let group = current.and_then(|current| current.sealed_in.as_ref());
        let mut source = StateSource::new(rest.scalars.iter().cloned().collect());
        for (index, (name, mut data)) in tensors.into_iter().enumerate() {
            if let Some(group) = group {
                flip_if_told(group, &mut data);
                if let Some(sealed) = seals.get((index as u64, RestKind::State)) {
                    group.check_sealed(&sealed, data.as_bytes())?;
                }
            }
            source.insert_tensor(name, data);
        }
        Ok(S::state_unflatten("", &mut source, device))
    }
}

/// Flips a bit of a state tensor if fault injection requests it.
fn flip_if_told(group: &ProcessGroup, data: &mut TensorData) {
    if let Some(bit) = group.flips(At::State, data.as_bytes().len()) {
        let mut bytes = data.as_bytes().to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        *data = TensorData::from_bytes_vec(bytes, data.shape().clone(), data.dtype());
    }
}

/// A record has only the inner optimizer's state, because seals belong to one run.
impl<S: RecordState> RecordState for SealedState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        match &self.0 {
            Form::Whole(state) => state.state_flatten(prefix, out),
            Form::Apart { tensors, rest, .. } => {
                for (name, data) in tensors {
                    out.push_tensor(prefix, name, data.clone());
                }
                for (name, scalar) in &rest.scalars {
                    out.push_scalar(prefix, name, *scalar);
                }
            }
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let state = S::state_unflatten(prefix, src, device)?;
        Some(Self(Form::Whole(state)))
    }
}
