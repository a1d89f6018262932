//! Flags of `train` from a file.

use serde_json::Value;

use crate::command::{Folder, Run, losses};

/// The tiny run of these tests, without its flags for the optimizer and the schedule.
const RUN: &str =
    "train --synthetic --layers 1 --dim 16 --heads 2 --seq 8 --batch 4 --warmup 0 --json";

fn report(run: &Run) -> Value {
    assert_eq!(run.code, 0, "{}", run.stderr);
    crate::command::last_report(run)
}

#[test]
fn a_file_is_the_same_as_its_flags() {
    let folder = Folder::new();
    let file = "steps = 3\nlr = 0.01\nlr-schedule = 'wsd'\nlr-decay = 3\nno-decay = ['wpe.*', 'vectors']\n\
                compile = true\nactivation-checkpointing = false\nmemory-budget = '1GiB'\n";
    folder.write("run.toml", file);
    let flags = "--steps 3 --lr 0.01 --lr-schedule wsd --lr-decay 3 --no-decay wpe.* --no-decay vectors --compile \
                 --memory-budget 1GiB";
    let of_flags = report(&folder.run(&format!("{RUN} {flags}")));
    let of_file = report(&folder.run(&format!("{RUN} --config run.toml")));
    assert_eq!(losses(&of_file), losses(&of_flags));
    assert_eq!(losses(&of_file).len(), 3);
    // The schedule of the file was used: a constant rate gives other losses.
    folder.write(
        "run.toml",
        file.replace("'wsd'\nlr-decay = 3", "'constant'"),
    );
    let of_other = report(&folder.run(&format!("{RUN} --config=run.toml")));
    assert_ne!(losses(&of_other), losses(&of_flags));
}

#[test]
fn the_command_line_replaces_flags_of_the_file() {
    let folder = Folder::new();
    folder.write("run.toml", "steps = 3\nlr = 0.5\nno-decay = ['*.bias']\n");
    let own = "--steps 2 --lr 0.01 --no-decay vectors";
    let print = |flags: &str| folder.run(&format!("{RUN} {flags} --print-config"));
    let of_both = print(&format!("--config run.toml {own}"));
    assert_eq!(of_both.code, 0, "{}", of_both.stderr);
    assert_eq!(of_both.stdout, print(own).stdout);
    assert!(
        of_both.stdout.contains("\nno-decay = [\"vectors\"]\n"),
        "{}",
        of_both.stdout
    );
}

#[test]
fn the_printed_file_is_the_same_run() {
    let folder = Folder::new();
    let flags = "--steps 3 --lr 1e-3 --optimizer sgd --momentum 0.5 --clip-grad-norm 1 --checkpoint-dir steps --resume=newest-good \
                 --strategy hybrid-shard --replicate-size host --no-decay *.bias --no-decay \"x\" --compile";
    let printed = folder.run(&format!("{RUN} {flags} --print-config"));
    assert_eq!(printed.code, 0, "{}", printed.stderr);
    assert!(
        folder.names().iter().all(|name| name != "steps"),
        "nothing is trained"
    );
    folder.write("run.toml", &printed.stdout);
    let again = folder.run("train --config run.toml --print-config");
    assert_eq!(again.stdout, printed.stdout, "{}", again.stderr);
    for line in [
        "steps = 3",
        "resume = \"newest-good\"",
        "compile = true",
        "# save-deadline = 3600",
    ] {
        assert!(
            printed.stdout.lines().any(|found| found == line),
            "{line}: {}",
            printed.stdout
        );
    }
}

#[test]
fn errors_name_the_file_and_the_key() {
    let folder = Folder::new();
    for (file, problem) in [
        ("steps = ", "line 1: "),
        ("steps = 3\nsteps = 4", "line 2: "),
        ("stepz = 3", "unknown key `stepz`; keys are the long flags"),
        (
            "lr_schedule = 'wsd'",
            "unknown key `lr_schedule`; write `lr-schedule`",
        ),
        ("[training]\nsteps = 3", "unknown key `training`"),
        ("[steps]\nnumber = 3", "`steps` is a table"),
        ("steps = 'many'", "invalid value 'many' for '--steps"),
        ("steps = 3.5", "invalid value '3.5' for '--steps"),
        ("steps = -3", "invalid value '-3' for '--steps"),
        ("steps = true", "`steps` takes a value, not true or false"),
        ("steps = [3, 4]", "`steps` takes one value, not a list"),
        ("steps = 2020-01-01", "`steps` cannot be 2020-01-01"),
        ("compile = 'yes'", "`compile` is true or false"),
        ("resume = 'oldest'", "invalid value 'oldest'"),
        ("config = 'other.toml'", "--config cannot be in a file"),
        ("print-config = true", "--print-config cannot be in a file"),
        ("help = true", "--help cannot be in a file"),
    ] {
        folder.write("run.toml", file);
        let run = folder.run(&format!("{RUN} --config run.toml"));
        assert_eq!(run.code, 2, "{file}: {}", run.stderr);
        let start = "error: --config run.toml: ";
        assert!(
            run.stderr.starts_with(start) && run.stderr.contains(problem),
            "{file}: {}",
            run.stderr
        );
    }
    let run = folder.run(&format!("{RUN} --config nowhere.toml"));
    assert_eq!(run.code, 2);
    assert!(
        run.stderr.contains("--config nowhere.toml: "),
        "{}",
        run.stderr
    );
    // Flags that exclude each other are found wherever they are.
    folder.write("run.toml", "memory-budget = '1GiB'\ncompile = true\n");
    let run = folder.run(&format!(
        "{RUN} --config run.toml --activation-checkpointing"
    ));
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("--memory-budget"), "{}", run.stderr);
    folder.write("run.toml", "lr-decay = 3\n");
    let run = folder.run(&format!("{RUN} --config run.toml"));
    assert!(
        run.stderr.contains("--lr-decay cannot be used with"),
        "{}",
        run.stderr
    );
}

#[test]
fn launch_finds_resume_in_the_file() {
    let folder = Folder::new();
    folder.write("run.toml", "steps = 1\n");
    let program = env!("CARGO_BIN_EXE_burn-fsdp");
    let start = format!("launch --max-restarts 1 -- {program} {RUN} --config run.toml");
    let run = folder.run(&start);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("from scratch"), "{}", run.stderr);
    folder.write(
        "run.toml",
        "steps = 1\ncheckpoint-dir = 'steps'\nresume = true\n",
    );
    let run = folder.run(&start);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(folder.names().iter().any(|name| name == "steps"));
    // The ranks of an attempt are filled in before the file is found.
    let attempts = "launch --max-restarts 1 --ranks 2,1";
    let run = folder.run(&format!(
        "{attempts} -- {program} {RUN} --ranks {{ranks}} --config run.toml"
    ));
    assert_eq!(run.code, 0, "{}", run.stderr);
}
