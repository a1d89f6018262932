//! Each family of decoders, trained, adapted, written, and used for generation.
//!
//! The folders are those that transformers has written for the tests of the models crate.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use burn::tensor::Device;
use burn_fsdp_models::{LlamaConfig, ModelConfig};
use serde_json::{Value, json};

use crate::command::{Folder, Run, crate_folder, losses};
use crate::hugging_face::{
    assert_close, copy_folder, loaded, ok, peer_loss, plainly, report, train,
};
use crate::skipped::python;

/// The vocabulary size of all folders.
pub(crate) const VOCAB: usize = 40;

fn source() -> PathBuf {
    crate_folder().join("../models/tests/models/families")
}

/// Returns a folder with copies of the folders of transformers, and their names. Each has a tokenizer of words.
pub(crate) fn folders() -> (Folder, Vec<String>) {
    let folder = Folder::new();
    let mut names = Vec::new();
    for entry in fs::read_dir(source()).expect("a folder of folders") {
        let path = entry.expect("an entry").path();
        if !path.join("config.json").exists() {
            continue;
        }
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        copy_folder(&path, &folder.path(&name));
        fs::remove_file(folder.path(&format!("{name}/expected.safetensors"))).expect("ours");
        folder.write(&format!("{name}/tokenizer.json"), tokenizer());
        names.push(name);
    }
    names.sort();
    assert!(names.len() >= 14, "{names:?}");
    (folder, names)
}

/// Returns a tokenizer of the words `w0` to `w39`.
pub(crate) fn tokenizer() -> String {
    let vocab: BTreeMap<String, usize> = (0..VOCAB).map(|id| (format!("w{id}"), id)).collect();
    json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    })
    .to_string()
}

pub(crate) fn sizes(folder: &Folder, name: &str) -> LlamaConfig {
    match ModelConfig::from_hugging_face(folder.path(name)) {
        Ok(ModelConfig::Llama(sizes)) => sizes,
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn both_engines_train_each_family_like_plain_burn() {
    let (folder, names) = folders();
    let device = Device::flex().autodiff();
    for name in names {
        let sizes = sizes(&folder, &name);
        let want = plainly(loaded(&folder, &name, sizes), 3, VOCAB, &device);
        for extra in [
            "--ranks 2",
            "--ranks 2 --activation-checkpointing --accumulate 2",
            "--ranks 1 --compile",
            "--ranks 2 --compile",
        ] {
            let report = report(
                &folder,
                &format!("--init {name} --synthetic --steps 3 {extra}"),
            );
            assert_close(&want, &losses(&report), &format!("{name} {extra}"));
            assert_eq!(report["model"], sizes.variant.family.name());
        }
        let low = losses(&report(
            &folder,
            &format!("--init {name} --synthetic --steps 1 --precision bf16"),
        ));
        assert!(
            (low[0] / want[0] - 1.0).abs() < 0.05,
            "{name}: {low:?}, {want:?}"
        );
    }
}

#[test]
fn both_engines_train_adapters_of_each_family() {
    let (folder, names) = folders();
    for name in names {
        let run = format!("--init {name} --lora 2 --synthetic --steps 3");
        let eager = losses(&report(&folder, &format!("{run} --ranks 2")));
        let compiled = losses(&report(&folder, &format!("{run} --ranks 2 --compile")));
        assert_close(&eager, &compiled, &name);
        assert!(eager[0] != eager[2], "{name}: {eager:?}");
    }
}

/// The text is that of the tokens that transformers chooses.
#[test]
fn each_family_generates_the_text_of_transformers() {
    let (folder, names) = folders();
    for name in names {
        let expected = fs::read(source().join(&name).join("expected.safetensors"));
        folder.write("expected.safetensors", expected.expect("a file"));
        let ids = folder.tensor("expected.safetensors", "greedy");
        // The folders' end token is 1, with which the prompt begins. Texts longer than the maximum are cut in front.
        let num_tokens = sizes(&folder, &name).seq.min(12);
        let ids = &ids[..num_tokens];
        let new = ids.iter().skip(4).take_while(|id| **id != 1.0);
        let words: Vec<_> = ids
            .iter()
            .take(4)
            .chain(new)
            .map(|id| format!("w{id}"))
            .collect();
        for ranks in [1, 2] {
            let mut command = folder.command(&format!(
                "generate --init {name} --tokens {} --temperature 0 --ranks {ranks}",
                num_tokens - 4
            ));
            command.args(["--prompt", "w1 w2 w3 w4"]);
            let run = Run::of(command.output().expect("the command starts"));
            assert_eq!(run.code, 0, "{name}: {}", run.stderr);
            assert_eq!(run.stdout.trim_end(), words.join(" "), "{name}");
        }
        // Neighbors of other lengths change nothing.
        let mut command = folder.command(&format!(
            "generate --init {name} --tokens {} --temperature 0 --ranks 2",
            num_tokens - 4
        ));
        for prompt in ["w5", "w1 w2 w3 w4", "w7 w8 w9 w3 w2 w6", "w4 w4"] {
            command.args(["--prompt", prompt]);
        }
        let run = Run::of(command.output().expect("the command starts"));
        assert_eq!(run.code, 0, "{name}: {}", run.stderr);
        let expected = format!("[2/4]\n{}\n", words.join(" "));
        assert!(run.stdout.contains(&expected), "{name}: {}", run.stdout);
    }
}

#[test]
fn consolidated_folders_of_each_family_are_read_back() {
    let (folder, names) = folders();
    for name in names {
        let run = format!("--init {name} --synthetic --steps 1 --checkpoint-dir {name}-steps");
        report(&folder, &format!("{run} --lr 0 --weight-decay 0"));
        let out = format!("{name}-out");
        ok(
            &folder,
            &format!("consolidate {name}-steps {out} --format hugging-face --init {name}"),
        );
        assert_eq!(sizes(&folder, &out), sizes(&folder, &name), "{name}");
        // Nothing has been trained.
        let still = "--lr 0 --weight-decay 0 --steps 1 --synthetic";
        let [before, after] = [&name, &out]
            .map(|folder_name| losses(&report(&folder, &format!("--init {folder_name} {still}"))));
        assert_eq!(before, after, "{name}: the same bits");
    }
}

#[test]
fn an_unsupported_setting_is_named_with_its_value_and_the_way_out() {
    let (folder, _) = folders();
    let config = folder.read("qwen3/config.json");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["residual_multiplier"] = json!(0.22);
    folder.write("qwen3/config.json", config.to_string());
    let refused = train(&folder, "--init qwen3 --synthetic --steps 1");
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    for words in [
        "`residual_multiplier` is 0.22",
        "remove it if it has no effect",
        "Qwen3",
    ] {
        assert!(refused.stderr.contains(words), "{}", refused.stderr);
    }
}

/// Transformers and peft read what was trained here.
#[test]
fn transformers_reads_trained_models_and_adapters_of_each_family() {
    let Some(python) = python("torch, transformers, peft") else {
        return;
    };
    let (folder, _) = folders();
    let still = "--lr 0 --weight-decay 0 --synthetic";
    for name in [
        "qwen2-window",
        "mistral",
        "qwen3",
        "phi3",
        "gemma2",
        "gemma3",
        "gpt-neox",
    ] {
        let run = format!("--init {name} --synthetic --steps 4");
        report(&folder, &format!("{run} --checkpoint-dir {name}-steps"));
        let write = format!("consolidate {name}-steps {name}-out --format hugging-face");
        ok(&folder, &format!("{write} --init {name}"));
        let ours = losses(&report(
            &folder,
            &format!("--init {name}-out {still} --steps 1"),
        ));
        let theirs = peer_loss(&python, &folder, &format!("{name}-out"));
        assert_close(&theirs, &ours, &format!("{name} in transformers"));

        report(
            &folder,
            &format!("{run} --lora 3 --checkpoint-dir {name}-adapted"),
        );
        let write = format!("consolidate {name}-adapted {name}-peft --format hugging-face");
        ok(&folder, &write);
        // The batch of a step has 24 tokens, and there are 40: step 5 has the batch of step 0.
        let run =
            format!("--init {name} --lora 3 {still} --checkpoint-dir {name}-adapted --resume");
        let ours = losses(&report(&folder, &format!("{run} --steps 6")));
        let theirs = peer_loss(&python, &folder, &format!("{name} {name}-peft"));
        assert_close(&theirs, &ours[1..], &format!("{name} in peft"));
        let write = format!("consolidate {name}-adapted {name}-merged --format hugging-face");
        ok(&folder, &format!("{write} --merge --init {name}"));
        let merged = peer_loss(&python, &folder, &format!("{name}-merged"));
        assert_close(&theirs, &merged, &format!("{name}, merged"));
    }
}
