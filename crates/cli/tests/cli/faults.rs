//! A failed rank ends the whole command without waiting for a deadline, and the message names the rank.

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
    // Rank 1 may fail before rank 0 has seen the end of the previous step.
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
        let line = error_line(&run);
        assert!(line.starts_with("error: rank 1 panicked: "), "{line}");
        assert!(!run.stderr.contains("waited"), "{}", run.stderr);
    }
}

#[test]
fn an_error_is_reported_by_rank() {
    for at in ["forward", "backward", "collective"] {
        let run = fails(at, "error", 600);
        let line = error_line(&run);
        assert!(line.starts_with("error: rank 1 failed: "), "{line}");
        assert!(!run.stderr.contains("waited"), "{}", run.stderr);
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

/// A bit in rank 1's data flips in step 3, in the eager engine and in the compiled step.
const FLIP: &str = "rank:1,step:3,at:collective,how:flip";

#[test]
fn a_flipped_bit_is_named_by_step_operation_and_rank_where_ranks_compare_bytes() {
    for engine in [
        "",
        "--compile",
        "--strategy no-shard",
        "--strategy no-shard --compile",
    ] {
        let folder = Folder::new();
        let arguments = format!("{ARGUMENTS} --check agreement {engine}");
        let run = folder.train_with_fault(&arguments, FLIP);
        assert_eq!(run.code, 3, "{engine}: {}", run.stderr);
        let line = error_line(&run);
        for word in [
            "in step 3, ",
            "than rank 1 passed to the call",
            "of group \"world\"",
            "checkpoint",
        ] {
            assert!(line.contains(word), "{engine}: {word}: {line}");
        }
        let right = Folder::new().train(&arguments);
        assert_eq!(right.code, 0, "{engine}: {}", right.stderr);
    }
}

#[test]
fn flipped_bits_go_unnoticed_if_ranks_compare_only_calls() {
    let run = Folder::new().train_with_fault(ARGUMENTS, FLIP);
    assert_eq!(run.code, 0, "{}", run.stderr);
}

#[test]
fn a_bit_that_flips_between_operations_is_named_by_step_rank_and_value() {
    for engine in ["", "--compile"] {
        for (at, eager, compiled) in [
            ("shard", "the shard of `", "of parameter "),
            ("weight", "the full parameter of `", "of the gathered "),
            ("gradient", "the reduced gradient of `", "of the reduced "),
            ("state", "the optimizer's state `", "of state "),
        ] {
            let arguments = format!("{ARGUMENTS} --check agreement {engine}");
            let fault = format!("rank:1,step:3,at:{at},how:flip,seed:6");
            let run = Folder::new().train_with_fault(&arguments, &fault);
            assert_eq!(run.code, 3, "{engine} {at}: {}", run.stderr);
            let line = error_line(&run);
            let value = if engine.is_empty() { eager } else { compiled };
            for word in ["in step 3, rank 1 found that the bytes", value, "of group"] {
                assert!(line.contains(word), "{engine} {at}: {word}: {line}");
            }
        }
    }
}
