//! Llama beside the one of Hugging Face's transformers.

use std::fs;
use std::path::Path;
use std::process::Command;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::{Llama, LlamaConfig, LlamaVariant, RopeScaling, WeightsFile};
use serde::Deserialize;
use tempfile::TempDir;

use crate::safetensors::Container;

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

/// As Llama 3.2 has it: the head is the embedding's table, positions are stretched. One turn of four is fast, one between, two
/// are slow.
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

fn tokens() -> Tensor<2, Int> {
    let tokens = [[1, 2, 3, 4, 5, 6, 7, 8], [0, 12, 3, 11, 3, 9, 2, 2]];
    Tensor::from_data(tokens, &Device::flex())
}

fn loss(model: &Llama) -> f32 {
    let targets = [[2, 3, 4, 5, 6, 7, 8, 9], [12, 3, 11, 3, 9, 2, 2, 0]];
    let targets = Tensor::<2, Int>::from_data(targets, &Device::flex());
    model.loss(tokens(), targets).into_scalar()
}

/// Each tensor a formula of its number by name.
fn file_of_formulas(config: &LlamaConfig, path: &Path) {
    let mut parameters = config.parameters();
    parameters.sort_by(|a, b| a.name.cmp(&b.name));
    Container::of_parameters(parameters).write(path);
}

#[test]
fn weights_of_hugging_face_have_its_loss() {
    for (config, theirs) in LOSSES {
        let folder = TempDir::new().expect("a temporary folder");
        file_of_formulas(&config, &folder.path().join("model.safetensors"));
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

/// Where transformers is not installed, it says so and does nothing. `BURN_FSDP_PYTHON` names a Python
/// that has it.
#[test]
fn hugging_face_reads_what_was_saved() {
    let python = std::env::var_os("BURN_FSDP_PYTHON").unwrap_or_else(|| "python3".into());
    let found = Command::new(&python)
        .args(["-c", "import torch, transformers"])
        .output();
    if !found.is_ok_and(|output| output.status.success()) {
        println!("skipped: {python:?} cannot import transformers");
        return;
    }
    for config in [CONFIG, TIED, LINEAR] {
        let folder = TempDir::new().expect("a temporary folder");
        let model = config.init(&Device::flex(), 3).expect("valid sizes");
        model
            .save_hugging_face(folder.path())
            .expect("a writable folder");
        let script = "tests/models/hugging_face_losses.py";
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
        let output = Command::new(&python)
            .arg(script)
            .arg(folder.path())
            .output()
            .expect("Python starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let theirs: Printed = serde_json::from_slice(&output.stdout).expect("a loss and logits");
        let ours = loss(&model);
        let difference = (ours / theirs.loss - 1.0).abs();
        assert!(difference < 1e-5, "{ours}, there {}", theirs.loss);
        let logits = model.forward(tokens()).into_data().try_to_vec::<f32>();
        let logits = logits.expect("floats");
        assert_eq!(logits.len(), theirs.logits.len());
        for (ours, theirs) in logits.iter().zip(&theirs.logits) {
            assert!((ours - theirs).abs() < 1e-5, "{ours}, there {theirs}");
        }
    }
}

/// A tied head is the embedding's table, once: its gradient is that of both uses.
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
    // A file with a head beside the table is of another model.
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("model.safetensors");
    file_of_formulas(&apart, &path);
    let error = WeightsFile::open(&path, TIED).expect_err("a head too many");
    assert!(error.to_string().contains("lm_head.weight"), "{error}");
}
