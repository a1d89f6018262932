//! A rank that fails ends the whole command, soon, and by its name.

use crate::command::{Folder, Run};

const ARGUMENTS: &str = "--synthetic --warmup 0 --steps 5 --metrics metrics.jsonl";

fn fails(at: &str, how: &str, deadline: u64) -> Run {
    let folder = Folder::new();
    let run = folder.train_with_fault(
        &format!("{ARGUMENTS} --deadline {deadline}"),
        &format!("rank:1,step:3,at:{at},how:{how}"),
    );
    assert_eq!(run.code, 3, "{at} {how}: {}", run.stderr);
    assert_eq!(folder.names(), ["metrics.jsonl"], "no curve of half a run");
    // Rank 1 may fail before rank 0 has seen the end of the step before.
    let num_lines = folder.read("metrics.jsonl").lines().count();
    assert!((2..=3).contains(&num_lines), "{at} {how}: {num_lines}");
    run
}

fn error_line(run: &Run) -> &str {
    let mut lines = run.stderr.lines();
    lines
        .find(|line| line.starts_with("error: "))
        .expect("a line that says what happened")
}

#[test]
fn a_panic_is_reported_by_rank() {
    for at in ["forward", "backward", "collective"] {
        let run = fails(at, "panic", 600);
        assert!(
            error_line(&run).starts_with("error: rank 1 panicked: "),
            "{}",
            run.stderr
        );
        assert!(
            !run.stderr.contains("waited"),
            "nobody waits for the deadline: {}",
            run.stderr
        );
    }
}

#[test]
fn an_error_is_reported_by_rank() {
    for at in ["forward", "backward", "collective"] {
        let run = fails(at, "error", 600);
        assert!(
            error_line(&run).starts_with("error: rank 1 failed: "),
            "{}",
            run.stderr
        );
        assert!(
            !run.stderr.contains("waited"),
            "nobody waits for the deadline: {}",
            run.stderr
        );
    }
}

#[test]
fn a_stall_ends_with_the_deadline() {
    for at in ["forward", "backward", "collective"] {
        let run = fails(at, "stall", 2);
        let line = error_line(&run);
        assert!(line.contains("waited 2s for ranks [1]"), "{at}: {line}");
    }
}
