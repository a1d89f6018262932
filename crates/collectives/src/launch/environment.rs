//! How this process was started: alone, or by the launcher of a parallel program.

use super::error::{ENGINE, LaunchError};
use super::other_launchers::strangers;

/// A launcher, identified by the variables that it sets.
struct Launcher {
    name: &'static str,
    /// The variable with the number of processes that the launcher has started together.
    size: &'static str,
    /// A variable that must also be set; otherwise another launcher has started this process.
    also: &'static str,
    /// The variable with the rank of this process.
    rank: &'static str,
    /// The variable with the number of processes on this machine.
    here: &'static str,
    /// The variable with the rank of this process on this machine.
    rank_here: &'static str,
}

/// Slurm's variable for the number of processes on each machine. Slurm may also set the variables of MPICH and related
/// launchers.
const SLURM_HERE: &str = "SLURM_STEP_TASKS_PER_NODE";

/// The known launchers; the first that matches is used.
const LAUNCHERS: [Launcher; 3] = [
    Launcher {
        name: "Open MPI's mpirun",
        size: "OMPI_COMM_WORLD_SIZE",
        also: "OMPI_COMM_WORLD_RANK",
        rank: "OMPI_COMM_WORLD_RANK",
        here: "OMPI_COMM_WORLD_LOCAL_SIZE",
        rank_here: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    // MPICH, Intel MPI, and srun with its PMI.
    Launcher {
        name: "MPICH's mpiexec",
        size: "PMI_SIZE",
        also: "PMI_RANK",
        rank: "PMI_RANK",
        here: "MPI_LOCALNRANKS",
        rank_here: "MPI_LOCALRANKID",
    },
    // Slurm also sets these in the job's script, except for the step's variable.
    Launcher {
        name: "Slurm's srun",
        size: "SLURM_STEP_NUM_TASKS",
        also: "SLURM_STEP_ID",
        rank: "SLURM_PROCID",
        here: SLURM_HERE,
        rank_here: "SLURM_LOCALID",
    },
];

/// The processes that a launcher has started, including this one. Each of them is one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Processes {
    /// Name of the launcher, or of the variable that requests `mpi` if there is no launcher.
    pub launcher: &'static str,
    /// Number of processes that the launcher has started.
    pub size: usize,
    /// This process's rank, as reported by the launcher before MPI starts.
    pub rank: usize,
    /// Number of these processes on this machine.
    pub here: usize,
    /// Index of this process among the ones on this machine.
    pub rank_here: usize,
}

/// Returns the processes that a launcher has started, including this one. Returns `None` if this process is alone and
/// `BURN_FSDP_ENGINE` is not `mpi`, or if the variable is `local`.
///
/// # Errors
///
/// [`LaunchError::Environment`] if a variable has an invalid value, and [`LaunchError::OtherLauncher`] if an
/// unsupported launcher has started this process together with others.
pub(super) fn processes(
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<Processes>, LaunchError> {
    let error = |name: &str, value: String, expected: &str| LaunchError::Environment {
        variable: name.to_owned(),
        value,
        expected: expected.to_owned(),
    };
    let engine = variable(ENGINE);
    let is_mpi = match engine.as_deref() {
        None | Some("") => false,
        Some("mpi") => true,
        Some("local") => return Ok(None),
        Some(other) => return Err(error(ENGINE, other.to_owned(), "local or mpi")),
    };
    // A user who requests `mpi` knows the launcher.
    let others = |known| match strangers(&variable, known).filter(|_| !is_mpi) {
        Some(found) => Err(LaunchError::OtherLauncher {
            launcher: found.launcher.to_owned(),
            variable: found.variable.to_owned(),
            value: found.value,
            processes: found.size,
        }),
        None => Ok(()),
    };
    for launcher in LAUNCHERS {
        let Some(text) = variable(launcher.size) else {
            continue;
        };
        if variable(launcher.also).is_none() {
            continue;
        }
        let Ok(size @ 1..) = text.trim().parse() else {
            return Err(error(launcher.size, text, "a number of processes"));
        };
        // Slurm writes `2(x3),1`; the first number is sufficient.
        let here = variable(launcher.here).or_else(|| variable(SLURM_HERE));
        let here = here.and_then(|text| {
            let end = text.find(|c: char| !c.is_ascii_digit());
            text[..end.unwrap_or(text.len())].parse().ok()
        });
        others(Some(size))?;
        if size == 1 && !is_mpi {
            return Ok(None);
        }
        let number = |name: &str| variable(name).and_then(|text| text.trim().parse().ok());
        let Some(rank) = number(launcher.rank).filter(|rank| *rank < size) else {
            let value = variable(launcher.rank).unwrap_or_default();
            return Err(error(launcher.rank, value, "the rank of this process"));
        };
        return Ok(Some(Processes {
            launcher: launcher.name,
            size,
            rank,
            here: here.unwrap_or(size).clamp(1, size),
            rank_here: number(launcher.rank_here).unwrap_or(rank),
        }));
    }
    others(None)?;
    // A world of one process.
    Ok(is_mpi.then_some(Processes {
        launcher: ENGINE,
        size: 1,
        rank: 0,
        here: 1,
        rank_here: 0,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<Processes>, LaunchError> {
        processes(|name| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    fn sizes(variables: &[(&str, &str)]) -> Option<(usize, usize)> {
        let found = of(variables).unwrap();
        found.map(|processes| (processes.size, processes.here))
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        assert_eq!(sizes(&[]), None);
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_RANK", "3")];
        assert_eq!(sizes(&open_mpi), Some((8, 8)));
        let here = ("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
        assert_eq!(sizes(&[open_mpi[0], open_mpi[1], here]), Some((8, 2)));
        assert_eq!(sizes(&[("PMI_SIZE", "4"), ("PMI_RANK", "0")]), Some((4, 4)));
        let slurm = [
            ("SLURM_STEP_NUM_TASKS", "7"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "6"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
        ];
        assert_eq!(sizes(&slurm), Some((7, 2)));
        let pmi = [("PMI_SIZE", "7"), ("PMI_RANK", "0"), slurm[3]];
        assert_eq!(sizes(&pmi), Some((7, 2)));
        // A process that does not know its rank would assume that it is the first.
        let error = of(&slurm[..2]).unwrap_err().to_string();
        assert!(error.contains("SLURM_PROCID"), "{error}");
    }

    #[test]
    fn the_rank_is_read_from_the_environment() {
        let found = of(&[
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ]);
        let found = found.unwrap().unwrap();
        assert_eq!((found.rank, found.here, found.rank_here), (5, 4, 1));
    }

    #[test]
    fn the_first_launcher_takes_precedence() {
        let both = [
            ("PMI_SIZE", "4"),
            ("PMI_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_RANK", "1"),
        ];
        assert_eq!(sizes(&both), Some((2, 2)));
    }

    #[test]
    fn a_job_without_parallel_tasks_is_not_a_launcher() {
        assert_eq!(sizes(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]), None);
        assert_eq!(sizes(&[("SLURM_STEP_NUM_TASKS", "8")]), None);
    }

    #[test]
    fn processes_of_another_launcher_are_refused() {
        let torch = [("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "2")];
        let message = of(&torch).unwrap_err().to_string();
        for words in [
            "one of 4 processes",
            "WORLD_SIZE",
            "mpirun",
            "BURN_FSDP_ENGINE=local",
        ] {
            assert!(message.contains(words), "{words}: {message}");
        }
        let message = of(&[("PMIX_RANK", "0")]).unwrap_err().to_string();
        assert!(message.contains("one of several processes"), "{message}");
        for engine in ["local", "mpi"] {
            let said = [torch[0], torch[1], (ENGINE, engine)];
            assert!(of(&said).is_ok(), "{engine}");
        }
        // One task of srun, in which torchrun has started four.
        let slurm = [
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "0"),
        ];
        assert!(of(&[slurm[0], slurm[1], slurm[2], torch[0], torch[1]]).is_err());
        // Open MPI and Slurm use PMIx.
        let pmix = ("PMIX_RANK", "0");
        assert_eq!(sizes(&[slurm[0], slurm[1], slurm[2], pmix]), None);
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0")];
        assert_eq!(sizes(&[open_mpi[0], open_mpi[1], pmix]), Some((2, 2)));
    }

    #[test]
    fn the_user_has_the_last_word() {
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_RANK", "3")];
        assert_eq!(sizes(&[open_mpi[0], open_mpi[1], (ENGINE, "local")]), None);
        assert_eq!(sizes(&[(ENGINE, "mpi")]), Some((1, 1)));
        let alone = [("PMI_SIZE", "1"), ("PMI_RANK", "0"), (ENGINE, "mpi")];
        assert_eq!(sizes(&alone), Some((1, 1)));
        assert_eq!(sizes(&alone[..2]), None);
        let error = of(&[(ENGINE, "tcp")]).unwrap_err().to_string();
        assert!(error.contains("BURN_FSDP_ENGINE"), "{error}");
        let error = of(&[("PMI_SIZE", "many"), ("PMI_RANK", "0")]).unwrap_err();
        assert!(error.to_string().contains("\"many\""), "{error}");
    }
}
