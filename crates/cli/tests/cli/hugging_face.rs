//! Models in Hugging Face's format: trained, adapted, written, and used for generation.
//!
//! Tests that run transformers print that they are skipped if it is not installed. `BURN_FSDP_PYTHON` names a Python
//! that has it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_fsdp_models::{
    Architecture, Batches, Gpt2Config, LanguageModel, LlamaConfig, LlamaVariant, TokenStream,
    WeightsFile,
};
use serde_json::Value;

use crate::command::{Folder, Run, crate_folder, last_report, losses, relative_difference};
use crate::skipped::python;

pub(crate) const TOKENIZER: &str = include_str!("../../../models/tests/models/tokenizer.json");

/// Three query heads per key head, and a head that is not tied.
pub(crate) const LLAMA: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 24,
    heads: 6,
    kv_heads: 2,
    hidden: 20,
    vocab: 300,
    seq: 16,
    rope_base: 100,
    variant: LlamaVariant::PLAIN,
};

pub(crate) const GPT2: Gpt2Config = Gpt2Config {
    layers: 2,
    dim: 24,
    heads: 3,
    hidden: 28,
    vocab: 300,
    seq: 16,
};

/// The arguments of all training runs here. Each step has another batch.
const TRAIN: &str = "--warmup 0 --batch 4 --seq 6 --lr 0.01 --eps 0.01 --sample 8";

/// A mapper that scales matrices: with initial weights, all tokens have about the same likelihood.
struct Larger(f32);

impl ModuleMapper for Larger {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let factor = if D == 1 { 1.0 } else { self.0 };
        param.map(|weight| weight * factor)
    }
}

/// Creates the folders `llama` and `gpt2`, with random weights.
pub(crate) fn folders() -> Folder {
    let folder = Folder::new();
    let device = Device::flex();
    for (name, factor) in [("llama", 8.0), ("other", 7.0)] {
        std::fs::create_dir(folder.path(name)).expect("a writable folder");
        let model = LLAMA.init(&device, 5).expect("valid sizes");
        let model = model.map(&mut Larger(factor));
        let saved = model.save_hugging_face(folder.path(name));
        saved.expect("a writable folder");
    }
    std::fs::create_dir(folder.path("gpt2")).expect("a writable folder");
    let model = GPT2.init(&device, 5).expect("valid sizes");
    let model = model.map(&mut Larger(8.0));
    let saved = model.save_hugging_face(folder.path("gpt2"));
    saved.expect("a writable folder");
    folder
}

/// Trains with the common arguments, except those that are overridden.
pub(crate) fn train(folder: &Folder, arguments: &str) -> Run {
    let given: Vec<&str> = arguments.split_whitespace().collect();
    let common: Vec<&str> = TRAIN.split_whitespace().collect();
    let common = common.chunks(2).filter(|pair| !given.contains(&pair[0]));
    let common = common.flatten().copied().collect::<Vec<_>>().join(" ");
    folder.run(&format!("train {common} {arguments}"))
}

pub(crate) fn report(folder: &Folder, arguments: &str) -> Value {
    let run = train(folder, &format!("{arguments} --json"));
    assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
    last_report(&run)
}

pub(crate) fn ok(folder: &Folder, arguments: &str) -> Run {
    let run = folder.run(arguments);
    assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
    run
}

/// Returns the losses of plain Burn on one rank, with the whole batch.
pub(crate) fn plainly<M: LanguageModel>(
    mut model: M,
    steps: usize,
    vocab: usize,
    device: &Device,
) -> Vec<f64> {
    let batches = Batches {
        stream: TokenStream::Synthetic { vocab },
        batch: 4,
        seq: 6,
    };
    let optimizer = AdamWConfig::new()
        .with_epsilon(0.01)
        .with_weight_decay(0.01);
    let mut optimizer = optimizer.with_cautious_weight_decay(false).init();
    let losses = (0..steps).map(|step| {
        let (inputs, targets) = batches.rows(step, 0..4).to_tensors(device);
        let loss = model.mean_loss(inputs, targets);
        let value = loss.clone().into_scalar::<f32>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.01, model.clone(), gradients);
        f64::from(value)
    });
    losses.collect()
}

pub(crate) fn loaded<A: Architecture>(folder: &Folder, name: &str, sizes: A) -> A::Model {
    let device = Device::flex().autodiff();
    let weights = WeightsFile::open(folder.path(name), sizes).expect("it fits the model");
    weights.load(&device).expect("readable")
}

pub(crate) fn assert_close(want: &[f64], got: &[f64], of: &str) {
    let difference = relative_difference(want, got);
    println!("{of}: at most {difference:e} apart");
    assert!(difference < 1e-5, "{of}: {difference:e}: {want:?}, {got:?}");
}

#[test]
fn losses_match_plain_burn() {
    let folder = folders();
    let device = Device::flex().autodiff();
    let llama = plainly(loaded(&folder, "llama", LLAMA), 3, 300, &device);
    let gpt2 = plainly(loaded(&folder, "gpt2", GPT2), 3, 300, &device);
    for (model, want) in [("llama", llama), ("gpt2", gpt2)] {
        for extra in [
            "--ranks 1",
            "--ranks 2",
            "--ranks 4",
            "--ranks 2 --strategy no-shard",
            "--ranks 4 --strategy hybrid-shard",
            "--ranks 2 --activation-checkpointing --accumulate 2",
            "--ranks 2 --unit-size 1000",
            "--ranks 2 --compile",
            "--ranks 4 --compile --activation-checkpointing --certify",
        ] {
            let run = format!("--model {model} --init {model} --synthetic --steps 3 {extra}");
            let report = report(&folder, &run);
            assert_close(&want, &losses(&report), &format!("{model} {extra}"));
            assert_eq!(report["seq"], 6);
        }
    }
    // By default, the architecture comes from config.json.
    let report = report(&folder, "--init gpt2 --synthetic --steps 1");
    assert_eq!(report["model"], "GPT-2");
    assert_eq!(report["params"], GPT2.num_params());
}

#[test]
fn models_train_in_low_precision() {
    let folder = folders();
    for model in ["llama", "gpt2"] {
        let losses_of = |precision: &str| {
            let run = format!("--init {model} --synthetic --steps 2 --precision {precision}");
            losses(&report(&folder, &run))
        };
        let difference = relative_difference(&losses_of("f32"), &losses_of("bf16"));
        assert!(difference > 0.0 && difference < 0.02, "{difference}");
    }
}

/// The values of a saved step's adapter factors, by Burn's paths, which are written into a module.
pub(crate) struct Factors<'a> {
    pub(crate) folder: &'a Folder,
    pub(crate) path: Vec<String>,
}

impl ModuleMapper for Factors<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        if !path.contains(".lora.") {
            return param;
        }
        let values = self.folder.tensor("factors.safetensors", &path);
        param.map(|old| {
            let data = burn::tensor::TensorData::new(values, old.shape());
            Tensor::from_data(data, &old.device()).require_grad()
        })
    }
}

/// The paths of the matrices in blocks.
struct Matrices {
    path: Vec<String>,
    of_blocks: &'static str,
    found: Vec<String>,
}

impl ModuleVisitor for Matrices {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        if D == 2 && path.starts_with(self.of_blocks) {
            self.found.push(path);
        }
    }
}

/// Returns the losses of Burn's own adapters, which start with the factors of a step.
fn adapted_plainly<A: Architecture>(folder: &Folder, name: &str, sizes: A) -> Vec<f64> {
    let device = Device::flex().autodiff();
    let model = loaded(folder, name, sizes);
    let mut matrices = Matrices {
        path: Vec::new(),
        of_blocks: A::BLOCKS.trim_end_matches('*'),
        found: Vec::new(),
    };
    model.visit(&mut matrices);
    let adapters = Lora::new(2, 3.0).set_param_group(ParamGroup::from_paths(matrices.found));
    let path = Vec::new();
    let model = model
        .apply_lora(adapters)
        .map(&mut Factors { folder, path });
    plainly(model, 4, 300, &device)
}

#[test]
fn adapters_train_like_burns() {
    let folder = folders();
    for model in ["llama", "gpt2"] {
        let run = format!("--init {model} --lora 2 --lora-alpha 3 --synthetic");
        // With a learning rate of zero, the step contains the initial factors.
        report(
            &folder,
            &format!("{run} --steps 1 --lr 0 --weight-decay 0 --checkpoint-dir {model}-begun"),
        );
        ok(
            &folder,
            &format!("consolidate {model}-begun factors.safetensors --overwrite"),
        );
        let want = match model {
            "llama" => adapted_plainly(&folder, model, LLAMA),
            _ => adapted_plainly(&folder, model, GPT2),
        };
        let whole = losses(&report(
            &folder,
            &format!("--init {model} --synthetic --steps 1"),
        ));
        for extra in [
            "--ranks 1",
            "--ranks 2",
            "--ranks 4",
            "--ranks 1 --compile",
            "--ranks 2 --compile",
            "--ranks 4 --compile --strategy shard-grad-op --certify",
        ] {
            let report = report(&folder, &format!("{run} --steps 4 {extra}"));
            let got = losses(&report);
            assert_close(&whole, &got[..1], &format!("{model} {extra}, first step"));
            assert_close(&want, &got, &format!("{model} {extra}"));
            let trained = report["trained_params"].as_u64().expect("a number");
            assert!(trained < report["params"].as_u64().expect("a number") / 2);
        }
    }
}

#[test]
fn only_adapters_are_saved_and_resumed() {
    let folder = folders();
    let run = "--init llama --lora 2 --synthetic";
    let want = losses(&report(&folder, &format!("{run} --steps 5")));
    report(
        &folder,
        &format!("{run} --steps 3 --checkpoint-dir steps --ranks 1"),
    );
    let inspected = ok(&folder, "inspect steps --json");
    let inspected: Value = serde_json::from_str(&inspected.stdout).expect("JSON");
    let tensors = inspected["tensors"].as_array().expect("tensors");
    // Two factors for each of seven matrices in two blocks, and two moments of each factor.
    assert_eq!(tensors.len(), 3 * 2 * 7 * 2);
    let name = |tensor: &Value| tensor["name"].as_str().expect("a name").to_owned();
    assert!(tensors.iter().all(|tensor| name(tensor).contains(".lora.")));
    // A compiled step writes the same names, and each engine resumes from both.
    report(
        &folder,
        &format!("{run} --steps 3 --checkpoint-dir compiled --ranks 2 --compile"),
    );
    let compiled = ok(&folder, "inspect compiled --json");
    let compiled: Value = serde_json::from_str(&compiled.stdout).expect("JSON");
    let names = |of: &Value| -> BTreeSet<String> {
        let tensors = of["tensors"].as_array().expect("tensors");
        tensors.iter().map(name).collect()
    };
    assert_eq!(names(&compiled), names(&inspected));
    for (from, ranks, extra) in [
        ("steps", 1, ""),
        ("steps", 2, ""),
        ("steps", 4, ""),
        ("steps", 2, "--compile"),
        ("compiled", 1, ""),
        ("compiled", 4, "--compile"),
    ] {
        std::fs::remove_dir_all(folder.path("again")).ok();
        copy_folder(&folder.path(from), &folder.path("again"));
        let again =
            format!("{run} --steps 5 --checkpoint-dir again --resume --ranks {ranks} {extra}");
        let got = losses(&report(&folder, &again));
        assert_close(&want[3..], &got, &format!("{from}, {ranks} ranks {extra}"));
    }
    let refused = train(
        &folder,
        "--init other --lora 2 --synthetic --steps 5 --checkpoint-dir compiled --resume --compile",
    );
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(
        refused.stderr.contains("belong to weights with checksum"),
        "{}",
        refused.stderr
    );
    for (arguments, problem) in [
        (
            "--init other --lora 2 --synthetic --steps 5",
            "belong to weights with checksum",
        ),
        (
            "--init llama --lora 3 --synthetic --steps 5",
            "was saved with adapters of --lora 2 --lora-alpha 4, but this run trains adapters of --lora 3",
        ),
        (
            "--init llama --synthetic --steps 5",
            "this run trains the whole model",
        ),
    ] {
        let run = train(
            &folder,
            &format!("{arguments} --checkpoint-dir steps --resume"),
        );
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(run.stderr.contains(problem), "{}", run.stderr);
    }
    report(
        &folder,
        "--init llama --synthetic --steps 1 --checkpoint-dir whole",
    );
    let run = train(
        &folder,
        &format!("{run} --steps 2 --checkpoint-dir whole --resume"),
    );
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr.contains("was saved with the whole model"),
        "{}",
        run.stderr
    );
}

pub(crate) fn copy_folder(from: &Path, into: &Path) {
    std::fs::create_dir_all(into).expect("a writable folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = into.join(entry.file_name());
        if entry.file_type().expect("a type").is_dir() {
            copy_folder(&entry.path(), &target)
        } else {
            std::fs::copy(entry.path(), target).expect("copied");
        }
    }
}

#[test]
fn text_is_read_in_the_tokens_of_the_folder() {
    let folder = folders();
    folder.write("llama/tokenizer.json", TOKENIZER);
    let text = "the cat sat on the mat; the other cat sat there, too.\n";
    folder.write("text", text.repeat(200));
    let of_folder = report(&folder, "--init llama --data text --steps 4");
    assert!(
        of_folder["data"]
            .as_str()
            .expect("text")
            .contains(" tokens, "),
        "{}",
        of_folder["data"]
    );
    let sample = of_folder["sample"].as_str().expect("a sample");
    // The sample continues the held-out text, which the tokenizer decodes unchanged.
    let held_out = &text.repeat(200)[text.len() * 200 - text.len() * 10..];
    assert!(sample.starts_with(&held_out[..20]), "{sample:?}");
    let finite = of_folder["eval_loss"].as_f64().expect("a number");
    assert!(finite.is_finite());
    // The same tokenizer, specified by name; without it, bytes.
    folder.write("named.json", TOKENIZER);
    let named = report(
        &folder,
        "--init llama --data text --tokenizer named.json --steps 4",
    );
    assert_eq!(losses(&named), losses(&of_folder));
    let bytes = report(&folder, "--init gpt2 --data text --steps 4");
    assert!(!bytes["data"].as_str().expect("text").contains("tokens"));
    // A GPT has as many tokens as the tokenizer.
    let gpt = report(
        &folder,
        "--layers 1 --dim 16 --heads 2 --data text --tokenizer named.json --steps 2",
    );
    assert_eq!(gpt["vocab"], 300);
}

#[test]
fn invalid_combinations_are_named_in_the_error() {
    let folder = folders();
    folder.write("tokenizer.json", TOKENIZER);
    folder.write("empty", "");
    folder.write("text", "the cat sat on the mat\n".repeat(100));
    std::fs::create_dir(folder.path("bert")).expect("a writable folder");
    folder.write("bert/config.json", r#"{"model_type": "bert"}"#);
    for (arguments, problem) in [
        ("--model llama --synthetic", "pass --init FOLDER"),
        (
            "--model llama --init missing --synthetic",
            "--init missing: No such file",
        ),
        (
            "--model gpt2 --init llama --synthetic",
            "--model is gpt2, but --init has a llama",
        ),
        ("--init bert --synthetic", "`model_type` is \"bert\""),
        (
            "--init llama --synthetic --dim 24",
            "--dim does not apply to the model of --init",
        ),
        (
            "--init llama --synthetic --vocab 300",
            "--vocab does not apply to the model of --init",
        ),
        (
            "--init llama --synthetic --seq 17",
            "--seq 17 is longer than the 16 positions",
        ),
        ("--init llama --synthetic --lora 0", "--lora is 0"),
        (
            "--init llama --synthetic --lora 18446744073709551615",
            "it must be at most the hidden size of the model",
        ),
        (
            "--init llama --synthetic --lora 2 --lora-alpha -1",
            "--lora-alpha is -1",
        ),
        (
            "--init llama --synthetic --lora 2 --save-init begun.safetensors",
            "--save-init cannot be used with --lora",
        ),
        ("--synthetic --lora 2", "--init"),
        ("--init llama --synthetic --lora-alpha 2", "--lora"),
        (
            "--synthetic --tokenizer tokenizer.json",
            "cannot be used with",
        ),
        ("--data text --tokenizer missing.json", "missing.json"),
        ("--data text --tokenizer empty", "empty: not a tokenizer"),
        (
            "--data text --tokenizer tokenizer.json --vocab 299",
            "its ids go up to 299, but the model has a vocabulary of 299",
        ),
    ] {
        let run = train(&folder, &format!("{arguments} --steps 1"));
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(run.stderr.contains(problem), "{arguments}: {}", run.stderr);
        assert!(run.stdout.is_empty(), "{arguments}: {}", run.stdout);
    }
}

#[test]
fn a_consolidated_folder_is_read_back() {
    let folder = folders();
    for model in ["llama", "gpt2"] {
        let run = format!("--init {model} --synthetic");
        let want = losses(&report(
            &folder,
            &format!("{run} --steps 3 --checkpoint-dir {model}-steps"),
        ));
        assert_eq!(want.len(), 3);
        for (name, extra) in [("one", ""), ("many", "--max-shard-size 5KB")] {
            let out = format!("{model}-{name}");
            ok(
                &folder,
                &format!("consolidate {model}-steps {out} --format hugging-face {extra}"),
            );
            let config = |name: &str| -> Value {
                serde_json::from_str(&folder.read(&format!("{name}/config.json"))).expect("JSON")
            };
            assert_eq!(config(&out), config(model));
            // The loss of a later step, from the written weights.
            let resumed = format!(
                "{run} --steps 4 --checkpoint-dir {model}-{name}-steps --resume --lr 0 --weight-decay 0"
            );
            copy_folder(
                &folder.path(&format!("{model}-steps")),
                &folder.path(&format!("{model}-{name}-steps")),
            );
            let next = losses(&report(&folder, &resumed));
            // With a learning rate of zero, the last step has that loss again.
            let unchanged = format!("--init {out} --synthetic --steps 4 --lr 0 --weight-decay 0");
            let all = losses(&report(&folder, &unchanged));
            assert_eq!(all[3..], next, "{out}: the same bits");
        }
    }
    let refused = folder.run("consolidate llama-steps again --format hugging-face --names burn");
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    report(
        &folder,
        "--layers 1 --dim 16 --heads 2 --synthetic --steps 1 --checkpoint-dir gpt-steps",
    );
    let refused = folder.run("consolidate gpt-steps again --format hugging-face");
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(
        refused
            .stderr
            .contains("transformers does not have this command's GPT")
            && refused.stderr.contains("--format"),
        "{}",
        refused.stderr
    );
    assert!(!folder.path("again").exists());
}

#[test]
fn text_is_generated_by_any_number_of_ranks() {
    let folder = folders();
    folder.write("llama/tokenizer.json", TOKENIZER);
    folder.write("gpt2/tokenizer.json", TOKENIZER);
    for model in ["llama", "gpt2"] {
        // Longer than the longest sequence of 16 tokens.
        for extra in ["--temperature 0", "--seed 3", ""] {
            let generate = |ranks: usize| {
                let mut command = folder.command(&format!(
                    "generate --init {model} --tokens 20 --ranks {ranks} {extra}"
                ));
                command.args(["--prompt", "the cat sat"]);
                let run = Run::of(command.output().expect("the command starts"));
                assert_eq!(run.code, 0, "{}", run.stderr);
                assert_eq!(run.stderr, "");
                run.stdout
            };
            let want = generate(1);
            assert!(want.starts_with("the cat sat"), "{want}");
            assert!(want.len() > 15, "{want}");
            for ranks in 2..=4 {
                assert_eq!(generate(ranks), want, "{model} {extra} {ranks} ranks");
            }
        }
    }
}

/// Continues "the" with the likeliest tokens, on two ranks.
fn generate(folder: &Folder, arguments: &str) -> Run {
    folder.run(&format!(
        "generate {arguments} --prompt the --tokens 6 --temperature 0 --ranks 2"
    ))
}

/// Returns the generated text.
fn generated(folder: &Folder, arguments: &str) -> String {
    let run = generate(folder, arguments);
    assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
    run.stdout
}

#[test]
fn generation_stops_at_the_folders_end_tokens() {
    let folder = folders();
    folder.write("llama/tokenizer.json", TOKENIZER);
    let text = || generated(&folder, "--init llama").trim_end().to_owned();
    assert!(text().len() > "the".len());
    let ends: Vec<String> = (0..300).map(|id| id.to_string()).collect();
    let ends = format!("{{\"eos_token_id\": [{}]}}", ends.join(", "));
    folder.write("llama/generation_config.json", &ends);
    assert_eq!(text(), "the");
    folder.write("llama/generation_config.json", "{\"eos_token_id\": -1}");
    let refused = folder.run("generate --init llama --prompt the");
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(
        refused.stderr.contains("generation_config.json"),
        "{}",
        refused.stderr
    );
}

/// Writes the step of `whole` with the tokenizer and token ids of its base.
fn copies_tokenizer_and_token_ids(folder: &Folder, whole: &str) {
    let config = folder.read("llama/config.json");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["eos_token_id"] = Value::from([299, 298].to_vec());
    folder.write("llama/config.json", config.to_string());
    folder.write("llama/generation_config.json", "{\"temperature\": 0.5}");
    folder.write("llama/notes.txt", "ours alone");
    ok(
        folder,
        "consolidate whole copied --format hugging-face --init llama",
    );
    // The folder has a tokenizer, so no other is needed.
    assert_eq!(generated(folder, "--init copied"), whole);
    let got: Value = serde_json::from_str(&folder.read("copied/config.json")).expect("JSON");
    assert_eq!(got["eos_token_id"], config["eos_token_id"]);
    assert_eq!(
        folder.read("copied/generation_config.json"),
        "{\"temperature\": 0.5}"
    );
    assert!(!folder.path("copied/notes.txt").exists());
    for (arguments, problem) in [
        ("elsewhere --init llama", "leave out one of them"),
        ("elsewhere --format hugging-face --init nowhere", "nowhere"),
        (
            "elsewhere --format hugging-face --init gpt2",
            "different sizes from the step's model",
        ),
        (
            "copied --format hugging-face",
            "--overwrite replaces only empty folders",
        ),
    ] {
        let refused = folder.run(&format!("consolidate whole {arguments} --overwrite"));
        assert_eq!(refused.code, 2, "{}", refused.stderr);
        assert!(refused.stderr.contains(problem), "{}", refused.stderr);
    }
}

/// The merged weights equal the base plus the scaled product of the factors in the folder for peft.
#[test]
fn adapters_are_merged_into_the_weights() {
    let folder = folders();
    folder.write("llama/tokenizer.json", TOKENIZER);
    for (name, extra) in [("llama", "--lora-alpha 5"), ("gpt2", "--compile --ranks 2")] {
        let run = format!("--init {name} --lora 2 --synthetic {extra} --steps 4 --lr 0.1");
        report(&folder, &format!("{run} --checkpoint-dir {name}-steps"));
        let write = format!("consolidate {name}-steps --format hugging-face --init {name}");
        ok(&folder, &format!("{write} {name}-peft"));
        let said = ok(&folder, &format!("{write} {name}-merged --merge"));
        assert!(said.stdout.contains("tensors"), "{}", said.stdout);
        let file = format!("{name}-merged/model.safetensors");
        let config = folder.read(&format!("{name}-peft/adapter_config.json"));
        let config: Value = serde_json::from_str(&config).expect("JSON");
        let scale = config["lora_alpha"].as_f64().expect("a number") as f32 / 2.0;
        let (header, _) = folder.weights(&format!("{name}/model.safetensors"));
        let header: Value = serde_json::from_str(&header).expect("a header");
        let mut num_changed = 0;
        for (tensor, entry) in header.as_object().expect("tensors") {
            if tensor == "__metadata__" {
                continue;
            }
            let base = folder.tensor(&format!("{name}/model.safetensors"), tensor);
            let merged = folder.tensor(&file, tensor);
            let module = tensor.trim_end_matches(".weight");
            let (peft, _) = folder.weights(&format!("{name}-peft/adapter_model.safetensors"));
            if !peft.contains(&format!("base_model.model.{module}.lora_A.weight")) {
                assert_eq!(base, merged, "{tensor}");
                continue;
            }
            let factor = |letter: &str| {
                let factor = format!("base_model.model.{module}.lora_{letter}.weight");
                folder.tensor(&format!("{name}-peft/adapter_model.safetensors"), &factor)
            };
            // Factors of peft are `[rank, in]` and `[out, rank]`. GPT-2's weights are `[in, out]`, others `[out, in]`.
            let (a, b) = (factor("A"), factor("B"));
            let width = entry["shape"][1].as_u64().expect("a width") as usize;
            let (num_in, is_turned) = (a.len() / 2, name == "gpt2");
            for (place, (base, merged)) in base.iter().zip(&merged).enumerate() {
                let (row, column) = (place / width, place % width);
                let (output, input) = if is_turned {
                    (column, row)
                } else {
                    (row, column)
                };
                let product: f32 = (0..2)
                    .map(|r| a[r * num_in + input] * b[output * 2 + r])
                    .sum();
                let want = base + scale * product;
                assert!(
                    (want - merged).abs() <= 1e-5 * want.abs().max(1.0),
                    "{tensor}: {want} {merged}"
                );
            }
            assert_ne!(base, merged, "{tensor}");
            num_changed += 1;
        }
        assert_eq!(num_changed, if name == "llama" { 14 } else { 8 });
        let prompt = "--prompt the --tokens 6 --temperature 0 --tokenizer bytes";
        let merged = ok(&folder, &format!("generate --init {name}-merged {prompt}"));
        let adapted = ok(
            &folder,
            &format!("generate {name}-steps --init {name} {prompt}"),
        );
        assert_eq!(merged.stdout, adapted.stdout, "{name}");
    }
    assert_eq!(folder.read("llama-merged/tokenizer.json"), TOKENIZER);
    let write = "consolidate llama-steps again --format hugging-face --merge";
    for (arguments, word) in [
        (write.to_owned(), "--init"),
        (
            format!("{write} --init other"),
            "belong to weights with checksum",
        ),
        (
            "consolidate llama-steps again --format hugging-face --init other".to_owned(),
            "belong to weights with checksum",
        ),
        (
            "consolidate llama-steps llama-merged --format hugging-face --merge --init llama"
                .to_owned(),
            "llama-merged already exists",
        ),
        (
            "consolidate llama-steps llama-steps/step-000004/x --format hugging-face --merge --init llama"
                .to_owned(),
            "llama-steps",
        ),
    ] {
        let run = folder.run(&arguments);
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(run.stderr.contains(word), "{arguments}: {}", run.stderr);
    }
    assert!(!folder.path("again").exists());
    let hidden = folder
        .names()
        .into_iter()
        .filter(|name| name.starts_with('.'));
    assert_eq!(hidden.count(), 0);
}

#[test]
fn text_is_generated_from_steps_and_adapters() {
    let folder = folders();
    folder.write("llama/tokenizer.json", TOKENIZER);
    folder.write("text", "the cat sat on the mat\n".repeat(300));
    let run = "--init llama --data text --steps 12 --lr 0.05";
    report(&folder, &format!("{run} --checkpoint-dir whole"));
    report(&folder, &format!("{run} --lora 4 --checkpoint-dir adapted"));
    let text = |arguments: &str| generated(&folder, arguments);
    let base = text("--init llama");
    let whole = text("whole --tokenizer llama/tokenizer.json");
    let adapted = text("adapted --init llama");
    assert_ne!(whole, base);
    assert_ne!(adapted, base);
    // Write the model, and generate from it again.
    ok(&folder, "consolidate whole written --format hugging-face");
    assert_eq!(
        text("--init written --tokenizer llama/tokenizer.json"),
        whole
    );
    copies_tokenizer_and_token_ids(&folder, &whole);
    // Each rank reads its rows and columns of a saved step.
    let placed = text("whole --tokenizer llama/tokenizer.json --weights placed");
    assert_eq!(placed, whole);
    for (arguments, problem) in [
        (
            "adapted --init llama --weights placed",
            "only `consolidate --merge` adds to the weights; use --weights whole",
        ),
        ("adapted", "has only adapters; pass --init FOLDER"),
        (
            "adapted --init other",
            "was trained on the tokens of a tokenizer",
        ),
        (
            "adapted --init other --tokenizer llama/tokenizer.json",
            "belong to weights with checksum",
        ),
        (
            "whole --init llama",
            "--init cannot be used with a step of a whole model",
        ),
        ("whole", "was trained on the tokens of a tokenizer"),
        ("--init gpt2 --ranks 0", "--ranks"),
        ("", "--init"),
    ] {
        let run = generate(&folder, arguments);
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(run.stderr.contains(problem), "{arguments}: {}", run.stderr);
    }
}

pub(crate) fn peer(python: &Path, folder: &Folder, arguments: &str) -> String {
    let script = crate_folder().join("tests/cli/transformers_peer.py");
    let output = Command::new(python)
        .arg(script)
        .args(arguments.split_whitespace())
        .current_dir(folder.path(""))
        .output()
        .expect("Python starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {error}");
    let text = String::from_utf8(output.stdout).expect("text");
    text.lines().last().unwrap_or_default().to_owned()
}

pub(crate) fn peer_loss(python: &Path, folder: &Folder, arguments: &str) -> Vec<f64> {
    let loss = peer(python, folder, &format!("loss {arguments}"));
    vec![serde_json::from_str(&loss).expect("a number")]
}

/// Weights from transformers are trained here and read back by transformers.
#[test]
fn weights_round_trip_through_transformers() {
    let Some(python) = python("torch, transformers, peft") else {
        return;
    };
    let folder = Folder::new();
    for kind in ["llama", "gpt2"] {
        peer(&python, &folder, &format!("make {kind} {kind}"));
        assert!(folder.names_in(kind).len() > 3, "several files");
        let theirs = peer_loss(&python, &folder, kind);
        let still = "--lr 0 --weight-decay 0 --steps 1 --synthetic";
        for ranks in [1, 2, 4] {
            let ours = losses(&report(
                &folder,
                &format!("--init {kind} {still} --ranks {ranks}"),
            ));
            assert_close(
                &theirs,
                &ours,
                &format!("{kind} of transformers, {ranks} ranks"),
            );
        }
        report(
            &folder,
            &format!("--init {kind} --synthetic --steps 4 --checkpoint-dir {kind}-steps"),
        );
        for (out, extra) in [("one", ""), ("many", "--max-shard-size 8KB")] {
            let out = format!("{kind}-{out}");
            ok(
                &folder,
                &format!("consolidate {kind}-steps {out} --format hugging-face {extra}"),
            );
            let ours = losses(&report(&folder, &format!("--init {out} {still}")));
            let theirs = peer_loss(&python, &folder, &out);
            assert_close(&theirs, &ours, &format!("{out} in transformers"));
        }
        report(
            &folder,
            &format!(
                "--init {kind} --lora 3 --synthetic --steps 4 --checkpoint-dir {kind}-adapted"
            ),
        );
        ok(
            &folder,
            &format!("consolidate {kind}-adapted {kind}-peft --format hugging-face"),
        );
        copy_folder(
            &folder.path(&format!("{kind}-adapted")),
            &folder.path(&format!("{kind}-again")),
        );
        let base = peer_loss(&python, &folder, kind);
        let theirs = peer_loss(&python, &folder, &format!("{kind} {kind}-peft"));
        // The four steps have different batches. With 300 tokens, step 25 has the same batch as step 0.
        let run = format!("--init {kind} --lora 3 {still} --checkpoint-dir {kind}-again --resume");
        let ours = losses(&report(&folder, &run.replace("--steps 1", "--steps 26")));
        assert_close(&theirs, &ours[21..], &format!("{kind} in peft"));
        assert!((base[0] - theirs[0]).abs() > 1e-3, "adapters do something");
    }
}

#[test]
fn transformers_chooses_the_same_tokens() {
    let Some(python) = python("torch, transformers, peft") else {
        return;
    };
    let folder = folders();
    for model in ["llama", "gpt2"] {
        let theirs = peer(&python, &folder, &format!("generate {model} 116,104,101 9"));
        let theirs: Vec<i64> = serde_json::from_str(&theirs).expect("tokens");
        let sizes = folder.path(model);
        let ours = match model {
            "llama" => greedy(LLAMA, &sizes),
            _ => greedy(GPT2, &sizes),
        };
        assert_eq!(ours, theirs, "{model}");
    }
}

/// Returns the likeliest tokens according to the library, with a cache.
fn greedy<A: Architecture>(sizes: A, folder: &Path) -> Vec<i64> {
    let device = Device::flex();
    let weights = WeightsFile::open(folder, sizes).expect("it fits the model");
    let model = weights.load(&device).expect("readable");
    let mut tokens = vec![116, 104, 101];
    let mut cache = burn_fsdp_models::KeyValueCache::new();
    for _ in 0..9 {
        let new = tokens[cache.num_tokens()..].to_vec();
        let shape = [1, new.len()];
        let input = burn::tensor::TensorData::new(new, shape);
        let logits = model.next_logits(Tensor::from_data(input, &device), &mut cache);
        tokens.push(logits.argmax(1).into_scalar::<i64>());
    }
    tokens
}

/// A resumed run of a folder needs the folder for the sizes and the tokenizer. The text that it reads is compared.
#[test]
fn resuming_needs_the_folder_and_names_differences() {
    let folder = folders();
    let run = "--synthetic --checkpoint-dir run";
    report(&folder, &format!("{run} --init llama --steps 2"));
    let more = format!("{run} --init llama --steps 4 --resume");
    let same = train(&folder, &format!("{more} --save-init init"));
    assert_eq!(same.code, 0, "{}", same.stderr);
    for words in ["has no effect", "was saved"] {
        assert!(!same.stderr.contains(words), "{}", same.stderr);
    }
    let longer = train(&folder, &format!("{more} --seq 12"));
    let sentence = "warning: --seq is 12, but was 6 when step 4 was saved";
    assert!(longer.stderr.contains(sentence), "{}", longer.stderr);
    let without = train(&folder, &format!("{run} --steps 4 --resume"));
    assert_eq!(without.code, 2, "another model: {}", without.stderr);
}

/// The files of the model cannot be replaced, but new files can be added to the folder.
#[test]
fn outputs_never_replace_files_of_the_folder() {
    let folder = folders();
    let run = "--init llama --synthetic --steps 1";
    for output in ["--metrics", "--trace", "--curve", "--save-init"] {
        for file in ["config.json", "model.safetensors"] {
            let path = folder.path(&format!("llama/{file}"));
            let before = std::fs::read(&path).expect("a file");
            let refused = train(&folder, &format!("{run} {output} llama/{file}"));
            assert_eq!(refused.code, 2, "{output} {file}: {}", refused.stderr);
            assert!(refused.stderr.contains("--init"), "{}", refused.stderr);
            assert!(
                before == std::fs::read(&path).expect("a file"),
                "{output} {file}"
            );
        }
    }
    // Twice, because the second run replaces the first run's file.
    for _ in 0..2 {
        report(
            &folder,
            &format!("{run} --curve llama/loss.svg --metrics llama/lines.jsonl"),
        );
    }
}

#[test]
fn rules_of_generation_are_named() {
    let folder = folders();
    let generate = "generate --init llama --tokenizer bytes --prompt a --tokens 2";
    folder.write(
        "llama/generation_config.json",
        r#"{"repetition_penalty": 1.0}"#,
    );
    assert!(!ok(&folder, generate).stderr.contains("penalty"));
    folder.write(
        "llama/generation_config.json",
        r#"{"repetition_penalty": 1.5}"#,
    );
    assert!(ok(&folder, generate).stderr.contains("repetition_penalty"));
}
