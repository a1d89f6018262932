//! The files that a run leaves on disk.

use serde_json::Value;

use crate::command::{Folder, losses};

fn lines(folder: &Folder) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).expect("a JSON object per line");
    folder.read("metrics.jsonl").lines().map(parse).collect()
}

#[test]
fn metrics_have_one_line_per_step() {
    let folder = Folder::new();
    let report = folder.report("--synthetic --warmup 2 --steps 3 --metrics metrics.jsonl");
    let lines = lines(&folder);
    let all = losses(&report);
    assert_eq!(lines.len(), all.len());
    for (step, (line, loss)) in lines.iter().zip(all).enumerate() {
        assert_eq!(line["step"], step);
        assert_eq!(line["loss"], loss);
        assert!(line["tokens_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(line["measured"], step >= 2);
    }
}

#[test]
fn evaluations_and_the_schedule_are_in_the_metrics() {
    let folder = Folder::new();
    folder.write(
        "text",
        "to be or not to be, that is the question. ".repeat(100),
    );
    let report = folder.report(
        "--data text --warmup 0 --steps 5 --eval-every 2 --metrics metrics.jsonl \
         --lr 1 --lr-schedule cosine --lr-warmup 2",
    );
    let lines = lines(&folder);
    let evaluated: Vec<bool> = lines
        .iter()
        .map(|line| line["eval_loss"].is_f64())
        .collect();
    assert_eq!(evaluated, [false, true, false, true, true]);
    assert_eq!(lines[4]["eval_loss"], report["eval_loss"]);
    let rates: Vec<f64> = lines
        .iter()
        .map(|line| line["lr"].as_f64().unwrap())
        .collect();
    assert_eq!(rates[..3], [0.5, 1.0, 1.0]);
    assert!((rates[4] - 0.1).abs() < 1e-12);
}

#[test]
fn the_curve_is_a_picture() {
    let folder = Folder::new();
    folder.report("--synthetic --steps 3");
    folder.report("--synthetic --steps 3 --curve other.svg");
    assert_eq!(folder.names(), ["loss.svg", "other.svg"]);
    let svg = folder.read("other.svg");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("polyline"));
}

#[test]
fn text_may_be_any_bytes_and_a_folder() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("folder")).unwrap();
    let bytes: Vec<u8> = (0..=255).cycle().take(4000).collect();
    let printable: Vec<u8> = (b' '..=255).cycle().take(4000).collect();
    folder.write("any", bytes);
    folder.write("folder/a", printable);
    folder.write("folder/b", b" not UTF-8 \xc3\x28");
    for (data, files) in [
        ("folder", "2 files"),
        ("any", "4000 bytes of text in 1 files"),
    ] {
        let run = folder.train(&format!("--data {data} --steps 2 --sample 20"));
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert!(run.stdout.contains(files), "{}", run.stdout);
    }
}
