//! The operations of an optimizer's states that are kept in fewer bits between steps.
//!
//! The optimizer computes in 32 bits. At the start of its step for a parameter, each state is widened. At the end, each
//! new state is rounded. A rounded state is a tensor of bytes, and these operations run on the host.

use burn::tensor::{DType, TensorData};
use burn_backend::TensorMetadata;
use burn_fsdp_tensors::{self as tensors, LowBits, Rounding, StateFormat};
use burn_ir::{
    BackendIr, CustomOpIr, HandleKind, OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus,
};

use crate::custom::{CustomOperation, CustomOperations};
use crate::graph::CustomProfile;

/// The type of a rounded state's elements.
pub(crate) const BYTES: DType = DType::U8;

/// Returns the name of the operation that widens states.
fn widening(format: StateFormat) -> &'static str {
    match format {
        StateFormat::Bf16 => "burn_fsdp.widen_bf16_state",
        StateFormat::Block8 => "burn_fsdp.widen_block8_state",
    }
}

/// Returns the name of the operation that rounds states.
fn rounding(format: StateFormat) -> &'static str {
    match format {
        StateFormat::Bf16 => "burn_fsdp.round_bf16_state",
        StateFormat::Block8 => "burn_fsdp.round_block8_state",
    }
}

const FORMATS: [StateFormat; 2] = [StateFormat::Bf16, StateFormat::Block8];

/// What an operation does with a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateOperation {
    /// It widens a rounded state.
    Widen(StateFormat),
    /// It rounds a state.
    Round(StateFormat),
}

impl StateOperation {
    /// Returns what a custom operation does with a state; `None` for any other operation.
    pub fn named(name: &str) -> Option<Self> {
        let named = |format: &StateFormat| {
            if name == widening(*format) {
                Some(Self::Widen(*format))
            } else {
                (name == rounding(*format)).then_some(Self::Round(*format))
            }
        };
        FORMATS.iter().find_map(named)
    }

    /// Returns what an operation does with a state; `None` for any other operation.
    pub fn of(operation: &OperationIr) -> Option<Self> {
        match operation {
            OperationIr::Custom(call) => Self::named(&call.id),
            _ => None,
        }
    }
}

/// Returns the operation that widens the rounded state `from` into `into`.
pub(crate) fn widen(format: StateFormat, from: TensorId, into: TensorIr) -> OperationIr {
    let rounded = TensorIr {
        id: from,
        shape: [format.num_bytes(into.shape.num_elements())].into(),
        status: TensorStatus::ReadOnly,
        dtype: BYTES,
    };
    let call = CustomOpIr {
        id: widening(format).to_owned(),
        inputs: vec![rounded],
        outputs: vec![into],
        scalars: Vec::new(),
    };
    OperationIr::Custom(call)
}

/// Returns the operation that rounds the state `name` into the value `into`.
pub(crate) fn round(bits: LowBits, name: &str, from: TensorIr, into: TensorId) -> OperationIr {
    let len = from.shape.num_elements();
    let rounded = TensorIr::uninit(into, [bits.format.num_bytes(len)].into(), BYTES);
    let seed = Rounding::seed(name, bits.num_roundings);
    let call = CustomOpIr {
        id: rounding(bits.format).to_owned(),
        inputs: vec![from],
        outputs: vec![rounded],
        scalars: [seed, len as u64].map(ScalarIr::UInt).to_vec(),
    };
    OperationIr::Custom(call)
}

/// The numbers that a call of the operation that rounds states carries.
#[derive(Debug, Clone, Copy)]
pub struct RoundCall {
    /// The seed of the draws.
    pub seed: u64,
    /// Number of elements of the whole state.
    pub len: usize,
    /// Flat index of the first element, which the executor appends if ranks have shards.
    pub start: usize,
}

impl RoundCall {
    /// Reads the numbers of a call.
    ///
    /// # Errors
    ///
    /// A description of a call that does not have them.
    pub fn of(call: &CustomOpIr) -> Result<Self, String> {
        let numbers = call.scalars.iter().map(|scalar| match scalar {
            ScalarIr::UInt(number) => Some(*number),
            _ => None,
        });
        let numbers: Option<Vec<u64>> = numbers.collect();
        let (seed, len, start) = match numbers.as_deref() {
            Some([seed, len]) => (*seed, *len, 0),
            Some([seed, len, start]) => (*seed, *len, *start),
            _ => return Err("it does not have the numbers of a rounded state".to_owned()),
        };
        Ok(Self {
            seed,
            len: len as usize,
            start: start as usize,
        })
    }
}

/// Rounds 32-bit floats whose first element has the flat index `call.start` in the whole state. Elements after the last
/// one are padding, and become zero, because they must not change the scale of a block.
fn rounded(data: &TensorData, format: StateFormat, call: RoundCall) -> TensorData {
    let own = call.len.saturating_sub(call.start);
    let (words, _) = data.as_bytes().as_chunks::<4>();
    let values = words.iter().enumerate().map(|(at, word)| {
        if at < own {
            f32::from_ne_bytes(*word)
        } else {
            0.0
        }
    });
    let bytes = format.rounded(values, Rounding::new(call.seed, call.start));
    let len = bytes.len();
    TensorData::from_bytes_vec(bytes, [len], BYTES)
}

/// Rounds a state that a checkpoint or the caller provides. `start` is the flat index of its first element. A state that
/// was rounded before keeps its bits.
pub(crate) fn stored(
    data: &TensorData,
    format: StateFormat,
    slot: &str,
    start: usize,
) -> TensorData {
    let call = RoundCall {
        seed: Rounding::seed(slot, 0),
        len: start + data.num_elements(),
        start,
    };
    rounded(data, format, call)
}

/// Returns a rounded state of this shape in 32 bits.
pub(crate) fn loaded(data: &TensorData, format: StateFormat, shape: &[usize]) -> TensorData {
    let len = shape.iter().product();
    let bytes = format.widened(data.as_bytes(), len);
    TensorData::from_bytes_vec(bytes, shape, DType::F32)
}

/// Adds the operations of rounded states to a set.
pub(crate) fn with_states<B: BackendIr>(operations: CustomOperations<B>) -> CustomOperations<B> {
    FORMATS.into_iter().fold(operations, |operations, format| {
        let operations = operations.with(StateOperation::Widen(format));
        operations.with(StateOperation::Round(format))
    })
}

impl<B: BackendIr> CustomOperation<B> for StateOperation {
    fn name(&self) -> &str {
        match self {
            Self::Widen(format) => widening(*format),
            Self::Round(format) => rounding(*format),
        }
    }

    fn run(
        &self,
        call: &CustomOpIr,
        inputs: Vec<HandleKind<B>>,
    ) -> Result<Vec<HandleKind<B>>, String> {
        let (Some(state), [output]) = (inputs.into_iter().next(), call.outputs.as_slice()) else {
            return Err("it must have one state and one result".to_owned());
        };
        let device = match &state {
            HandleKind::Float(state) => state.device(),
            HandleKind::Int(state) => state.device(),
            _ => return Err("its state must be a tensor of floats or of bytes".to_owned()),
        };
        let data = tensors::read(state)?;
        Ok(vec![match self {
            Self::Widen(format) => {
                let wide = loaded(&data, *format, &output.shape.to_vec());
                HandleKind::Float(B::float_from_data(wide, &device))
            }
            Self::Round(format) => {
                let rounded = rounded(&data, *format, RoundCall::of(call)?);
                HandleKind::Int(B::int_from_data(rounded, &device))
            }
        }])
    }

    fn profile(&self, _: &CustomOpIr) -> CustomProfile {
        CustomProfile::default()
    }
}
