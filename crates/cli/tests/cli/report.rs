//! The output of a run at its end.

use serde_json::Value;

use crate::command::{Folder, losses};

/// Parameters of the tiny model: two tables and a head, two blocks, the last norm.
const PARAMS: u64 = 256 * 16 + 8 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16 + 256 * 16;
/// The parameters in vectors, which every rank holds whole.
const VECTORS: u64 = 2 * 13 * 16 + 2 * 16;

fn text() -> String {
    "the quick brown fox jumps over the lazy dog. ".repeat(100)
}

#[test]
fn json_has_every_field() {
    let folder = Folder::new();
    folder.write("text", text());
    let report = folder.report("--data text --warmup 1 --steps 4 --ranks 2 --sample 20");
    assert_eq!(report["mode"], "train");
    assert_eq!(report["engine"], "local");
    assert_eq!(report["strategy"], "full-shard");
    assert_eq!(report["ranks"], 2);
    assert_eq!(report["params"], PARAMS);
    assert!(report["tokens_per_s"].as_f64().unwrap() > 0.0);
    let step = |name: &str| report["step_ms"][name].as_f64().unwrap();
    assert!(0.0 < step("min") && step("min") <= step("median") && step("median") <= step("max"));
    assert_eq!(losses(&report).len(), 5);
    assert!(losses(&report)[4] < losses(&report)[0]);
    assert!(report["eval_loss"].as_f64().unwrap() > 0.0);
    assert_eq!(report["peak_rss_bytes"].as_array().unwrap().len(), 1);
    assert!(report["peak_rss_bytes"][0].as_u64().unwrap() > 1 << 20);
    assert!(report["sample"].as_str().unwrap().len() >= 20);
    // Each warning appears once, not once per rank. The tables are the largest part of such a small model.
    let warnings = report["warnings"].as_array().unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].as_str().unwrap().contains("`root`"));
    // Parameters and two moments with four bytes each. The matrices are divided by two.
    let state = 3 * 4 * ((PARAMS - VECTORS) / 2 + VECTORS);
    assert_eq!(report["state_bytes"], serde_json::json!([state, state]));
    for rank in 0..2 {
        let peak = report["unsharded_peak_bytes"][rank].as_u64().unwrap();
        assert!(peak > 0 && peak < 3 * 4 * PARAMS, "{peak}");
    }
}

/// What part of the machine's arithmetic a run uses, where that is asked for.
#[test]
fn utilization_is_measured_in_the_run() {
    let folder = Folder::new();
    let flags = "--synthetic --steps 4 --ranks 2";
    for kind in ["", "--compile"] {
        let report = folder.report(&format!("{flags} {kind} --utilization"));
        let number = |name: &str| report[name].as_f64().expect("a number");
        // Two blocks of 12 matrices of 16 by 16, with attention over 8 tokens, and a head; forward, and twice that backward.
        let forward = 2.0 * (2.0 * 12.0 * 256.0 + 4.0 * 8.0 * 16.0) + 2.0 * 16.0 * 256.0;
        let flops = 3.0 * forward * number("tokens_per_s");
        assert!((number("flops_per_s") / flops - 1.0).abs() < 1e-9);
        let part = number("utilization");
        assert!(part > 0.0 && part < 1.0, "{part}");
    }
    let report = folder.report(flags);
    assert!(report["flops_per_s"].as_f64().is_some());
    assert_eq!(report["utilization"], Value::Null);
}

#[test]
fn collectives_are_counted_by_step() {
    let counts = |strategy: &str| {
        let folder = Folder::new();
        let report = folder.report(&format!("--synthetic --steps 3 --strategy {strategy}"));
        let count = |kind: &str| report["collectives"][kind]["count"].as_u64().unwrap();
        assert_eq!(count("broadcast"), 0);
        (
            count("all_gather"),
            count("reduce_scatter"),
            count("all_reduce"),
        )
    };
    // Three units: two blocks, and the root, which is kept.
    assert_eq!(counts("full-shard"), (5, 3, 1));
    assert_eq!(counts("shard-grad-op"), (3, 3, 1));
    assert_eq!(counts("no-shard"), (0, 0, 3));
}

#[test]
fn synthetic_tokens_are_not_evaluated() {
    let folder = Folder::new();
    let report = folder.report("--synthetic --steps 2 --eval-every 1");
    assert_eq!(report["eval_loss"], Value::Null);
    assert_eq!(report["sample"], Value::Null);
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("--eval-every"), "{warnings}");
}

#[test]
fn reports_without_measured_steps_have_no_times() {
    let folder = Folder::new();
    let report = folder.report("--synthetic --steps 0 --warmup 2");
    assert_eq!(report["step_ms"], Value::Null);
    assert_eq!(report["tokens_per_s"], Value::Null);
    assert_eq!(losses(&report).len(), 2);
}

#[test]
fn the_summary_is_for_people() {
    let folder = Folder::new();
    folder.write("text", text());
    let run = folder.train("--data text --steps 3 --sample 10");
    assert_eq!(run.code, 0, "{}", run.stderr);
    for word in [
        "parameters on 2 ranks",
        "tokens/s",
        "held-out",
        "loss.svg",
        "sharding   saves",
        "sample",
    ] {
        assert!(run.stdout.contains(word), "{word}: {}", run.stdout);
    }
    assert!(
        run.stderr.contains("blocks.1"),
        "the wrap plan: {}",
        run.stderr
    );
}

#[test]
fn help_shows_the_defaults() {
    let run = Folder::new().train("--help");
    assert_eq!(run.code, 0);
    let help = run.stdout;
    for word in ["[default: full-shard]", "[default: 600]", "--lr-schedule"] {
        assert!(help.contains(word), "{word}: {help}");
    }
}
