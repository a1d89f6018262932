//! `train --compile`: a compiled step instead of the eager engine, with the same visible behavior.

use serde_json::Value;

use crate::command::{Folder, losses, relative_difference};

const STEPS: &str = "--synthetic --warmup 2 --steps 6";

#[test]
fn a_compiled_step_trains_like_the_eager_engine() {
    let folder = Folder::new();
    for flags in [
        "--ranks 1",
        "--ranks 2",
        "--ranks 3",
        "--ranks 2 --strategy shard-grad-op",
        "--ranks 2 --strategy no-shard",
        "--ranks 2 --prefetch 1",
        "--ranks 2 --lr-schedule cosine --lr-warmup 3",
        "--ranks 2 --weight-decay 0.1 --beta1 0.8 --beta2 0.95",
        "--ranks 2 --accumulate 3",
        "--ranks 3 --strategy no-shard --accumulate 2",
        "--ranks 2 --clip-grad-norm 0.01",
        "--ranks 2 --accumulate 2 --clip-grad-norm 0.5 --prefetch 1",
        "--ranks 4 --strategy hybrid-shard --replicate-size 2",
        "--ranks 4 --strategy hybrid-shard --replicate-size 2 --accumulate 3 --clip-grad-norm 0.01",
    ] {
        let eager = folder.report(&format!("{STEPS} {flags}"));
        let compiled = folder.report(&format!("{STEPS} {flags} --compile"));
        let difference = relative_difference(&losses(&eager), &losses(&compiled));
        assert!(difference < 1e-5, "{flags}: {difference:e}");
        assert_eq!(eager["compiled"], false);
        assert_eq!(compiled["compiled"], true);
        assert_eq!(compiled["strategy"], eager["strategy"]);
        assert_eq!(compiled["losses"].as_array().map(Vec::len), Some(8));
        assert!(
            compiled["tokens_per_s"]
                .as_f64()
                .is_some_and(|speed| speed > 0.0)
        );
        let ranks = eager["ranks"].as_u64().expect("a number") as usize;
        for key in ["state_bytes", "unsharded_peak_bytes"] {
            let bytes = compiled[key].as_array().expect("one per rank");
            assert_eq!(bytes.len(), ranks);
            assert!(bytes.iter().all(|bytes| bytes.as_u64() > Some(0)), "{key}");
        }
        // Parameters and two states of each, whole or sharded, and nothing else.
        let params = compiled["params"].as_u64().expect("a number");
        let whole = 12 * params;
        let held = compiled["state_bytes"][0].as_u64().expect("a number");
        let least = match eager["strategy"].as_str() {
            Some("no-shard") => whole,
            Some("hybrid-shard") => whole / 2,
            _ => whole / ranks as u64,
        };
        assert!((least..least + 2000).contains(&held), "{held} {least}");
        // Only operations of all ranks are counted. With copies of the shards, the shards' operations belong to smaller
        // groups.
        let reduced = compiled["collectives"]["reduce_scatter"]["count"].as_u64();
        let is_whole =
            ["no-shard", "hybrid-shard"].contains(&eager["strategy"].as_str().unwrap_or(""));
        assert_eq!(reduced > Some(0), !is_whole);
    }
}

#[test]
fn evaluation_sample_metrics_and_weights_match_the_eager_engine() {
    let folder = Folder::new();
    folder.write(
        "text",
        "to be or not to be, that is the question. ".repeat(100),
    );
    folder.report("--data text --steps 0 --warmup 0 --seed 9 --save-init init.safetensors");
    let flags = "--data text --seed 9 --warmup 0 --steps 4 --eval-every 2 --sample 12 \
                 --init init.safetensors --metrics metrics.jsonl";
    let lines = |folder: &Folder| -> Vec<Value> {
        let lines = folder.read("metrics.jsonl");
        let parse = |line: &str| serde_json::from_str(line).expect("a whole line");
        lines.lines().map(parse).collect()
    };
    let eager = folder.report(flags);
    let eager_lines = lines(&folder);
    let compiled = folder.report(&format!("{flags} --compile"));
    let compiled_lines = lines(&folder);
    let evaluations = |report: &Value| -> Vec<f64> {
        let losses = report["eval_losses"].as_array().expect("a list").clone();
        let losses = losses
            .iter()
            .map(|pair| pair[1].as_f64().expect("a number"));
        losses.collect()
    };
    assert_eq!(evaluations(&eager).len(), 2);
    assert!(relative_difference(&evaluations(&eager), &evaluations(&compiled)) < 1e-5);
    assert!(relative_difference(&losses(&eager), &losses(&compiled)) < 1e-5);
    let sample = compiled["sample"].as_str().expect("a text");
    assert!(
        sample.contains("be") && sample == eager["sample"],
        "{sample}"
    );
    assert_eq!(compiled_lines.len(), 4);
    for (eager, compiled) in eager_lines.iter().zip(&compiled_lines) {
        for key in ["step", "lr", "measured"] {
            assert_eq!(eager[key], compiled[key]);
        }
        assert_eq!(eager["eval_loss"].is_f64(), compiled["eval_loss"].is_f64());
    }
    let seeded = folder.report("--data text --warmup 0 --steps 4 --seed 9 --compile");
    assert_eq!(
        losses(&seeded),
        losses(&compiled),
        "the same weights to begin with"
    );
    assert!(folder.read("loss.svg").contains("polyline"));
}

#[test]
fn a_run_changes_its_engine_in_the_middle() {
    let dir = "--synthetic --warmup 0 --checkpoint-dir steps";
    let want = losses(&Folder::new().report("--synthetic --warmup 0 --steps 6 --ranks 1"));
    for (first, second) in [
        ("", "--compile"),
        ("--compile", ""),
        ("--compile", "--compile --ranks 3"),
        ("--strategy no-shard", "--compile"),
        (
            "--compile --strategy no-shard --ranks 3",
            "--strategy shard-grad-op",
        ),
        (
            "--compile --ranks 4 --strategy hybrid-shard --replicate-size 2 --accumulate 3",
            "--ranks 2",
        ),
        (
            "",
            "--compile --ranks 4 --strategy hybrid-shard --replicate-size 2",
        ),
    ] {
        let folder = Folder::new();
        let before = folder.report(&format!("{dir} --steps 3 {first}"));
        assert_eq!(before["saved_step"], 3);
        let after = folder.report(&format!("{dir} --steps 6 --resume {second}"));
        assert_eq!(after["first_step"], 3);
        assert_eq!(after["saved_step"], 6);
        let got = [losses(&before), losses(&after)].concat();
        let difference = relative_difference(&want, &got);
        assert!(difference < 1e-5, "{first} to {second}: {difference:e}");
        let inspected = folder.run("inspect steps/step-000006");
        assert_eq!(inspected.code, 0, "{}", inspected.stderr);
    }
}

#[test]
fn resumed_compiled_runs_are_bit_identical() {
    let dir = "--synthetic --warmup 0 --checkpoint-dir steps --compile";
    for flags in [
        "",
        "--ranks 1",
        "--ranks 3 --strategy no-shard",
        "--accumulate 2 --clip-grad-norm 0.1",
        "--precision bf16 --reduce-dtype f32",
        "--precision f16 --clip-grad-norm 0.5",
        "--ranks 4 --strategy hybrid-shard --replicate-size 2",
    ] {
        let whole = losses(&Folder::new().report(&format!("{dir} --steps 8 {flags}")));
        let folder = Folder::new();
        let before = losses(&folder.report(&format!("{dir} --steps 4 {flags}")));
        let after = losses(&folder.report(&format!("{dir} --steps 8 --resume {flags}")));
        assert_eq!([before, after].concat(), whole, "{flags}");
    }
}

#[test]
fn unsupported_flags_of_compiled_steps_are_rejected() {
    for (flags, flag) in [
        ("--offload state", "--offload"),
        ("--no-sync", "--no-sync"),
        ("--prefetch 2", "--prefetch of more than 1"),
    ] {
        let folder = Folder::new();
        let run = folder.train(&format!("{STEPS} --compile {flags}"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        let expected = format!("error: {flag} cannot be used with compiled steps: ");
        assert!(run.stderr.starts_with(&expected), "{}", run.stderr);
        assert!(run.stderr.contains("leave out"), "{}", run.stderr);
        assert!(folder.names().is_empty(), "{flags}");
    }
    let folder = Folder::new();
    let fault = "rank:1,step:1,at:backward,how:error";
    let run = folder.train_with_fault(&format!("{STEPS} --compile"), fault);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("at:collective"), "{}", run.stderr);
}

#[test]
fn units_by_size_match_the_eager_engine() {
    for least in [1, 300, 1000, 1_000_000] {
        let flags = "--synthetic --steps 4 --warmup 0 --unit-size";
        let report = |more: &str| Folder::new().report(&format!("{flags} {more}"));
        let eager = report(&least.to_string());
        let compiled = report(&format!("{least} --compile"));
        let difference = relative_difference(&losses(&eager), &losses(&compiled));
        assert!(difference <= 1e-5, "{least}: {difference}");
        let whole = report("1000000 --compile");
        let gathers = |report: &Value| report["collectives"]["all_gather"]["count"].as_u64();
        let is_more = gathers(&compiled) > gathers(&whole);
        assert_eq!(
            is_more,
            least <= 1000,
            "{least}: {}",
            compiled["collectives"]
        );
    }
}

#[test]
fn recomputing_blocks_does_not_change_losses() {
    let sizes = "--layers 4 --batch 24 --seq 16 --synthetic --steps 5 --warmup 0 --compile";
    for flags in [
        "",
        "--ranks 1",
        "--precision bf16",
        "--accumulate 2",
        "--clip-grad-norm 0.1",
    ] {
        let report = |more: &str| Folder::new().report(&format!("{sizes} {flags} {more}"));
        let kept = losses(&report(""));
        assert_eq!(
            losses(&report("--activation-checkpointing")),
            kept,
            "{flags}"
        );
    }
}

#[test]
fn a_plan_is_proved_before_the_first_step() {
    // Tensors of 65,536 elements or more, which passes plan differently from small ones.
    let sizes =
        "--layers 2 --dim 64 --heads 2 --batch 24 --seq 128 --synthetic --steps 3 --warmup 0";
    for (flags, plans) in [
        ("--ranks 3 --eval-every 2", 2),
        ("--ranks 2 --accumulate 3 --clip-grad-norm 1", 2),
        (
            "--ranks 4 --strategy hybrid-shard --replicate-size 2 --activation-checkpointing",
            2,
        ),
        ("--ranks 2 --precision bf16", 2),
        // Steps at a rate of zero omit weight decay.
        ("--ranks 2 --lr 0", 2),
        ("--ranks 2 --loss-chunks 4 --precision bf16", 2),
    ] {
        let run = Folder::new().train(&format!("{sizes} --compile --certify {flags}"));
        assert_eq!(run.code, 0, "{flags}: {}", run.stderr);
        let printed = format!("{}{}", run.stdout, run.stderr);
        assert_eq!(
            printed.matches("proved: the plan of step ").count(),
            plans,
            "{flags}: {printed}"
        );
        assert!(printed.contains("compute the traced step"), "{flags}");
    }
    let run = Folder::new().train(&format!("{sizes} --certify"));
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("--compile"), "{}", run.stderr);
}

#[test]
fn losses_in_parts_need_less_memory() {
    let folder = Folder::new();
    let steps = "--synthetic --warmup 0 --steps 4 --eval-every 2 --eval-batches 1";
    let sizes = "--layers 1 --dim 32 --heads 2 --batch 16 --seq 128 --vocab 8192";
    // The logits of all ranks have 64 MiB, those of a micro-batch 32 MiB.
    for (flags, least) in [
        ("--ranks 2", 40 << 20),
        ("--ranks 1 --accumulate 2 --clip-grad-norm 0.1", 16 << 20),
    ] {
        let train = |chunks: &str| {
            let run = format!("{steps} {sizes} {flags} {chunks}");
            folder.report(&run)
        };
        let (eager, whole) = (train(""), train("--compile"));
        let parts = train("--compile --loss-chunks 8");
        let difference = relative_difference(&losses(&eager), &losses(&parts));
        assert!(difference < 1e-5, "{flags}: {difference:e}");
        let peak = |report: &Value| report["peak_rss_bytes"][0].as_u64().expect("a number");
        let (parts, whole) = (peak(&parts), peak(&whole));
        assert!(parts + least < whole, "{flags}: {parts}, {whole}");
    }
    for (flags, word) in [
        ("--loss-chunks 2", "--compile"),
        ("--compile --loss-chunks 0", "--loss-chunks"),
        ("--compile --certify --loss-chunks 3", "2, 4 and 8"),
        ("--compile --loss-chunks 5000", "--loss-chunks"),
    ] {
        let run = folder.train(&format!("--synthetic --steps 1 {flags}"));
        assert_ne!(run.code, 0, "{flags}");
        assert!(run.stderr.contains(word), "{flags}: {}", run.stderr);
    }
}

#[test]
fn memory_budgets_are_met_by_recomputing_blocks() {
    let sizes = "--layers 4 --batch 24 --seq 16 --synthetic --steps 3 --warmup 0 --compile";
    trains_within_the_minimum(sizes);
    trains_within_the_minimum(&format!("{sizes} --precision bf16"));
    for (flags, says) in [
        ("--compile --accumulate 2", "cannot be used with"),
        (
            "--compile --activation-checkpointing",
            "cannot be used with",
        ),
        ("", "--compile"),
    ] {
        let run = Folder::new().train(&format!("--synthetic --memory-budget 1GiB {flags}"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        assert!(run.stderr.contains(says), "{flags}: {}", run.stderr);
    }
}

/// Trains with the minimum memory that the command reports.
fn trains_within_the_minimum(sizes: &str) {
    let kept = Folder::new().report(sizes);
    assert_eq!(kept["recomputed_units"].as_array().map(Vec::len), Some(0));
    let folder = Folder::new();
    let run = folder.train(&format!("{sizes} --memory-budget 1KiB"));
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr.contains("error: --memory-budget: "),
        "{}",
        run.stderr
    );
    let words: Vec<&str> = run.stderr.split_whitespace().collect();
    let bytes = words.windows(2).find(|words| words[1] == "bytes,");
    let least: u64 = bytes.expect("the least is told")[0].parse().unwrap();
    let tight = Folder::new().report(&format!("{sizes} --memory-budget {least}"));
    assert!(!tight["recomputed_units"].as_array().unwrap().is_empty());
    assert_eq!(losses(&tight), losses(&kept));
}

#[test]
fn a_failing_rank_of_a_compiled_run_is_named() {
    for (at, how, words) in [
        ("forward", "panic", "rank 1 panicked: "),
        ("forward", "error", "rank 1 failed: "),
        ("collective", "error", "rank 1 failed: "),
    ] {
        let folder = Folder::new();
        let fault = format!("rank:1,step:3,at:{at},how:{how}");
        let run = folder.train_with_fault(&format!("{STEPS} --compile"), &fault);
        assert_eq!(run.code, 3, "{at} {how}: {}", run.stderr);
        let line = run.stderr.lines().find(|line| line.starts_with("error: "));
        assert!(
            line.is_some_and(|line| line.contains(words)),
            "{at} {how}: {}",
            run.stderr
        );
    }
}
