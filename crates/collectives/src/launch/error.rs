//! The errors of a launch.

use std::fmt;

/// An error of a rank, whatever its type.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The variable that says whether ranks are threads or processes.
pub(super) const ENGINE: &str = "BURN_FSDP_ENGINE";

/// The reason why a launch did not return a result of every rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A launch of no ranks.
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

    /// More threads than one rank should have.
    #[error(
        "cannot give each rank {threads} threads; ask for at most {most}, and for about as many as there are cores \
         for each rank"
    )]
    TooManyThreads {
        /// The threads of a rank that were asked for.
        threads: usize,
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
        /// The value that it should have.
        expected: String,
    },

    /// A process of several that were started together, which cannot talk to the others.
    #[error(
        "this is one of {processes} processes that {launcher} has started, but the program was built \
         without MPI, and each of them would do the same work; build it with the feature `mpi`, or set \
         {}=local if they are to run by themselves",
        ENGINE
    )]
    NoMpi {
        /// The launcher that has started them.
        launcher: String,
        /// Number of processes.
        processes: usize,
    },

    /// A process of several that were started by a launcher through which ranks do not find each other.
    #[error(
        "this is one of {} processes that {launcher} has started ({variable}={value}), through which ranks do not \
         find each other, and each of them would do the same work; start them by `mpirun` or `srun`, or start one \
         process, whose ranks are threads, or set {}=local if each is to run by itself",
        Number(*processes), ENGINE
    )]
    OtherLauncher {
        /// The launcher that has started them.
        launcher: String,
        /// The variable that tells of it.
        variable: String,
        /// Its value.
        value: String,
        /// Number of processes, if the launcher says it.
        processes: Option<usize>,
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
        /// The launcher that has started them.
        launcher: String,
    },

    /// A second launch under MPI, which cannot be begun twice in a process.
    #[error(
        "this process has launched before; under MPI the ranks are launched once, so do all the work \
         in one launch"
    )]
    Again,

    /// A failure of MPI.
    #[error(
        "cannot begin MPI: {0}; see that the program was built for the MPI whose launcher started it"
    )]
    Mpi(String),

    /// A rank that the system gave no threads.
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
        /// Its error.
        source: BoxError,
        /// The ranks that did not return within the grace period after that.
        abandoned: Vec<usize>,
    },

    /// A rank that panicked, and was the first to fail.
    #[error("rank {rank} panicked: {message}{}", Abandoned(abandoned))]
    Panicked {
        /// The rank that panicked.
        rank: usize,
        /// The message of the panic.
        message: String,
        /// The ranks that did not return within the grace period after that.
        abandoned: Vec<usize>,
    },
}

/// A number of processes that may not be known.
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
