//! An optimizer whose states are sealed from step to step.

use std::sync::Arc;

use burn::optim::{Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp_collectives::{At, ProcessGroup, Seal};

use crate::device::is_host;
use crate::error::Error;
use crate::parameter::current::{Current, current};
use crate::thrown::throw;
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

/// The state of a [`SealedOptimizer`]: that of its optimizer, taken apart and sealed from one step to the next.
#[derive(Debug, Clone)]
pub struct SealedState<S>(Form<S>);

#[derive(Debug, Clone)]
enum Form<S> {
    /// As the optimizer has it: of a record, or where ranks do not compare bytes.
    Whole(S),
    /// In parts, each with its seal.
    Apart {
        tensors: Vec<(String, TensorData, Option<Seal>)>,
        /// The numbers beside them.
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
            // It is put together on the device of the step.
            apart => SealedState(apart),
        }
    }
}

impl<S: RecordState> SealedState<S> {
    /// Takes a state apart and seals it, where ranks compare bytes.
    fn of(state: S, current: Option<&Current>) -> Self {
        let Some(group) = current.and_then(|current| current.sealed_in.as_ref()) else {
            return Self(Form::Whole(state));
        };
        let mut sink = StateSink::default();
        state.state_flatten("", &mut sink);
        let tensors = std::mem::take(&mut sink.tensors)
            .into_iter()
            .map(|(name, data)| {
                let seal = group.seal(data.as_bytes());
                (name, data, seal)
            });
        let tensors = tensors.collect();
        let rest = Arc::new(sink);
        Self(Form::Apart { tensors, rest })
    }

    /// Returns the state of the optimizer, which is what was sealed; `None` if it cannot be put together.
    fn checked(self, current: Option<&Current>, device: &Device) -> Result<Option<S>, Error> {
        let (tensors, rest) = match self.0 {
            Form::Whole(state) => return Ok(Some(state)),
            Form::Apart { tensors, rest } => (tensors, rest),
        };
        let mut source = StateSource::new(rest.scalars.iter().cloned().collect());
        for (name, mut data, seal) in tensors {
            let sealed_in =
                current.and_then(|current| Some((current, current.sealed_in.as_ref()?)));
            if let Some((current, group)) = sealed_in {
                flip_if_told(group, &mut data);
                let path = &current.slot().path;
                let what = || format!("the optimizer's state `{name}` of `{path}`");
                let looked = seal.map(|seal| group.check_seal(&seal, data.as_bytes(), what));
                looked.transpose()?;
            }
            source.insert_tensor(name, data);
        }
        Ok(S::state_unflatten("", &mut source, device))
    }
}

/// Flips a bit of a state, if a fault says so.
fn flip_if_told(group: &ProcessGroup, data: &mut TensorData) {
    if let Some(bit) = group.flips(At::State, data.as_bytes().len()) {
        let mut bytes = data.as_bytes().to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        *data = transport::owned_data(bytes, data.shape().clone(), data.dtype());
    }
}

/// That of the optimizer: seals are of one run.
impl<S: RecordState> RecordState for SealedState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        match &self.0 {
            Form::Whole(state) => state.state_flatten(prefix, out),
            Form::Apart { tensors, rest } => {
                for (name, data, _) in tensors {
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
