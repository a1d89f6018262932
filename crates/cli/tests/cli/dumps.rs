//! `--dump-graphs`: the graphs of compiled steps, as users get them.

use crate::command::{Folder, losses};

const RUN: &str = "--synthetic --warmup 0 --steps 3 --compile";

#[test]
fn one_rank_dumps_graphs_without_changing_losses() {
    let folder = Folder::new();
    let without = folder.report(RUN);
    let with = folder.report(&format!("{RUN} --dump-graphs out/graphs"));
    assert_eq!(losses(&with), losses(&without));
    // One graph for the first step, and one for later steps, in which the optimizer has state.
    assert_eq!(folder.names_in("out/graphs"), ["graph-0", "graph-1"]);
    let names = folder.names_in("out/graphs/graph-1");
    assert!(names.contains(&"changes.txt".to_owned()), "{names:?}");
    for pass in [
        "trace",
        "insert-collectives",
        "bucket-collectives",
        "liveness",
    ] {
        for extension in ["txt", "svg", "dot"] {
            let end = format!("-{pass}.{extension}");
            let found = names.iter().filter(|name| name.ends_with(&end)).count();
            assert_eq!(found, 1, "{end}: {names:?}");
        }
    }
    let changes = folder.read("out/graphs/graph-1/changes.txt");
    assert!(
        changes.contains("joined: all_gather [blocks.1 ("),
        "{changes}"
    );
    let trace = folder.read("out/graphs/graph-1/00-trace.txt");
    assert!(
        trace.contains("parameter blocks.1.fc.weight f32[16, 64]"),
        "{trace}"
    );
    // A shorter run of another kind replaces them.
    let other = "--synthetic --warmup 0 --steps 1 --compile --accumulate 2";
    folder.report(&format!("{other} --dump-graphs out/graphs"));
    assert_eq!(folder.names_in("out/graphs"), ["graph-0"]);
    let names = folder.names_in("out/graphs/graph-0");
    let of_update = |name: &String| name.ends_with("-update-liveness.txt");
    assert!(names.iter().any(of_update), "{names:?}");
    assert_eq!(folder.names(), ["loss.svg", "out"]);
}

#[test]
fn dumps_without_graphs_or_a_writable_folder_are_rejected() {
    let folder = Folder::new();
    let run = folder.train("--synthetic --steps 1 --dump-graphs graphs");
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("--compile"), "{}", run.stderr);
    folder.write("file", "mine");
    folder.write(
        "text",
        "to be or not to be, that is the question. ".repeat(99),
    );
    std::fs::create_dir_all(folder.path("mine/graph-3")).expect("makes");
    folder.write("mine/graph-3/notes.md", "mine");
    std::fs::create_dir(folder.path("steps")).expect("makes");
    let names = folder.names();
    for (path, flags, words) in [
        ("file", "--synthetic", &["not a folder"][..]),
        ("file/graphs", "--synthetic", &["file is not a folder"]),
        (
            "/proc/graphs",
            "--synthetic",
            &[
                "cannot write graphs to /proc/graphs",
                "choose a writable folder",
            ],
        ),
        (
            "mine",
            "--synthetic",
            &["mine/graph-3/notes.md", "move it away"],
        ),
        (
            ".",
            "--data text",
            &["contains the text of --data", "name another folder"],
        ),
        ("text/..", "--data text", &["not a folder"]),
        (
            "graphs",
            "--synthetic --curve graphs",
            &["--dump-graphs and --curve name the same file"],
        ),
        (
            "steps",
            "--synthetic --checkpoint-dir steps",
            &["name the same file"],
        ),
        (
            "steps/step-graphs",
            "--synthetic --checkpoint-dir steps",
            &["among the saved steps"],
        ),
    ] {
        // With this many steps, the problem must be found before the first of them.
        let run = folder.train(&format!(
            "{flags} --compile --steps 1000000000 --dump-graphs {path}"
        ));
        assert_eq!(run.code, 2, "{path}: {}", run.stderr);
        for word in ["--dump-graphs"].iter().chain(words) {
            assert!(run.stderr.contains(word), "{path}: {word}: {}", run.stderr);
        }
        assert_eq!(folder.names(), names, "{path}");
    }
    assert_eq!(folder.read("mine/graph-3/notes.md"), "mine");
}

#[test]
fn plans_dump_their_graphs() {
    let folder = Folder::new();
    let plan = "plan --model gpt --preset 7b --compile";
    let without = folder.run(plan);
    let run = folder.run(&format!("{plan} --dump-graphs graphs"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(run.stdout, without.stdout);
    // The graphs have fewer blocks, from which the rest is extrapolated.
    assert_eq!(folder.names_in("graphs"), ["graph-0", "graph-1"]);
    for (graph, blocks) in [("graph-0", 6), ("graph-1", 8)] {
        let changes = folder.read(&format!("graphs/{graph}/changes.txt"));
        assert!(
            changes.contains(&format!("{blocks} blocks: input 0 ")),
            "{changes}"
        );
        let picture = folder.read(&format!("graphs/{graph}/00-trace.svg"));
        assert!(picture.contains(&format!("blocks.{}: ", blocks - 1)));
        assert!(!picture.contains(&format!("blocks.{blocks}: ")));
    }
    let run = folder.run("plan --model gpt --preset 7b --dump-graphs graphs");
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("--compile"), "{}", run.stderr);
    folder.write("file", "mine");
    let run = folder.run(&format!("{plan} --dump-graphs file/graphs"));
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr.contains("--dump-graphs file/graphs: "),
        "{}",
        run.stderr
    );
}
