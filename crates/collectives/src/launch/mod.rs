//! Starting ranks.

mod environment;
#[cfg(feature = "mpi")]
mod processes;
mod threads;
mod workers;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use crate::ProcessGroup;

/// An error of a rank, whatever its type.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The most ranks that are started as threads of one process. What ranks tell each other is a table
/// of ranks by ranks, and no machine has as many cores.
const MOST_THREADS: usize = 1024;

/// How to start ranks.
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig {
    ranks: usize,
    deadline: Duration,
    grace: Duration,
    threads_per_rank: Option<usize>,
}

impl LaunchConfig {
    /// This many ranks, with the defaults of the other methods.
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks,
            deadline: Duration::from_secs(600),
            grace: Duration::from_secs(2),
            threads_per_rank: None,
        }
    }

    /// How long a rank waits for its peers in one operation before it gives up, 10 minutes by
    /// default. It counts from the moment that the rank waits; a pause of the whole machine counts as a
    /// tenth of it. Groups that do work of another kind, such as checkpoints, may have their own: see
    /// [`ProcessGroup::isolate`].
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How long the remaining ranks have to return after one has failed, 2 seconds by default. Those
    /// that do not are abandoned: their threads go on on their own.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Threads of each rank that compute; by default the cores divided by the ranks, at least 1.
    /// 0 is the default, too.
    ///
    /// They are the workers of a rayon pool, one of which runs the body. A rank with a single one gets
    /// a second worker for work that is spawned in the background, by a data loader, say: it looks for
    /// such work every few milliseconds, so that it hardly takes part in anything else.
    ///
    /// Burn's CPU backend cuts the sum of all elements of a tensor of 4 million and more by which worker
    /// is free, so that its last digits may differ from run to run and from rank to rank.
    #[must_use]
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = (threads > 0).then_some(threads);
        self
    }

    /// Threads of a rank, where this many ranks share the machine.
    fn num_threads(&self, ranks_here: usize) -> usize {
        let cores = || thread::available_parallelism().map_or(1, |cores| cores.get());
        self.threads_per_rank
            .unwrap_or_else(|| (cores() / ranks_here).max(1))
    }
}

/// The ranks did not all return a result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// There is nothing to start.
    #[error("cannot launch 0 ranks; ask for at least one")]
    NoRanks,

    /// More ranks than one process should have.
    #[error(
        "cannot launch {ranks} ranks as threads of one process; ask for at most {most}, and for about \
         as many as there are cores"
    )]
    TooManyRanks {
        /// The ranks that were asked for.
        ranks: usize,
        /// The most that can be.
        most: usize,
    },

    /// A variable of the environment that cannot be understood.
    #[error("the environment variable {variable} is {value:?}; it should be {expected}")]
    Environment {
        /// Its name.
        variable: String,
        /// Its value.
        value: String,
        /// What it should be.
        expected: String,
    },

    /// This process is one of several that were started together, and cannot talk to the others.
    #[error(
        "this is one of {processes} processes that {launcher} has started, but the program was built \
         without MPI, and each of them would do the same work; build it with the feature `mpi`, or set \
         {}=local if they are to run by themselves",
        environment::ENGINE
    )]
    NoMpi {
        /// Who has started them.
        launcher: String,
        /// How many.
        processes: usize,
    },

    /// Another number of ranks than there are processes.
    #[error(
        "asked for {ranks} ranks, but {launcher} has started {processes} processes, and each is one \
         rank; ask for {processes} ranks, or start {ranks} processes"
    )]
    OtherSize {
        /// The ranks that were asked for.
        ranks: usize,
        /// The processes that there are.
        processes: usize,
        /// Who has started them.
        launcher: String,
    },

    /// MPI cannot be begun twice in a process.
    #[error(
        "this process has launched before; under MPI the ranks are launched once, so do all the work \
         in one launch"
    )]
    Again,

    /// MPI does not work.
    #[error(
        "cannot begin MPI: {0}; see that the program was built for the MPI whose launcher started it"
    )]
    Mpi(String),

    /// The system did not give a rank its threads.
    #[error("cannot start rank {rank}: {source}; launch fewer ranks, or fewer threads per rank")]
    Start {
        /// The rank that could not be started.
        rank: usize,
        /// What the system said.
        source: BoxError,
    },

    /// A rank returned an error, or unwound with one. If several did, this is the first.
    #[error("rank {rank} failed: {source}{}", Abandoned(abandoned))]
    Failed {
        /// The rank that failed first.
        rank: usize,
        /// Its error.
        source: BoxError,
        /// The ranks that did not return within the grace period after that.
        abandoned: Vec<usize>,
    },

    /// A rank panicked, and was the first to fail.
    #[error("rank {rank} panicked: {message}{}", Abandoned(abandoned))]
    Panicked {
        /// The rank that panicked.
        rank: usize,
        /// What it said.
        message: String,
        /// The ranks that did not return within the grace period after that.
        abandoned: Vec<usize>,
    },
}

/// An error that unwinds through code that cannot return it.
///
/// Thrown with [`std::panic::resume_unwind`], which prints nothing. [`launch()`] turns it back into an
/// error.
#[derive(Debug)]
pub struct Unwound(pub Box<dyn std::error::Error + Send + Sync>);

struct Abandoned<'a>(&'a [usize]);

impl fmt::Display for Abandoned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            ranks => write!(
                f,
                "; ranks {ranks:?} did not return after that and were abandoned"
            ),
        }
    }
}

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
/// A launcher that has started a single process counts as none, unless 1. says `mpi`. Processes need
/// the feature `mpi`: without it, [`LaunchError::NoMpi`]. The number of
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
    let environment = environment::processes(|name| std::env::var(name).ok())?;
    let Some(processes) = environment else {
        return threads::launch(&config, body);
    };
    #[cfg(feature = "mpi")]
    return processes::launch(&config, &processes, body);
    #[cfg(not(feature = "mpi"))]
    Err(LaunchError::NoMpi {
        launcher: processes.launcher.to_owned(),
        processes: processes.size,
    })
}

/// Number of processes that a launcher such as `mpirun` has started this one among, and so the number
/// of ranks that [`launch()`] will have to be asked for; `None` if none has. See there.
pub fn launcher_ranks() -> Option<usize> {
    let environment = environment::processes(|name| std::env::var(name).ok());
    environment.ok().flatten().map(|processes| processes.size)
}

/// Why a rank has no result.
enum Cause {
    Start(BoxError),
    Failed(BoxError),
    Panicked(String),
}

/// Runs the body of one rank to its end, whichever that is.
fn run_rank<T, E>(
    num_threads: usize,
    body: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, Cause>
where
    T: Send,
    E: Into<BoxError>,
{
    let workers = workers::Workers::start(num_threads);
    let workers = workers.map_err(|error| Cause::Start(error.into()))?;
    let body = AssertUnwindSafe(|| workers.run(|| body().map_err(Into::into)));
    match catch_unwind(body) {
        Ok(result) => result.map_err(Cause::Failed),
        Err(payload) => Err(Cause::unwound(payload)),
    }
}

impl Cause {
    /// What a panic's payload says.
    fn unwound(payload: Box<dyn Any + Send>) -> Self {
        let payload = match payload.downcast::<Unwound>() {
            Ok(unwound) => return Self::Failed(unwound.0),
            Err(payload) => payload,
        };
        let payload = match payload.downcast::<BoxError>() {
            Ok(error) => return Self::Failed(*error),
            Err(payload) => payload,
        };
        let text = payload
            .downcast::<String>()
            .map(|text| *text)
            .or_else(|payload| {
                payload
                    .downcast::<&'static str>()
                    .map(|text| (*text).to_owned())
            });
        Self::Panicked(text.unwrap_or_else(|_| "a payload that is not text".to_owned()))
    }

    fn of(self, rank: usize, abandoned: Vec<usize>) -> LaunchError {
        match self {
            Self::Start(source) => LaunchError::Start { rank, source },
            Self::Failed(source) => LaunchError::Failed {
                rank,
                source,
                abandoned,
            },
            Self::Panicked(message) => LaunchError::Panicked {
                rank,
                message,
                abandoned,
            },
        }
    }
}

/// Prints an error with all its sources.
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = match self {
            Self::Panicked(message) => return write!(f, "panicked: {message}"),
            Self::Start(error) | Self::Failed(error) => error,
        };
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            // Some errors print their source themselves.
            let more = error.to_string();
            if !text.contains(&more) {
                text = format!("{text}: {more}");
            }
            source = error.source();
        }
        f.write_str(&text)
    }
}
