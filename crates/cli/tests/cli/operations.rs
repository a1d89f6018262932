//! Records of a run's operations, written and compared.

use crate::command::{Folder, Run};

const SMALL: &str = "--synthetic --warmup 0 --steps 3 --batch 4";

/// Trains with the arguments, and writes the operations into `name`.
fn write(folder: &Folder, name: &str, arguments: &str) {
    let run = folder.train(&format!("{SMALL} --operations {name} {arguments}"));
    assert_eq!(run.code, 0, "{name}: {}", run.stderr);
}

fn diff(folder: &Folder, names: [&str; 2]) -> Run {
    folder.run(&format!("diff {} {}", names[0], names[1]))
}

#[test]
fn identical_runs_record_identical_operations() {
    let saves = "--checkpoint-dir run --save-every 1 --overwrite";
    for engine in ["", "--compile", "--strategy hybrid-shard --ranks 4", saves] {
        let folder = Folder::new();
        write(&folder, "a", engine);
        write(&folder, "b", engine);
        let run = diff(&folder, ["a", "b"]);
        assert_eq!(run.code, 0, "{engine}: {}", run.stderr);
        assert!(run.stdout.contains("have the same bytes"), "{}", run.stdout);
    }
}

#[test]
fn the_first_operation_that_differs_is_named() {
    let folder = Folder::new();
    write(&folder, "a", "");
    // The first step is the same, but its update of the parameters is not.
    write(&folder, "rate", "--lr 0.02");
    write(&folder, "strategy", "--strategy no-shard");
    for (other, words) in [
        (
            "rate",
            ["in step 1, ", "all_gather", "sends different bytes"],
        ),
        (
            "strategy",
            ["before the first step", "wte", "the second run does"],
        ),
    ] {
        let run = diff(&folder, ["a", other]);
        assert_eq!(run.code, 3, "{other}: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{other}: {word}: {}", run.stderr);
        }
    }
}

#[test]
fn incomparable_records_are_rejected() {
    let folder = Folder::new();
    write(&folder, "four", "--ranks 4");
    // Files of an earlier run with more ranks are removed.
    write(&folder, "a", "--ranks 4");
    write(&folder, "a", "");
    std::fs::create_dir(folder.path("torn")).unwrap();
    let whole = std::fs::read_to_string(folder.path("a/rank-0.jsonl")).unwrap();
    folder.write("torn/rank-0.jsonl", &whole[..whole.len() - 9]);
    std::fs::create_dir(folder.path("garbled")).unwrap();
    folder.write("garbled/rank-0.jsonl", "{\"step\":");
    // If one rank's file is missing, the rest must not be mistaken for a run with fewer ranks.
    write(&folder, "lost", "");
    std::fs::remove_file(folder.path("lost/rank-1.jsonl")).unwrap();
    let last = format!("line {}: EOF", whole.lines().count());
    for (other, word) in [
        ("four", "2 ranks, but the other has 4"),
        ("garbled", "rank-0.jsonl"),
        ("torn", "rank-0.jsonl"),
        ("torn", last.as_str()),
        ("lost", "rank-1.jsonl"),
        ("nowhere", "it contains no rank-0.jsonl"),
    ] {
        let run = diff(&folder, ["a", other]);
        assert_eq!(run.code, 2, "{other}: {}", run.stderr);
        assert!(run.stderr.contains(word), "{other}: {}", run.stderr);
    }
}
