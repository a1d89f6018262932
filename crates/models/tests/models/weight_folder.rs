//! Tests of folders in Hugging Face's form, valid and invalid.

use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::{Gpt, GptConfig, ModelError, WeightsFile};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::safetensors::Container;

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    dim: 8,
    heads: 2,
    vocab: 11,
    seq: 4,
};

const INDEX: &str = "model.safetensors.index.json";

/// Returns the model in two files, divided in the middle.
fn folder() -> (TempDir, Value) {
    let folder = TempDir::new().expect("a temporary folder");
    let whole = Container::of_model(&CONFIG);
    let mut map = Map::new();
    let mut write = |file: &str, names: &[String]| {
        let mut part = Container {
            header: Map::new(),
            data: Vec::new(),
        };
        for name in names {
            let entry = &whole.header[name];
            let offset = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize;
            let start = part.data.len();
            part.data.extend(&whole.data[offset(0)..offset(1)]);
            let mut entry = entry.clone();
            entry["data_offsets"] = json!([start, part.data.len()]);
            part.header.insert(name.clone(), entry);
            map.insert(name.clone(), json!(file));
        }
        part.write(&folder.path().join(file));
    };
    let names: Vec<String> = whole.header.keys().cloned().collect();
    let (first, second) = names.split_at(names.len() / 2);
    write("model-00001-of-00002.safetensors", first);
    write("model-00002-of-00002.safetensors", second);
    let index = json!({"metadata": {"total_size": whole.data.len()}, "weight_map": map});
    write_index(folder.path(), &index);
    (folder, index)
}

fn write_index(folder: &Path, index: &Value) {
    fs::write(folder.join(INDEX), index.to_string()).expect("a writable folder");
}

fn refused(folder: &TempDir) -> ModelError {
    WeightsFile::open(folder.path(), CONFIG).expect_err("the folder was made wrong")
}

fn logits(model: &Gpt) -> Vec<f32> {
    let tokens = Tensor::<2, Int>::from_data([[1, 5, 10, 3]], &Device::flex());
    model
        .forward(tokens)
        .into_data()
        .try_to_vec()
        .expect("f32 logits")
}

#[test]
fn several_files_are_one_model() {
    let (folder, _) = folder();
    let file = folder.path().join("whole");
    Container::of_model(&CONFIG).write(&file);
    let device = Device::flex();
    let load = |path: &Path| {
        WeightsFile::open(path, CONFIG)
            .expect("fits")
            .load(&device)
            .expect("readable")
    };
    let model = load(folder.path());
    assert_eq!(model.num_params(), CONFIG.num_params());
    assert_eq!(logits(&model), logits(&load(&file)));
}

#[test]
fn a_folder_without_weights_is_named() {
    let folder = TempDir::new().expect("a temporary folder");
    let error = refused(&folder).to_string();
    assert!(error.contains("neither model.safetensors nor"), "{error}");
}

/// As in transformers, an index next to the single file is not read, whatever it contains.
#[test]
fn a_single_file_takes_precedence_over_an_index() {
    let mut other = Container::of_model(&CONFIG);
    let third = other.data.iter_mut().skip(2).step_by(4);
    third.for_each(|byte| *byte ^= 1);
    let device = Device::flex();
    let alone = TempDir::new().expect("a temporary folder");
    other.write(&alone.path().join("model.safetensors"));
    let load = |folder: &TempDir| {
        let weights = WeightsFile::open(folder.path(), CONFIG).expect("fits");
        logits(&weights.load(&device).expect("readable"))
    };
    let (folder, _) = folder();
    assert_ne!(load(&folder), load(&alone));
    other.write(&folder.path().join("model.safetensors"));
    assert_eq!(load(&folder), load(&alone));
    write_index(
        folder.path(),
        &json!({"weight_map": {"wte.weight": "gone"}}),
    );
    assert_eq!(load(&folder), load(&alone));
    fs::write(folder.path().join(INDEX), "no JSON").expect("a writable folder");
    assert_eq!(load(&folder), load(&alone));
}

#[test]
fn files_outside_of_the_folder_are_not_opened() {
    for name in [
        "../secret",
        "/etc/passwd",
        "..",
        "",
        ".hidden",
        "a/b",
        "a\\b",
        "c:d",
    ] {
        let (folder, mut index) = folder();
        index["weight_map"]["wte.weight"] = json!(name);
        write_index(folder.path(), &index);
        let error = refused(&folder).to_string();
        assert!(
            error.contains("is not a plain file name"),
            "{name:?}: {error}"
        );
    }
}

/// A change that makes an index invalid.
type Change<'a> = &'a dyn Fn(&mut Value);

#[test]
fn an_index_that_does_not_fit_its_files_is_refused() {
    let (first, second) = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    );
    let swapped = |index: &mut Value| {
        let file = if index["weight_map"]["wte.weight"] == first {
            second
        } else {
            first
        };
        index["weight_map"]["wte.weight"] = json!(file);
    };
    let missing = |index: &mut Value| {
        let map = index["weight_map"].as_object_mut().expect("a map");
        map.remove("wte.weight");
    };
    let extra = |index: &mut Value| index["weight_map"]["more"] = json!(first);
    let gone = |index: &mut Value| index["weight_map"]["more"] = json!("gone");
    let number = |index: &mut Value| index["weight_map"]["wte.weight"] = json!(3);
    let cases: [(Change<'_>, &str); 5] = [
        (&swapped, "tensor wte.weight"),
        (&missing, "has tensor wte.weight"),
        (&extra, "lacks tensor more"),
        (&gone, "gone"),
        (&number, "the index is invalid"),
    ];
    for (change, text) in cases {
        let (folder, mut index) = folder();
        change(&mut index);
        write_index(folder.path(), &index);
        let error = refused(&folder).to_string();
        assert!(error.contains(text), "{text}: {error}");
        assert!(!error.contains("valid safetensors"), "{error}");
    }
    let (folder, _) = folder();
    fs::write(folder.path().join(INDEX), "{\"weight_map\":").expect("a writable folder");
    let error = refused(&folder).to_string();
    assert!(error.contains("the index is invalid"), "{error}");
}
