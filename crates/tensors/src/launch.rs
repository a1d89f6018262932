//! Starting ranks that compute with Burn.

use burn_fsdp_collectives::{LaunchConfig, LaunchError, ProcessGroup};

use crate::device::on_shared_stream;

/// Runs `body` on every rank of a new world, as [`burn_fsdp_collectives::launch()`] does, and returns the results of this
/// process's ranks in rank order.
///
/// Each rank is a thread of this process with its own rayon pool, or under a launcher such as `mpirun` or `srun`, a
/// process. `BURN_FSDP_ENGINE` (`local` or `mpi`) overrules the environment. On devices of CubeCL, such as GPUs, the
/// ranks of a process use one stream, so that those that share a device read each other's tensors in place. Threads that
/// `body` starts have streams of their own.
///
/// When a rank panics or returns an error, the pending and later operations of all others fail. Ranks that do not return
/// within [`LaunchConfig::grace`] are abandoned, and this function returns without them. As long as no rank has failed,
/// it waits for all of them, however long they take. Errors that `body` handles itself and does not return are not
/// failures of the launch.
///
/// # Errors
///
/// [`LaunchError::Failed`] or [`LaunchError::Panicked`], with the rank that failed first and the reason. If no rank could
/// start: the other variants of [`LaunchError`].
pub fn launch<T, E, F>(config: LaunchConfig, body: F) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
    F: Fn(ProcessGroup) -> Result<T, E> + Send + Sync + 'static,
{
    burn_fsdp_collectives::launch(config, move |world| on_shared_stream(|| body(world)))
}
