//! An optimizer that keeps its states in fewer bits.

use std::sync::{Arc, LazyLock};

use burn::optim::{Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use burn_fsdp_mesh::Partition;

use crate::device::is_capture;
use crate::error::Error;
use crate::parameter::current::{Current, current, is_trial};
use crate::thrown::throw;

/// The format in which a [`LowBitOptimizer`] keeps states between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateFormat {
    /// 16 bits per element, the upper half of a 32-bit float: 8 bits of precision. Half the memory.
    Bf16,
    /// 8 bits per element, plus 32 bits per block of [`BLOCK`](Self::BLOCK) elements for the block's largest magnitude,
    /// which is exact. Each element has a sign and one of 128 levels relative to that magnitude: the dynamic tree of
    /// Dettmers et al., 2021, with 64 levels in the top decade and half as many in each decade below. A quarter of the
    /// memory.
    ///
    /// A step is rejected if a block spans two shards; to prevent this, use [`Cut::Multiples`](crate::Cut::Multiples).
    Block8,
}

impl StateFormat {
    /// Number of elements in a block of [`Block8`](Self::Block8), counted from the first element of the whole
    /// parameter.
    pub const BLOCK: usize = 256;
}

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
/// A step ends with [`Error::Option`], which [`catch`](crate::catch) returns as a value, if a block spans two shards,
/// if the states of `O` are not in 32 bits (they are if the parameter is), or while a compiled step is traced.
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
    elements: Elements,
}

#[derive(Debug, Clone)]
enum Elements {
    Bf16(Vec<u16>),
    Block8 { codes: Vec<i8>, scales: Vec<f32> },
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
        if is_capture(&device) {
            throw(Error::Option {
                option: "the optimizer of a compiled step",
                expected: "one with 32-bit states; use another optimizer, or train with the eager engine",
                got: "a `LowBitOptimizer`".to_owned(),
            });
        }
        let num_roundings = state.as_ref().map_or(0, |state| state.num_roundings);
        let state = state.and_then(|state| state.widened(&device));
        let (tensor, state) = self.optimizer.step(lr, tensor, grad, state);
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
            let rounding = Rounding::new(&name, num_roundings, start);
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

/// The pseudorandom draws for rounding the elements of one tensor.
#[derive(Debug, Clone, Copy)]
struct Rounding {
    seed: u64,
    /// The flat index of the tensor's first element in the whole parameter.
    start: usize,
}

impl Rounding {
    fn new(name: &str, num_roundings: u64, start: usize) -> Self {
        let seed = name.bytes().fold(mixed(num_roundings), |seed, byte| {
            mixed(seed ^ u64::from(byte))
        });
        Self { seed, start }
    }

    /// Returns the 32-bit random number for element `at` of the tensor.
    fn draw(self, at: usize) -> u32 {
        (mixed(self.seed ^ (self.start + at) as u64) >> 32) as u32
    }
}

/// Mixes the bits of `word` like splitmix64.
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
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
        let elements = match format {
            StateFormat::Bf16 => Elements::Bf16(
                values
                    .enumerate()
                    .map(|(at, value)| bf16(value, rounding.draw(at)))
                    .collect(),
            ),
            StateFormat::Block8 => {
                let values: Vec<f32> = values.collect();
                let (mut codes, mut scales) = (Vec::with_capacity(values.len()), Vec::new());
                for (block, values) in values.chunks(StateFormat::BLOCK).enumerate() {
                    let draw = |at| rounding.draw(block * StateFormat::BLOCK + at);
                    scales.push(encode(values, draw, &mut codes));
                }
                Elements::Block8 { codes, scales }
            }
        };
        Ok(Self { shape, elements })
    }

    fn widened(self) -> TensorData {
        let bytes = match self.elements {
            Elements::Bf16(halves) => halves
                .iter()
                .flat_map(|half| (u32::from(*half) << 16).to_ne_bytes())
                .collect(),
            Elements::Block8 { codes, scales } => {
                let mut bytes = Vec::with_capacity(4 * codes.len());
                for (codes, scale) in codes.chunks(StateFormat::BLOCK).zip(scales) {
                    let levels = LEVELS.map(|level| level * scale);
                    bytes.extend(codes.iter().flat_map(|code| {
                        let value = levels[usize::from(code.unsigned_abs())];
                        let signed = if *code < 0 { -value } else { value };
                        signed.to_ne_bytes()
                    }));
                }
                bytes
            }
        };
        TensorData::from_bytes_vec(bytes, self.shape, DType::F32)
    }
}

/// Returns the bits of `value` in bf16. `draw` decides whether to round up or down.
fn bf16(value: f32, draw: u32) -> u16 {
    let bits = value.to_bits();
    let half = |bits: u32| (bits >> 16) as u16;
    let up = f32::from_bits(bits.wrapping_add(draw & 0xffff) & 0xffff_0000);
    match (value.is_nan(), value.is_finite() && up.is_finite()) {
        // A NaN stays NaN even if its low bits are lost.
        (true, _) => half(bits) | 0x40,
        // Rounding up must not overflow.
        (false, false) => half(bits),
        // A nonzero number stays nonzero.
        (false, true) if up == 0.0 && value != 0.0 => half(bits) | 1,
        (false, true) => half(up.to_bits()),
    }
}

/// The levels of magnitude relative to the largest. Each decade has half as many levels as the next larger one, evenly
/// spaced. The last level is the largest magnitude itself.
static LEVELS: LazyLock<[f32; 128]> = LazyLock::new(|| {
    const TENTHS: [f64; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut levels = [0.0; 128];
    for (exponent, tenth) in TENTHS.into_iter().enumerate() {
        let len = 1 << exponent;
        for i in 0..len {
            let middle = 0.1 + 0.9 * (i as f64 + 0.5) / len as f64;
            levels[len + i] = (middle * tenth) as f32;
        }
    }
    levels[127] = 1.0;
    levels
});

/// Appends the codes of a block to `codes`. Returns the block's scale.
fn encode(values: &[f32], draw: impl Fn(usize) -> u32, codes: &mut Vec<i8>) -> f32 {
    let is_finite = values.iter().all(|value| value.is_finite());
    let largest = values
        .iter()
        .fold(0.0, |max: f32, value| max.max(value.abs()));
    let scale = if is_finite { largest } else { f32::NAN };
    // Values are compared with decoded levels, so a decoded value encodes to the same code.
    let levels = LEVELS.map(|level| level * scale);
    codes.extend(values.iter().enumerate().map(|(at, value)| {
        let size = value.abs();
        let above = levels.partition_point(|level| *level <= size).min(127);
        let below = above.saturating_sub(1);
        let part = f64::from(size - levels[below]) / f64::from(levels[above] - levels[below]);
        let is_up =
            levels[below] == 0.0 && size > 0.0 || f64::from(draw(at)) < part * 2f64.powi(32);
        let code = match (size >= levels[127], is_up) {
            (true, _) => 127,
            (false, true) => above as i8,
            (false, false) => below as i8,
        };
        if value.is_sign_negative() {
            -code
        } else {
            code
        }
    }));
    scale
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

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::{Rounded, Rounding, StateFormat};

    fn rounded(values: &[f32], format: StateFormat, num_roundings: u64) -> Vec<f32> {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        let rounding = Rounding::new("a state", num_roundings, StateFormat::BLOCK);
        let rounded = Rounded::of(data, format, rounding).expect("of 32 bits");
        rounded.widened().try_to_vec().expect("floats")
    }

    /// Returns values of every magnitude, from the smallest number to the largest, and blocks with only small values.
    fn values() -> Vec<f32> {
        let sizes = [
            1e-45,
            3e-42,
            1e-38,
            1e-30,
            1e-12,
            1e-3,
            0.0,
            1.0,
            7e5,
            f32::MAX,
        ];
        let of_block = |most: usize| (0..StateFormat::BLOCK).map(move |i| sizes[i * 7 % most]);
        let values = (1..=sizes.len()).flat_map(of_block).enumerate();
        values
            .map(|(i, size)| size * ((i * 31 % 64) as f32 / 32.0 - 1.0))
            .collect()
    }

    #[test]
    fn rounding_is_idempotent() {
        for format in [StateFormat::Bf16, StateFormat::Block8] {
            let once = rounded(&values(), format, 0);
            assert_ne!(once, values());
            for again in 1..20 {
                assert_eq!(rounded(&once, format, again), once, "{format:?}");
            }
        }
    }

    #[test]
    fn nonzero_values_become_neither_zero_nor_infinite() {
        for format in [StateFormat::Bf16, StateFormat::Block8] {
            for draw in 0..20 {
                for (value, got) in values().into_iter().zip(rounded(&values(), format, draw)) {
                    assert_eq!(value == 0.0, got == 0.0, "{format:?}: {value}, {got}");
                    assert!(
                        got.is_finite() && value * got >= 0.0,
                        "{format:?}: {value}, {got}"
                    );
                }
            }
        }
    }

    #[test]
    fn nan_and_infinities_are_not_hidden() {
        for wrong in [f32::NAN, f32::INFINITY] {
            let mut values = vec![1.0; 2 * StateFormat::BLOCK];
            values[3] = wrong;
            let got = rounded(&values, StateFormat::Block8, 0);
            assert!(got[..StateFormat::BLOCK].iter().all(|value| value.is_nan()));
            assert!(got[StateFormat::BLOCK..].iter().all(|value| *value == 1.0));
            let got = rounded(&values, StateFormat::Bf16, 0);
            assert_eq!(got[3].is_nan(), wrong.is_nan());
            assert!(!got[3].is_finite() && got[4] == 1.0);
        }
    }
}
