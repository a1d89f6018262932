//! Starting ranks.

mod body;
mod config;
mod environment;
mod error;
mod other_launchers;
#[cfg(feature = "mpi")]
mod processes;
mod threads;
mod workers;

pub use body::Unwound;
pub use config::LaunchConfig;
pub use environment::Processes;
pub use error::LaunchError;
pub use threads::thread_ranks;

use crate::ProcessGroup;

/// Runs `body` on every rank of a new world, each on its own thread and inside its own rayon pool,
/// and returns the results of this process's ranks in rank order.
///
/// # Threads or processes
///
/// Where nothing else is said, all ranks are threads of this process. Under the launcher of a parallel
/// program each process is one rank; this function then runs `body` once, and returns one result. The
/// environment says which, in this order:
///
/// 1. `BURN_FSDP_ENGINE`: `local` is threads whatever started the process, `mpi` is processes.
/// 2. `OMPI_COMM_WORLD_SIZE` with `OMPI_COMM_WORLD_RANK`: Open MPI's `mpirun`.
/// 3. `PMI_SIZE` with `PMI_RANK`: `mpiexec` of MPICH and its kin, `srun` with its PMI.
/// 4. `SLURM_STEP_NUM_TASKS` with `SLURM_STEP_ID`: `srun`.
///
/// A launcher that has started a single process counts as none, unless 1. says `mpi`. Where another launcher has started
/// several, such as `torchrun`, they would not find each other: [`LaunchError::OtherLauncher`], unless there is 1. Processes
/// need the feature `mpi`: without it, [`LaunchError::NoMpi`]. The number of
/// ranks must be that of processes: [`LaunchError::OtherSize`]. Processes are launched once:
/// [`LaunchError::Again`].
///
/// # Failures
///
/// When a rank panics or returns an error, the pending and later operations of all others fail, and
/// the ranks that do not return within [`LaunchConfig::grace`] are abandoned: this function returns
/// whatever they do. While no rank has failed it waits for all of them, however long they take.
///
/// Errors that `body` deals with itself and does not return are no failures of the launch.
///
/// # Errors
///
/// [`LaunchError`], which names the rank that failed first and why.
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
        // Without the feature there are none, or an error.
        _ => threads::launch(&config, body),
    }
}

/// Returns the processes that a launcher such as `mpirun` has started this one among; `None` if it is alone, and
/// [`launch()`] makes threads. See there.
///
/// # Errors
///
/// [`LaunchError::Environment`] if a variable of the environment has a value that cannot be,
/// [`LaunchError::OtherLauncher`] if a launcher has started this process with others through which ranks do not find each
/// other, and [`LaunchError::NoMpi`] if there are such processes and the program was built without the feature `mpi`.
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

/// Returns the number of processes that a launcher such as `mpirun` has started this one among, and so the
/// number of ranks that [`launch()`] will have to be asked for; `None` if none has. See there.
pub fn launcher_ranks() -> Option<usize> {
    let environment = environment::processes(|name| std::env::var(name).ok());
    environment.ok().flatten().map(|processes| processes.size)
}
