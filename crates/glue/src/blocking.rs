//! Saving and resuming a training run, with one call each: the part of [`checkpoint`](burn_fsdp_checkpoint) that
//! most programs need.

use std::path::Path;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_fsdp_checkpoint::{Checkpoints, Error as StepError, SaveRequest, Saved, TrainingState};
use burn_fsdp_collectives::{AsMesh, ProcessGroup};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::check_elementwise_once;
use burn_fsdp_spmd::{BackendIr, Batch, CompiledStep};
use serde::{Deserialize, Serialize};

use crate::compiled_restore::restore_compiled;
use crate::compiled_snapshot::snapshot_compiled;
use crate::error::CheckpointError;
use crate::rendezvous::{GroupRendezvous, exchange};
use crate::restore::restore;
use crate::snapshot::{TrainingSnapshot, snapshot};
use crate::state_types::check_state_types;

/// A training run restored from a saved step, or a fresh one.
#[derive(Clone)]
#[non_exhaustive]
pub struct Resumed<M> {
    /// The model.
    pub model: M,
    /// The optimizer, with the saved state if there is one.
    pub optimizer: ModuleOptimizer,
    /// Number of completed steps, which is also the number of the next step, counted from 0.
    pub step: u64,
}

impl<M> std::fmt::Debug for Resumed<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut resumed = f.debug_struct("Resumed");
        resumed.field("step", &self.step).finish_non_exhaustive()
    }
}

/// Atomically saves a sharded model and its optimizer to a checkpoint folder, as the state after `step` steps. Any
/// number of ranks can continue from it with [`resume`].
///
/// Collective: all ranks of `mesh` call it at the same point, and all get the same result. It returns the step's number
/// and folder when the step is on disk; a [`Checkpointer`](crate::checkpointer::Checkpointer) saves while training continues. Running
/// states are saved from rank 0: to save their mean, call [`sync_buffers`](burn_fsdp_shard::sync_buffers) first.
///
/// The model must be sharded along the mesh's only axis, or along an axis named `shard`; for other axes use
/// [`snapshot`].
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp::{
///     backward, fully_shard, launch, resume, save, Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy,
/// };
///
/// /// Trains to step `until`, resuming from an earlier run in this folder.
/// fn train(folder: &std::path::Path, ranks: usize, until: u64) -> Vec<u64> {
///     let folder = folder.to_owned();
///     let done = launch(LaunchConfig::new(ranks), move |world| {
///         let device = Device::flex().autodiff().gradient_checkpointing();
///         let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
///         let model = fully_shard(LinearConfig::new(4, 2).init(&device), &mesh, ShardPolicy::new())?;
///         let resumed = resume(&folder, model, AdamWConfig::new().init(), &mesh)?;
///         let (mut model, mut optimizer) = (resumed.model, resumed.optimizer);
///         for _ in resumed.step..until {
///             let output = model.forward(Tensor::<2>::ones([3, 4], &device));
///             let gradients = backward(output.square().mean(), &model)?;
///             model = optimizer.step(1e-2, model, gradients);
///         }
///         save(&folder, until, &model, &optimizer, &mesh)?;
///         Ok::<_, Error>(until - resumed.step)
///     });
///     done.expect("no rank failed")
/// }
///
/// let folder = tempfile::tempdir().expect("a folder");
/// assert_eq!(train(folder.path(), 2, 5), [5, 5]);
/// assert_eq!(train(folder.path(), 3, 7), [2, 2, 2]);
/// ```
///
/// # Errors
///
/// Every rank returns an error if any rank fails. Causes: `step` differs from rank 0's; the folder already has this
/// step; an error of [`snapshot`] or [`save_step`](burn_fsdp_checkpoint::save()). The folder then stays
/// unchanged.
pub fn save<M: Module>(
    folder: impl AsRef<Path>,
    step: u64,
    model: &M,
    optimizer: &ModuleOptimizer,
    mesh: &impl AsMesh,
) -> Result<Saved, CheckpointError> {
    let mesh = mesh.as_mesh("shard")?;
    let taken =
        shard_axis(mesh.mesh()).and_then(|axis| snapshot(model, optimizer, mesh.mesh(), axis));
    save_taken(folder.as_ref(), step, taken, mesh.world())
}

/// Saves a compiled step, as [`save`] saves a sharded model and its optimizer. The number of the saved step is the number
/// of steps that it has done. Any number of ranks can continue from it, with compiled steps or with the eager engine.
///
/// Collective: all ranks of `mesh` call it at the same point, and all get the same result. `mesh` contains the ranks of
/// the step's mode; it can be the group that the mode was given.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp::compile::{compile, resume_compiled, save_compiled, Mode};
/// use burn_fsdp::{launch, Error, LaunchConfig, Strategy};
///
/// /// Trains to step `until`, resuming from an earlier run in this folder. Returns each rank's number of steps.
/// fn train(folder: &std::path::Path, ranks: usize, until: u64) -> Result<Vec<u64>, Error> {
///     let folder = folder.to_owned();
///     Ok(launch(LaunchConfig::new(ranks), move |world| {
///         let mut step = compile(
///             |device: &Device| LinearConfig::new(4, 2).init(device),
///             |model: &Linear, x: Tensor<2>| model.forward(x).square().mean(),
///             AdamWConfig::new().build(),
///             Mode::data_parallel(world.clone(), Strategy::FullShard),
///         )?;
///         let done = resume_compiled(&folder, &mut step, &world)?;
///         for _ in done..until {
///             step.step(1e-2, &Tensor::ones([3, 4], &Device::flex()))?;
///         }
///         save_compiled(&folder, &mut step, &world)?;
///         Ok::<_, Error>(until - done)
///     })?)
/// }
///
/// let folder = tempfile::tempdir()?;
/// assert_eq!(train(folder.path(), 2, 5)?, [5, 5]);
/// assert_eq!(train(folder.path(), 3, 7)?, [2, 2, 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Every rank returns an error if any rank fails. Causes: an error of
/// [`snapshot_compiled`]; ranks that have done different numbers of steps; a folder that already has this step.
pub fn save_compiled<B: Batch, Be: BackendIr, O>(
    folder: impl AsRef<Path>,
    step: &mut CompiledStep<B, Be, O>,
    mesh: &impl AsMesh,
) -> Result<Saved, CheckpointError> {
    let mesh = mesh.as_mesh("shard")?;
    let axis = shard_axis(mesh.mesh())?;
    // With collectives that moved, the rest of the last step is collective, and the snapshot is not.
    let flushed = step.flush().map_err(CheckpointError::from);
    agreed(mesh.world(), "save, last step", step.num_steps(), flushed)?;
    let taken = snapshot_compiled(step, mesh.mesh(), axis);
    save_taken(folder.as_ref(), step.num_steps(), taken, mesh.world())
}

/// Loads the newest step in `folder` into a compiled step, as [`resume`] does for a sharded model and its optimizer. Either
/// engine may have saved it. Returns the number of steps done, which is 0 if nothing in the folder is named like a step;
/// then nothing changes.
///
/// Collective: all ranks of `mesh` call it at the same point.
///
/// # Errors
///
/// As [`resume`] and [`restore_compiled`].
pub fn resume_compiled<B: Batch, Be: BackendIr, O>(
    folder: impl AsRef<Path>,
    step: &mut CompiledStep<B, Be, O>,
    mesh: &impl AsMesh,
) -> Result<u64, CheckpointError> {
    let mesh = mesh.as_mesh("shard")?;
    let checkpoints = Checkpoints::new(folder.as_ref());
    let Some(number) = newest(&checkpoints, mesh.world())? else {
        return Ok(0);
    };
    let flushed = step.flush().map_err(CheckpointError::from);
    agreed(mesh.world(), "resume, last step", number, flushed)?;
    let restored = open(&checkpoints, number).and_then(|saved| restore_compiled(step, &saved));
    agreed(mesh.world(), "resume, restored", number, restored)?;
    Ok(number)
}

/// Saves what a rank has taken, as the state after `step` steps.
///
/// Collective.
fn save_taken(
    folder: &Path,
    step: u64,
    taken: Result<TrainingSnapshot, CheckpointError>,
    world: &ProcessGroup,
) -> Result<Saved, CheckpointError> {
    let mut taken = agreed(world, "save, snapshot", step, taken)?;
    let training = TrainingState {
        step,
        optimizer: taken.optimizer,
        ..TrainingState::default()
    };
    let request = SaveRequest::new(taken.plan, training);
    let mut rendezvous = GroupRendezvous::new(world.clone());
    let checkpoints = Checkpoints::new(folder);
    Ok(burn_fsdp_checkpoint::save(
        &checkpoints,
        &request,
        &mut taken.snapshot,
        &mut rendezvous,
    )?)
}

/// Resumes a training run on any number of ranks: loads the newest step that [`save`] wrote to `folder` into the
/// sharded model and its optimizer. Returns both unchanged if nothing in the folder is named like a step.
///
/// Collective: all ranks of `mesh` call it at the same point. Rank 0 finds the newest step, and all ranks load it.
/// Configure `optimizer` like the saved one. If nothing is saved yet, this checks that the optimizer's future state can
/// be saved and restored.
///
/// # Errors
///
/// All ranks return an error if any rank fails. Causes: an error of [`restore`]; a link or a file with the name of the
/// newest step; a damaged newest step, which is never skipped. To find an older step, use
/// [`Checkpoints::newest_good`](burn_fsdp_checkpoint::Checkpoints::newest_good).
pub fn resume<M: Module>(
    folder: impl AsRef<Path>,
    model: M,
    optimizer: ModuleOptimizer,
    mesh: &impl AsMesh,
) -> Result<Resumed<M>, CheckpointError> {
    let mesh = mesh.as_mesh("shard")?;
    let world = mesh.world();
    let checkpoints = Checkpoints::new(folder.as_ref());
    let Some(number) = newest(&checkpoints, world)? else {
        // Fail now rather than at the first save.
        let checked = check_elementwise_once(&model, &optimizer)
            .map_err(CheckpointError::from)
            .and_then(|()| check_state_types(&model, &optimizer));
        agreed(world, "resume, nothing saved", 0, checked)?;
        return Ok(Resumed {
            model,
            optimizer,
            step: 0,
        });
    };
    let restored = open(&checkpoints, number).and_then(|step| restore(model, optimizer, &step));
    let (model, optimizer) = agreed(world, "resume, restored", number, restored)?;
    Ok(Resumed {
        model,
        optimizer,
        step: number,
    })
}

/// Returns the number of the newest step that rank 0 finds.
///
/// Collective.
fn newest(checkpoints: &Checkpoints, world: &ProcessGroup) -> Result<Option<u64>, CheckpointError> {
    let newest = match world.rank() {
        0 => checkpoints.steps().map(|steps| steps.last().copied()),
        _ => Ok(None),
    };
    newest_of_rank_0(world, newest)
}

fn open(
    checkpoints: &Checkpoints,
    number: u64,
) -> Result<burn_fsdp_checkpoint::Step, CheckpointError> {
    let step = checkpoints.open(number)?;
    step.check_sizes()?;
    Ok(step)
}

/// Returns the axis along which the model is sharded.
fn shard_axis(mesh: &Mesh) -> Result<&str, CheckpointError> {
    const USUAL: &str = "shard";
    match mesh.axes() {
        [only] => Ok(&only.name),
        _ if mesh.axis(USUAL).is_ok() => Ok(USUAL),
        axes => {
            let names: Vec<_> = axes.iter().map(|axis| axis.name.as_str()).collect();
            Err(CheckpointError::Step(StepError::Argument {
                argument: "mesh",
                expected:
                    "a mesh with one axis, or with an axis \"shard\"; `snapshot` takes any axis"
                        .to_owned(),
                got: format!("one with the axes {}", names.join(", ")),
            }))
        }
    }
}

/// One rank's result of a save or a resume, as sent to the other ranks.
#[derive(Debug, Serialize, Deserialize)]
struct Word {
    step: u64,
    failure: Option<String>,
}

/// Returns `own` if all ranks succeeded for the same step. Otherwise returns an error on all ranks; a rank that failed
/// returns its own error.
fn agreed<T>(
    world: &ProcessGroup,
    label: &'static str,
    step: u64,
    own: Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    let word = Word {
        step,
        failure: own.as_ref().err().map(ToString::to_string),
    };
    let words: Vec<Word> = exchange(world, label, &word)?;
    // A rank's own error has more detail than its message to the others.
    let own = own?;
    for (rank, word) in words.iter().enumerate() {
        if let Some(reason) = &word.failure {
            let reason = reason.clone();
            return Err(CheckpointError::Peer { rank, reason });
        }
        if word.step != words[0].step {
            return Err(CheckpointError::Step(StepError::Argument {
                argument: "step",
                expected: format!("{} on all ranks, as on rank 0", words[0].step),
                got: format!("{} on rank {rank}", word.step),
            }));
        }
    }
    Ok(own)
}

/// Returns rank 0's newest step, on every rank.
fn newest_of_rank_0(
    world: &ProcessGroup,
    own: Result<Option<u64>, StepError>,
) -> Result<Option<u64>, CheckpointError> {
    let word = own.as_ref().map_err(ToString::to_string).copied();
    let words: Vec<Result<Option<u64>, String>> = exchange(world, "resume, newest step", &word)?;
    own?;
    match words.into_iter().next() {
        Some(Ok(newest)) => Ok(newest),
        Some(Err(reason)) => Err(CheckpointError::Peer { rank: 0, reason }),
        None => unreachable!("a group has a rank 0"),
    }
}
