//! An optimizer whose states are sealed from step to step.

use std::sync::Arc;

use burn::optim::{Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp_collectives::{At, ProcessGroup, Seal};

use crate::device::is_host;
use crate::error::{Error, throw};
use crate::parameter::current::{Current, current};
use crate::transport;

/// An optimizer of Burn that seals the states that it keeps of sharded parameters, and looks at each step whether they are
/// what it has written, where ranks compare bytes ([`Check::Agreement`](burn_fsdp_collectives::Check::Agreement)); elsewhere
/// it is the optimizer alone. A state that has changed ends the step with
/// [`AlteredAtRest`](burn_fsdp_collectives::Error::AlteredAtRest), which [`catch`](crate::catch) makes a value.
///
/// Records are those of the optimizer. States are sealed from the first step on that writes them: what a record has loaded
/// is not, until then. States on devices with memory of their own are never.
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
    /// Returns `optimizer` with seals.
    pub fn new(optimizer: O) -> Self {
        Self(optimizer)
    }
}

/// The state of a [`SealedOptimizer`]: that of its optimizer, and the seals of its tensors.
#[derive(Debug, Clone)]
pub struct SealedState<S> {
    state: S,
    /// By name; `None` if it was not sealed.
    seals: Option<Arc<[(String, Seal)]>>,
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
        let current = current().filter(|_| is_host(&device));
        let state = state.map(|state| match &current {
            Some(current) => state
                .taken(current, &device)
                .unwrap_or_else(|error| throw(error)),
            None => state.state,
        });
        let (tensor, state) = self.0.step(lr, tensor, grad, state);
        let state = state.map(|state| SealedState::of(state, current.as_ref()));
        (tensor, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        SealedState {
            state: O::to_device(state.state, device),
            // They are of the elements, which a move does not change.
            seals: state.seals,
        }
    }
}

impl<S: RecordState> SealedState<S> {
    fn of(state: S, current: Option<&Current>) -> Self {
        let of_tensors = |group: &ProcessGroup| {
            let seals = tensors(&state).into_iter();
            let seals = seals.map(|(name, data)| Some((name, group.seal(data.as_bytes())?)));
            seals.collect::<Option<Arc<[_]>>>()
        };
        Self {
            seals: current
                .filter(|current| current.group.compares_bytes())
                .and_then(|current| of_tensors(&current.group)),
            state,
        }
    }

    /// Returns the state of the optimizer, which is what was sealed.
    fn taken(self, current: &Current, device: &Device) -> Result<S, Error> {
        let Self { state, seals } = self;
        if seals.is_none() && !current.group.awaits_flip(At::State) {
            return Ok(state);
        }
        let seals = seals.as_deref().unwrap_or_default();
        let mut sink = StateSink::default();
        state.state_flatten("", &mut sink);
        let mut is_flipped = false;
        for (_, data) in &mut sink.tensors {
            is_flipped |= flip_if_told(&current.group, data);
        }
        for (name, data) in &sink.tensors {
            let Some((_, seal)) = seals.iter().find(|(sealed, _)| sealed == name) else {
                continue;
            };
            let what = || format!("the optimizer's state `{name}` of `{}`", current.path);
            current.group.check_seal(seal, data.as_bytes(), what)?;
        }
        Ok(match is_flipped {
            true => put_together(sink, device).unwrap_or(state),
            false => state,
        })
    }
}

/// Flips a bit of a state, if a fault says so.
fn flip_if_told(group: &ProcessGroup, data: &mut TensorData) -> bool {
    let Some(bit) = group.flips(At::State, data.as_bytes().len()) else {
        return false;
    };
    let mut bytes = data.as_bytes().to_vec();
    bytes[bit / 8] ^= 1 << (bit % 8);
    *data = transport::owned_data(bytes, data.shape().clone(), data.dtype());
    true
}

/// Returns the state with these tensors and numbers.
fn put_together<S: RecordState>(sink: StateSink, device: &Device) -> Option<S> {
    let mut source = StateSource::new(sink.scalars.into_iter().collect());
    for (name, data) in sink.tensors {
        source.insert_tensor(name, data);
    }
    S::state_unflatten("", &mut source, device)
}

/// Returns the tensors of a state by name.
fn tensors<S: RecordState>(state: &S) -> Vec<(String, TensorData)> {
    let mut sink = StateSink::default();
    state.state_flatten("", &mut sink);
    sink.tensors
}

/// That of the optimizer: seals are of one run.
impl<S: RecordState> RecordState for SealedState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        self.state.state_flatten(prefix, out);
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let state = S::state_unflatten(prefix, src, device)?;
        Some(Self { state, seals: None })
    }
}
