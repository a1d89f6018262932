//! The metrics of runs: their numbers, TensorBoard's event files, and the page of `burn-fsdp report`.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

use crate::command::{Folder, Run};
use crate::decoder::{Scalars, events, files, scalars};

const TEXT: &str = "to be or not to be, that is the question. ";

fn lines(folder: &Folder, name: &str) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).expect("a JSON object per line");
    folder.read(name).lines().map(parse).collect()
}

#[test]
fn metrics_have_norms_ranks_and_memory() {
    let folder = Folder::new();
    for engine in ["", "--compile"] {
        let run = format!("--synthetic --warmup 1 --steps 3 --metrics m.jsonl {engine}");
        let report = folder.report(&format!("{run} --clip-grad-norm 0.5"));
        for line in lines(&folder, "m.jsonl") {
            let number = |key: &str| {
                line[key]
                    .as_f64()
                    .unwrap_or_else(|| panic!("{key}: {line}"))
            };
            assert!(number("grad_norm") > 0.0);
            assert_eq!(line["ranks"], report["ranks"]);
            assert!(line["rss_bytes"].as_u64() > Some(1 << 20));
            let flops_per_token = |line: &Value| {
                line["flops_per_s"].as_f64().unwrap() / line["tokens_per_s"].as_f64().unwrap()
            };
            assert!((flops_per_token(&line) / flops_per_token(&report) - 1.0).abs() < 1e-9);
            let unsharded = line["unsharded_bytes"].as_u64();
            assert_eq!(unsharded.is_some(), line["measured"] == true);
            assert!(unsharded <= report["unsharded_peak_bytes"][0].as_u64());
        }
        folder.report(&run);
        let is_null = |line: &Value| line["grad_norm"].is_null();
        assert!(lines(&folder, "m.jsonl").iter().all(is_null), "{engine}");
    }
}

/// Returns the values that the event files must have, from the metrics lines.
fn expected(lines: &[Value]) -> Scalars {
    let mut all = Scalars::new();
    for line in lines {
        let step = line["step"].as_u64().expect("a step");
        for (tag, key) in [
            ("loss/train", "loss"),
            ("loss/held_out", "eval_loss"),
            ("optimizer/lr", "lr"),
            ("optimizer/grad_norm", "grad_norm"),
            ("speed/tokens_per_s", "tokens_per_s"),
            ("speed/step_ms", "step_ms"),
            ("speed/flops_per_s", "flops_per_s"),
            ("memory/rss_bytes", "rss_bytes"),
            ("memory/unsharded_bytes", "unsharded_bytes"),
        ] {
            if let Some(value) = line[key].as_f64() {
                let values: &mut BTreeMap<_, _> = all.entry(tag.to_owned()).or_default();
                values.insert(step, value as f32);
            }
        }
        let ranks = line["ranks"].as_f64().expect("a number");
        let per_rank = line["tokens_per_s"].as_f64().expect("a number") / ranks;
        let values = all.entry("speed/tokens_per_s_per_rank".to_owned());
        values.or_default().insert(step, per_rank as f32);
    }
    all
}

#[test]
fn event_files_have_the_values_of_the_metrics() {
    let folder = Folder::new();
    folder.write("text", TEXT.repeat(100));
    let run = "--data text --sample 0 --warmup 0 --eval-every 2 --metrics m.jsonl --tensorboard logs/run \
               --checkpoint-dir steps --clip-grad-norm 1 --lr-warmup 4";
    folder.report(&format!("{run} --steps 4"));
    let logs = folder.path("logs/run");
    assert_eq!(files(&logs).len(), 1);
    assert_eq!(scalars(&logs), expected(&lines(&folder, "m.jsonl")));
    // Steps 4 and 5 of this run are lost: it saves nothing after step 4. The next run repeats them.
    let fault = "rank:0,step:6,at:forward,how:error";
    let lost = folder.train_with_fault(&format!("{run} --steps 8 --resume"), fault);
    assert_eq!(lost.code, 3, "{}", lost.stderr);
    assert_eq!(scalars(&logs)["loss/train"].len(), 6);
    folder.report(&format!("{run} --steps 9 --resume --ranks 3"));
    let all = lines(&folder, "m.jsonl");
    assert_eq!(all.len(), 9);
    assert_eq!(scalars(&logs), expected(&all));
    let names: Vec<_> = files(&logs);
    assert_eq!(names.len(), 3, "{names:?}");
    // A run from scratch replaces what TensorBoard shows, but no file.
    folder.report(&format!("{run} --steps 2 --overwrite"));
    assert_eq!(scalars(&logs), expected(&lines(&folder, "m.jsonl")));
    assert_eq!(files(&logs)[..3], names);
}

#[test]
fn folders_that_cannot_have_event_files_are_rejected() {
    let folder = Folder::new();
    folder.report("--synthetic --warmup 0 --steps 2 --checkpoint-dir steps");
    folder.write("file", "text");
    for (flags, word) in [
        ("--tensorboard file", "is not a folder"),
        ("--tensorboard file/logs", "is not a folder"),
        ("--tensorboard steps/step-000002", "inside the saved step"),
        (
            "--tensorboard steps/step-000009 --checkpoint-dir steps --resume",
            "among the saved steps",
        ),
        ("--tensorboard logs --metrics logs", "the same file"),
        (
            "--tensorboard logs --compile --dump-graphs logs",
            "the same file",
        ),
    ] {
        let run = folder.train(&format!("--synthetic --warmup 0 --steps 3 {flags}"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        assert!(
            run.stderr.contains("--tensorboard") && run.stderr.contains(word),
            "{flags}: {}",
            run.stderr
        );
    }
    assert_eq!(folder.names(), ["file", "loss.svg", "steps"]);
}

/// A file of one kibibyte is full after a few steps.
#[cfg(unix)]
#[test]
fn a_full_disk_under_the_event_file_ends_nothing() {
    let folder = Folder::new();
    let program = env!("CARGO_BIN_EXE_burn-fsdp");
    let arguments = "train --layers 1 --dim 16 --heads 2 --seq 8 --batch 4 --synthetic --steps 30 --tensorboard logs";
    let script = format!("ulimit -f 1; exec {program} {arguments} --curve loss.svg --json");
    let mut shell = Command::new("bash");
    shell.args(["-c", &script]).current_dir(folder.path(""));
    let run = Run::of(shell.output().expect("bash runs"));
    // Only the curve, which is also too large, is an error.
    assert_eq!(run.code, 3, "{}", run.stderr);
    assert!(run.stderr.contains("error: --curve"), "{}", run.stderr);
    assert_eq!(
        run.stderr.matches("events are lost").count(),
        1,
        "{}",
        run.stderr
    );
    let report: Value = serde_json::from_str(run.stdout.trim()).expect("a report");
    assert_eq!(report["losses"].as_array().map(Vec::len), Some(32));
    let file = std::fs::read(&files(&folder.path("logs"))[0]).expect("it is there");
    // The file ends with a complete record.
    assert!(events(&file).len() > 3);
}

#[test]
fn a_report_draws_each_run() {
    let folder = Folder::new();
    folder.write("text", TEXT.repeat(100));
    std::fs::create_dir(folder.path("second")).expect("a folder");
    let run = "--data text --sample 0 --warmup 0 --steps 5 --eval-every 2";
    folder.report(&format!("{run} --metrics first&one.jsonl"));
    folder.report(&format!("{run} --lr 0.001 --metrics second/any.jsonl"));
    // The second time, the page replaces itself.
    for _ in 0..2 {
        let run = folder.run("report first&one.jsonl second --out page.html");
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(run.stdout, "wrote page.html: 2 runs with 10 steps\n");
    }
    let page = folder.read("page.html");
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    assert!(page.contains("first&amp;one") && page.contains(">second<"));
    for chart in [
        "Loss",
        "Learning rate",
        "Throughput per rank",
        "Resident memory",
    ] {
        assert!(page.contains(&format!("<b>{chart}</b>")), "{chart}");
    }
    // Without clipping, there is no norm to draw.
    assert!(!page.contains("<b>Gradient norm</b>"));
    let run = folder.run("report second/any.jsonl");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(folder.read("report.html").contains("Training run any"));
}

#[test]
fn reports_of_anything_else_are_rejected() {
    let folder = Folder::new();
    folder.report("--synthetic --warmup 0 --steps 2 --metrics m.jsonl --operations operations --checkpoint-dir steps");
    folder.write("empty", "");
    folder.write("notes.txt", "these are not metrics\n");
    for (name, copies) in [("none", &[][..]), ("several", &["a.jsonl", "b.jsonl"])] {
        std::fs::create_dir(folder.path(name)).expect("a folder");
        for copy in copies {
            folder.write(&format!("{name}/{copy}"), folder.read("m.jsonl"));
        }
    }
    let before = folder.names();
    for (arguments, words) in [
        ("nowhere", ["nowhere cannot be read", "No such file"]),
        ("m.jsonl empty", ["empty is empty", "name another file"]),
        (
            "notes.txt",
            ["notes.txt has no line", "train --metrics FILE"],
        ),
        (
            "steps",
            ["steps contains no metrics file", "train --metrics FILE"],
        ),
        (
            "operations",
            ["operations contains no", "train --metrics FILE"],
        ),
        ("none", ["none contains no metrics file", "*.jsonl"]),
        ("several", ["a.jsonl, b.jsonl", "name one"]),
        ("m.jsonl --out m.jsonl", ["RUN and --out", "the same file"]),
        (
            "m.jsonl --out several/../m.jsonl",
            ["RUN and --out", "the same file"],
        ),
        (
            "m.jsonl --out notes.txt",
            ["not an HTML page", "name another"],
        ),
        ("m.jsonl --out none", ["--out none", "is a folder"]),
        (
            "m.jsonl --out steps/step-000002/page.html",
            ["--out", "inside the saved step"],
        ),
        (
            "m.jsonl --out nowhere/page.html",
            ["--out nowhere", "No such file"],
        ),
    ] {
        let run = folder.run(&format!("report {arguments}"));
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        for word in words {
            assert!(
                run.stderr.contains(word),
                "{arguments}: {word}: {}",
                run.stderr
            );
        }
        assert_eq!(run.stdout, "", "{arguments}");
    }
    assert_eq!(folder.names(), before);
    assert_eq!(lines(&folder, "m.jsonl").len(), 2);
    assert_eq!(folder.run("report").code, 2);
}
