//! Saving, resuming, and the commands for a saved step.

use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use crate::command::{Folder, Run, hears_hangups, last_report, losses, send};

pub(crate) const DIR: &str = "--synthetic --checkpoint-dir steps --metrics metrics.jsonl";

/// Returns the step and the bits of the loss in each line of the metrics file.
pub(crate) fn metrics(folder: &Folder) -> Vec<(u64, u64)> {
    let lines = folder.read("metrics.jsonl");
    let parse = |line: &str| -> Value { serde_json::from_str(line).expect("a whole line") };
    let pair = |line: Value| {
        let loss = line["loss"].as_f64().expect("a number");
        (line["step"].as_u64().expect("a number"), loss.to_bits())
    };
    lines.lines().map(parse).map(pair).collect()
}

#[test]
fn resumed_runs_are_bit_identical() {
    for extra in [
        "",
        "--ranks 1",
        "--ranks 3",
        "--precision bf16",
        "--precision f16",
        "--strategy no-shard",
    ] {
        let whole = Folder::new();
        whole.report(&format!("{DIR} --warmup 0 --steps 8 {extra}"));
        let folder = Folder::new();
        folder.report(&format!("{DIR} --warmup 0 --steps 4 {extra}"));
        assert_eq!(folder.names_in("steps"), ["step-000004"]);
        let report = folder.report(&format!("{DIR} --warmup 0 --steps 8 --resume {extra}"));
        assert_eq!(report["first_step"], 4);
        assert_eq!(report["saved_step"], 8);
        assert_eq!(losses(&report).len(), 4);
        assert_eq!(metrics(&folder), metrics(&whole), "{extra}");
    }
}

/// Optimizer state moves from files into steps and back, or a run continues with the state in memory.
#[test]
fn resumed_runs_with_state_in_files_are_bit_identical() {
    let whole = Folder::new();
    whole.report(&format!("{DIR} --warmup 0 --steps 8 --ranks 3"));
    for [first, then] in [
        ["--offload off", "--offload off"],
        ["--offload off", ""],
        ["", "--offload off"],
    ] {
        let folder = Folder::new();
        let run = format!("{DIR} --warmup 0 --ranks 3 --save-every 2");
        folder.report(&format!("{run} --steps 4 {first}"));
        folder.report(&format!("{run} --steps 8 --resume {then}"));
        assert_eq!(metrics(&folder), metrics(&whole), "{first:?}, {then:?}");
        assert!(
            folder.names_in("off").is_empty(),
            "{:?}",
            folder.names_in("off")
        );
    }
}

/// Other commands take the folder of a step, so a user might also pass it to a training run.
#[test]
fn runs_do_not_save_into_a_step() {
    let folder = Folder::new();
    folder.report("--synthetic --warmup 0 --steps 2 --checkpoint-dir steps");
    let step = folder.names_in("steps/step-000002");
    for (dir, extra) in [
        ("steps/step-000002", "--resume"),
        ("steps/step-000002", "--overwrite"),
        ("steps/step-000002/more", ""),
    ] {
        let run = folder.train(&format!(
            "--synthetic --warmup 0 --steps 4 --checkpoint-dir {dir} {extra}"
        ));
        assert_eq!(run.code, 2, "{dir} {extra}: {}", run.stderr);
        let way_out = "give the folder that contains the step";
        assert!(run.stderr.contains(way_out), "{}", run.stderr);
        assert_eq!(folder.names_in("steps/step-000002"), step);
    }
    assert_eq!(folder.run("inspect steps/step-000002").code, 0);
}

#[test]
fn a_run_resumes_on_another_number_of_ranks() {
    let whole = Folder::new();
    whole.report(&format!("{DIR} --ranks 1 --warmup 0 --steps 6"));
    let folder = Folder::new();
    folder.report(&format!("{DIR} --ranks 4 --warmup 0 --steps 3"));
    folder.report(&format!(
        "{DIR} --ranks 3 --warmup 0 --steps 6 --resume --strategy shard-grad-op"
    ));
    for ((step, got), (_, want)) in metrics(&folder).into_iter().zip(metrics(&whole)) {
        let (got, want) = (f64::from_bits(got), f64::from_bits(want));
        assert!(
            (got - want).abs() <= 1e-5 * want,
            "step {step}: {got} {want}"
        );
    }
}

#[test]
fn resuming_without_a_step_starts_fresh_and_only_new_steps_are_kept() {
    let folder = Folder::new();
    let report = folder.report(&format!(
        "{DIR} --warmup 0 --steps 9 --save-every 2 --keep-last 2 --resume"
    ));
    assert_eq!(report["first_step"], 0);
    assert_eq!(folder.names_in("steps"), ["step-000008", "step-000009"]);
    let run = folder.train(&format!("{DIR} --warmup 0 --steps 9 --resume"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let told = "from step 9, with no steps left to train; raise --steps";
    assert!(run.stdout.contains(told), "{}", run.stdout);
}

#[test]
fn torn_and_later_lines_are_removed() {
    let folder = Folder::new();
    folder.report(&format!("{DIR} --warmup 0 --steps 4"));
    let mut lines = folder.read("metrics.jsonl");
    lines.push_str("{\"step\":4,\"loss\":1.0}\n{\"step\":5,\"lo");
    folder.write("metrics.jsonl", lines);
    folder.report(&format!("{DIR} --warmup 0 --steps 6 --resume"));
    let steps: Vec<_> = metrics(&folder).into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_damaged_step_is_an_error_or_passed_over() {
    let folder = Folder::new();
    folder.report(&format!("{DIR} --warmup 0 --steps 4 --save-every 2"));
    let file = "steps/step-000004/rank-00001.safetensors";
    let file = if folder.path(file).exists() {
        file.to_owned()
    } else {
        format!(
            "steps/step-000004/{}",
            folder.names_in("steps/step-000004")[1]
        )
    };
    let mut bytes = std::fs::read(folder.path(&file)).expect("a file");
    let last = bytes.len() - 3;
    bytes[last] ^= 4;
    folder.write(&file, bytes);
    let run = folder.train(&format!("{DIR} --warmup 0 --steps 6 --resume"));
    assert_eq!(run.code, 2, "nothing was trained: {}", run.stderr);
    assert!(run.stderr.contains("step-000004"), "{}", run.stderr);
    let report = folder.report(&format!("{DIR} --warmup 0 --steps 6 --resume=newest-good"));
    assert_eq!(report["first_step"], 2);
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("step-000004 skipped"), "{warnings}");
    let inspected = folder.run("inspect steps/step-000006");
    assert_eq!(inspected.code, 0, "{}", inspected.stderr);
}

#[test]
fn a_signal_ends_the_run_after_a_save() {
    ends_after_a_save("TERM");
    // A terminal that is gone. Runs started by `nohup` must continue.
    if hears_hangups() {
        ends_after_a_save("HUP");
    }
}

fn ends_after_a_save(signal: &str) {
    let folder = Folder::new();
    let mut child = folder
        .command("train --layers 2 --dim 16 --heads 2 --seq 8 --batch 12 --steps 100000 --json")
        .args(DIR.split(' '))
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process");
    while !folder.path("metrics.jsonl").exists() || folder.read("metrics.jsonl").is_empty() {
        sleep(Duration::from_millis(10));
    }
    send(&format!("-{signal}"), child.id());
    let status = child.wait().expect("an end");
    assert_eq!(status.code(), Some(0));
    let done = metrics(&folder).len();
    assert_eq!(folder.names_in("steps"), [format!("step-{done:06}")]);
    let report = folder.report(&format!("{DIR} --warmup 0 --steps {} --resume", done + 1));
    assert_eq!(report["first_step"], done);
}

/// The training is complete and saved. Then it writes a sample that nobody wants to wait for.
#[test]
fn a_signal_ends_the_sample_and_the_report_is_there() {
    let folder = Folder::new();
    folder.write(
        "text",
        "to be or not to be, that is the question. ".repeat(200),
    );
    let child = folder
        .train_command(
            "--data text --warmup 0 --steps 2 --checkpoint-dir steps --sample 1000000000 --json",
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a process");
    while !folder.path("steps/step-000002").exists() {
        sleep(Duration::from_millis(5));
    }
    send("-TERM", child.id());
    let run = Run::of(child.wait_with_output().expect("an end"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(last_report(&run)["saved_step"], 2);
}

#[test]
fn a_step_is_consolidated_inspected_and_sampled() {
    let folder = Folder::new();
    folder.write(
        "text",
        "to be or not to be, that is the question. ".repeat(200),
    );
    folder.report("--data text --checkpoint-dir steps --warmup 0 --steps 20 --sample 0");
    let shown = folder.run("inspect steps");
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    for text in [
        "blocks.1.qkv.weight",
        "optimizer.wte.weight.momentum.moment_1",
        "every byte matches its checksum",
    ] {
        assert!(shown.stdout.contains(text), "{text} in {}", shown.stdout);
    }
    let json = folder.run("inspect steps --json --no-verify");
    let json: Value = serde_json::from_str(&json.stdout).expect("an object");
    assert_eq!(json["training"]["step"], 20);

    let made = folder.run("consolidate steps model.safetensors");
    assert_eq!(made.code, 0, "{}", made.stderr);
    let (header, _) = folder.weights("model.safetensors");
    assert!(
        header.contains("\"blocks.0.fc.weight\"") && !header.contains("moment"),
        "{header}"
    );
    // A path that is not a regular file is not replaced by one.
    std::os::unix::fs::symlink("elsewhere", folder.path("link")).expect("a link");
    let onto = folder.run("consolidate steps link --overwrite");
    assert_eq!(onto.code, 2, "{}", onto.stderr);
    assert!(onto.stderr.contains("not a plain file"), "{}", onto.stderr);
    let again = folder.run("consolidate steps model.safetensors");
    assert_eq!(again.code, 2);
    assert!(
        again.stderr.contains("model.safetensors"),
        "{}",
        again.stderr
    );
    let made = folder.run("consolidate steps/step-000020 parts --max-shard-size 10KB");
    assert_eq!(made.code, 0, "{}", made.stderr);
    let names = folder.names_in("parts");
    assert!(
        names.len() > 2 && names.contains(&"model.safetensors.index.json".to_owned()),
        "{names:?}"
    );

    let said = folder.run("generate steps --prompt tobe --bytes 12");
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(said.stdout.starts_with("tobe"), "{}", said.stdout);
    assert_eq!(
        folder.run("generate steps --prompt tobe --bytes 12").stdout,
        said.stdout
    );
}

#[test]
fn wrong_paths_and_sizes_are_usage_errors() {
    let folder = Folder::new();
    folder.write("file", "no step");
    std::fs::create_dir_all(folder.path("left/rank-0")).expect("a folder");
    folder.write("left/rank-0/state", "of a run that was killed");
    for (arguments, text) in [
        ("inspect nowhere", "nowhere"),
        ("inspect file", "file"),
        ("consolidate nowhere out", "nowhere"),
        ("generate nowhere --prompt a", "nowhere"),
        (
            "consolidate nowhere out --max-shard-size 5x",
            "80GiB or 40GB",
        ),
    ] {
        let run = folder.run(arguments);
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(run.stderr.contains(text), "{arguments}: {}", run.stderr);
    }
    for (arguments, text) in [
        ("--synthetic --resume", "--checkpoint-dir"),
        ("--synthetic --checkpoint-dir file", "not a folder"),
        (
            "--synthetic --checkpoint-dir steps --save-every 0",
            "--save-every is 0",
        ),
        (
            "--synthetic --accumulate 4",
            "4 micro-batches do not divide the 6 sequences",
        ),
        (
            "--synthetic --ranks 3 --strategy hybrid-shard",
            "does not divide the 3 ranks",
        ),
        ("--synthetic --clip-grad-norm -1", "a number above 0"),
        ("--synthetic --unit-size 0", "--unit-size is 0"),
        ("--synthetic --overwrite", "--checkpoint-dir"),
        (
            "--synthetic --checkpoint-dir steps --resume --overwrite",
            "cannot be used with",
        ),
        (
            "--synthetic --checkpoint-dir steps --save-deadline 0",
            "--save-deadline is 0",
        ),
        ("--synthetic --offload file", "not a folder"),
        ("--synthetic --offload file/x", "not a folder"),
        ("--synthetic --offload left", "files of another run"),
    ] {
        let run = folder.train(arguments);
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(run.stderr.contains(text), "{arguments}: {}", run.stderr);
    }
    let report = folder.report(&format!("{DIR} --warmup 0 --steps 2"));
    assert_eq!(report["saved_step"], 2);
    let run = folder.train(&format!("{DIR} --warmup 0 --steps 3 --resume --heads 4"));
    assert_eq!(run.code, 2, "{}", run.stderr);
    // Only what differs is named.
    let words = r#"was saved by a model of {"heads":2}, but this command has {"heads":4}"#;
    assert!(run.stderr.contains(words), "{}", run.stderr);
}
