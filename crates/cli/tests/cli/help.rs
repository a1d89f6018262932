//! The help texts: a short form for every day, and a long one with everything.

use crate::command::{Folder, Run};

/// The most columns that a terminal of usual width shows.
const COLUMNS: usize = 100;

/// Flags of `train` that only the long form shows.
const RARE: [&str; 12] = [
    "--certify",
    "--check <",
    "--deadline",
    "--dump-graphs",
    "--operations",
    "--save-deadline",
    "--synthetic",
    "--trace",
    "--unit-size",
    "--utilization",
    "--warmup",
    "BURN_FSDP_ENGINE",
];

/// Prints the help of a command on a terminal of unknown width.
fn help(arguments: &str) -> String {
    let folder = Folder::new();
    let mut command = folder.command(arguments);
    let run = Run::of(command.env_remove("COLUMNS").output().expect("it starts"));
    assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
    run.stdout
}

#[test]
fn the_short_help_of_a_training_fits_on_a_screen_and_a_half() {
    let help = help("train -h");
    assert!(help.lines().count() <= 90, "{help}");
    for line in help.lines() {
        assert!(line.chars().count() <= COLUMNS, "{line}");
    }
    for word in [
        "Fine-tuning:",
        "Devices and sharding:",
        "Memory and speed:",
        "--batch <BATCH>",
        "[default: full-shard]",
        "--resume[=<WHICH>]",
        "--memory-budget <BYTES>",
        "--help",
    ] {
        assert!(help.contains(word), "{word}: {help}");
    }
    for word in RARE {
        assert!(!help.contains(word), "{word}: {help}");
    }
}

#[test]
fn the_long_help_of_a_training_has_every_flag() {
    let help = help("train --help");
    for word in RARE {
        assert!(help.contains(word), "{word}: {help}");
    }
    for word in [
        "Diagnostics:",
        "--batch <BATCH>",
        "Possible values:",
        "Muon for the matrices of blocks",
    ] {
        assert!(help.contains(word), "{word}: {help}");
    }
}

#[test]
fn other_commands_also_have_two_forms() {
    for (command, rare) in [
        ("plan", "--every-block"),
        ("generate", "--deadline"),
        ("launch", "BURN_FSDP_RESTART"),
    ] {
        let (short, long) = (
            help(&format!("{command} -h")),
            help(&format!("{command} --help")),
        );
        assert!(!short.contains(rare), "{command}: {short}");
        assert!(long.contains(rare), "{command}: {long}");
    }
}
