//! Unsupported launchers, recognised by the variables that they set in each process.

/// A launcher that the ranks cannot use to find each other.
struct Other {
    name: &'static str,
    /// The variable with a process's number among those that were started together.
    rank: &'static str,
    size: Size,
}

/// The source of the number of processes.
enum Size {
    /// The value of this variable: a number, or `MOST` in `LEAST:MOST`.
    Variable(&'static str),
    /// The number of addresses `"host:port"` in this variable.
    Addresses(&'static str),
    /// The launcher does not report the number.
    Unknown,
}

/// Processes that an unsupported launcher has started together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Strangers {
    /// Name of the launcher.
    pub(super) launcher: &'static str,
    /// The variable that identifies the launcher.
    pub(super) variable: &'static str,
    pub(super) value: String,
    /// Number of processes, if the launcher reports it.
    pub(super) size: Option<usize>,
}

/// The launchers; the first that has started several processes is used. PMIx is last because many others also use it.
const OTHERS: [Other; 13] = [
    // Also `accelerate`, DeepSpeed, Ray Train, and the PyTorchJob and XGBoostJob of Kubeflow.
    Other {
        name: "torchrun or a similar launcher",
        rank: "RANK",
        size: Size::Variable("WORLD_SIZE"),
    },
    Other {
        name: "Kubeflow's PyTorch trainer",
        rank: "PET_NODE_RANK",
        size: Size::Variable("PET_NNODES"),
    },
    Other {
        name: "Kubeflow's TensorFlow trainer",
        rank: "TF_CONFIG",
        size: Size::Addresses("TF_CONFIG"),
    },
    Other {
        name: "a JAX launcher",
        rank: "JAX_PROCESS_ID",
        size: Size::Variable("JAX_NUM_PROCESSES"),
    },
    Other {
        name: "a Paddle launcher",
        rank: "PADDLE_TRAINER_ID",
        size: Size::Variable("PADDLE_TRAINERS_NUM"),
    },
    Other {
        name: "horovodrun",
        rank: "HOROVOD_RANK",
        size: Size::Variable("HOROVOD_SIZE"),
    },
    // Set by its `mpirun_rsh`. Its `mpiexec` also sets MPICH's variables.
    Other {
        name: "MVAPICH's mpirun_rsh",
        rank: "MV2_COMM_WORLD_RANK",
        size: Size::Variable("MV2_COMM_WORLD_SIZE"),
    },
    Other {
        name: "MVAPICH's mpirun_rsh",
        rank: "MVP_COMM_WORLD_RANK",
        size: Size::Variable("MVP_COMM_WORLD_SIZE"),
    },
    // Set by `flux run -o pmi=off`. Otherwise Flux also sets MPICH's variables. In the script of `flux batch` it sets
    // none.
    Other {
        name: "flux run",
        rank: "FLUX_TASK_RANK",
        size: Size::Variable("FLUX_JOB_SIZE"),
    },
    Other {
        name: "jsrun",
        rank: "JSM_NAMESPACE_RANK",
        size: Size::Variable("JSM_NAMESPACE_SIZE"),
    },
    // It also sets MPICH's variables, unless PMI was disabled.
    Other {
        name: "PALS",
        rank: "PALS_RANKID",
        size: Size::Unknown,
    },
    Other {
        name: "ALPS' aprun",
        rank: "ALPS_APP_PE",
        size: Size::Unknown,
    },
    // `prterun`, and `srun --mpi=pmix` where the environment was cleared.
    Other {
        name: "a PMIx launcher",
        rank: "PMIX_RANK",
        size: Size::Unknown,
    },
];

/// Returns the processes that an unsupported launcher has started together with this one, if there are several. `known`
/// is the number of processes of a supported launcher. If the numbers are equal, the supported launcher has started
/// them and also set the variables of another launcher, for programs that look for those.
///
/// A variable that is set without the others, or is not a number, does not come from a launcher.
pub(super) fn strangers(
    variable: &impl Fn(&str) -> Option<String>,
    known: Option<usize>,
) -> Option<Strangers> {
    let mut is_known = known.is_some();
    for other in &OTHERS {
        let Some(rank) = variable(other.rank) else {
            continue;
        };
        let (told_by, size) = match other.size {
            Size::Addresses(name) => (name, Some(addresses(&rank))),
            _ if number(&rank).is_none() => continue,
            Size::Variable(name) => match variable(name).as_deref().and_then(most) {
                Some(size) => (name, Some(size)),
                None => continue,
            },
            Size::Unknown => (other.rank, None),
        };
        let are_several = match size {
            Some(size) => size > 1 && known != Some(size),
            // Rank 0 may be a single process; any other rank has peers.
            None => !is_known || (known == Some(1) && number(&rank) != Some(0)),
        };
        if are_several {
            return Some(Strangers {
                launcher: other.name,
                variable: told_by,
                // TensorFlow's variable can have any length.
                value: variable(told_by)
                    .unwrap_or_default()
                    .chars()
                    .take(60)
                    .collect(),
                size,
            });
        }
        is_known |= size.is_some_and(|size| size > 0);
    }
    None
}

fn number(text: &str) -> Option<usize> {
    text.trim().parse().ok()
}

/// Parses a number, or the second number of a text such as `2:4`.
fn most(text: &str) -> Option<usize> {
    number(text.rsplit_once(':').map_or(text, |(_, most)| most))
}

/// Returns the number of `host:port` strings in a JSON text.
fn addresses(text: &str) -> usize {
    let is_address = |part: &&str| {
        let port = part.rsplit_once(':').map(|(_, port)| port);
        port.is_some_and(|port| port.parse::<u16>().is_ok())
    };
    // Every second piece is between quotes.
    text.split('"')
        .skip(1)
        .step_by(2)
        .filter(is_address)
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    type Variables<'a> = &'a [(&'a str, &'a str)];

    fn of(variables: Variables<'_>, known: Option<usize>) -> Option<Strangers> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        strangers(&variable, known)
    }

    const TF: &str = r#"{"cluster":{"chief":["a-0.x:2222"],"worker":["b-0:2222","b-1:2222"]},"task":{"type":"worker","index":1}}"#;
    const TF_ALONE: &str =
        r#"{"cluster":{"chief":["a-0.x:2222"]},"task":{"type":"chief","index":0}}"#;

    /// The variables that each launcher sets in one process of several, with the identifying variable and the number.
    const SEVERAL: [(Variables<'static>, &str, Option<usize>); 14] = [
        (
            &[
                ("RANK", "2"),
                ("WORLD_SIZE", "4"),
                ("LOCAL_RANK", "2"),
                ("TORCHELASTIC_RUN_ID", "none"),
            ],
            "WORLD_SIZE",
            Some(4),
        ),
        (
            &[("PET_NODE_RANK", "0"), ("PET_NNODES", "2")],
            "PET_NNODES",
            Some(2),
        ),
        (
            &[("PET_NODE_RANK", "0"), ("PET_NNODES", "1:3")],
            "PET_NNODES",
            Some(3),
        ),
        (&[("TF_CONFIG", TF)], "TF_CONFIG", Some(3)),
        (
            &[("JAX_PROCESS_ID", "1"), ("JAX_NUM_PROCESSES", "2")],
            "JAX_NUM_PROCESSES",
            Some(2),
        ),
        (
            &[("PADDLE_TRAINER_ID", "0"), ("PADDLE_TRAINERS_NUM", "2")],
            "PADDLE_TRAINERS_NUM",
            Some(2),
        ),
        (
            &[("HOROVOD_RANK", "0"), ("HOROVOD_SIZE", "8")],
            "HOROVOD_SIZE",
            Some(8),
        ),
        (
            &[("MV2_COMM_WORLD_RANK", "2"), ("MV2_COMM_WORLD_SIZE", "4")],
            "MV2_COMM_WORLD_SIZE",
            Some(4),
        ),
        (
            &[("MVP_COMM_WORLD_RANK", "0"), ("MVP_COMM_WORLD_SIZE", "4")],
            "MVP_COMM_WORLD_SIZE",
            Some(4),
        ),
        (
            &[("FLUX_TASK_RANK", "0"), ("FLUX_JOB_SIZE", "2")],
            "FLUX_JOB_SIZE",
            Some(2),
        ),
        (
            &[("JSM_NAMESPACE_RANK", "5"), ("JSM_NAMESPACE_SIZE", "6")],
            "JSM_NAMESPACE_SIZE",
            Some(6),
        ),
        (
            &[("PALS_RANKID", "0"), ("PALS_NODEID", "0")],
            "PALS_RANKID",
            None,
        ),
        (&[("ALPS_APP_PE", "3")], "ALPS_APP_PE", None),
        (
            &[("PMIX_RANK", "0"), ("PMIX_NAMESPACE", "prterun-x")],
            "PMIX_RANK",
            None,
        ),
    ];

    #[test]
    fn each_launcher_is_known_by_its_variables() {
        for (variables, told_by, size) in SEVERAL {
            let found = of(variables, None).unwrap_or_else(|| panic!("{variables:?}"));
            assert_eq!((found.variable, found.size), (told_by, size));
        }
    }

    #[test]
    fn a_single_process_has_no_launcher() {
        let alone: [Variables<'_>; 6] = [
            &[
                ("RANK", "0"),
                ("WORLD_SIZE", "1"),
                ("TORCHELASTIC_RUN_ID", "none"),
            ],
            &[("PET_NODE_RANK", "0"), ("PET_NNODES", "1")],
            &[("FLUX_TASK_RANK", "0"), ("FLUX_JOB_SIZE", "1")],
            // The launcher reports one process; PMIx, which it uses, does not report a number.
            &[
                ("JSM_NAMESPACE_RANK", "0"),
                ("JSM_NAMESPACE_SIZE", "1"),
                ("PMIX_RANK", "0"),
            ],
            &[("TF_CONFIG", TF_ALONE)],
            &[],
        ];
        for variables in alone {
            assert_eq!(of(variables, None), None, "{variables:?}");
        }
    }

    #[test]
    fn stray_variables_are_not_a_launcher() {
        let stray: [Variables<'_>; 6] = [
            &[("RANK", "2")],
            &[("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost")],
            &[("RANK", "captain"), ("WORLD_SIZE", "4")],
            &[("RANK", "1"), ("WORLD_SIZE", "large")],
            &[("LOCAL_RANK", "1"), ("PMIX_NAMESPACE", "x")],
            &[("TF_CONFIG", "{}"), ("RANK", ""), ("WORLD_SIZE", "")],
        ];
        for variables in stray {
            assert_eq!(of(variables, None), None, "{variables:?}");
        }
    }

    #[test]
    fn a_known_launcher_may_set_the_variables_of_another() {
        let torch = [("RANK", "2"), ("WORLD_SIZE", "4")];
        assert_eq!(of(&torch, Some(4)), None);
        // Each of 2 processes has started 4 that do not know of the others, or is one of 4 pods.
        for known in [1, 2] {
            let found = of(&torch, Some(known)).expect("another number");
            assert_eq!(found.size, Some(4));
        }
        // Open MPI and srun use PMIx.
        for known in [1, 4] {
            assert_eq!(of(&[("PMIX_RANK", "0")], Some(known)), None);
        }
        assert_eq!(of(&[("PMIX_RANK", "3")], Some(4)), None);
        assert!(of(&[("PMIX_RANK", "3")], Some(1)).is_some());
    }
}
