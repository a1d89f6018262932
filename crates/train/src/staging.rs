//! The contents of a checkpoint of Burn's loop, in files on rank 0: the whole model and the whole state of its
//! optimizer, with at most one tensor in memory.

use burn::module::{Module, ParamId};
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use burn::tensor::TensorData;
use burn_fsdp_shard::{RecordedTensor, recorded_state};
use burn_pack::{Tensor as PackedTensor, Writer};

use crate::groups::Groups;
use crate::scratch::{Pile, Scratch};
use crate::whole_state::filed;
use burn_fsdp_glue::error::{CheckpointError, Error};

/// The contents of a checkpoint, for Burn's checkpointers.
pub(crate) struct Staged {
    /// The record of the model.
    pub(crate) record: ModuleRecord,
    /// An optimizer that can only be recorded; its record is the whole state.
    pub(crate) optimizer: ModuleOptimizer,
    /// The files with the tensors of both.
    pub(crate) files: Scratch,
}

/// Gathers a sharded model's record and its optimizer state, tensor by tensor, into files on rank 0; other ranks have
/// no files.
///
/// Collective.
pub(crate) fn staged<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    groups: &Groups,
    files: Option<Scratch>,
) -> Result<Option<Staged>, Error> {
    let Some(files) = files else {
        recorded_state(model, |_| {})?;
        filed(model, optimizer, groups, None)?;
        return Ok(None);
    };
    let record = recorded(model, &files)?;
    let mut pile = files.pile("states")?;
    let state = filed(model, optimizer, groups, Some(&mut pile))?;
    let state = state.unwrap_or_default();
    Ok(Some(Staged {
        record,
        optimizer: state.into_optimizer()?,
        files,
    }))
}

/// Returns the record of a sharded model on rank 0, with all tensors in a file.
///
/// Collective: the other ranks send.
fn recorded<M: Module>(model: &M, files: &Scratch) -> Result<ModuleRecord, Error> {
    let mut recorded = Recorded::new(files)?;
    let mut failure = None;
    recorded_state(model, |tensor| {
        // After a failure, still receive what the other ranks send.
        if failure.is_none() {
            let RecordedTensor { path, id, data, .. } = tensor;
            failure = recorded.add(path, id, &data).err();
        }
    })?;
    match failure {
        Some(failure) => Err(failure),
        None => written(recorded),
    }
}

/// The tensors of a record, in a file.
pub(crate) struct Recorded<'a> {
    files: &'a Scratch,
    pile: Pile,
    tensors: Vec<PackedTensor>,
}

impl<'a> Recorded<'a> {
    pub(crate) fn new(files: &'a Scratch) -> Result<Self, Error> {
        Ok(Self {
            files,
            pile: files.pile("tensors")?,
            tensors: Vec::new(),
        })
    }

    /// Adds the tensor at a path.
    pub(crate) fn add(
        &mut self,
        path: String,
        id: ParamId,
        data: &TensorData,
    ) -> Result<(), Error> {
        let (shape, dtype) = (data.shape().clone(), data.dtype());
        let bytes = self.pile.add(data.as_bytes())?;
        let tensor = PackedTensor::new(path, dtype, shape, Some(id.val()), bytes);
        self.tensors.push(tensor);
        Ok(())
    }
}

/// Returns the record, which reads its tensors from a file.
pub(crate) fn written(recorded: Recorded<'_>) -> Result<ModuleRecord, Error> {
    let Recorded { files, tensors, .. } = recorded;
    let path = files.path("model.bpk");
    let written = Writer::new(tensors).write_to_file_in_place(&path);
    let unwritten = |reason: String| CheckpointError::Record { reason };
    written.map_err(|error| unwritten(error.to_string()))?;
    let removed = std::fs::remove_file(files.path("tensors"));
    removed.map_err(|error| unwritten(error.to_string()))?;
    let record = ModuleRecord::load(&path);
    Ok(record.map_err(|error| unwritten(error.to_string()))?)
}
