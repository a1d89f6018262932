//! Folders and files of other programs, as the command reads and writes them.

use std::path::PathBuf;

use burn::tensor::Device;
use burn_fsdp_models::{Gpt2Config, LlamaConfig, LlamaVariant};
use serde_json::{Value, json};

use crate::command::{Folder, Run, last_report, losses};

const LLAMA: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 16,
    heads: 4,
    kv_heads: 2,
    hidden: 20,
    vocab: 300,
    seq: 16,
    rope_base: 10_000,
    variant: LlamaVariant {
        has_tied_head: true,
        ..LlamaVariant::PLAIN
    },
};

const GPT2: Gpt2Config = Gpt2Config {
    layers: 2,
    dim: 16,
    heads: 2,
    hidden: 20,
    vocab: 300,
    seq: 16,
};

/// Creates the folders `llama` and `gpt2`, whose heads are tied to the embedding tables.
pub(crate) fn folders() -> Folder {
    let folder = Folder::new();
    let device = Device::flex();
    for name in ["llama", "gpt2"] {
        std::fs::create_dir(folder.path(name)).expect("a writable folder");
    }
    let llama = LLAMA.init(&device, 3).expect("valid sizes");
    let gpt2 = GPT2.init(&device, 3).expect("valid sizes");
    let saved = llama.save_hugging_face(folder.path("llama"));
    saved.expect("a writable folder");
    let saved = gpt2.save_hugging_face(folder.path("gpt2"));
    saved.expect("a writable folder");
    folder
}

/// Copies a folder, with other tensor names and additional tensors.
fn changed(
    folder: &Folder,
    from: &str,
    into: &str,
    prefix: &str,
    more: &[(&str, Vec<usize>, Vec<f32>)],
) {
    std::fs::create_dir(folder.path(into)).expect("a writable folder");
    folder.write(
        &format!("{into}/config.json"),
        folder.read(&format!("{from}/config.json")),
    );
    let (header, mut data) = folder.weights(&format!("{from}/model.safetensors"));
    let header: serde_json::Map<String, Value> = serde_json::from_str(&header).expect("a header");
    let renamed = header.into_iter().map(|(name, entry)| match name.as_str() {
        "__metadata__" => (name, entry),
        _ => (format!("{prefix}{name}"), entry),
    });
    let mut header: serde_json::Map<String, Value> = renamed.collect();
    for (name, shape, values) in more {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert((*name).to_owned(), entry);
    }
    let header = Value::from(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    folder.write(&format!("{into}/model.safetensors"), bytes);
}

fn train(folder: &Folder, arguments: &str) -> Run {
    folder.run(&format!(
        "train --synthetic --steps 2 --warmup 0 --batch 4 --seq 8 --lr 0.01 --eps 0.01 --json {arguments}"
    ))
}

fn trained(folder: &Folder, arguments: &str) -> Vec<f64> {
    let run = train(folder, arguments);
    assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
    losses(&last_report(&run))
}

#[test]
fn tensors_derived_from_others_are_ignored() {
    let folder = folders();
    let table =
        |name: &str, tensor: &str| folder.tensor(&format!("{name}/model.safetensors"), tensor);
    let llama = table("llama", "model.embed_tokens.weight");
    let gpt2 = table("gpt2", "transformer.wte.weight");
    let buffer = "model.layers.1.self_attn.rotary_emb.inv_freq";
    let more = [
        (buffer, vec![2], vec![1.0, 0.01]),
        ("lm_head.weight", vec![300, 16], llama.clone()),
        ("score.weight", vec![1, 16], vec![0.5; 16]),
    ];
    changed(&folder, "llama", "llama-more", "", &more);
    let more = [
        ("transformer.h.0.attn.masked_bias", vec![], vec![-1e4]),
        ("lm_head.weight", vec![300, 16], gpt2.clone()),
    ];
    changed(&folder, "gpt2", "gpt2-more", "", &more);
    for (plain, more) in [("llama", "llama-more"), ("gpt2", "gpt2-more")] {
        for extra in [
            "--ranks 1",
            "--ranks 4",
            "--ranks 2 --compile",
            "--ranks 2 --lora 2",
        ] {
            let want = trained(&folder, &format!("--init {plain} {extra}"));
            let got = trained(&folder, &format!("--init {more} {extra}"));
            assert_eq!(want, got, "{more} {extra}");
        }
    }
    // A head with different values is not tied, which contradicts the settings.
    for (name, mut values) in [("llama", llama), ("gpt2", gpt2)] {
        values[3] += 1.0;
        let head = [("lm_head.weight", vec![300, 16], values)];
        changed(&folder, name, &format!("{name}-other"), "", &head);
        let run = train(&folder, &format!("--init {name}-other"));
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(run.stderr.contains("tie_word_embeddings"), "{}", run.stderr);
        assert!(run.stdout.is_empty(), "{}", run.stdout);
    }
}

#[test]
fn wrapped_names_are_rejected_and_name_the_wrapper() {
    let folder = folders();
    for (name, prefix) in [
        ("llama", "module."),
        ("gpt2", "_orig_mod."),
        ("llama", "base_model.model."),
    ] {
        let into = format!("{name}-{prefix}x");
        changed(&folder, name, &into, prefix, &[]);
        let run = train(&folder, &format!("--init {into}"));
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(
            run.stderr.contains(&format!("`{prefix}`")),
            "{}",
            run.stderr
        );
    }
}

/// Each written file has the permissions that the process's mask leaves.
#[cfg(unix)]
#[test]
fn written_files_follow_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folders();
    for (mask, want) in [("022", 0o644), ("027", 0o640), ("077", 0o600)] {
        let files = [
            "init.safetensors",
            "hf.safetensors",
            "curve.svg",
            "m.jsonl",
            "t.json",
            "out.safetensors",
        ]
        .map(|name| format!("{mask}-{name}"));
        let [init, hf, curve, metrics, trace, out] = &files;
        let tiny = "--layers 1 --dim 16 --heads 2";
        let common = "--synthetic --steps 1 --warmup 0 --batch 4 --seq 8";
        let outputs = format!(
            "--checkpoint-dir {mask}-run --metrics {metrics} --trace {trace} --curve {curve}"
        );
        let mut script = format!("umask {mask}\nset -e\n");
        for arguments in [
            format!("train {tiny} {common} --save-init {init} {outputs}"),
            format!(
                "train --init llama {common} --save-init {hf} --checkpoint-dir {mask}-hf --curve {curve}"
            ),
            format!("consolidate {mask}-run {out}"),
            format!("consolidate {mask}-hf {mask}-out --format hugging-face"),
        ] {
            script += &format!("\"$BIN\" {arguments}\n");
        }
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .env("BIN", env!("CARGO_BIN_EXE_burn-fsdp"))
            .env_remove("BURN_FSDP_FAULT")
            .current_dir(folder.path(""))
            .output();
        let output = output.expect("a shell");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let mut paths: Vec<PathBuf> = files.iter().map(|name| folder.path(name)).collect();
        paths.extend(files_in(&folder.path(&format!("{mask}-out"))));
        paths.extend(files_in(&folder.path(&format!("{mask}-run"))));
        assert!(paths.len() > 10, "{paths:?}");
        for path in paths {
            let mode = path
                .metadata()
                .expect("it was written")
                .permissions()
                .mode()
                & 0o777;
            assert_eq!(mode, want, "umask {mask}: {}", path.display());
        }
    }
}

/// A replaced file keeps its permissions: a file that was closed to others stays closed.
#[cfg(unix)]
#[test]
fn a_file_that_is_replaced_keeps_its_mode() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let train = "--synthetic --steps 1 --warmup 0 --checkpoint-dir run --overwrite --curve curve.svg --trace t.json";
    let files = ["out.safetensors", "curve.svg", "t.json"].map(|name| folder.path(name));
    for write in [0, 1] {
        folder.report(train);
        let run = folder.run("consolidate run out.safetensors --overwrite");
        assert_eq!(run.code, 0, "{}", run.stderr);
        for (path, mode) in files.iter().zip([0o600, 0o640, 0o604]) {
            let permissions = path.metadata().expect("it was written").permissions();
            if write == 1 {
                assert_eq!(permissions.mode() & 0o777, mode, "{}", path.display());
            }
            let closed = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path, closed).expect("its owner may");
        }
    }
}

/// A training run warns about dropout in a folder's settings, because `transformers` would use it.
#[test]
fn ignored_dropout_is_warned_about() {
    let folder = folders();
    let set = |name: &str, settings: &[(&str, Value)]| {
        let path = format!("{name}/config.json");
        let mut config: Value = serde_json::from_str(&folder.read(&path)).expect("JSON");
        for (setting, value) in settings {
            config[setting] = value.clone();
        }
        folder.write(&path, config.to_string());
    };
    let warnings_of = |name: &str| {
        let arguments =
            format!("train --init {name} --synthetic --steps 1 --warmup 0 --batch 4 --seq 8");
        let run = folder.run(&format!("{arguments} --json"));
        assert_eq!(run.code, 0, "{}", run.stderr);
        let report = crate::command::last_report(&run);
        let all: Vec<String> = crate::command::warnings(&report)
            .into_iter()
            .map(ToString::to_string)
            .collect();
        let told = all.iter().filter(|warning| warning.contains("drop"));
        let told: Vec<_> = told.cloned().collect();
        assert_eq!(
            run.stderr.matches("without dropout").count(),
            told.len(),
            "{}",
            run.stderr
        );
        told
    };
    for name in ["llama", "gpt2"] {
        assert_eq!(warnings_of(name), [""; 0]);
    }
    set("llama", &[("attention_dropout", 0.0.into())]);
    assert_eq!(warnings_of("llama"), [""; 0]);
    set("llama", &[("attention_dropout", 0.25.into())]);
    let pdrop = [
        ("attn_pdrop", 0.1.into()),
        ("embd_pdrop", 0.into()),
        ("resid_pdrop", 0.2.into()),
    ];
    set("gpt2", &pdrop);
    let [llama] = &warnings_of("llama")[..] else {
        panic!("one warning");
    };
    assert!(llama.contains("`attention_dropout` 0.25"), "{llama}");
    let [gpt2] = &warnings_of("gpt2")[..] else {
        panic!("one warning");
    };
    assert!(
        gpt2.contains("`attn_pdrop` 0.1, `resid_pdrop` 0.2:"),
        "{gpt2}"
    );
    let run = folder.run("generate --init gpt2 --prompt a --tokens 2 --tokenizer bytes");
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
}

/// Returns the files in a folder and its subfolders, except hidden ones.
#[cfg(unix)]
fn files_in(folder: &std::path::Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let entries = entries.map(|entry| entry.expect("an entry").path());
    let is_hidden = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with('.'))
    };
    let (folders, files): (Vec<_>, Vec<_>) = entries
        .filter(|path| !is_hidden(path))
        .partition(|path| path.is_dir());
    let nested = folders.iter().flat_map(|folder| files_in(folder));
    files
        .into_iter()
        .chain(nested.collect::<Vec<_>>())
        .collect()
}

/// Folders of other formats, where a checkpoint is expected, are named with the command that reads them.
#[test]
fn folders_of_models_are_no_checkpoints() {
    let folder = Folder::new();
    for (name, file, words) in [
        (
            "hub",
            "config.json",
            "Hugging Face's format, and not a checkpoint",
        ),
        (
            "peft",
            "adapter_config.json",
            "peft's format, and not a checkpoint",
        ),
        (
            "other",
            "notes.txt",
            "other is not a checkpoint, or does not exist",
        ),
    ] {
        std::fs::create_dir(folder.path(name)).expect("a writable folder");
        folder.write(&format!("{name}/{file}"), "{}");
        for command in ["generate --prompt x", "inspect"] {
            let run = folder.run(&format!("{command} {name}"));
            assert_eq!(run.code, 2, "{}", run.stderr);
            assert!(run.stderr.contains(words), "{command}: {}", run.stderr);
        }
    }
    let run = folder.run("generate nowhere --prompt x");
    let words = "nowhere is not a checkpoint, or does not exist";
    assert!(run.stderr.contains(words), "{}", run.stderr);
}
