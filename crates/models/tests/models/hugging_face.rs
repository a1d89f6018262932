//! Tests of Llama and GPT-2 against Hugging Face's transformers.

use std::fs;
use std::path::Path;
use std::process::Command;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::{
    Gpt2Config, Llama, LlamaConfig, LlamaVariant, ModelError, ParameterSpec, RopeScaling,
    WeightsFile,
};
use serde::Deserialize;
use serde_json::json;
use tempfile::TempDir;

use crate::safetensors::Container;
use crate::skipped::python;

pub(crate) const CONFIG: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 16,
    heads: 4,
    kv_heads: 2,
    hidden: 24,
    vocab: 13,
    seq: 8,
    rope_base: 10_000,
    variant: LlamaVariant::PLAIN,
};

/// A configuration like Llama 3.2, with a tied head and scaled positions. Of its four rotations, one is fast, one is
/// between, and two are slow.
pub(crate) const TIED: LlamaConfig = LlamaConfig {
    heads: 2,
    kv_heads: 1,
    variant: LlamaVariant {
        has_tied_head: true,
        norm_epsilon: 1e-6,
        rope_scaling: RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 128,
        },
        ..LlamaVariant::PLAIN
    },
    ..CONFIG
};

const LINEAR: LlamaConfig = LlamaConfig {
    variant: LlamaVariant {
        rope_scaling: RopeScaling::Linear { factor: 3.0 },
        ..LlamaVariant::PLAIN
    },
    ..CONFIG
};

/// The losses that `hugging_face_losses.py --formulas` prints with transformers 5.23.
const LOSSES: [(LlamaConfig, f32); 3] = [(CONFIG, 3.1335824), (TIED, 2.984528), (LINEAR, 2.999174)];

pub(crate) fn tokens() -> Tensor<2, Int> {
    let tokens = [[1, 2, 3, 4, 5, 6, 7, 8], [0, 12, 3, 11, 3, 9, 2, 2]];
    Tensor::from_data(tokens, &Device::flex())
}

pub(crate) fn targets() -> Tensor<2, Int> {
    let targets = [[2, 3, 4, 5, 6, 7, 8, 9], [12, 3, 11, 3, 9, 2, 2, 0]];
    Tensor::from_data(targets, &Device::flex())
}

fn loss(model: &Llama) -> f32 {
    model.loss(tokens(), targets()).into_scalar()
}

/// Writes a file in which a formula of each tensor's number by name gives its values.
fn file_of_formulas(mut parameters: Vec<ParameterSpec>, path: &Path) {
    parameters.sort_by(|a, b| a.name.cmp(&b.name));
    Container::of_parameters(parameters).write(path);
}

#[test]
fn weights_of_hugging_face_have_its_loss() {
    for (config, theirs) in LOSSES {
        let folder = TempDir::new().expect("a temporary folder");
        file_of_formulas(
            config.parameters(),
            &folder.path().join("model.safetensors"),
        );
        let json = config.to_hugging_face().to_string();
        fs::write(folder.path().join("config.json"), json).expect("a writable folder");
        let read = LlamaConfig::from_hugging_face(folder.path()).expect("such a Llama");
        let weights = WeightsFile::open(folder.path(), read).expect("the folder fits the model");
        let model = weights.load(&Device::flex()).expect("readable");
        let found = loss(&model);
        assert!(
            (found / theirs - 1.0).abs() < 1e-5,
            "{found}, there {theirs}"
        );
    }
}

#[derive(Deserialize)]
struct Printed {
    loss: f32,
    logits: Vec<f32>,
}

/// Asserts that transformers reads a folder and computes this loss and these logits.
fn assert_transformers_agrees(python: &Path, folder: &Path, ours: f32, logits: Tensor<3>) {
    let script = "tests/models/hugging_face_losses.py";
    let script = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the test"))
        .join(script);
    let command = Command::new(python).arg(script).arg(folder).output();
    let output = command.expect("Python starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let theirs: Printed = serde_json::from_slice(&output.stdout).expect("a loss and logits");
    let difference = (ours / theirs.loss - 1.0).abs();
    assert!(difference < 1e-5, "{ours}, there {}", theirs.loss);
    let logits = logits.into_data().try_to_vec::<f32>().expect("floats");
    assert_eq!(logits.len(), theirs.logits.len());
    for (ours, theirs) in logits.iter().zip(&theirs.logits) {
        assert!((ours - theirs).abs() < 1e-5, "{ours}, there {theirs}");
    }
}

#[test]
fn hugging_face_reads_saved_weights() {
    let Some(python) = python("torch, transformers") else {
        return;
    };
    for config in [CONFIG, TIED, LINEAR] {
        let folder = TempDir::new().expect("a temporary folder");
        let model = config.init(&Device::flex(), 3).expect("valid sizes");
        model
            .save_hugging_face(folder.path())
            .expect("a writable folder");
        assert_transformers_agrees(
            &python,
            folder.path(),
            loss(&model),
            model.forward(tokens()),
        );
    }
    let folder = TempDir::new().expect("a temporary folder");
    let model = GPT2.init(&Device::flex(), 3).expect("valid sizes");
    model
        .save_hugging_face(folder.path())
        .expect("a writable folder");
    let loss = model.loss(tokens(), targets()).into_scalar();
    assert_transformers_agrees(&python, folder.path(), loss, model.forward(tokens()));
}

const GPT2: Gpt2Config = Gpt2Config {
    layers: 2,
    dim: 12,
    heads: 3,
    hidden: 20,
    vocab: 13,
    seq: 8,
};

/// The loss that `hugging_face_losses.py --formulas` prints with transformers 5.23.
const GPT2_LOSS: f32 = 3.0404897;

/// The files have the names that transformers saves, or the names of the first published files, which also contain
/// the masks.
#[test]
fn a_gpt2_of_hugging_face_has_its_loss() {
    for is_bare in [false, true] {
        let folder = TempDir::new().expect("a temporary folder");
        let mut parameters = GPT2.parameters();
        parameters.sort_by(|a, b| a.name.cmp(&b.name));
        let mut container = Container::of_parameters(parameters);
        if is_bare {
            let renamed = std::mem::take(&mut container.header).into_iter();
            let renamed = renamed.map(|(name, entry)| {
                let bare = name.strip_prefix("transformer.").expect("theirs");
                (bare.to_owned(), entry)
            });
            container.header = renamed.collect();
            container.push("h.0.attn.bias", &[1, 1, 8, 8], &[1.0; 64]);
        }
        container.write(&folder.path().join("model.safetensors"));
        let json = GPT2.to_hugging_face().to_string();
        fs::write(folder.path().join("config.json"), json).expect("a writable folder");
        let config = Gpt2Config::from_hugging_face(folder.path()).expect("a GPT-2");
        assert_eq!(config, GPT2);
        let weights = WeightsFile::open(folder.path(), config).expect("it fits the model");
        let model = weights.load(&Device::flex()).expect("readable");
        assert_eq!(model.num_params(), GPT2.num_params());
        let found: f32 = model.loss(tokens(), targets()).into_scalar();
        let difference = (found / GPT2_LOSS - 1.0).abs();
        assert!(difference < 1e-5, "{found}, there {GPT2_LOSS}");
    }
}

#[test]
fn unsupported_gpt2_settings_are_named() {
    for (setting, value) in [
        ("model_type", json!("llama")),
        ("activation_function", json!("relu")),
        ("layer_norm_epsilon", json!(1e-6)),
        ("tie_word_embeddings", json!(false)),
        ("scale_attn_weights", json!(false)),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("add_cross_attention", json!(true)),
        ("n_head", json!(5)),
        ("n_inner", json!(0)),
        ("n_embd", json!("12")),
    ] {
        let folder = TempDir::new().expect("a temporary folder");
        let mut json = GPT2.to_hugging_face();
        json[setting] = value;
        fs::write(folder.path().join("config.json"), json.to_string()).expect("writable");
        let message = Gpt2Config::from_hugging_face(folder.path());
        let message = message.expect_err(setting).to_string();
        let names = [setting, "heads", "hidden", "string"];
        assert!(names.iter().any(|name| message.contains(name)), "{message}");
    }
    // An untied head, and two tensors with the same name.
    for extra in ["lm_head.weight", "wte.weight"] {
        let folder = TempDir::new().expect("a temporary folder");
        let path = folder.path().join("model.safetensors");
        let mut container = Container::of_parameters(GPT2.parameters());
        container.push(extra, &[13, 12], &[0.5; 13 * 12]);
        container.write(&path);
        let error = WeightsFile::open(&path, GPT2).expect_err("one too many");
        assert!(
            matches!(error, ModelError::UnexpectedTensor { .. }),
            "{error}"
        );
    }
}

/// A tied head and the embedding are a single parameter, and its gradient is the sum of both uses.
#[test]
fn a_tied_head_is_one_parameter() {
    let device = Device::flex().autodiff();
    let model = TIED.init(&device, 4).expect("valid sizes");
    assert_eq!(model.num_params(), TIED.num_params());
    let names = TIED.parameters();
    assert!(names.iter().all(|spec| spec.name != "lm_head.weight"));
    let apart = LlamaVariant {
        has_tied_head: false,
        ..TIED.variant
    };
    let apart = LlamaConfig {
        variant: apart,
        ..TIED
    };
    assert_eq!(
        apart.num_params(),
        TIED.num_params() + TIED.vocab * TIED.dim
    );
    // A file with a head in addition to the embedding belongs to another model.
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("model.safetensors");
    file_of_formulas(apart.parameters(), &path);
    let error = WeightsFile::open(&path, TIED).expect_err("a head too many");
    assert!(error.to_string().contains("lm_head.weight"), "{error}");
}
