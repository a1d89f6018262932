//! Llama beside the one of Hugging Face's transformers.

use std::path::Path;
use std::process::Command;

use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::{Llama, LlamaConfig, WeightsFile};
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
};

/// What `hugging_face_losses.py` prints with transformers 5.23.
const LOSS: f32 = 3.1335824;

fn loss(model: &Llama) -> f32 {
    let device = Device::flex();
    let tokens = Tensor::<2, Int>::from_data(
        [[1, 2, 3, 4, 5, 6, 7, 8], [0, 12, 3, 11, 3, 9, 2, 2]],
        &device,
    );
    let targets = Tensor::<2, Int>::from_data(
        [[2, 3, 4, 5, 6, 7, 8, 9], [12, 3, 11, 3, 9, 2, 2, 0]],
        &device,
    );
    model.loss(tokens, targets).into_scalar()
}

/// Each tensor a formula of its number by name.
fn file_of_formulas(path: &Path) {
    let mut parameters = CONFIG.parameters();
    parameters.sort_by(|a, b| a.name.cmp(&b.name));
    Container::of_parameters(parameters).write(path);
}

#[test]
fn weights_of_hugging_face_have_its_loss() {
    let folder = TempDir::new().expect("a temporary folder");
    file_of_formulas(&folder.path().join("model.safetensors"));
    let weights = WeightsFile::open(folder.path(), CONFIG).expect("the folder fits the model");
    let model = weights.load(&Device::flex()).expect("readable");
    let found = loss(&model);
    assert!((found / LOSS - 1.0).abs() < 1e-5, "{found}, there {LOSS}");
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
    let folder = TempDir::new().expect("a temporary folder");
    let model = CONFIG.init(&Device::flex(), 3).expect("valid sizes");
    model
        .save(folder.path().join("model.safetensors"))
        .expect("a writable folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/hugging_face_losses.py");
    let output = Command::new(&python)
        .arg(script)
        .arg(folder.path())
        .output()
        .expect("Python starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let printed = String::from_utf8_lossy(&output.stdout);
    let theirs: f32 = printed.trim().parse().expect("a loss");
    let ours = loss(&model);
    assert!((ours / theirs - 1.0).abs() < 1e-5, "{ours}, there {theirs}");
}
