//! Launchers of parallel programs through which ranks cannot find each other.

use std::process::Command;

use crate::command::{Folder, Run, last_report};

type Variables = &'static [(&'static str, &'static str)];

/// The variables that launchers set in one of several processes, and the variable that the message names.
const SEVERAL: [(Variables, &str); 9] = [
    (
        &[
            ("WORLD_SIZE", "4"),
            ("RANK", "2"),
            ("LOCAL_RANK", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
        ],
        "WORLD_SIZE=4",
    ),
    (
        &[("MV2_COMM_WORLD_SIZE", "4"), ("MV2_COMM_WORLD_RANK", "2")],
        "MV2_COMM_WORLD_SIZE=4",
    ),
    (
        &[
            ("PMIX_RANK", "2"),
            ("PMIX_NAMESPACE", "prterun-x"),
            ("PRTE_LAUNCHED", "1"),
        ],
        "PMIX_RANK=2",
    ),
    (
        &[("FLUX_JOB_SIZE", "2"), ("FLUX_TASK_RANK", "0")],
        "FLUX_JOB_SIZE=2",
    ),
    (&[("PALS_RANKID", "1"), ("PALS_APID", "a")], "PALS_RANKID=1"),
    (
        &[("JSM_NAMESPACE_SIZE", "6"), ("JSM_NAMESPACE_RANK", "0")],
        "JSM_NAMESPACE_SIZE=6",
    ),
    (
        &[("PET_NNODES", "2"), ("PET_NODE_RANK", "1")],
        "PET_NNODES=2",
    ),
    (
        &[("HOROVOD_SIZE", "2"), ("HOROVOD_RANK", "1")],
        "HOROVOD_SIZE=2",
    ),
    // One task of srun, in which torchrun started two.
    (
        &[
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "0"),
            ("WORLD_SIZE", "2"),
            ("RANK", "1"),
        ],
        "WORLD_SIZE=2",
    ),
];

/// The variables of a process that was started by itself.
const ALONE: [Variables; 6] = [
    &[("RANK", "2")],
    &[("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost")],
    &[
        ("WORLD_SIZE", "1"),
        ("RANK", "0"),
        ("TORCHELASTIC_RUN_ID", "none"),
    ],
    // The script of a job with several tasks, which has started none of them.
    &[
        ("SLURM_JOB_ID", "1"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_PROCID", "0"),
        ("SLURM_NNODES", "2"),
    ],
    &[
        ("OMPI_COMM_WORLD_SIZE", "1"),
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("PMIX_RANK", "0"),
    ],
    &[
        ("JSM_NAMESPACE_SIZE", "1"),
        ("JSM_NAMESPACE_RANK", "0"),
        ("PMIX_RANK", "0"),
    ],
];

const TRAIN: &str = "--synthetic --steps 1 --warmup 0 --json";

fn run(mut command: Command, variables: Variables) -> Run {
    command.envs(variables.iter().copied());
    Run::of(command.output().expect("it starts"))
}

/// Checks that a command exits with one sentence about the launcher, and prints nothing else.
fn is_refused(run: &Run, variable: &str) {
    assert_eq!(run.code, 2, "{variable}: {}", run.stderr);
    assert_eq!(
        (run.stdout.as_str(), run.stderr.lines().count()),
        ("", 1),
        "{}",
        run.stderr
    );
    for words in [
        "error: this is one of",
        variable,
        "mpirun",
        "BURN_FSDP_ENGINE=local",
    ] {
        assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
    }
}

#[test]
fn processes_of_other_launchers_report_why_they_do_not_train() {
    for (variables, variable) in SEVERAL {
        let folder = Folder::new();
        is_refused(&run(folder.train_command(TRAIN), variables), variable);
        assert_eq!(folder.names(), [""; 0], "nothing was written");
    }
}

#[test]
fn every_command_that_starts_ranks_asks_for_the_launcher() {
    let folder = Folder::new();
    folder.report("--synthetic --steps 1 --warmup 0 --checkpoint-dir steps");
    let (variables, variable) = SEVERAL[0];
    for arguments in [
        "generate steps --prompt a --tokens 2",
        "generate steps --prompt a --tokens 2 --ranks 2",
    ] {
        is_refused(&run(folder.command(arguments), variables), variable);
    }
    // The same below launch, which does not restart it.
    let train = folder.train_command(&format!("{TRAIN} --checkpoint-dir other --resume"));
    let mut launch = folder.command("launch --max-restarts 2 --");
    launch.arg(train.get_program()).args(train.get_args());
    is_refused(&run(launch, variables), variable);
    // Commands that start no ranks do not check the launcher.
    let shown = run(folder.command("inspect steps"), variables);
    assert_eq!(shown.code, 0, "{}", shown.stderr);
}

#[test]
fn a_single_process_or_the_local_engine_trains() {
    for variables in ALONE {
        let folder = Folder::new();
        let run = run(folder.train_command(TRAIN), variables);
        assert_eq!(run.code, 0, "{variables:?}: {}", run.stderr);
    }
    for (variables, _) in SEVERAL {
        let folder = Folder::new();
        let mut command = folder.train_command(&format!("{TRAIN} --ranks 3"));
        command.env("BURN_FSDP_ENGINE", "local");
        let run = run(command, variables);
        assert_eq!(run.code, 0, "{variables:?}: {}", run.stderr);
        assert_eq!(last_report(&run)["ranks"], 3);
    }
}
