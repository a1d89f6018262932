//! Starting ranks, as threads or as processes.

mod body;
mod config;
mod environment;
mod error;
mod one_rank;
mod other_launchers;
#[cfg(feature = "mpi")]
mod processes;
mod threads;
mod workers;
mod worlds;

pub use body::Unwound;
pub use config::LaunchConfig;
pub use environment::Processes;
pub use error::LaunchError;
pub use threads::thread_ranks;

use crate::group::ProcessGroup;

/// Runs `body` on every rank of a new world, each on its own thread and inside its own rayon pool. Returns the results
/// of this process's ranks in rank order.
///
/// # Threads or processes
///
/// By default, all ranks are threads of this process. Under the launcher of a parallel program each process is one
/// rank. This function then runs `body` once, and returns one result. The environment decides, in this order:
///
/// 1. `BURN_FSDP_ENGINE`: `local` selects threads regardless of the launcher, `mpi` selects processes.
/// 2. `OMPI_COMM_WORLD_SIZE` with `OMPI_COMM_WORLD_RANK`: Open MPI's `mpirun`.
/// 3. `PMI_SIZE` with `PMI_RANK`: `mpiexec` of MPICH and related launchers, `srun` with its PMI.
/// 4. `SLURM_STEP_NUM_TASKS` with `SLURM_STEP_ID`: `srun`.
///
/// A launcher that has started a single process is ignored, unless `BURN_FSDP_ENGINE` is `mpi`. If another launcher,
/// such as `torchrun`, has started several processes, they would not find each other. The launch then fails with
/// [`LaunchError::OtherLauncher`], unless `BURN_FSDP_ENGINE` is set. Processes need the feature `mpi`
/// ([`LaunchError::NoMpi`]) and as many ranks as there are processes ([`LaunchError::OtherSize`]). They can be launched
/// only once ([`LaunchError::Again`]).
///
/// # Failures
///
/// When a rank panics or returns an error, the pending and later operations of all others fail. Ranks that do not
/// return within [`LaunchConfig::grace`] are abandoned, and this function returns without them. As long as no rank has
/// failed, it waits for all of them, however long they take.
///
/// Errors that `body` handles itself and does not return are not failures of the launch.
///
/// # Errors
///
/// [`LaunchError::Failed`] or [`LaunchError::Panicked`], with the rank that failed first and the reason. If no rank
/// could start: the other variants of [`LaunchError`].
pub fn launch<T, E, F>(config: LaunchConfig, body: F) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
    F: Fn(ProcessGroup) -> Result<T, E> + Send + Sync + 'static,
{
    if config.ranks == 0 {
        return Err(LaunchError::NoRanks);
    }
    match self::processes()? {
        #[cfg(feature = "mpi")]
        Some(found) => processes::launch(&config, &found, body),
        // Without the feature `mpi`, there are no processes, or an error was returned.
        _ => threads::launch(&config, body),
    }
}

/// Returns the processes that a launcher such as `mpirun` has started, including this one. Returns `None` if
/// [`launch()`] starts threads: this process is alone and `BURN_FSDP_ENGINE` is not `mpi`, or the variable is `local`.
///
/// # Errors
///
/// [`LaunchError::Environment`] if an environment variable has an invalid value. [`LaunchError::OtherLauncher`] if a
/// launcher that the ranks cannot use to find each other has started this process with others. [`LaunchError::NoMpi`]
/// if there are such processes and the program was built without the feature `mpi`.
pub fn processes() -> Result<Option<Processes>, LaunchError> {
    let found = environment::processes(|name| std::env::var(name).ok())?;
    match found {
        Some(processes) if !cfg!(feature = "mpi") => Err(LaunchError::NoMpi {
            launcher: processes.launcher.to_owned(),
            processes: processes.size,
        }),
        found => Ok(found),
    }
}

/// Returns the number of processes that a launcher such as `mpirun` has started, including this one. This is the number
/// of ranks that [`launch()`] must be called with. Returns `None` where [`processes()`] returns `None`, and if the
/// environment is not valid.
pub fn launcher_ranks() -> Option<usize> {
    let environment = environment::processes(|name| std::env::var(name).ok());
    environment.ok().flatten().map(|processes| processes.size)
}
