//! `train --device` and `generate --device`: the device of a rank.

use crate::command::Folder;
use crate::foreign::folders;

#[test]
fn missing_devices_are_named_in_the_error() {
    let folder = Folder::new();
    for (device, words) in [
        ("gpu", ["is not a device", "wgpu"]),
        ("wgpu:", ["is not a device", "wgpu:0"]),
        ("cuda:-1", ["is not a device", "wgpu:0"]),
        ("flex:1", ["no flex device 1", "which has 1"]),
        #[cfg(not(feature = "cuda"))]
        ("cuda:0", ["no cuda", "burn-fsdp-cli/cuda"]),
        #[cfg(feature = "wgpu")]
        ("wgpu:999", ["no wgpu device 999", "`wgpu:0`"]),
    ] {
        let run = folder.train(&format!("--synthetic --device {device}"));
        assert_eq!(run.code, 2, "{device}: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{device}: {}", run.stderr);
        }
    }
    for device in ["flex:0", "auto"] {
        let run = folder.train(&format!("--synthetic --steps 1 --device {device}"));
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
}

#[test]
fn generation_names_missing_devices() {
    let folder = folders();
    let generate = "generate --init llama --tokenizer bytes --prompt a --tokens 2";
    for (flags, words) in [
        ("--device gpu", &["is not a device", "wgpu"][..]),
        ("--device flex:1", &["no flex device 1"]),
    ] {
        let run = folder.run(&format!("{generate} {flags}"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{flags}: {}", run.stderr);
        }
    }
    let plain = folder.run(generate);
    let named = folder.run(&format!("{generate} --device flex:0"));
    assert_eq!(
        (plain.code, &plain.stdout),
        (0, &named.stdout),
        "{}",
        plain.stderr
    );
}

/// These tests need a device of the backend. CI provides one in software.
#[cfg(feature = "wgpu")]
mod wgpu {
    use serde_json::Value;

    use crate::command::{Folder, losses, relative_difference};
    use crate::foreign::folders;

    #[test]
    fn a_device_trains_like_the_cpu_and_its_copies_are_shown() {
        let folder = Folder::new();
        for flags in [
            "--ranks 2",
            "--ranks 2 --strategy shard-grad-op --prefetch 1",
        ] {
            let steps = format!("{flags} --synthetic --warmup 0 --steps 3");
            let host = folder.report(&steps);
            let device = folder.report(&format!("{steps} --device wgpu:0"));
            let difference = relative_difference(&losses(&host), &losses(&device));
            assert!(difference < 1e-4, "{flags}: {difference:e}");
            assert_eq!(device["collectives"], host["collectives"]);
            assert_eq!(device["state_bytes"], host["state_bytes"]);
            assert_eq!(device["staged_bytes"], host["staged_bytes"]);
            let checked = folder.report(&format!("{steps} --device wgpu:0 --check agreement"));
            let copies = |report: &Value| report["staged_bytes"][0][0].as_u64();
            assert_eq!(copies(&host), Some(0));
            assert!(copies(&checked) > Some(0), "{checked}");
        }
    }

    #[test]
    fn a_device_generates_like_the_cpu() {
        let folder = folders();
        folder.write("prompts.txt", "a\nto be or\nnot\n");
        for model in ["llama", "gpt2"] {
            let generate =
                format!("generate --init {model} --tokenizer bytes --prompts prompts.txt");
            let generate = format!("{generate} --tokens 8 --temperature 0");
            let host = folder.run(&generate);
            assert_eq!(host.code, 0, "{}", host.stderr);
            for (ranks, weights) in [
                (1, "auto"),
                (2, "whole"),
                (2, "sharded"),
                (1, "placed"),
                (2, "placed"),
            ] {
                let flags = format!("--device wgpu:0 --ranks {ranks} --weights {weights}");
                let device = folder.run(&format!("{generate} {flags}"));
                assert_eq!(device.code, 0, "{model} {flags}: {}", device.stderr);
                assert_eq!(device.stdout, host.stdout, "{model} {flags}");
            }
        }
    }

    #[test]
    fn a_run_moves_from_a_device_to_the_cpu() {
        let folder = Folder::new();
        let text = "to be or not to be, that is the question. ".repeat(100);
        folder.write("text", text.as_bytes());
        let rest = "--data text --warmup 0 --sample 5 --checkpoint-dir steps --resume";
        let first = folder.report(&format!("{rest} --device wgpu:0 --steps 2"));
        assert!(first["eval_loss"].as_f64().is_some(), "{first}");
        let second = folder.report(&format!("{rest} --steps 3"));
        assert_eq!(second["first_step"], 2);
    }

    #[test]
    fn compiled_steps_train_on_a_device_like_on_the_cpu() {
        let folder = Folder::new();
        for flags in [
            "--ranks 1",
            "--ranks 2",
            "--ranks 2 --strategy no-shard",
            "--ranks 2 --accumulate 2 --clip-grad-norm 1",
        ] {
            let steps = format!("{flags} --compile --synthetic --warmup 0 --steps 3");
            let host = folder.report(&steps);
            let device = folder.report(&format!("{steps} --device wgpu:0"));
            let difference = relative_difference(&losses(&host), &losses(&device));
            assert!(difference < 1e-4, "{flags}: {difference:e}");
            assert_eq!(device["collectives"], host["collectives"], "{flags}");
            assert_eq!(device["state_bytes"], host["state_bytes"], "{flags}");
        }
    }

    /// From a compiled step on the device to one on the CPU and to the eager engine on the device, and back.
    #[test]
    fn compiled_steps_move_between_a_device_and_the_cpu() {
        let folder = Folder::new();
        let text = "to be or not to be, that is the question. ".repeat(100);
        folder.write("text", text.as_bytes());
        folder.report("--compile --synthetic --warmup 0 --steps 1 --save-init weights");
        for adapters in ["", "--lora 2 --init weights"] {
            let rest = format!("--data text --warmup 0 --sample 5 {adapters}");
            let whole = folder.report(&format!("{rest} --compile --steps 4"));
            let steps = format!("steps{}", adapters.len());
            let rest = format!("{rest} --checkpoint-dir {steps} --resume");
            let mut seen = Vec::new();
            for (number, flags) in [
                "--compile --device wgpu:0 --ranks 1",
                "--compile --ranks 2",
                "--compile --device wgpu:0 --ranks 2",
                "--device wgpu:0 --ranks 1",
            ]
            .into_iter()
            .enumerate()
            {
                let flags = format!("{rest} {flags} --steps {}", number + 1);
                let report = folder.report(&flags);
                assert_eq!(report["first_step"], number, "{flags}");
                assert!(report["eval_loss"].as_f64().is_some(), "{flags}: {report}");
                seen.extend(losses(&report));
            }
            // Burn draws the adapters' factors on the device where a run begins.
            if adapters.is_empty() {
                let difference = relative_difference(&losses(&whole), &seen);
                assert!(difference < 1e-4, "{difference:e}: {seen:?}");
            }
        }
    }

    #[test]
    fn weights_of_a_file_are_read_into_compiled_steps_on_a_device() {
        let folder = Folder::new();
        let steps = "--compile --synthetic --warmup 0 --steps 2 --ranks 2";
        let first = folder.report(&format!("{steps} --seed 5 --save-init weights"));
        let flags = format!("{steps} --seed 5 --init weights --device wgpu:0");
        let second = folder.report(&flags);
        let difference = relative_difference(&losses(&first), &losses(&second));
        assert!(difference < 1e-4, "{difference:e}");
    }

    #[test]
    fn plans_of_the_cpu_are_refused_for_compiled_steps_on_a_device() {
        let folder = Folder::new();
        for flag in ["--memory-budget 1GiB", "--certify"] {
            let run = folder.train(&format!("--synthetic --compile --device wgpu:0 {flag}"));
            assert_eq!(run.code, 2, "{}", run.stderr);
            for word in [flag.split(' ').next().expect("a flag"), "--device", "CPU"] {
                assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
            }
        }
    }
}
