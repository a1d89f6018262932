//! Outputs that fail, early or late: existing files are kept, and the results are still reported.
#![cfg(unix)]

use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};

use crate::checkpoints::{DIR, metrics};
use crate::command::{Folder, Run, last_report};

#[test]
fn an_unread_stderr_does_not_panic() {
    let folder = Folder::new();
    let full = || {
        File::options()
            .write(true)
            .open("/dev/full")
            .expect("a device")
    };
    // Each of these prints to stderr: an error, a plan, a warning.
    for (arguments, code) in [
        ("inspect nowhere", 2),
        ("train --synthetic --steps 2", 0),
        ("train --synthetic --steps 5 --lr 1e30 --warmup 0", 3),
        (
            "train --synthetic --steps 0 --checkpoint-dir s --metrics /dev/full --warmup 1",
            0,
        ),
    ] {
        for (log, closed) in [("off", false), ("trace", false), ("off", true)] {
            let _ = std::fs::remove_dir_all(folder.path("s"));
            let sizes = if arguments.starts_with("train") {
                "--layers 1 --dim 16 --heads 2 --seq 8 --batch 4"
            } else {
                ""
            };
            let mut command = folder.command(&format!("{arguments} {sizes}"));
            command.env("RUST_LOG", log).stdout(Stdio::null());
            let status = if closed {
                let mut child = command.stderr(Stdio::piped()).spawn().expect("runs");
                drop(child.stderr.take());
                child.wait().expect("an end")
            } else {
                command.stderr(full()).status().expect("runs")
            };
            assert_eq!(
                status.code(),
                Some(code),
                "{arguments}, log {log}, closed {closed}"
            );
        }
    }
}

#[test]
fn a_full_stdout_is_an_error_but_a_closed_one_is_not() {
    let folder = Folder::new();
    let full = File::options()
        .write(true)
        .open("/dev/full")
        .expect("a device");
    let mut command = folder.train_command("--synthetic --steps 2 --json");
    let plans = [
        "plan --model gpt --preset 7b",
        "plan --model gpt --preset 7b --json",
    ];
    let mut plans = plans.map(|plan| folder.command(plan));
    for command in plans.iter_mut().chain([&mut command]) {
        let full = full.try_clone().expect("a device");
        let run = Run::of(
            command
                .stdout(full)
                .stderr(Stdio::piped())
                .output()
                .expect("runs"),
        );
        assert_eq!(run.code, 3, "{}", run.stderr);
        assert!(run.stderr.contains("stdout"), "{}", run.stderr);
    }
    let mut child = command.stdout(Stdio::piped()).spawn().expect("runs");
    drop(child.stdout.take());
    assert_eq!(child.wait().expect("an end").code(), Some(0));
}

#[test]
fn a_full_disk_under_the_metrics_ends_nothing() {
    let folder = Folder::new();
    let run = folder.train(
        "--synthetic --warmup 0 --steps 6 --metrics /dev/full --checkpoint-dir steps --json",
    );
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = last_report(&run);
    assert_eq!(report["saved_step"], 6);
    let warnings = report["warnings"].to_string();
    assert_eq!(
        warnings.matches("--metrics /dev/full").count(),
        1,
        "{warnings}"
    );
    assert_eq!(
        run.stderr.matches("lines are lost").count(),
        1,
        "{}",
        run.stderr
    );
}

#[test]
fn resuming_into_a_pipe_does_not_read_from_it() {
    let folder = Folder::new();
    let run = "--synthetic --warmup 0 --checkpoint-dir steps --metrics /dev/stdout --curve c.svg";
    for (steps, how, lines) in [(3, "", 3), (6, "--resume", 3)] {
        let mut child = folder
            .train_command(&format!("{run} --steps {steps} {how} --json"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("runs");
        let mut text = String::new();
        let mut out = child.stdout.take().expect("piped");
        out.read_to_string(&mut text).expect("reads");
        assert_eq!(child.wait().expect("an end").code(), Some(0));
        assert_eq!(text.lines().count(), lines + 1, "{text}");
    }
}

/// At the moment when the resumed run has opened its metrics but trained nothing, all earlier lines are still there.
#[test]
fn metrics_survive_a_resumed_run_that_dies_at_once() {
    let folder = Folder::new();
    folder.report(&format!("{DIR} --warmup 0 --steps 6"));
    let before = metrics(&folder);
    let fault = "rank:0,step:6,at:forward,how:panic";
    let run = folder.train_with_fault(&format!("{DIR} --warmup 0 --steps 9 --resume"), fault);
    assert_eq!(run.code, 3, "{}", run.stderr);
    assert_eq!(metrics(&folder), before);
    // Opening the file does not truncate it, and the inode number is the same.
    use std::os::unix::fs::MetadataExt;
    let number = || {
        std::fs::metadata(folder.path("metrics.jsonl"))
            .expect("there")
            .ino()
    };
    let old = number();
    folder.report(&format!("{DIR} --warmup 0 --steps 9 --resume"));
    assert_eq!(number(), old);
    let steps: Vec<_> = metrics(&folder).into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
}

/// The folder disappears during the run. The last save and the curve fail, but the report is printed.
#[test]
fn the_report_is_printed_whatever_fails_last() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("out")).expect("makes");
    let mut child = folder
        .train_command(
            "--synthetic --warmup 0 --steps 400 --checkpoint-dir steps --curve out/c.svg --json \
             --metrics m",
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("runs");
    let lines = || {
        std::fs::read_to_string(folder.path("m"))
            .unwrap_or_default()
            .lines()
            .count()
    };
    while lines() == 0 {
        assert!(
            child.try_wait().expect("asks").is_none(),
            "it has steps to go"
        );
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    std::fs::remove_dir_all(folder.path("out")).expect("removes");
    std::fs::remove_dir_all(folder.path("steps")).expect("removes");
    folder.write("steps", "in the way");
    let run = Run::of(child.wait_with_output().expect("an end"));
    assert_eq!(run.code, 3, "{}", run.stderr);
    let report = last_report(&run);
    assert_eq!(report["losses"].as_array().expect("a list").len(), 400);
    assert_eq!(
        report["failures"].as_array().expect("a list").len(),
        2,
        "{report}"
    );
    for word in ["step 400 was not saved", "--curve out/c.svg"] {
        assert!(run.stderr.contains(word), "{}", run.stderr);
    }
}

/// A run's inputs are never overwritten by its outputs, not through another name of the same file, and not inside a
/// folder.
#[test]
fn outputs_never_replace_inputs() {
    let folder = Folder::new();
    folder.report("--synthetic --warmup 0 --steps 2 --checkpoint-dir steps");
    let text = "to be or not to be, that is the question. ".repeat(99);
    folder.write("text", &text);
    folder.write("more", &text);
    std::fs::hard_link(folder.path("text"), folder.path("linked")).expect("a link");
    let tokenizer = include_str!("../../../models/tests/models/tokenizer.json");
    folder.write("tokenizer.json", tokenizer);
    folder.report("--data text --save-init weights.safetensors --steps 0 --warmup 1");
    let taken = [
        ("--data text", "linked"),
        (
            "--data text --vocab 300 --tokenizer tokenizer.json",
            "tokenizer.json",
        ),
        (
            "--data text --init weights.safetensors",
            "weights.safetensors",
        ),
        ("--data text", "steps/step-000002/index.json"),
        ("--data text", "steps/step-000002/rank-00000.safetensors"),
        ("--data text", "steps/step-000002/new"),
    ];
    let step = folder.names_in("steps/step-000002");
    for (reads, file) in taken {
        let before = std::fs::read(folder.path(file)).ok();
        for output in ["--metrics", "--trace", "--curve", "--save-init"] {
            let run = folder.train(&format!("{reads} --steps 1 {output} {file}"));
            assert_eq!(run.code, 2, "{reads} {output} {file}: {}", run.stderr);
            assert!(run.stderr.contains(output), "{}", run.stderr);
            let after = std::fs::read(folder.path(file)).ok();
            assert!(before == after, "{reads} {output} {file}");
        }
    }
    assert_eq!(folder.names_in("steps/step-000002"), step);
    // A file with another name but the same bytes is a different file.
    folder.report("--data text --steps 1 --curve more");
}

#[test]
fn too_many_ranks_are_a_usage_error() {
    let folder = Folder::new();
    let run = folder.run("train --synthetic --ranks 1025 --batch 1025 --steps 1");
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("1024"), "{}", run.stderr);
}

/// A file that does not fit is not an error in the command line.
#[test]
fn a_full_disk_is_not_a_usage_error() {
    let folder = Folder::new();
    folder.report("--synthetic --warmup 0 --steps 2 --checkpoint-dir steps");
    let program = env!("CARGO_BIN_EXE_burn-fsdp");
    for (command, made) in [
        ("consolidate steps model.safetensors", "model.safetensors"),
        (
            "train --synthetic --layers 2 --dim 16 --heads 2 --seq 8 --batch 4 --steps 1 --save-init first.safetensors",
            "first.safetensors",
        ),
    ] {
        // One kibibyte.
        let script = format!("ulimit -f 1; exec {program} {command}");
        let mut shell = Command::new("bash");
        shell.args(["-c", &script]).current_dir(folder.path(""));
        let run = Run::of(shell.output().expect("bash runs"));
        assert_eq!(run.code, 3, "{command}: {}", run.stderr);
        assert!(!folder.path(made).exists(), "{command}");
    }
}
