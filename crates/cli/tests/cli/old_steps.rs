//! Steps that older versions of the command wrote, in `tests/fixtures/steps`. They must resume, whatever happens to the
//! format.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::command::{Folder, Run, crate_folder, last_report, losses, relative_difference};

fn fixtures() -> PathBuf {
    crate_folder().join("tests/fixtures/steps")
}

/// Returns the names of the saved runs.
fn saved_runs() -> Vec<String> {
    let entries = fs::read_dir(fixtures()).expect("the fixtures");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = names
        .filter_map(|name| Some(name.to_str()?.strip_suffix(".expected.json")?.to_owned()))
        .collect();
    names.sort();
    names
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a writable folder");
    for entry in fs::read_dir(from).expect("a readable folder") {
        let path = entry.expect("an entry").path();
        let target = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            let bytes = fs::read(&path).expect("a readable file");
            fs::write(target, bytes).expect("a writable file");
        }
    }
}

/// Returns the arguments of the run, and its losses from step 4 on.
fn expected(name: &str) -> (Vec<String>, Vec<f64>) {
    let text = fs::read_to_string(fixtures().join(format!("{name}.expected.json")));
    let expected: Value = serde_json::from_str(&text.expect("a file")).expect("JSON");
    let arguments: Vec<String> =
        serde_json::from_value(expected["arguments"].clone()).expect("a list of arguments");
    let losses = serde_json::from_value(expected["losses_after"].clone());
    (arguments, losses.expect("a list of losses"))
}

/// Resumes from a copy of the saved steps.
fn resume(folder: &Folder, name: &str, arguments: &[String]) -> Run {
    copy_folder(&fixtures().join(name), &folder.path(name));
    if arguments.iter().any(|argument| argument == "hf") {
        copy_folder(&fixtures().join("hf"), &folder.path("hf"));
    }
    let mut command = folder.command("");
    command
        .args(arguments)
        .args(["--checkpoint-dir", name, "--json"]);
    Run::of(command.output().expect("the command starts"))
}

/// On the processor that wrote them, the losses have the same bits. Other processors add in a different order.
#[test]
fn steps_of_older_versions_resume_with_the_same_losses() {
    let names = saved_runs();
    assert!(names.len() >= 8, "{names:?}");
    for name in names {
        let (arguments, want) = expected(&name);
        let is_half = arguments.iter().any(|a| a == "bf16" || a == "f16");
        let bound = if is_half { 1e-3 } else { 1e-5 };
        let folder = Folder::new();
        let run = resume(&folder, &name, &arguments);
        assert_eq!(run.code, 0, "{name}: {}", run.stderr);
        let report = last_report(&run);
        assert_eq!(report["first_step"], 4, "{name}");
        let difference = relative_difference(&want, &losses(&report));
        println!("{name}: at most {difference:e} apart");
        assert!(difference < bound, "{name}: {difference:e}");
    }
}

/// The same weights with fresh optimizer state give other losses, so the states of old steps are used.
#[test]
fn fresh_state_gives_other_losses() {
    let name = "eager-2";
    let (arguments, want) = expected(name);
    let folder = Folder::new();
    copy_folder(&fixtures().join(name), &folder.path(name));
    let run = folder.run(&format!("consolidate {name} weights.safetensors"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let fresh: Vec<_> = arguments.iter().filter(|a| *a != "--resume").collect();
    let mut command = folder.command("");
    command.args(fresh);
    command.args(["--init", "weights.safetensors", "--json"]);
    let run = Run::of(command.output().expect("the command starts"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let got = losses(&last_report(&run));
    let difference = relative_difference(&want, &got[4..]);
    assert!(difference > 1e-4, "{difference:e}");
}
