//! Checkpoints of training runs whose optimizer state is in files.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Bytes;
use burn_fsdp_checkpoint::Step;
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{check_elementwise_once, local_state, units_of_params};
use burn_pack::{Error as PackError, Reader, Tensor as PackedTensor};

use crate::error::{CheckpointError, optimizer_error};
use crate::file_backed::{FileBackedOptimizer, KeptFile};
use crate::optimizer_record::{OptimizerParts, deferred};
use crate::restore::{restore_matching, restore_optimizer};
use crate::snapshot::{States, Store, TrainingSnapshot, of_states};

impl FileBackedOptimizer {
    /// Takes a snapshot of a sharded model and of this optimizer's state, as
    /// [`snapshot_matching`](crate::snapshot::snapshot_matching) does for an optimizer in memory. The
    /// state stays in files until the step is written, with one tensor at a time in memory, and training may continue
    /// meanwhile.
    ///
    /// Collective if the policy assigns parameters to one owner, or a rank has a shard without elements.
    ///
    /// # Errors
    ///
    /// As [`snapshot_matching`](crate::snapshot::snapshot_matching); a file that has changed since it was
    /// written.
    pub fn snapshot<M: Module>(
        &self,
        model: &M,
        mesh: &Mesh,
        axis: &str,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<TrainingSnapshot, CheckpointError> {
        check_elementwise_once(model, self.configured())?;
        let mut parts = OptimizerParts::default();
        for file in self.kept()? {
            let reader = Reader::from_file_exact(&file.path).map_err(optimizer_error)?;
            let mut own = OptimizerParts::of(reader)?;
            let file = Arc::new(file);
            let tensors = own.tensors.iter().map(|tensor| read_from(&file, tensor));
            own.tensors = tensors.collect();
            parts.extend(own);
        }
        let states = States {
            parts,
            are_in: Store::Files,
        };
        of_states(model, self.configured(), &states, (mesh, axis), is_wanted)
    }

    /// Loads a step as [`restore_training`](crate::restore::restore_training) does: into a sharded model,
    /// the parameters and running states that `is_wanted` selects by path; into this optimizer, its whole state, with
    /// one unit at a time in memory. The saved run may have had its optimizer state in memory: both kinds of optimizers
    /// save the same steps.
    ///
    /// Not collective.
    ///
    /// # Errors
    ///
    /// As [`restore_training`](crate::restore::restore_training); a file that cannot be written. After
    /// an error, the optimizer has no state or only some units' state: do not continue with it.
    pub fn restore_step<M: Module>(
        &mut self,
        model: M,
        step: &Step,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<M, CheckpointError> {
        check_elementwise_once(&model, self.configured())?;
        self.clear();
        let state = local_state(&model)?;
        let held = state.iter().filter(|local| !local.elements.is_empty());
        let held: BTreeSet<_> = held.map(|local| local.path.as_str()).collect();
        let mut units: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (path, unit) in units_of_params(&model) {
            units.entry(unit).or_default().insert(path);
        }
        let of_none = |path: &str| !units.values().any(|paths| paths.contains(path));
        // Rejects state that belongs to no parameter of the model.
        restore_optimizer(&model, &state, self.configured().clone(), step, of_none)?;
        for (unit, paths) in &units {
            let is_of_unit = |path: &str| paths.contains(path) && held.contains(path);
            let empty = self.configured().clone();
            let optimizer = restore_optimizer(&model, &state, empty, step, is_of_unit)?;
            let parts = OptimizerParts::take(&optimizer)?;
            if !parts.tensors.is_empty() || !parts.scalars.is_empty() {
                self.store(unit.clone(), &optimizer)?;
            }
        }
        restore_matching(model, step, is_wanted)
    }
}

/// Returns a tensor that is read from a file on demand.
fn read_from(file: &Arc<KeptFile>, tensor: &PackedTensor) -> PackedTensor {
    let (file, name) = (file.clone(), tensor.name.clone());
    let read = move || -> Result<Bytes, PackError> {
        let checked = file.check();
        checked.map_err(|error| PackError::IoError(error.to_string()))?;
        let bytes = Reader::from_file_exact(&file.path)?.tensor_data(&name)?;
        Ok(Bytes::from_bytes_vec(bytes))
    };
    deferred(tensor, read)
}
