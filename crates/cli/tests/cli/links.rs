//! Links are not followed, and nothing outside the named folder is touched.
#![cfg(unix)]

use std::os::unix::fs::symlink;

use crate::command::Folder;

const RUN: &str = "--synthetic --warmup 0 --checkpoint-dir steps --save-every 5";

fn with_docs() -> Folder {
    let folder = Folder::new();
    std::fs::create_dir_all(folder.path("docs/sub")).expect("makes");
    std::fs::create_dir(folder.path("steps")).expect("makes");
    folder.write("docs/thesis.txt", "important");
    folder.write("docs/sub/y", "x");
    folder
}

#[test]
fn targets_of_links_named_like_a_step_are_kept() {
    let folder = with_docs();
    symlink("../docs", folder.path("steps/step-000005")).expect("links");
    for how in ["", "--overwrite", "--resume", "--resume=newest-good"] {
        let run = folder.train(&format!("{RUN} --steps 10 {how}"));
        assert_eq!(run.code, 2, "{how}: {}", run.stderr);
    }
    assert_eq!(folder.read("docs/thesis.txt"), "important");
    assert_eq!(folder.read("docs/sub/y"), "x");
    assert_eq!(folder.names_in("steps"), ["step-000005"]);
}

#[test]
fn a_linked_step_is_reported_and_kept() {
    let folder = with_docs();
    folder.report(&format!("{RUN} --steps 10"));
    std::fs::rename(folder.path("steps/step-000010"), folder.path("elsewhere")).expect("renames");
    symlink("../elsewhere", folder.path("steps/step-000010")).expect("links");
    for command in [
        "inspect steps",
        "generate steps --prompt a",
        "consolidate steps out",
    ] {
        let run = folder.run(command);
        assert_eq!(run.code, 2, "{command}: {}", run.stderr);
        assert!(
            run.stderr.contains("step-000010") && run.stderr.contains("is a link"),
            "{}",
            run.stderr
        );
    }
    let run = folder.train(&format!("{RUN} --steps 10 --resume"));
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("is a link"), "{}", run.stderr);
    assert_eq!(folder.run("inspect elsewhere").code, 0, "still whole");
    // A link that the user names explicitly is followed.
    assert_eq!(folder.run("inspect steps/step-000010").code, 0);
}

#[test]
fn files_are_written_through_no_planted_link() {
    let folder = with_docs();
    // Temporary names must be random. Names with the process's number, which were used before, can be predicted.
    let mut command = folder.train_command("--synthetic --steps 2 --curve c.svg --trace t.json");
    let child = command
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("a process");
    for name in ["c.svg", "t.json"] {
        let _ = symlink(
            "docs/thesis.txt",
            folder.path(&format!(".{name}.{}.part", child.id())),
        );
    }
    assert!(child.wait_with_output().expect("an end").status.success());
    assert_eq!(folder.read("docs/thesis.txt"), "important");
    assert!(folder.read("c.svg").starts_with("<svg"));
    // Readable by those whom the process's mask permits, like any file.
    use std::os::unix::fs::PermissionsExt;
    let mode = |name: &str| {
        let metadata = std::fs::metadata(folder.path(name)).expect("there");
        metadata.permissions().mode()
    };
    assert_eq!(mode("c.svg"), mode("docs/thesis.txt"));
}

#[test]
fn outputs_among_the_steps_are_refused() {
    let folder = with_docs();
    folder.report(&format!("{RUN} --steps 5"));
    for (output, text) in [
        ("--metrics steps/.lock", "among the saved steps"),
        (
            "--curve steps/step-000005/index.json",
            "among the saved steps",
        ),
        ("--trace steps/step-000005/new", "among the saved steps"),
        ("--metrics steps", "is a folder"),
        ("--tensorboard steps/step-000005", "among the saved steps"),
    ] {
        let run = folder.train(&format!("{RUN} --steps 6 --resume {output}"));
        assert_eq!(run.code, 2, "{output}: {}", run.stderr);
        assert!(run.stderr.contains(text), "{output}: {}", run.stderr);
    }
    let step = "steps/step-000005";
    for out in ["rank-00001.safetensors", "index.json", "new"] {
        let run = folder.run(&format!("consolidate steps {step}/{out} --overwrite"));
        assert_eq!(run.code, 2, "{out}: {}", run.stderr);
        assert!(run.stderr.contains("outside the steps"), "{}", run.stderr);
    }
    assert_eq!(folder.run("inspect steps").code, 0);
    folder.report(&format!(
        "{RUN} --steps 6 --resume --metrics steps/metrics.jsonl"
    ));
}
