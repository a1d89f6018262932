//! An optimizer's whole state in a file, for Burn's checkpointers.

use std::collections::BTreeMap;

use burn::module::ParamGroup;
use burn::optim::{
    DynOptimizer, DynState, LearningRate, ModuleOptimizer, OptimizerRecord, SgdConfig, StateSink,
    StateSource,
};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Bytes, DType, Device, Shape, TensorData};
use burn_pack::Scalar;

use burn_fsdp_glue::error::{CheckpointError, optimizer_error};
use burn_fsdp_glue::optimizer_record::{RANK_KEY, packed};

/// The whole state of an optimizer, with its tensors in a file.
#[derive(Debug, Default)]
pub(crate) struct Filed {
    /// The states, by parameter id as text.
    of: BTreeMap<String, FiledState>,
}

/// The state of one parameter.
#[derive(Debug, Default)]
pub(crate) struct FiledState {
    /// The number of dims of the parameter.
    pub(crate) dims: usize,
    /// The path by which the optimizer finds the parameter's group.
    pub(crate) group_path: Option<String>,
    pub(crate) scalars: Vec<(String, Scalar)>,
    pub(crate) tensors: Vec<FiledTensor>,
}

#[derive(Debug)]
pub(crate) struct FiledTensor {
    pub(crate) field: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// The elements, read from the file on demand.
    pub(crate) bytes: Bytes,
}

impl Filed {
    pub(crate) fn insert(&mut self, id: u64, state: FiledState) {
        self.of.insert(id.to_string(), state);
    }

    /// Returns an optimizer that can only be recorded; its record is this state.
    ///
    /// An optimizer that contained the state would read it from the file and hold it in memory.
    pub(crate) fn into_optimizer(self) -> Result<ModuleOptimizer, CheckpointError> {
        let (mut scalars, mut paths) = (BTreeMap::new(), BTreeMap::new());
        for (id, state) in &self.of {
            scalars.insert(format!("{id}.{RANK_KEY}"), Scalar::from(state.dims));
            if let Some(path) = &state.group_path {
                paths.insert(id.clone(), path.clone());
            }
        }
        let record = OptimizerRecord::from_bytes(packed(Vec::new(), scalars, &paths)?);
        let record = record.map_err(optimizer_error)?;
        // The first group of an optimizer must accept any parameter; the last group that accepts a parameter is used.
        let any = SgdConfig::new().init();
        let filed = any.with_group(ParamGroup::all(), self, None);
        Ok(filed.load_record(record))
    }
}

impl DynOptimizer for Filed {
    fn step_dyn(
        &self,
        _rank: usize,
        _rate: LearningRate,
        tensor: BridgeTensor,
        _gradient: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        (tensor, state)
    }

    fn to_device_dyn(&self, state: DynState, _device: &Device) -> DynState {
        state
    }

    fn state_flatten(&self, prefix: &str, _state: &DynState, out: &mut StateSink) {
        let Some(state) = self.of.get(prefix) else {
            return;
        };
        for (field, scalar) in &state.scalars {
            out.push_scalar(prefix, field, *scalar);
        }
        for tensor in &state.tensors {
            let shape = Shape::from(tensor.shape.clone());
            let data = TensorData::from_bytes(tensor.bytes.clone(), shape, tensor.dtype);
            out.push_tensor(prefix, &tensor.field, data);
        }
    }

    fn state_unflatten(
        &self,
        rank: usize,
        _prefix: &str,
        _source: &mut StateSource,
        _device: &Device,
    ) -> Option<DynState> {
        Some(DynState::create((), rank))
    }
}
