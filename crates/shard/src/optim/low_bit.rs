//! An optimizer that keeps its states in fewer bits.

use std::sync::Arc;

use burn::optim::{Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use burn_fsdp_mesh::Partition;
use burn_fsdp_tensors::{LowBits, Rounding, StateFormat};

use crate::device::is_capture;
use crate::error::Error;
use crate::parameter::current::{Current, current, is_trial};
use crate::thrown::throw;

/// A Burn optimizer that keeps its states in fewer bits: each 32-bit tensor that `O` keeps for a parameter is stored in
/// a [`StateFormat`]. A step widens a parameter's states to 32-bit floats, lets `O` update in 32 bits, and rounds the
/// new states.
///
/// *Rounding is stochastic*: the probability of rounding up is proportional to the distance from the lower value, so
/// the mean of many roundings is the value itself. With rounding to nearest, an average would never move if each change
/// is below half of the type's resolution: Adam's second moment with `beta_2` 0.999 changes by a thousandth, but bf16
/// resolves only 1/256. A nonzero value never becomes zero, because optimizers may divide by it.
///
/// *The bits do not depend on the number of ranks*: a hash of the state's name, its number of steps, and the element's
/// flat index in the whole parameter decides whether to round up. That index also determines the element's block.
///
/// *Records and checkpoints* hold the states in 32 bits, in `O`'s form, and the number of steps. A rounded value rounds
/// to itself, so a resumed step has the same bits on any number of ranks. An optimizer without this wrapper rejects
/// these records, and this wrapper rejects records without the number of steps.
///
/// States are in host memory regardless of the parameter's device, and each step reads them back. Do not combine this
/// with a [`SealedOptimizer`](crate::SealedOptimizer): around this optimizer it would keep the states in 32 bits, and
/// inside it, it seals nothing. A state with an infinite or NaN element makes its block NaN, so the loss becomes NaN
/// instead of wrong.
///
/// A step ends with [`Error::Option`], which [`catch`](crate::catch) returns as a value, if a block spans two shards, or
/// if the states of `O` are not in 32 bits (they are if the parameter is).
///
/// *A compiled step* keeps the same bits in its own memory. With 8 bits it cuts parameters between blocks. It rejects
/// this optimizer if placements divide the parameters.
///
/// ```
/// use burn::optim::{AdamWConfig, ModuleOptimizer};
/// use burn_fsdp_shard::{Cut, LowBitOptimizer, ShardPolicy, StateFormat};
///
/// let policy = ShardPolicy::new().cut(Cut::Multiples(StateFormat::BLOCK));
/// let adamw = AdamWConfig::new().build();
/// let optimizer: ModuleOptimizer = LowBitOptimizer::new(adamw, StateFormat::Block8).into();
/// # let _ = policy;
/// ```
#[derive(Debug, Clone)]
pub struct LowBitOptimizer<O> {
    optimizer: O,
    format: StateFormat,
}

impl<O: Optimizer> LowBitOptimizer<O> {
    /// Wraps `optimizer`, to keep its states in `format`.
    pub fn new(optimizer: O, format: StateFormat) -> Self {
        Self { optimizer, format }
    }
}

/// The state of a [`LowBitOptimizer`].
#[derive(Debug, Clone)]
pub struct LowBitState<S> {
    form: Form<S>,
    /// Number of times that the state was rounded.
    num_roundings: u64,
}

#[derive(Debug, Clone)]
enum Form<S> {
    /// The optimizer's own state after loading a record, until the next step.
    Wide(S),
    Rounded {
        tensors: Vec<(String, Rounded)>,
        /// The scalars of the state.
        rest: Arc<StateSink>,
    },
}

#[derive(Debug, Clone)]
struct Rounded {
    shape: Shape,
    format: StateFormat,
    bytes: Vec<u8>,
}

/// The name of [`LowBitState::num_roundings`] in records.
const NUM_ROUNDINGS: &str = "num_roundings";

impl<O: Optimizer> Optimizer for LowBitOptimizer<O> {
    type State<const D: usize> = LowBitState<O::State<D>>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let device = grad.device();
        let num_roundings = state.as_ref().map_or(0, |state| state.num_roundings);
        let state = state.and_then(|state| state.widened(&device));
        let (tensor, state) = self.optimizer.step(lr, tensor, grad, state);
        if is_capture(&device) {
            // A compiled step rounds the states that it keeps, with the same draws.
            let format = self.format;
            let told = LowBits {
                format,
                num_roundings,
            };
            told.tell();
            let kept = |state| LowBitState {
                form: Form::Wide(state),
                num_roundings: num_roundings + 1,
            };
            return (tensor, state.map(kept));
        }
        let state = state.map(|state| {
            if is_trial() {
                // A trial tests the inner optimizer on pieces that belong to no parameter, so there are no indices for
                // rounding.
                LowBitState {
                    form: Form::Wide(state),
                    num_roundings,
                }
            } else {
                let current = current();
                let rounded = LowBitState::rounded(&state, self.format, num_roundings, &current);
                rounded.unwrap_or_else(|error| throw(error))
            }
        });
        (tensor, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        let form = match state.form {
            Form::Wide(state) => Form::Wide(O::to_device(state, device)),
            // The state is assembled on the step's device.
            rounded => rounded,
        };
        LowBitState { form, ..state }
    }
}

impl<S: RecordState> LowBitState<S> {
    fn rounded(
        state: &S,
        format: StateFormat,
        num_roundings: u64,
        current: &Option<Current>,
    ) -> Result<Self, Error> {
        let start = match current {
            Some(current) => start_of(current, format)?,
            None => 0,
        };
        let mut sink = StateSink::default();
        state.state_flatten("", &mut sink);
        let tensors = std::mem::take(&mut sink.tensors).into_iter();
        let tensors = tensors.map(|(name, data)| {
            let rounding = Rounding::new(Rounding::seed(&name, num_roundings), start);
            Ok((name, Rounded::of(data, format, rounding)?))
        });
        Ok(Self {
            form: Form::Rounded {
                tensors: tensors.collect::<Result<_, Error>>()?,
                rest: Arc::new(sink),
            },
            num_roundings: num_roundings + 1,
        })
    }

    /// Returns the inner optimizer's state in 32 bits; `None` if it cannot be assembled.
    fn widened(self, device: &Device) -> Option<S> {
        let (tensors, rest) = match self.form {
            Form::Wide(state) => return Some(state),
            Form::Rounded { tensors, rest } => (tensors, rest),
        };
        let mut source = StateSource::new(rest.scalars.iter().cloned().collect());
        for (name, rounded) in tensors {
            source.insert_tensor(name, rounded.widened());
        }
        S::state_unflatten("", &mut source, device)
    }
}

/// Returns the flat index of this rank's first element of a parameter; fails if a block spans two shards.
fn start_of(current: &Current, format: StateFormat) -> Result<usize, Error> {
    let slot = current.slot();
    let partition = &slot.partition;
    if format == StateFormat::Block8 && slot.is_gathered() && divides_blocks(partition) {
        return Err(Error::Option {
            option: "ShardPolicy::cut",
            expected: "`Cut::Multiples(StateFormat::BLOCK)`; set it, or keep the states as `StateFormat::Bf16`",
            got: format!(
                "a cut through blocks of {} elements, which share a scale (`{}` has {partition})",
                StateFormat::BLOCK,
                slot.path
            ),
        });
    }
    Ok(current.start())
}

/// Returns true if any shard ends inside a block. This checks all shards, so all ranks get the same result.
fn divides_blocks(partition: &Partition) -> bool {
    let len = partition.num_elements();
    let mut ends = partition.ranges().map(|range| range.end);
    ends.any(|end| end < len && !end.is_multiple_of(StateFormat::BLOCK))
}

impl Rounded {
    fn of(data: TensorData, format: StateFormat, rounding: Rounding) -> Result<Self, Error> {
        let shape = data.shape().clone();
        if data.dtype() != DType::F32 {
            return Err(Error::Option {
                option: "a state of `LowBitOptimizer`",
                expected: "of 32 bits; give the module parameters in 32 bits, or use the optimizer without \
                    `LowBitOptimizer`",
                got: format!("of type {:?}", data.dtype()),
            });
        }
        let (words, _) = data.as_bytes().as_chunks::<4>();
        let values = words.iter().map(|word| f32::from_ne_bytes(*word));
        Ok(Self {
            shape,
            format,
            bytes: format.rounded(values, rounding),
        })
    }

    fn widened(self) -> TensorData {
        let bytes = self.format.widened(&self.bytes, self.shape.num_elements());
        TensorData::from_bytes_vec(bytes, self.shape, DType::F32)
    }
}

/// A record has the inner optimizer's state and the number of roundings.
impl<S: RecordState> RecordState for LowBitState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        match &self.form {
            Form::Wide(state) => state.state_flatten(prefix, out),
            Form::Rounded { tensors, rest } => {
                for (name, rounded) in tensors {
                    out.push_tensor(prefix, name, rounded.clone().widened());
                }
                for (name, scalar) in &rest.scalars {
                    out.push_scalar(prefix, name, *scalar);
                }
            }
        }
        out.push_scalar(prefix, NUM_ROUNDINGS, self.num_roundings.into());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let state = S::state_unflatten(prefix, src, device)?;
        let num_roundings = src.take_scalar(prefix, NUM_ROUNDINGS)?;
        Some(Self {
            form: Form::Wide(state),
            num_roundings: u64::try_from(num_roundings).ok()?,
        })
    }
}
