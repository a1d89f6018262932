//! Wrong input: one clear line, exit code 2, and no written files.

use crate::command::Folder;

const OUTPUTS: &str = "--save-init init.safetensors --metrics metrics.jsonl --curve curve.svg";

/// Runs with all outputs requested. Expects an error that leaves the folder unchanged.
fn refused(folder: &Folder, arguments: &str) -> String {
    let before = folder.names();
    let run = folder.train(&format!("{OUTPUTS} {arguments}"));
    assert_eq!(run.code, 2, "{arguments}: {}{}", run.stdout, run.stderr);
    assert!(run.stderr.starts_with("error: "), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert_eq!(run.stdout, "");
    assert_eq!(folder.names(), before, "{arguments}");
    run.stderr
}

fn assert_rejected(arguments: &str, words: &[&str]) {
    let message = refused(&Folder::new(), arguments);
    for word in words {
        assert!(message.contains(word), "{word}: {message}");
    }
}

#[test]
fn ranks_must_divide_the_batch() {
    assert_rejected("--synthetic --ranks 5", &["5 ranks", "batch of 12"]);
}

#[test]
fn heads_must_divide_dim() {
    assert_rejected("--synthetic --heads 3", &["3 heads", "dim 16"]);
}

#[test]
fn sizes_of_zero_are_named() {
    for size in [
        "layers", "dim", "heads", "vocab", "seq", "batch", "ranks", "threads", "deadline",
    ] {
        assert_rejected(&format!("--synthetic --{size} 0"), &[size, "0"]);
    }
}

/// Flags that would have no effect, or a harmful one, are reported as errors.
#[test]
fn flags_without_effect_are_rejected() {
    for (arguments, words) in [
        (
            "--reduce-dtype f16",
            ["--reduce-dtype f16", "scales the loss"],
        ),
        (
            "--reduce-dtype f16 --compile",
            ["--reduce-dtype f16", "scales the loss"],
        ),
        ("--replicate-size 2", ["--replicate-size", "hybrid-shard"]),
        (
            "--replicate-size host --strategy no-shard",
            ["--replicate-size", "hybrid-shard"],
        ),
        ("--beta2 -0.1", ["--beta2 is -0.1;", "must be"]),
    ] {
        assert_rejected(&format!("--synthetic {arguments}"), &words);
    }
}

#[test]
fn numbers_outside_their_range_are_named() {
    for arguments in [
        "--lr -1",
        "--lr NaN",
        "--beta1 1",
        "--beta2 -0.5",
        "--eps 0",
        "--weight-decay inf",
    ] {
        let (flag, _) = arguments.split_once(' ').unwrap();
        assert_rejected(&format!("--synthetic {arguments}"), &[flag, "must be"]);
    }
}

#[test]
fn sizes_beyond_this_machine_are_refused() {
    assert_rejected("--synthetic --dim 1048576", &["GiB"]);
    assert_rejected("--synthetic --dim 18446744073709551614", &["parameters"]);
    assert_rejected("--synthetic --steps 18446744073709551615", &["too large"]);
}

#[test]
fn text_must_exist_and_be_long_enough() {
    assert_rejected("--data nowhere", &["nowhere", "No such file"]);
    let folder = Folder::new();
    folder.write("empty", "");
    folder.write("short", "x".repeat(60));
    std::fs::create_dir(folder.path("folder")).unwrap();
    for name in ["empty", "folder"] {
        let message = refused(&folder, &format!("--data {name}"));
        let is_named = message.contains(&format!("{name}: at least"));
        assert!(
            is_named && message.contains("but 0 were found"),
            "{message}"
        );
    }
    let message = refused(&folder, "--data short");
    assert!(
        message.contains("short has 57 bytes") && message.contains("97"),
        "{message}"
    );
}

#[test]
fn text_needs_a_token_for_every_byte() {
    let folder = Folder::new();
    folder.write("text", "x".repeat(1000));
    assert!(refused(&folder, "--data text --vocab 255").contains("256"));
}

#[test]
fn outputs_must_be_writable() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("folder")).unwrap();
    for flag in ["--metrics", "--curve", "--save-init"] {
        for path in ["folder", "nowhere/file", "folder/sub/file"] {
            let before = folder.names();
            let run = folder.train(&format!("--synthetic {flag} {path}"));
            assert_eq!(run.code, 2, "{flag} {path}: {}", run.stderr);
            assert!(
                run.stderr.starts_with(&format!("error: {flag} {path}: ")),
                "{}",
                run.stderr
            );
            assert_eq!(folder.names(), before);
        }
    }
}

#[test]
fn outputs_must_differ_and_spare_the_inputs() {
    let folder = Folder::new();
    folder.write("text", "x".repeat(1000));
    for arguments in ["--metrics a --curve ./a", "--data text --metrics text"] {
        let run = folder.train(&format!("{arguments} --steps 1"));
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(run.stderr.contains("same file"), "{}", run.stderr);
    }
    assert_eq!(folder.read("text"), "x".repeat(1000));
    assert_eq!(folder.names(), ["text"]);
}

#[test]
fn invalid_faults_are_rejected() {
    let offloaded = "rank:1,step:0,at:state,how:flip";
    for (fault, word) in [
        (offloaded, "--offload"),
        ("rank:1", "missing"),
        ("rank:x,step:0,at:forward,how:panic", "rank"),
        ("rank:2,step:0,at:forward,how:panic", "no rank 2"),
        ("rank:1,step:99,at:forward,how:panic", "no step 99"),
        ("rank:1,step:0,at:shard,how:panic", "how:flip"),
        ("rank:1,step:0,at:running,how:flip", "no running states"),
    ] {
        let folder = Folder::new();
        let extra = if fault == offloaded {
            "--offload off"
        } else {
            ""
        };
        let run = folder.train_with_fault(&format!("--synthetic --steps 2 {extra}"), fault);
        assert_eq!(run.code, 2, "{fault}: {}", run.stderr);
        assert!(run.stderr.contains("BURN_FSDP_FAULT"), "{}", run.stderr);
        assert!(run.stderr.contains(word), "{}", run.stderr);
        assert!(folder.names().is_empty());
    }
}

#[test]
fn a_stall_without_peers_is_rejected() {
    for engine in ["", "--compile"] {
        let arguments = format!("--synthetic --steps 2 --ranks 1 {engine}");
        let fault = "rank:0,step:0,at:forward,how:stall";
        let run = Folder::new().train_with_fault(&arguments, fault);
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(run.stderr.contains("the only rank"), "{}", run.stderr);
    }
}

#[test]
fn sources_of_tokens_exclude_each_other() {
    let run = Folder::new().train("--synthetic --data text");
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("--synthetic"), "{}", run.stderr);
}

/// Creates weights of the tiny model with a changed header.
fn changed_weights(change: impl Fn(&str) -> String) -> Folder {
    let folder = Folder::new();
    folder.report("--synthetic --warmup 0 --steps 0 --save-init good");
    let (header, data) = folder.weights("good");
    let header = change(&header);
    let length = (header.len() as u64).to_le_bytes();
    folder.write("bad", [&length, header.as_bytes(), &data].concat());
    folder
}

#[test]
fn weights_of_another_model_are_refused() {
    let other = changed_weights(str::to_owned);
    let message = refused(&other, "--synthetic --init bad --dim 32");
    assert!(message.contains("shape"), "{message}");
    let message = refused(&other, "--synthetic --init bad --layers 3");
    assert!(
        message.contains("blocks.2") && message.contains("missing"),
        "{message}"
    );
    let renamed = changed_weights(|header| header.replace("lnf.bias", "lnf.bios"));
    let message = refused(&renamed, "--synthetic --init bad");
    assert!(
        message.contains("lnf.bias") && message.contains("missing"),
        "{message}"
    );
}

#[test]
fn invalid_safetensors_are_rejected() {
    let lying =
        changed_weights(|header| header.replacen("\"data_offsets\":[", "\"data_offsets\":[9", 1));
    assert!(refused(&lying, "--synthetic --init bad").contains("not a valid safetensors"));
    let half = Folder::new();
    half.report("--synthetic --warmup 0 --steps 0 --save-init good");
    let good = std::fs::read(half.path("good")).unwrap();
    for length in [0, 4, 100, good.len() - 1] {
        half.write("bad", &good[..length]);
        let message = refused(&half, "--synthetic --init bad");
        assert!(message.contains("bad"), "{message}");
    }
    assert!(refused(&half, "--synthetic --init nowhere").contains("nowhere"));
    half.write("bad", b"\xff\xff\xff\xff\xff\xff\xff\x7f{}");
    refused(&half, "--synthetic --init bad");
}
