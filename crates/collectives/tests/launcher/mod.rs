//! A program started as several processes, by `mpirun`.
//!
//! A test that has this module has `skipped` beside it, in its root. `BURN_FSDP_MPIRUN` is the launcher with its options, if it is not Open MPI's.
#![allow(dead_code, reason = "every test uses another part of this")]

use std::process::{Command, Stdio};

use crate::skipped::skipped;

const OPEN_MPI: &str =
    "mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1";

/// What the processes of a test do; set by the test for itself.
const SCENE: &str = "BURN_FSDP_TEST_SCENE";

/// `mpirun -n PROCESSES`, for a program to follow; `None` where there is no `mpirun`, after saying so.
pub(crate) fn mpirun(processes: usize) -> Option<Command> {
    let given = std::env::var("BURN_FSDP_MPIRUN").ok();
    let mut words = given.as_deref().unwrap_or(OPEN_MPI).split_whitespace();
    let program = words.next().expect("the name of a launcher");
    let version = Command::new(program).arg("--version").output();
    if version.is_err() {
        skipped(&format!("there is no {program}"));
        return None;
    }
    let mut command = Command::new(program);
    command.args(words).args(["-n", &processes.to_string()]);
    Some(command)
}

/// What this process does in a test, if the test has started it.
pub(crate) fn scene() -> Option<String> {
    std::env::var(SCENE).ok()
}

/// `mpirun` with this very program, to play a scene.
pub(crate) fn this_program(processes: usize, scene: &str) -> Option<Command> {
    let mut command = mpirun(processes)?;
    command.arg(std::env::current_exe().expect("this program has a path"));
    // The variable makes a single process one rank of one.
    command.env(SCENE, scene).env("BURN_FSDP_ENGINE", "mpi");
    command.stdin(Stdio::null());
    Some(command)
}

/// Runs the test of this name once more, in that many processes, and checks that all pass.
///
/// Does nothing but say so where there is no `mpirun`, or the program is built without the feature `mpi`.
pub(crate) fn again_as_processes(processes: usize, test: &str) {
    if let Some(played) = played(processes, test, |_| {}) {
        assert!(played.succeeded, "{}", played.said);
        played.assert_passed(processes);
    }
}

/// A test that processes have run.
pub(crate) struct Played {
    /// False where a launch failed, too, as the test may want it: its process ends without MPI's leave.
    pub(crate) succeeded: bool,
    /// How many processes passed.
    passed: usize,
    pub(crate) said: String,
}

impl Played {
    /// Asserts that so many processes passed.
    pub(crate) fn assert_passed(&self, processes: usize) {
        assert_eq!(self.passed, processes, "{}", self.said);
    }
}

/// Runs the test of this name once more, in that many processes, by a command that is changed; `None` where there is no
/// `mpirun`, or the program is built without the feature `mpi`, after saying so.
pub(crate) fn played(
    processes: usize,
    test: &str,
    change: impl Fn(&mut Command),
) -> Option<Played> {
    let mut command = this_program(processes, test)?;
    change(&mut command);
    command.args(["--exact", test, "--test-threads", "1", "--nocapture"]);
    let output = command.output().expect("mpirun runs");
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let said = format!("{stdout}{stderr}");
    if said.contains("build it with the feature `mpi`") {
        skipped("built without the feature `mpi`");
        return None;
    }
    Some(Played {
        succeeded: output.status.success(),
        passed: stdout.matches("1 passed").count(),
        said,
    })
}
