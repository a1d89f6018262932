//! A run and its checkpoint folder: no step is lost, and no other run can use the folder.

use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use crate::checkpoints::{DIR, metrics};
use crate::command::{Folder, Run, last_report, send};

const RUN: &str = "--synthetic --warmup 0 --checkpoint-dir steps";

#[test]
fn a_folder_with_steps_requires_resume_or_overwrite() {
    let folder = Folder::new();
    folder.report(&format!("{DIR} --warmup 0 --steps 6 --save-every 2"));
    let lines = metrics(&folder);
    let index = folder.read("steps/step-000006/index.json");
    let run = folder.train(&format!(
        "{DIR} --warmup 0 --steps 6 --save-every 2 --seed 2"
    ));
    assert_eq!(run.code, 2, "{}", run.stderr);
    for word in ["steps has steps", "--resume", "--overwrite"] {
        assert!(run.stderr.contains(word), "{}", run.stderr);
    }
    assert_eq!(metrics(&folder), lines, "the metrics stay, too");
    assert_eq!(folder.read("steps/step-000006/index.json"), index);
    // After a shorter run, no step of the longer run is left that could be mistaken for its own.
    let report = folder.report(&format!("{DIR} --warmup 0 --steps 3 --seed 2 --overwrite"));
    assert_eq!(report["first_step"], 0);
    assert_eq!(folder.names_in("steps"), ["step-000003"]);
}

#[test]
fn only_steps_are_overwritten() {
    let folder = Folder::new();
    std::fs::create_dir_all(folder.path("steps/step-000005/notes")).expect("makes");
    folder.write("steps/step-000005/notes/n.txt", "mine");
    for how in ["", "--overwrite", "--resume"] {
        let run = folder.train(&format!("{RUN} --steps 5 {how}"));
        assert_eq!(run.code, 2, "{how}: {}", run.stderr);
        assert!(run.stderr.contains("steps"), "{how}: {}", run.stderr);
    }
    assert_eq!(folder.read("steps/step-000005/notes/n.txt"), "mine");
}

#[test]
fn an_unwritable_folder_is_an_error_before_training() {
    let folder = Folder::new();
    folder.write("file", "");
    std::fs::create_dir(folder.path("taken")).expect("makes");
    std::fs::create_dir(folder.path("taken/.lock")).expect("makes");
    for path in ["file/steps", "taken", "/proc/steps", "/dev/null/steps"] {
        let arguments = format!("--synthetic --steps 1000000000 --checkpoint-dir {path}");
        let run = folder.train(&arguments);
        assert_eq!(run.code, 2, "{path}: {}", run.stderr);
        assert!(run.stderr.contains(path), "{path}: {}", run.stderr);
    }
}

#[test]
fn a_second_run_is_kept_out_as_long_as_the_first_lives() {
    let folder = Folder::new();
    let first = folder
        .train_command(&format!(
            "{RUN} --steps 100000000 --save-every 5 --keep-last 2 --json"
        ))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a process");
    while !folder.path("steps/step-000005").exists() && !folder.path("steps/step-000010").exists() {
        sleep(Duration::from_millis(5));
    }
    for how in ["--resume", "--overwrite", "--resume=newest-good"] {
        let run = folder.train(&format!("{RUN} --steps 5 {how}"));
        assert_eq!(run.code, 2, "{how}: {}", run.stderr);
        assert!(
            run.stderr.contains("locked by another run"),
            "{how}: {}",
            run.stderr
        );
    }
    // Readers are allowed, even if steps are removed during reading.
    for _ in 0..3 {
        for reader in [
            "inspect steps",
            "consolidate steps model --overwrite",
            "generate steps --prompt a --bytes 1",
        ] {
            let run = folder.run(reader);
            assert_eq!(run.code, 0, "{reader}: {}", run.stderr);
        }
    }
    send("-TERM", first.id());
    let first = Run::of(first.wait_with_output().expect("an end"));
    assert_eq!(first.code, 0, "{}", first.stderr);
    let saved = last_report(&first)["saved_step"].as_u64().expect("saved");
    let report = folder.report(&format!("{RUN} --steps {} --resume", saved + 1));
    assert_eq!(report["first_step"], saved);
}

#[test]
fn unreadable_steps_are_not_skipped() {
    let folder = Folder::new();
    folder.report(&format!("{RUN} --steps 6 --save-every 2"));
    // Even if every step is damaged, the run must not start again and replace them.
    for step in ["step-000002", "step-000004", "step-000006"] {
        let file = format!("steps/{step}/rank-00001.safetensors");
        let mut bytes = std::fs::read(folder.path(&file)).expect("reads");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        folder.write(&file, bytes);
    }
    let run = folder.train(&format!("{RUN} --steps 6 --resume=newest-good"));
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr.contains("none of them is complete"),
        "{}",
        run.stderr
    );
    assert_eq!(folder.names_in("steps").len(), 3);
}

#[cfg(unix)]
#[test]
fn folders_may_have_any_name() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new();
    let name = std::ffi::OsStr::from_bytes(b"x\xff");
    let output = folder
        .train_command("--synthetic --warmup 0 --steps 6 --save-every 2 --json")
        .arg("--checkpoint-dir")
        .arg(name)
        .output()
        .expect("runs");
    let run = Run::of(output);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(last_report(&run)["saved_step"], 6);
    let inspected = folder
        .command("inspect --json")
        .arg(name)
        .output()
        .expect("runs");
    let inspected = Run::of(inspected);
    assert_eq!(inspected.code, 0, "{}", inspected.stderr);
    let json: serde_json::Value = serde_json::from_str(&inspected.stdout).expect("an object");
    assert_eq!(json["training"]["step"], 6);
}

#[test]
fn a_step_must_match_the_number_of_its_folder() {
    let folder = Folder::new();
    folder.report(&format!("{RUN} --steps 6 --save-every 3"));
    std::fs::rename(
        folder.path("steps/step-000006"),
        folder.path("steps/step-000030"),
    )
    .expect("renames");
    let run = folder.train(&format!("{RUN} --steps 8 --resume"));
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("step-000030"), "{}", run.stderr);
    let report = folder.report(&format!("{RUN} --steps 8 --resume=newest-good"));
    assert_eq!(report["first_step"], 3);
    assert_eq!(
        folder.names_in("steps"),
        ["step-000003", "step-000008", "step-000030"]
    );
}

#[test]
fn a_run_with_nothing_to_do_cleans_up_and_reports_it() {
    let folder = Folder::new();
    folder.report(&format!("{RUN} --steps 6"));
    let left = "steps/.step-000009.removed-0123456789abcdef";
    std::fs::create_dir(folder.path(left)).expect("makes");
    let report = folder.report(&format!("{RUN} --steps 6 --resume"));
    assert_eq!(report["first_step"], 6);
    assert!(!folder.path(left).exists());
    let run = folder.train(&format!("{RUN} --steps 4 --resume"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("beyond the 4"), "{}", run.stderr);
}
