//! Compute threads of each rank.

use std::process::Command;
#[cfg(target_os = "linux")]
use std::{fs, process::Stdio, thread::sleep, time::Duration};

use crate::command::{Folder, Run, last_report};

const TRAIN: &str = "--synthetic --steps 1 --warmup 0 --json";

fn trained(arguments: &str, variable: Option<&str>) -> Run {
    let folder = Folder::new();
    let mut command = folder.train_command(&format!("{TRAIN} {arguments}"));
    set(&mut command, variable);
    Run::of(command.output().expect("it starts"))
}

fn set(command: &mut Command, variable: Option<&str>) {
    command.env_remove("RAYON_NUM_THREADS");
    if let Some(value) = variable {
        command.env("RAYON_NUM_THREADS", value);
    }
}

#[test]
fn the_report_has_the_number_of_threads() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for (arguments, variable, threads) in [
        ("--ranks 2 --threads 3", None, 3),
        ("--ranks 2", Some("1"), 1),
        ("--ranks 1", Some("1"), 1),
        ("--ranks 3", Some("5"), 5),
        ("--ranks 2 --threads 2", Some("5"), 2),
        ("--ranks 2 --threads 2", Some("many"), 2),
        ("--ranks 4", None, (cores / 4).max(1)),
        ("--ranks 4", Some("0"), (cores / 4).max(1)),
    ] {
        let run = trained(arguments, variable);
        assert_eq!(run.code, 0, "{arguments} {variable:?}: {}", run.stderr);
        assert_eq!(
            last_report(&run)["threads"],
            threads,
            "{arguments} {variable:?}"
        );
    }
}

#[test]
fn invalid_thread_counts_are_rejected() {
    for (arguments, variable, words) in [
        ("--threads 0", None, "--threads is 0; it must be at least 1"),
        (
            "--threads 100000",
            None,
            "cannot give each rank 100000 threads",
        ),
        ("--threads=-1", None, "--threads"),
        ("", Some("many"), "RAYON_NUM_THREADS is \"many\""),
        ("", Some("1.5"), "RAYON_NUM_THREADS is \"1.5\""),
        ("", Some("70000"), "cannot give each rank 70000 threads"),
    ] {
        let run = trained(arguments, variable);
        assert_eq!(run.code, 2, "{arguments} {variable:?}: {}", run.stderr);
        assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
    }
    let folder = Folder::new();
    folder.report("--synthetic --steps 1 --warmup 0 --checkpoint-dir steps");
    let generate = |arguments: &str, variable| {
        let mut command =
            folder.command(&format!("generate steps --prompt a --tokens 2 {arguments}"));
        set(&mut command, variable);
        Run::of(command.output().expect("it starts"))
    };
    assert_eq!(generate("--threads 0", None).code, 2);
    assert_eq!(generate("", Some("many")).code, 2);
    let texts = ["--threads 1", "--threads 3", "--threads 2 --ranks 2"].map(|threads| {
        let run = generate(threads, None);
        assert_eq!(run.code, 0, "{}", run.stderr);
        run.stdout
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
}

/// Returns the processor ticks of each thread of a process whose name starts with `rank`.
#[cfg(target_os = "linux")]
fn ticks(process: u32) -> Vec<u64> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("its threads");
    let of_task = |task: fs::DirEntry| {
        let text = fs::read_to_string(task.path().join("stat")).ok()?;
        let (name, fields) = text.rsplit_once(')')?;
        let fields: Vec<_> = fields.split_whitespace().collect();
        let number = |index: usize| fields[index].parse::<u64>().ok();
        name.contains("(rank ").then_some(number(11)? + number(12)?)
    };
    let mut ticks: Vec<_> = tasks.flatten().filter_map(of_task).collect();
    ticks.sort_unstable();
    ticks.reverse();
    ticks
}

#[cfg(target_os = "linux")]
#[test]
fn the_requested_number_of_threads_computes() {
    for (flags, variable, threads) in [
        ("--ranks 1 --threads 1", None, 1),
        ("--ranks 1", Some("1"), 1),
        ("--ranks 1 --threads 2", None, 2),
        ("--ranks 1", Some("3"), 3),
        ("--ranks 1 --threads 4", Some("1"), 4),
    ] {
        let folder = Folder::new();
        let mut command = folder.train_command(&format!(
            "--dim 256 --heads 4 --seq 64 --batch 8 --synthetic --steps 100000000 --metrics lines --json {flags}"
        ));
        set(&mut command, variable);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = command.spawn().expect("it starts");
        let busy = loop {
            sleep(Duration::from_millis(50));
            let ticks = ticks(child.id());
            // A hundred ticks are one second of processor time.
            if ticks.iter().sum::<u64>() > 150 {
                break ticks;
            }
            assert!(child.try_wait().expect("a child").is_none(), "it trains");
        };
        child.kill().expect("it is there");
        child.wait().expect("an end");
        // One additional thread waits for the rank's end.
        assert_eq!(busy.len(), threads + 1, "{flags} {variable:?}: {busy:?}");
        let computing = busy.iter().filter(|ticks| **ticks * 50 > busy[0]).count();
        assert!(
            (1..=threads).contains(&computing),
            "{flags} {variable:?}: {busy:?}"
        );
        let is_shared = computing > 1;
        assert_eq!(is_shared, threads > 1, "{flags} {variable:?}: {busy:?}");
    }
}
