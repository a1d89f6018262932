//! A killed run's files do not block the next run, and other files are kept.
#![cfg(unix)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::command::{Folder, Run, last_report, send, warnings};

const OFFLOADED: &str = "--synthetic --warmup 0 --offload off";

/// Starts an endless run, and returns it when a file appears in a folder.
fn begun(folder: &Folder, arguments: &str, in_folder: &str) -> Child {
    let mut command = folder.train_command(&format!("{arguments} --steps 100000000"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().expect("a process");
    let is_there = || {
        let entries = std::fs::read_dir(folder.path(in_folder));
        entries.is_ok_and(|mut entries| entries.next().is_some())
    };
    while !is_there() {
        assert!(
            child.try_wait().expect("asks").is_none(),
            "it has steps to go"
        );
        sleep(Duration::from_millis(2));
    }
    child
}

#[test]
fn offloaded_state_of_a_killed_run_is_replaced() {
    let folder = Folder::new();
    for signal in ["-INT", "-TERM", "-KILL"] {
        let mut child = begun(&folder, &format!("{OFFLOADED} --ranks 3"), "off/rank-0");
        // While it lives, no other run can use its folder.
        let run = folder.train(&format!("{OFFLOADED} --steps 2"));
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(
            run.stderr.contains("another run is using it"),
            "{}",
            run.stderr
        );
        send(signal, child.id());
        let status = child.wait().expect("an end");
        // Signals with a handler end it after its step. It then leaves nothing behind, and exits as if the signal had
        // killed it.
        let (number, leaves) = match signal {
            "-INT" => (2, false),
            "-TERM" => (15, false),
            _ => (9, true),
        };
        assert_eq!(status.signal(), Some(number), "{signal}");
        assert_eq!(!folder.names_in("off").is_empty(), leaves, "{signal}");
        // A state that Burn had not yet moved to its place.
        std::fs::create_dir_all(folder.path("off/rank-1")).expect("makes");
        folder.write("off/rank-1/00007-blocks.0.bpk.4711-3.tmp", "half");
        let report = folder.report(&format!("{OFFLOADED} --steps 2"));
        assert_eq!(report["losses"].as_array().expect("losses").len(), 2);
        assert!(
            folder.names_in("off").is_empty(),
            "{signal}: {:?}",
            folder.names_in("off")
        );
    }
}

#[test]
fn foreign_files_among_offloaded_state_are_kept() {
    let folder = Folder::new();
    for name in ["notes.txt", "00000-x.bpk.zip", "x.tmp"] {
        std::fs::create_dir_all(folder.path("off/rank-1")).expect("makes");
        folder.write(&format!("off/rank-1/{name}"), "mine");
        folder.write("off/rank-1/00000-x.bpk", "left");
        let run = folder.train(&format!("{OFFLOADED} --steps 2"));
        assert_eq!(run.code, 2, "{}", run.stderr);
        for word in ["off/rank-1", "files of another run", name] {
            assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
        }
        assert_eq!(folder.read(&format!("off/rank-1/{name}")), "mine");
        std::fs::remove_dir_all(folder.path("off")).expect("removes");
    }
}

#[test]
fn offloaded_state_is_neither_written_nor_removed_through_a_link() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("docs")).expect("makes");
    std::fs::create_dir(folder.path("real")).expect("makes");
    folder.write("docs/00000-x.bpk", "mine");
    // The named folder may be a link, as the checkpoint folder may be. Entries inside it may not.
    std::os::unix::fs::symlink("real", folder.path("off")).expect("links");
    folder.report(&format!("{OFFLOADED} --steps 2"));
    std::os::unix::fs::symlink("../docs", folder.path("real/rank-1")).expect("links");
    let run = folder.train(&format!("{OFFLOADED} --steps 2 --ranks 2"));
    assert_eq!(run.code, 2, "{}", run.stderr);
    for word in ["off/rank-1", "is a link"] {
        assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
    }
    assert_eq!(folder.read("docs/00000-x.bpk"), "mine");
}

/// Save failures with the same text give one warning, and a count at the end.
#[test]
fn repeated_save_failures_are_counted() {
    let folder = Folder::new();
    let mut command = folder.train_command(
        "--synthetic --warmup 0 --steps 100000000 --checkpoint-dir steps --save-every 1 --metrics lines --json",
    );
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.expect("a process");
    let until = |lines: usize| {
        let is_there = || std::fs::read_to_string(folder.path("lines")).unwrap_or_default();
        while is_there().lines().count() < lines {
            sleep(Duration::from_millis(5));
        }
    };
    until(3);
    std::fs::rename(folder.path("steps"), folder.path("elsewhere")).expect("renames");
    folder.write("steps", "no folder");
    until(folder.read("lines").lines().count() + 20);
    send("-TERM", child.id());
    let run = Run::of(child.wait_with_output().expect("an end"));
    assert_eq!(run.code, 3, "{}", run.stderr);
    let report = last_report(&run);
    let all = warnings(&report);
    // The save that was in progress may fail in another way.
    let one = "a save failed; training continues: cannot create steps:";
    let told: Vec<_> = all.iter().filter(|warning| warning.contains(one)).collect();
    let [first, again] = told[..] else {
        panic!("the warning and the number, not {all:?}");
    };
    assert!(first.starts_with(one), "{first}");
    let (number, _) = again.split_once(" more saves failed").expect("a number");
    assert!(number.parse::<usize>().expect("a number") > 1, "{again}");
    assert_eq!(run.stderr.matches(one).count(), 2, "{}", run.stderr);
}

#[test]
fn steps_kept_for_their_foreign_files_are_reported_once() {
    let folder = Folder::new();
    let run = "--synthetic --warmup 0 --checkpoint-dir steps --save-every 2 --keep-last 2";
    folder.report(&format!("{run} --steps 4"));
    for step in [2, 4] {
        folder.write(&format!("steps/step-00000{step}/notes.txt"), "the best one");
    }
    let run = folder.train(&format!("{run} --steps 16 --resume --json"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let kept = ["step-000002", "step-000004", "step-000014", "step-000016"];
    assert_eq!(folder.names_in("steps"), kept);
    let report = last_report(&run);
    let [warning] = warnings(&report)[..] else {
        panic!("one warning, not {report}");
    };
    for word in ["step-000002", "notes.txt", "move it elsewhere"] {
        assert!(warning.contains(word), "{word}: {warning}");
    }
    assert_eq!(run.stderr.matches("notes.txt").count(), 1, "{}", run.stderr);
    // Once these files are gone, the steps are removed.
    for step in [2, 4] {
        std::fs::remove_file(folder.path(&format!("steps/step-00000{step}/notes.txt")))
            .expect("removes");
    }
    let run = "--synthetic --warmup 0 --checkpoint-dir steps --save-every 2 --keep-last 2";
    let report = folder.report(&format!("{run} --steps 18 --resume"));
    assert!(warnings(&report).is_empty(), "{report}");
    assert_eq!(folder.names_in("steps"), ["step-000016", "step-000018"]);
}
