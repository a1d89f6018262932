//! `burn-fsdp plan`: the cost of a run.

use std::process::Command;

use serde_json::Value;

use crate::command::{Folder, Run};

fn plan(folder: &Folder, arguments: &str) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-fsdp"));
    command.current_dir(folder.path("")).arg("plan");
    command.args(arguments.split_whitespace());
    Run::of(command.output().expect("the command starts"))
}

fn planned(arguments: &str) -> Value {
    let run = plan(&Folder::new(), &format!("{arguments} --json"));
    assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
    serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {}", run.stdout))
}

fn total(bytes: &Value) -> u64 {
    let categories = bytes.as_object().expect("an object");
    categories.values().filter_map(Value::as_u64).sum()
}

#[test]
fn every_size_of_every_model_is_answered() {
    for model in ["gpt", "llama"] {
        for (preset, billions) in [
            ("7b", 7.0),
            ("13b", 13.0),
            ("70b", 70.0),
            ("175b", 175.0),
            ("1t", 1000.0),
        ] {
            for compile in ["", " --compile"] {
                let arguments = format!("--model {model} --preset {preset} --ranks 64{compile}");
                let answer = planned(&arguments);
                let params = answer["num_params"].as_f64().unwrap_or(0.0) / 1e9;
                assert!(
                    (params / billions - 1.0).abs() < 0.07,
                    "{arguments}: {params}"
                );
                // Each of 64 ranks needs at least its shard of parameters and states.
                let peak = match compile {
                    "" => total(&answer["peak"]["bytes"]),
                    _ => answer["peak"].as_u64().unwrap_or(0),
                };
                assert!(peak as f64 > 12e9 * params / 64.0, "{arguments}: {peak}");
            }
        }
    }
}

/// The largest batch that can be planned. The plan only uses its shape and allocates nothing of its size.
#[test]
fn a_huge_batch_is_planned_without_its_memory() {
    let answer = planned("--model gpt --preset 7b --batch 8192 --ranks 4 --compile");
    assert_eq!(answer["fits"], false);
    let peak = answer["peak"].as_f64().unwrap_or(0.0);
    // More than the residual stream.
    assert!(peak > 8192.0 * 2048.0 * 4096.0 * 4.0, "{peak}");
}

#[test]
fn the_headline_sizes_fit() {
    for (arguments, memory) in [
        ("--model gpt --preset 13b --ranks 8", "40GB"),
        ("--model gpt --preset 175b --ranks 128", "80GB"),
        (
            "--model gpt --preset 1t --ranks 256 --offload --prefetch 0",
            "80GB",
        ),
    ] {
        let answer = planned(&format!(
            "{arguments} --gpu-memory {memory} --activation-checkpointing"
        ));
        assert_eq!(answer["fits"], true, "{arguments}: {}", answer["peak"]);
        assert!(total(&answer["peak"]["bytes"]) <= answer["available"].as_u64().unwrap_or(0));
    }
}

#[test]
fn advice_for_jobs_that_do_not_fit_makes_them_fit() {
    let arguments = "--model gpt --preset 175b --gpu-memory 80GiB --activation-checkpointing";
    let answer = planned(&format!("{arguments} --ranks 16"));
    assert_eq!(answer["fits"], false);
    let advice = answer["advice"].as_array().expect("a list");
    let more = advice
        .iter()
        .find(|advice| advice["change"].as_str().unwrap_or("").ends_with(" ranks"))
        .expect("more ranks help");
    let ranks = more["job"]["ranks"].as_u64().expect("a number");
    let with = |ranks: u64| planned(&format!("{arguments} --ranks {ranks}"))["fits"].clone();
    assert_eq!(with(ranks), true);
    assert_eq!(with(ranks - 1), false);
}

#[test]
fn compiled_plans_divide_parameters_among_ranks() {
    let answer = |ranks: usize| {
        let arguments = format!("--model gpt --preset 7b --seq 128 --compile --ranks {ranks}");
        let answer = planned(&arguments);
        let rest = &answer["plan"]["memory"]["at_rest"];
        rest["parameters"].as_u64().expect("a number")
    };
    let (one, four) = (answer(1), answer(4));
    assert!(one.abs_diff(4 * four) < 1_000_000, "{one} {four}");
}

#[test]
fn a_few_blocks_predict_the_memory_of_many() {
    let peak = |flags: &str| {
        let answer = planned(&format!(
            "--model gpt --preset 7b --ranks 16 --compile {flags}"
        ));
        answer["peak"].as_u64().expect("a number") as f64
    };
    let ratio = peak("") / peak("--every-block");
    assert!((ratio - 1.0).abs() < 0.01, "{ratio}");
}

#[test]
fn the_plan_of_all_blocks_is_proved() {
    for arguments in [
        "--model gpt --preset 13b",
        "--model llama --preset 7b --ranks 3 --strategy shard-grad-op --activation-checkpointing",
        "--model gpt --preset 7b --ranks 1000 --strategy no-shard",
    ] {
        let arguments = format!("{arguments} --compile --certify");
        let proof = &planned(&arguments)["proof"];
        let number = |name: &str| proof[name].as_u64().expect("a number");
        let blocks = if arguments.contains("13b") { 40 } else { 32 };
        assert_eq!(number("blocks"), blocks);
        assert!((3..=8).contains(&number("ranks")), "{proof}");
        // Parameters and two states of each, in consecutive steps.
        assert!(number("num_tensors") > 30 * blocks, "{proof}");
        let run = plan(&Folder::new(), &arguments);
        let says = format!("a plan of all {blocks} blocks");
        assert!(
            run.stdout.contains(&says) && run.stdout.contains("assuming"),
            "{}",
            run.stdout
        );
    }
    let peak = |more: &str| {
        // Long enough for activations to be larger than the shards that are cast.
        let sizes = "--model gpt --preset 7b --batch 4 --compile";
        planned(&format!("{sizes} {more}"))["peak"]
            .as_u64()
            .expect("a peak")
    };
    assert!(peak("--precision bf16") < peak("--precision f32"));
    assert_eq!(peak(""), peak("--precision f32"));
    assert!(planned("--model gpt --preset 7b --compile")["proof"].is_null());
    assert_rejected("--model gpt --preset 7b --certify", &["--compile"]);
}

#[test]
fn the_memory_curve_of_a_step_is_drawn() {
    let folder = Folder::new();
    for compile in ["", " --compile --seq 64"] {
        let run = plan(
            &folder,
            &format!("--model llama --preset 7b --svg memory.svg{compile}"),
        );
        assert_eq!(run.code, 0, "{}", run.stderr);
        let svg = folder.read("memory.svg");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("peak: ") && svg.contains("optimizer state"));
    }
    assert_eq!(folder.names(), ["memory.svg"]);
}

fn assert_rejected(arguments: &str, words: &[&str]) {
    let folder = Folder::new();
    let run = plan(&folder, arguments);
    assert_eq!(run.code, 2, "{arguments}: {}{}", run.stdout, run.stderr);
    assert!(run.stderr.starts_with("error: "), "{}", run.stderr);
    assert_eq!(run.stdout, "");
    for word in words {
        assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
    }
    assert!(folder.names().is_empty());
}

#[test]
fn wrong_input_is_named() {
    assert_rejected("--model gpt --preset 8b", &["gpt preset", "8b", "175b"]);
    assert_rejected("--model llama --preset 2t", &["llama preset", "2t", "70b"]);
    assert_rejected("--model bert --preset 7b", &["bert", "gpt"]);
    assert_rejected("--preset 7b", &["--model"]);
    let model = "--model gpt --preset 7b";
    for (flags, words) in [
        ("--ranks 0", &["--ranks"][..]),
        ("--batch 0", &["--batch"]),
        ("--seq 0", &["--seq"]),
        ("--ranks 99999999999", &["--ranks", "too large"]),
        ("--seq 4096", &["4096", "2048"]),
        ("--batch 8193", &["--batch times --seq", "16777216"]),
        ("--gpu-memory lots", &["lots", "80GiB"]),
        ("--machine abacus", &["abacus", "h100"]),
        ("--compile --offload", &["--offload", "--compile"]),
        (
            "--compile --activation-checkpointing selective",
            &["--activation-checkpointing selective"],
        ),
        ("--svg nowhere/memory.svg", &["nowhere"]),
    ] {
        assert_rejected(&format!("{model} {flags}"), words);
    }
}
