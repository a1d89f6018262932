//! A program started as several processes, by `mpirun`.
//!
//! A test with this module also needs the module `skipped` in its root. `BURN_FSDP_MPIRUN` names the launcher with its
//! options, if it is not Open MPI's.
#![allow(dead_code, reason = "every test uses another part of this")]

use std::process::{Command, Stdio};

use crate::skipped::skipped;

const OPEN_MPI: &str =
    "mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1";

/// Selects the scene that the processes of a test run; set by the test for itself.
const SCENE: &str = "BURN_FSDP_TEST_SCENE";

/// Returns `mpirun -n PROCESSES`, to be followed by a program. Prints a notice and returns `None` if there is no
/// `mpirun`.
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

/// Returns the scene that this process runs, if a test has started it.
pub(crate) fn scene() -> Option<String> {
    std::env::var(SCENE).ok()
}

/// Returns an `mpirun` command that starts this program again, to run a scene.
pub(crate) fn this_program(processes: usize, scene: &str) -> Option<Command> {
    let mut command = mpirun(processes)?;
    command.arg(std::env::current_exe().expect("this program has a path"));
    // The variable makes a single process rank 0 of a world of one.
    command.env(SCENE, scene).env("BURN_FSDP_ENGINE", "mpi");
    command.stdin(Stdio::null());
    Some(command)
}

/// Runs the test with this name again in this many processes, and checks that all pass.
///
/// Only prints a notice if there is no `mpirun`, or if the program was built without the feature `mpi`.
pub(crate) fn again_as_processes(processes: usize, test: &str) {
    if let Some(played) = played(processes, test, |_| {}) {
        assert!(played.succeeded, "{}", played.said);
        played.assert_passed(processes);
    }
}

/// The outcome of a test that processes have run.
pub(crate) struct Played {
    /// False also if a launch failed, even if the test expects that, because its process ends without finalising MPI.
    pub(crate) succeeded: bool,
    /// The number of processes that passed.
    passed: usize,
    pub(crate) said: String,
}

impl Played {
    /// Asserts the number of processes that passed.
    pub(crate) fn assert_passed(&self, processes: usize) {
        assert_eq!(self.passed, processes, "{}", self.said);
    }
}

/// Runs the test with this name again in this many processes, with a modified command. Prints a notice and returns
/// `None` if there is no `mpirun`, or if the program was built without the feature `mpi`.
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
