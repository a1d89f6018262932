//! The numbers and tensors of an optimizer's state.

use std::collections::{BTreeMap, BTreeSet};

use burn::optim::{RecordState, StateSink};
use burn::tensor::{DType, TensorData};
use burn_capture::CaptureClient;
use burn_fsdp_tensors::StateFormat;
use burn_ir::{OperationIr, TensorId};
use burn_pack::Scalar;
use burn_router::RouterClient;

use super::structure::Slot;
use crate::trace::capture::Recording;

/// The numbers and tensors of a state, by name.
#[derive(Debug)]
pub(super) struct Form {
    pub(super) scalars: Vec<(String, Scalar)>,
    pub(super) tensors: Vec<(String, TensorId)>,
}

impl Form {
    /// Reads a state whose tensors were created in this recording, with ids of at least `first`. After this call, no
    /// operation may be recorded.
    pub(super) fn of<S: RecordState>(state: &S, client: &CaptureClient, first: TensorId) -> Self {
        let end = client.create_empty_handle();
        for id in first.value()..end.value() {
            let own = TensorData::new(vec![id as i64], [1]);
            client.register_alias(TensorId::new(id), client.register_tensor_data(own).id());
        }
        let mut sink = StateSink::default();
        state.state_flatten("", &mut sink);
        let id_of = |data: TensorData| {
            let id = data
                .as_slice::<i64>()
                .ok()
                .and_then(|ids| ids.first().copied());
            TensorId::new(id.unwrap_or(-1) as u64)
        };
        Self {
            scalars: sink.scalars,
            tensors: sink
                .tensors
                .into_iter()
                .map(|(name, data)| (name, id_of(data)))
                .collect(),
        }
    }

    /// Returns true if two names refer to the same tensor.
    pub(super) fn has_aliases(&self) -> bool {
        let ids = self.tensors.iter().map(|(_, id)| *id);
        let distinct: BTreeSet<TensorId> = ids.collect();
        distinct.len() != self.tensors.len()
    }
}

/// Returns the shapes and types of the tensors of the new state, which are kept in this format between steps.
pub(super) fn tensors_of(
    recording: &Recording<[TensorId; 3]>,
    form: Option<&Form>,
    format: Option<StateFormat>,
) -> Result<Vec<Slot>, String> {
    let outputs = recording.operations.iter().flat_map(OperationIr::outputs);
    let mut known: BTreeMap<TensorId, (Vec<usize>, DType)> = outputs
        .map(|output| (output.id, (output.shape.to_vec(), output.dtype)))
        .collect();
    for (id, data) in &recording.values {
        let of = || (data.shape().to_vec(), data.dtype());
        known.entry(*id).or_insert_with(of);
    }
    let tensors = form.map(|form| form.tensors.as_slice()).unwrap_or_default();
    let tensors = tensors.iter().map(|(name, id)| {
        let found = known.get(id).cloned();
        let (shape, dtype) =
            found.ok_or_else(|| format!("no recorded operation computes its state \"{name}\""))?;
        if format.is_some() && dtype != DType::F32 {
            return Err(format!(
                "its state \"{name}\" has type {dtype:?}, but only 32-bit states can be kept in fewer bits; give the \
                 module parameters in 32 bits"
            ));
        }
        Ok(Slot {
            name: name.as_str().into(),
            shape,
            dtype,
            format,
        })
    });
    tensors.collect()
}

/// Returns the numbers by name as text. Equal integers of different types have the same text.
pub(super) fn numbers(of: &[(String, Scalar)]) -> BTreeMap<&str, String> {
    let text = |value: &Scalar| match value {
        Scalar::Int(value) => value.to_string(),
        Scalar::UInt(value) => value.to_string(),
        Scalar::Float(value) => format!("{value:?}"),
        Scalar::Bool(value) => value.to_string(),
    };
    let numbers = of.iter().map(|(name, value)| (name.as_str(), text(value)));
    numbers.collect()
}
