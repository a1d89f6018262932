//! Every flag with unintended values: the command answers or reports an error, but never panics, aborts or hangs.

use crate::command::{Folder, Random, is_long};

/// Training flags that take a number. Each run has at most one step.
const NUMBERS: [&str; 31] = [
    "--layers",
    "--dim",
    "--heads",
    "--vocab",
    "--seq",
    "--seed",
    "--eval-every",
    "--eval-batches",
    "--batch",
    "--warmup",
    "--steps",
    "--lr",
    "--lr-warmup",
    "--lr-decay",
    "--beta1",
    "--beta2",
    "--eps",
    "--momentum",
    "--weight-decay",
    "--accumulate",
    "--clip-grad-norm",
    "--ranks",
    "--prefetch",
    "--replicate-size",
    "--unit-size",
    "--deadline",
    "--save-every",
    "--keep-last",
    "--save-deadline",
    "--sample",
    "--strategy",
];

const VALUES: [&str; 20] = [
    "0",
    "1",
    "-1",
    "3",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e309",
    "-1e309",
    "1e-320",
    "nan",
    "inf",
    "",
    " ",
    "x",
    "0x10",
    "\u{1f980}",
    "..",
];

/// Paths for files and folders to read or write.
const PATHS: [&str; 12] = [
    "/dev/null",
    "/dev/full",
    "/proc/self/mem",
    "/proc/self",
    "/",
    ".",
    "..",
    "",
    "nowhere/x",
    "file",
    "file/x",
    "\u{1f980}",
];

/// Runs a command and expects one of the exit codes in the help's table.
fn assert_ends_well(folder: &Folder, arguments: &[&str]) -> i32 {
    let mut command = folder.command("");
    command.args(arguments);
    let run = crate::command::bounded(command);
    let run = run.unwrap_or_else(|| panic!("{arguments:?} does not end"));
    assert!(
        [0, 2, 3].contains(&run.code),
        "{arguments:?}: {} {}",
        run.code,
        run.stderr
    );
    assert!(
        !run.stderr.contains("panicked"),
        "{arguments:?}: {}",
        run.stderr
    );
    if run.code != 0 {
        assert!(
            run.stderr.contains("error: "),
            "{arguments:?}: {}",
            run.stderr
        );
    }
    run.code
}

const TINY: [&str; 16] = [
    "train",
    "--synthetic",
    "--layers",
    "1",
    "--dim",
    "16",
    "--heads",
    "2",
    "--seq",
    "8",
    "--batch",
    "4",
    "--steps",
    "1",
    "--warmup",
    "0",
];

#[test]
fn numbers_of_any_size_are_accepted_or_rejected() {
    let folder = Folder::new();
    let mut random = Random::new(11);
    let mut all: Vec<(&str, &str)> = Vec::new();
    for flag in NUMBERS {
        all.extend(VALUES.iter().map(|value| (flag, *value)));
    }
    // A run of very many steps may be intended, and would take too long here.
    all.retain(|(flag, value)| !(["--steps", "--warmup"].contains(flag) && *value == "4294967296"));
    let count = if is_long() { all.len() } else { 48 };
    let mut codes = [0; 4];
    for number in 0..count {
        let (flag, value) = if is_long() {
            all[number]
        } else {
            random.choice(&all)
        };
        let mut arguments: Vec<&str> = TINY.to_vec();
        // A flag may only be specified once.
        if let Some(place) = arguments.iter().position(|argument| *argument == flag) {
            arguments.drain(place..place + 2);
        }
        let saves = ["--save-every", "--keep-last", "--save-deadline"];
        if saves.contains(&flag) {
            arguments.extend(["--checkpoint-dir", "steps", "--resume"]);
        }
        let joined = format!("{flag}={value}");
        arguments.push(&joined);
        codes[assert_ends_well(&folder, &arguments) as usize] += 1;
    }
    println!(
        "{count} commands: {} done, {} refused, {} failed",
        codes[0], codes[2], codes[3]
    );
    assert!(codes[2] > 0 && codes[0] > 0);
}

#[test]
fn paths_of_any_kind_are_accepted_or_rejected() {
    let folder = Folder::new();
    folder.write("file", "x".repeat(5000));
    folder.write("output", "x".repeat(5000));
    let saved = [
        &TINY[..],
        &["--checkpoint-dir", "steps", "--metrics", "metrics"],
    ]
    .concat();
    assert_eq!(assert_ends_well(&folder, &saved), 0);
    let mut all: Vec<Vec<&str>> = Vec::new();
    for path in PATHS {
        // An output file is overwritten, so it must not be the file that is inspected below.
        let output = if path == "file" { "output" } else { path };
        for flag in ["--metrics", "--curve", "--trace", "--save-init"] {
            all.push([&TINY[..], &[flag, output]].concat());
        }
        all.push([&TINY[..], &["--init", path]].concat());
        all.push([&TINY[..], &["--config", path]].concat());
        // The command writes into writable folders, so only use the test's own folder.
        if !["/", ".."].contains(&path) {
            all.push([&TINY[..], &["--checkpoint-dir", path]].concat());
            all.push([&TINY[..], &["--offload", path]].concat());
            all.push([&TINY[..], &["--tensorboard", path]].concat());
            all.push([&TINY[..], &["--compile", "--dump-graphs", path]].concat());
        }
        let text: Vec<_> = TINY
            .iter()
            .copied()
            .filter(|argument| *argument != "--synthetic")
            .collect();
        // The whole disk would be read, as requested.
        if !["/", "..", "/proc/self"].contains(&path) {
            all.push([&text[..], &["--data", path, "--sample", "2"]].concat());
        }
        all.push(vec!["report", path]);
        all.push(vec!["report", "metrics", "--out", output]);
        all.push(vec!["inspect", path]);
        all.push(vec!["inspect", path, "--json", "--no-verify"]);
        all.push(vec!["consolidate", path, "out"]);
        all.push(vec!["consolidate", "steps", path]);
        all.push(vec![
            "consolidate",
            "steps",
            path,
            "--max-shard-size",
            "1KB",
        ]);
        all.push(vec!["generate", path, "--prompt", "a", "--bytes", "1"]);
    }
    for value in ["", "a", "\u{1f980}"] {
        all.push(vec!["generate", "steps", "--bytes", "2", "--prompt", value]);
    }
    let mut random = Random::new(5);
    let count = if is_long() { all.len() } else { 40 };
    for number in 0..count {
        let picked = if is_long() {
            number
        } else {
            random.below(all.len() as u64) as usize
        };
        assert_ends_well(&folder, &all[picked]);
    }
    assert_eq!(
        folder.read("file"),
        "x".repeat(5000),
        "nothing replaced what was only named"
    );
    println!("{count} commands of {}", all.len());
}
