//! The contents of a checkpoint of Burn's loop, in files on rank 0: the whole model and the whole state of its
//! optimizer, with at most one tensor in memory.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use burn_fsdp_shard::{RecordedTensor, recorded_state};
use burn_pack::{Tensor as PackedTensor, Writer};

use crate::error::{CheckpointError, Error};
use crate::train::groups::Groups;
use crate::train::scratch::{Pile, Scratch};
use crate::train::whole_state::filed;

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
    let mut pile = files.pile("tensors")?;
    let mut tensors = Vec::new();
    let mut failure = None;
    let mut add = |pile: &mut Pile, tensor: RecordedTensor| {
        let (shape, dtype) = (tensor.data.shape().clone(), tensor.data.dtype());
        let bytes = pile.add(tensor.data.as_bytes())?;
        let id = Some(tensor.id.val());
        tensors.push(PackedTensor::new(tensor.path, dtype, shape, id, bytes));
        Ok::<_, Error>(())
    };
    recorded_state(model, |tensor| {
        // After a failure, still receive what the other ranks send.
        if failure.is_none() {
            failure = add(&mut pile, tensor).err();
        }
    })?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    let path = files.path("model.bpk");
    let written = Writer::new(tensors).write_to_file_in_place(&path);
    let unwritten = |reason: String| CheckpointError::Record { reason };
    written.map_err(|error| unwritten(error.to_string()))?;
    let removed = std::fs::remove_file(files.path("tensors"));
    removed.map_err(|error| unwritten(error.to_string()))?;
    let record = ModuleRecord::load(&path);
    Ok(record.map_err(|error| unwritten(error.to_string()))?)
}
