//! `burn-fsdp plan`: what a run would take.

use std::process::Command;
use std::time::Instant;

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
fn every_preset_is_answered_in_little_time() {
    for arguments in [
        "--model gpt --preset 7b",
        "--model gpt --preset 13b",
        "--model gpt --preset 175b",
        "--model gpt --preset 1t",
        "--model llama --preset 7b",
        "--model llama --preset 13b",
        "--model llama --preset 70b",
    ] {
        for compile in ["", " --compile"] {
            let start = Instant::now();
            let run = plan(&Folder::new(), &format!("{arguments} --ranks 64{compile}"));
            let elapsed = start.elapsed();
            assert_eq!(run.code, 0, "{}", run.stderr);
            assert!(run.stdout.contains("fit"), "{}", run.stdout);
            assert!(run.stdout.contains("peak"), "{}", run.stdout);
            println!("{arguments}{compile}: {elapsed:?}");
        }
    }
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
fn what_does_not_fit_is_told_what_would_help_and_that_helps() {
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
fn a_compiled_step_is_planned_exactly_and_divided() {
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
fn a_few_blocks_tell_what_many_take() {
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
fn memory_over_the_step_is_drawn() {
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

fn refused_saying(arguments: &str, words: &[&str]) {
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
    refused_saying("--model gpt --preset 8b", &["gpt preset", "8b", "175b"]);
    refused_saying("--model llama --preset 1t", &["llama preset", "70b"]);
    refused_saying("--model bert --preset 7b", &["bert", "gpt"]);
    refused_saying("--preset 7b", &["--model"]);
    let model = "--model gpt --preset 7b";
    for (flags, words) in [
        ("--ranks 0", &["--ranks"][..]),
        ("--batch 0", &["--batch"]),
        ("--seq 0", &["--seq"]),
        ("--ranks 99999999999", &["--ranks", "too large"]),
        ("--seq 4096", &["4096", "2048"]),
        ("--gpu-memory lots", &["lots", "80GiB"]),
        ("--machine abacus", &["abacus", "h100"]),
        ("--compile --offload", &["--offload", "--compile"]),
        ("--compile --precision bf16", &["bf16", "32 bits"]),
        (
            "--compile --activation-checkpointing",
            &["--activation-checkpointing"],
        ),
        ("--svg nowhere/memory.svg", &["nowhere"]),
    ] {
        refused_saying(&format!("{model} {flags}"), words);
    }
}

/// The table in the documentation is what the command prints.
#[test]
fn published_figures_in_the_documentation_are_recomputed() {
    let run = plan(&Folder::new(), "--published");
    assert_eq!(run.code, 0, "{}", run.stderr);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/plan.md");
    let page = std::fs::read_to_string(path).expect("docs/plan.md");
    for line in run.stdout.lines() {
        assert!(page.contains(line), "docs/plan.md lacks: {line}");
    }
}

/// Within 15 %, but for what the documentation says is not.
#[test]
fn predictions_are_near_published_figures() {
    let run = plan(&Folder::new(), "--published");
    let mut far = Vec::new();
    for line in run.stdout.lines().skip(2) {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let difference = cells[10].trim_end_matches(" %");
        if let Ok(percent) = difference.parse::<f64>()
            && percent.abs() > 15.0
        {
            far.push(format!("{} {}", cells[1], cells[2]));
        }
        assert!(!cells[9].starts_with("does not"), "{line}");
    }
    assert_eq!(far, ["PyTorch on AWS gpt 1t"]);
}
