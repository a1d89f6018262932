use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use burn::module::{Module, ModuleMapper, Param};
use burn::store::ModuleSnapshot;
use burn::store::burn_pack::Tensor as PackedTensor;
use burn::tensor::{Device, Int, Shape, Tensor};
use burn_fsdp_models::{
    Gpt, GptConfig, Llama, LlamaConfig, LlamaVariant, ModelError, ParameterSpec, WeightsFile,
};
use serde_json::json;
use tempfile::TempDir;

use crate::safetensors::Container;

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    dim: 8,
    heads: 2,
    vocab: 11,
    seq: 4,
};

fn file() -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("weights.safetensors");
    (folder, path)
}

fn logits(model: &Gpt, device: &Device) -> Vec<f32> {
    let tokens = Tensor::<2, Int>::from_data([[1, 5, 10, 3], [0, 2, 2, 9]], device);
    model
        .forward(tokens)
        .into_data()
        .try_to_vec()
        .expect("f32 logits")
}

/// Changes a valid file and returns the error of opening it.
fn open_changed(change: impl FnOnce(&mut Container)) -> ModelError {
    let (_folder, path) = file();
    let mut container = Container::of_model(&CONFIG);
    change(&mut container);
    container.write(&path);
    WeightsFile::open(path, CONFIG).expect_err("the file was made wrong")
}

#[test]
fn saved_weights_are_loaded() {
    let (_folder, path) = file();
    let device = Device::flex();
    let model = CONFIG.init(&device, 7).unwrap();
    model.save(&path).unwrap();
    let loaded = WeightsFile::open(&path, CONFIG)
        .unwrap()
        .load(&device)
        .unwrap();
    assert_eq!(logits(&model, &device), logits(&loaded, &device));
}

#[test]
fn equal_weights_become_equal_files() {
    let (_folder, path) = file();
    let model = CONFIG.init(&Device::flex(), 7).unwrap();
    let bytes = || {
        model.save(&path).unwrap();
        std::fs::read(&path).unwrap()
    };
    let first = bytes();
    assert!((0..8).all(|_| bytes() == first));
}

#[test]
fn loaded_weights_are_trained() {
    let (_folder, path) = file();
    let device = Device::flex().autodiff();
    CONFIG.init(&device, 7).unwrap().save(&path).unwrap();
    let loaded = WeightsFile::open(&path, CONFIG)
        .unwrap()
        .load(&device)
        .unwrap();
    let tokens = Tensor::<2, Int>::from_data([[1, 5, 10, 3]], &device);
    let grads = loaded.loss(tokens.clone(), tokens).backward();
    let grads = burn::optim::GradientsParams::from_grads(grads, &loaded);
    assert_eq!(grads.len(), CONFIG.parameters().len());
    assert_eq!(loaded.num_params(), CONFIG.num_params());
}

#[test]
fn files_have_the_names_and_shapes_of_pytorch() {
    let (_folder, path) = file();
    CONFIG
        .init(&Device::flex(), 7)
        .unwrap()
        .save(&path)
        .unwrap();
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    for spec in CONFIG.parameters() {
        assert_eq!(
            header[&spec.name]["shape"],
            json!(spec.shape),
            "{}",
            spec.name
        );
        assert_eq!(header[&spec.name]["dtype"], "F32", "{}", spec.name);
    }
}

#[test]
fn saving_replaces_a_file_and_leaves_no_other() {
    let (folder, path) = file();
    fs::write(&path, "something else").unwrap();
    CONFIG
        .init(&Device::flex(), 7)
        .unwrap()
        .save(&path)
        .unwrap();
    assert!(WeightsFile::open(&path, CONFIG).is_ok());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn saving_into_a_missing_folder_is_an_error() {
    let (_folder, path) = file();
    let path = path.with_file_name("missing").join("weights.safetensors");
    let model = CONFIG.init(&Device::flex(), 7).unwrap();
    let error = model.save(&path).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
}

#[test]
fn a_missing_file_is_named() {
    let (_folder, path) = file();
    let error = WeightsFile::open(&path, CONFIG).unwrap_err();
    assert!(matches!(error, ModelError::File { .. }), "{error}");
    assert!(error.to_string().contains("weights.safetensors"));
}

#[test]
fn the_table_matches_the_module() {
    let device = Device::flex();
    let (_folder, path) = file();
    let llama = LlamaConfig {
        layers: 2,
        dim: 8,
        heads: 4,
        kv_heads: 2,
        hidden: 12,
        vocab: 7,
        seq: 4,
        rope_base: 10_000,
        variant: LlamaVariant::PLAIN,
    };
    let paths = |collected: Vec<PackedTensor>| -> BTreeSet<(String, Vec<usize>)> {
        let path = |tensor: PackedTensor| (tensor.name.clone(), tensor.shape.to_vec());
        collected.into_iter().map(path).collect()
    };
    let table = |parameters: Vec<ParameterSpec>| -> BTreeSet<(String, Vec<usize>)> {
        let path = |spec: ParameterSpec| (spec.path.clone(), spec.module_shape());
        parameters.into_iter().map(path).collect()
    };
    let model = CONFIG.init(&device, 7).unwrap();
    let found = paths(model.collect(None, None, false));
    assert_eq!(found, table(CONFIG.parameters()));
    assert_eq!(found.len(), CONFIG.parameters().len());
    let model = llama.init(&device, 7).unwrap();
    let found = paths(model.collect(None, None, false));
    assert_eq!(found, table(llama.parameters()));
    assert_eq!(found.len(), llama.parameters().len());
    model.save(&path).unwrap();
    let loaded = WeightsFile::open(&path, llama).unwrap().load(&device);
    let logits = |model: &Llama| {
        let tokens = Tensor::<2, Int>::from_data([[1, 5, 6, 3]], &device);
        model.forward(tokens).into_data()
    };
    assert_eq!(logits(&loaded.unwrap()), logits(&model));
}

#[test]
fn a_module_of_other_parameters_is_not_written() {
    let (_folder, path) = file();
    let mut model = CONFIG.init(&Device::flex(), 7).unwrap();
    model = model.map(&mut HalveHead);
    let error = model.save(&path).unwrap_err();
    assert!(
        matches!(&error, ModelError::UnexpectedParameter { parameter, found, .. }
            if parameter == "head.weight" && found == &[4, 11]),
        "{error}"
    );
    assert!(!path.exists());
}

/// Keeps half of the last weight, as in a sharded model.
struct HalveHead;

impl ModuleMapper for HalveHead {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.shape().to_vec()[..] {
            [8, 11] => {
                let half = Tensor::zeros(Shape::from(vec![4, 11]), &param.device());
                Param::initialized(param.id, half)
            }
            _ => param,
        }
    }
}

#[test]
fn every_truncation_is_an_error() {
    let (_folder, path) = file();
    let bytes = Container::of_model(&CONFIG).to_bytes();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for len in [0, 1, 7, 8, 9, 8 + header / 2, 8 + header, bytes.len() - 1] {
        fs::write(&path, &bytes[..len]).unwrap();
        let error = WeightsFile::open(&path, CONFIG).unwrap_err();
        assert!(
            matches!(error, ModelError::MalformedWeights { .. }),
            "{len} bytes: {error}"
        );
        assert!(
            error.to_string().contains("truncated"),
            "{len} bytes: {error}"
        );
    }
}

#[test]
fn bytes_after_the_last_tensor_are_an_error() {
    let error = open_changed(|file| file.data.push(0));
    assert!(
        error.to_string().contains("its tensors end at byte"),
        "{error}"
    );
}

#[test]
fn an_enormous_header_is_not_read() {
    let (_folder, path) = file();
    let mut bytes = u64::MAX.to_le_bytes().to_vec();
    bytes.extend([b' '; 64]);
    fs::write(&path, bytes).unwrap();
    let error = WeightsFile::open(&path, CONFIG).unwrap_err();
    assert!(error.to_string().contains("its header claims"), "{error}");
}

#[test]
fn a_header_that_is_not_json_is_an_error() {
    let (_folder, path) = file();
    for header in [
        &b"\xff\xfe{}"[..],
        b"{\"wte.weight\":",
        b"[]",
        b"{\"wte.weight\":3}",
    ] {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        fs::write(&path, bytes).unwrap();
        let error = WeightsFile::open(&path, CONFIG).unwrap_err();
        assert!(
            matches!(error, ModelError::MalformedWeights { .. }),
            "{error}"
        );
    }
}

#[test]
fn offsets_past_the_end_are_named() {
    let error = open_changed(|file| {
        file.entry("lnf.bias")["data_offsets"] = json!([0, 1_000_000_000_000_u64]);
    });
    assert!(
        error.to_string().contains("tensor lnf.bias claims bytes"),
        "{error}"
    );
}

#[test]
fn offsets_that_run_backwards_are_named() {
    let error = open_changed(|file| file.entry("lnf.bias")["data_offsets"] = json!([64, 32]));
    assert!(
        error.to_string().contains("tensor lnf.bias claims bytes"),
        "{error}"
    );
}

#[test]
fn overlapping_tensors_are_named() {
    let error = open_changed(|file| {
        let first = file.entry("wpe.weight")["data_offsets"][0]
            .as_u64()
            .unwrap();
        let end = file.entry("wpe.weight")["data_offsets"][1]
            .as_u64()
            .unwrap();
        file.entry("wpe.weight")["data_offsets"] = json!([first - 4, end - 4]);
    });
    assert!(
        error
            .to_string()
            .contains("tensor wpe.weight starts at byte"),
        "{error}"
    );
}

#[test]
fn a_size_that_does_not_fit_the_shape_is_named() {
    let error = open_changed(|file| file.entry("head.weight")["shape"] = json!([10, 8]));
    assert!(
        error
            .to_string()
            .contains("tensor head.weight has 352 bytes"),
        "{error}"
    );
}

#[test]
fn a_shape_that_overflows_is_named() {
    let error = open_changed(|file| {
        file.entry("head.weight")["shape"] = json!([u64::MAX, u64::MAX]);
    });
    assert!(error.to_string().contains("tensor head.weight"), "{error}");
}

#[test]
fn a_tensor_that_occurs_twice_is_named() {
    let (_folder, path) = file();
    let container = Container::of_model(&CONFIG);
    let header = serde_json::to_string(&container.header).unwrap();
    let again = format!(
        "{{\"head.weight\":{},{}",
        container.header["head.weight"],
        &header[1..]
    );
    let mut bytes = (again.len() as u64).to_le_bytes().to_vec();
    bytes.extend(again.as_bytes());
    bytes.extend(&container.data);
    fs::write(&path, bytes).unwrap();
    let error = WeightsFile::open(path, CONFIG).expect_err("twice");
    assert!(
        error
            .to_string()
            .contains("tensor head.weight occurs twice"),
        "{error}"
    );
}

#[test]
fn a_missing_tensor_is_named() {
    let error = open_changed(|file| {
        let entry = file.header.remove("head.weight").unwrap();
        file.header.insert("tail.weight".to_owned(), entry);
    });
    assert!(
        matches!(&error, ModelError::MissingTensor { name, expected, .. }
            if name == "head.weight" && expected == &[11, 8]),
        "{error}"
    );
}

#[test]
fn an_extra_tensor_is_named() {
    let error = open_changed(|file| file.push("head.bias", &[11], &[0.0; 11]));
    assert!(
        matches!(&error, ModelError::UnexpectedTensor { name, found, .. }
            if name == "head.bias" && found == &[11]),
        "{error}"
    );
}

#[test]
fn a_wrong_shape_is_named() {
    let error = open_changed(|file| file.entry("head.weight")["shape"] = json!([8, 11]));
    assert!(
        matches!(&error, ModelError::WrongShape { name, expected, found, .. }
            if name == "head.weight" && expected == &[11, 8] && found == &[8, 11]),
        "{error}"
    );
}

#[test]
fn a_wrong_type_is_named() {
    let error = open_changed(|file| file.entry("head.weight")["dtype"] = json!("I32"));
    assert!(
        matches!(&error, ModelError::WrongDtype { name, found, .. }
            if name == "head.weight" && found == "I32"),
        "{error}"
    );
}

#[test]
fn weights_of_a_deeper_model_are_refused() {
    let (_folder, path) = file();
    Container::of_model(&GptConfig {
        layers: 3,
        ..CONFIG
    })
    .write(&path);
    let error = WeightsFile::open(path, CONFIG).unwrap_err();
    assert!(
        error.to_string().contains("tensor blocks.2.fc.bias"),
        "{error}"
    );
}
