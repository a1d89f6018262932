//! The errors of a launch.

use std::fmt;

/// An error of a rank, of any type.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The variable that selects threads or processes as ranks.
pub(super) const ENGINE: &str = "BURN_FSDP_ENGINE";

/// The reason why a launch did not return a result for every rank. The message is also what `{:?}` prints, because Rust
/// prints the error of `main` that way.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A launch without ranks.
    #[error("cannot launch 0 ranks; request at least one")]
    NoRanks,

    /// More ranks than one process supports.
    #[error(
        "cannot launch {ranks} ranks as threads of one process; request at most {most}, and about one per core"
    )]
    TooManyRanks {
        /// The requested number of ranks.
        ranks: usize,
        /// The maximum number of ranks.
        most: usize,
    },

    /// More threads than one rank supports.
    #[error(
        "cannot give each rank {threads} threads; request at most {most}, and about as many as there are cores per \
         rank"
    )]
    TooManyThreads {
        /// The requested number of threads of a rank.
        threads: usize,
        /// The maximum number of threads of a rank.
        most: usize,
    },

    /// An environment variable that cannot be parsed.
    #[error("the environment variable {variable} is {value:?}; it should be {expected}")]
    Environment {
        /// Name of the variable.
        variable: String,
        /// Value of the variable.
        value: String,
        /// A description of the valid values.
        expected: String,
    },

    /// A process that was started together with others and cannot communicate with them.
    #[error(
        "this is one of {processes} processes started by {launcher}, but the program was built without MPI, so each \
         process would do the same work; build it with the feature `mpi`, or set {}=local to run each process on \
         its own",
        ENGINE
    )]
    NoMpi {
        /// The launcher that started the processes.
        launcher: String,
        /// Number of processes that were started.
        processes: usize,
    },

    /// A process that was started with others by a launcher that does not let the ranks find each other.
    #[error(
        "this is one of {} processes started by {launcher} ({variable}={value}), which does not let ranks find each \
         other, so each process would do the same work; start them with `mpirun` or `srun`, start one process whose \
         ranks are threads, or set {}=local to run each process on its own",
        Number(*processes), ENGINE
    )]
    OtherLauncher {
        /// The launcher that started the processes.
        launcher: String,
        /// The variable that identifies the launcher.
        variable: String,
        /// Value of that variable.
        value: String,
        /// Number of processes, if the launcher reports it.
        processes: Option<usize>,
    },

    /// A number of ranks that differs from the number of processes.
    #[error(
        "{ranks} ranks were requested, but {launcher} started {processes} processes, and each is one rank; request \
         {processes} ranks, or start {ranks} processes"
    )]
    OtherSize {
        /// The requested number of ranks.
        ranks: usize,
        /// The number of processes that were started.
        processes: usize,
        /// The launcher that started the processes.
        launcher: String,
    },

    /// A second launch under MPI, which cannot be started twice in a process.
    #[error(
        "this process has already launched its ranks, which MPI allows only once; do all work in one launch"
    )]
    Again,

    /// A failure to initialise MPI, with its error message.
    #[error(
        "cannot initialise MPI: {0}; check that the program was built for the MPI whose launcher started it"
    )]
    Mpi(String),

    /// A rank whose threads the system could not start.
    #[error("cannot start rank {rank}: {source}; launch fewer ranks, or fewer threads per rank")]
    Start {
        /// The rank that could not be started.
        rank: usize,
        /// The error of the system.
        source: BoxError,
    },

    /// A rank that returned an error, or unwound with one. If several did, this is the first.
    #[error("rank {rank} failed: {source}{}", Abandoned(abandoned))]
    Failed {
        /// The rank that failed first.
        rank: usize,
        /// The rank's error.
        source: BoxError,
        /// The ranks that did not return within the grace period.
        abandoned: Vec<usize>,
    },

    /// A rank that panicked, and was the first to fail.
    #[error("rank {rank} panicked: {message}{}", Abandoned(abandoned))]
    Panicked {
        /// The rank that panicked.
        rank: usize,
        /// The message of the panic.
        message: String,
        /// The ranks that did not return within the grace period.
        abandoned: Vec<usize>,
    },
}

impl fmt::Debug for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A number of processes, if it is known.
struct Number(Option<usize>);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(number) => write!(f, "{number}"),
            None => f.write_str("several"),
        }
    }
}

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
