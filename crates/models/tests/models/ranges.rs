//! Tests of parameters that are read in parts, in every type that files may have.

use std::fs;
use std::ops::Range;

use burn::store::ModuleSnapshot;
use burn::tensor::Device;
use burn_fsdp_models::{
    Architecture, Llama, LlamaConfig, LlamaVariant, ModelError, RopeScaling, WeightsFile,
};
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::hugging_face::CONFIG;
use crate::safetensors::Container;

/// Returns a folder with the model's weights in one file of this type, and their values as 32-bit floats.
fn folder(dtype: &str) -> (TempDir, Container) {
    let whole = Container::of_parameters(CONFIG.parameters());
    let mut stored = Container {
        header: Map::new(),
        data: Vec::new(),
    };
    let mut rounded = stored.clone();
    for (name, entry) in &whole.header {
        let offset = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize;
        let (bytes, _) = whole.data[offset(0)..offset(1)].as_chunks::<4>();
        let values: Vec<f32> = bytes
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
        let start = stored.data.len();
        let mut kept = Vec::new();
        for value in values {
            let (bytes, value) = match dtype {
                "BF16" => (
                    bf16::from_f32(value).to_le_bytes().to_vec(),
                    bf16::from_f32(value).to_f32(),
                ),
                "F16" => (
                    f16::from_f32(value).to_le_bytes().to_vec(),
                    f16::from_f32(value).to_f32(),
                ),
                _ => (value.to_le_bytes().to_vec(), value),
            };
            stored.data.extend(bytes);
            kept.push(value);
        }
        let entry =
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, stored.data.len()]});
        stored.header.insert(name.clone(), entry);
        rounded.push(name, &shape, &kept);
    }
    let folder = TempDir::new().expect("a temporary folder");
    stored.write(&folder.path().join("model.safetensors"));
    (folder, rounded)
}

/// Returns all parameters of a plain model, by path.
fn parameters(model: &Llama) -> Vec<(String, Vec<f32>)> {
    let tensors = model.collect(None, None, false).into_iter();
    let values = tensors.map(|tensor| {
        let bytes = tensor.to_bytes().expect("in memory");
        let (chunks, _) = bytes.as_chunks::<4>();
        let values = chunks
            .iter()
            .map(|bytes| f32::from_ne_bytes(*bytes))
            .collect();
        (tensor.name, values)
    });
    values.collect()
}

/// Returns the ranges of the uneven flat shards of `num` ranks.
fn shares(len: usize, num: usize) -> Vec<Range<usize>> {
    let chunk = len.div_ceil(num);
    (0..num)
        .map(|rank| (rank * chunk).min(len)..((rank + 1) * chunk).min(len))
        .collect()
}

#[test]
fn shares_together_are_the_whole_in_every_type() {
    for dtype in ["F32", "BF16", "F16"] {
        let (folder, rounded) = folder(dtype);
        let wanted = TempDir::new().expect("a temporary folder");
        rounded.write(&wanted.path().join("model.safetensors"));
        let wanted = WeightsFile::open(wanted.path(), CONFIG).unwrap();
        let wanted = parameters(&wanted.load(&Device::flex()).unwrap());
        let weights = WeightsFile::open(folder.path(), CONFIG).unwrap();
        let loaded = parameters(&weights.load(&Device::flex()).unwrap());
        assert_eq!(loaded, wanted, "{dtype}");
        for (path, whole) in &wanted {
            for num in [1, 2, 3, 4, 7] {
                let parts = shares(whole.len(), num).into_iter();
                let parts: Vec<f32> = parts
                    .flat_map(|range| weights.read(path, range).unwrap())
                    .collect();
                assert_eq!(&parts, whole, "{path} in {num} parts of {dtype}");
            }
        }
    }
}

/// For a matrix that is transposed in the file, a shard reads at most two more rows of the module.
#[test]
fn a_share_reads_its_own_bytes() {
    let (folder, _) = folder("BF16");
    for spec in CONFIG.parameters() {
        let len: usize = spec.shape.iter().product();
        for range in shares(len, 4) {
            let weights = WeightsFile::open(folder.path(), CONFIG).unwrap();
            weights.read(&spec.path, range.clone()).unwrap();
            let own = 2 * range.len() as u64;
            let more = if spec.is_transposed {
                2 * 2 * spec.shape[0] as u64
            } else {
                0
            };
            let read = weights.num_bytes_read();
            assert!(
                (own..=own + more).contains(&read),
                "{}: {read} for {own}",
                spec.name
            );
        }
    }
}

#[test]
fn columns_are_read_alone_if_they_are_rows_of_the_file() {
    for dtype in ["F32", "BF16"] {
        let (folder, _) = folder(dtype);
        let weights = WeightsFile::open(folder.path(), CONFIG).unwrap();
        for spec in CONFIG.parameters() {
            let shape = spec.module_shape();
            let &[rows, width] = &shape[..] else {
                assert!(weights.read_columns(&spec.path, 0..1).is_err());
                continue;
            };
            let whole = weights.read(&spec.path, 0..rows * width).unwrap();
            for columns in shares(width, 3) {
                let before = weights.num_bytes_requested();
                let read = weights.read_columns(&spec.path, columns.clone()).unwrap();
                let own = whole.chunks(width).flat_map(|row| &row[columns.clone()]);
                let own: Vec<f32> = own.copied().collect();
                assert_eq!(read, own, "{}", spec.path);
                let size = if dtype == "F32" { 4 } else { 2 };
                let requested = weights.num_bytes_requested() - before;
                let expected = if spec.is_transposed {
                    own.len()
                } else {
                    rows * width
                };
                assert_eq!(requested, (size * expected) as u64, "{}", spec.path);
            }
            assert!(weights.read_columns(&spec.path, 0..width + 1).is_err());
        }
        assert!(weights.read_columns("nowhere.weight", 0..1).is_err());
    }
}

#[test]
fn unreadable_ranges_are_named() {
    let (folder, _) = folder("F32");
    let weights = WeightsFile::open(folder.path(), CONFIG).unwrap();
    let unknown = weights.read("nowhere.weight", 0..1).unwrap_err();
    assert!(unknown.to_string().contains("nowhere.weight"), "{unknown}");
    let beyond = weights.read("norm.gamma", 10..17).unwrap_err();
    assert!(beyond.to_string().contains("it has 16"), "{beyond}");
    assert_eq!(
        weights.read("norm.gamma", 16..16).unwrap(),
        Vec::<f32>::new()
    );
    // No longer the file that was checked when it was opened.
    let (other, _) = self::folder("BF16");
    fs::copy(
        other.path().join("model.safetensors"),
        folder.path().join("model.safetensors"),
    )
    .unwrap();
    let changed = weights.read("norm.gamma", 0..4).unwrap_err();
    assert!(matches!(changed, ModelError::File { .. }), "{changed}");
    let container = Container::of_parameters(CONFIG.parameters());
    let path = other.path().join("model.safetensors");
    let mut wrong = container;
    wrong
        .entry("model.norm.weight")
        .insert("dtype".to_owned(), json!("I32"));
    wrong.write(&path);
    let error = WeightsFile::open(&path, CONFIG).unwrap_err();
    assert!(matches!(error, ModelError::WrongDtype { .. }), "{error}");
}

#[test]
fn a_blank_model_has_the_sizes_and_zeros() {
    let model = CONFIG.blank(&Device::flex()).unwrap();
    let init = CONFIG.init(&Device::flex(), 1).unwrap();
    for ((path, blank), (other, drawn)) in parameters(&model).iter().zip(parameters(&init)) {
        assert_eq!((path, blank.len()), (&other, drawn.len()));
        let expected = if path.ends_with("gamma") { 1.0 } else { 0.0 };
        assert!(blank.iter().all(|value| *value == expected), "{path}");
    }
}

fn config_json() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 13, "max_position_embeddings": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
    })
}

fn read_config(json: &Value) -> Result<LlamaConfig, ModelError> {
    let folder = TempDir::new().expect("a temporary folder");
    fs::write(folder.path().join("config.json"), json.to_string()).expect("writable");
    LlamaConfig::from_hugging_face(folder.path())
}

#[test]
fn sizes_come_from_config_json() {
    assert_eq!(read_config(&config_json()).unwrap(), CONFIG);
    // As transformers 5 writes it.
    let mut newer = config_json();
    let fields = newer.as_object_mut().unwrap();
    fields.remove("rope_theta");
    fields.remove("rope_scaling");
    fields.insert(
        "rope_parameters".to_owned(),
        json!({"rope_theta": 500000.0, "rope_type": "default"}),
    );
    fields.insert("head_dim".to_owned(), json!(4));
    fields.remove("num_key_value_heads");
    let config = read_config(&newer).unwrap();
    assert_eq!((config.rope_base, config.kv_heads), (500_000, 4));
}

#[test]
fn unsupported_llama_settings_are_named() {
    let changes = [
        ("model_type", json!("mamba")),
        ("hidden_act", json!("mish")),
        ("attention_bias", json!("yes")),
        ("logit_scale", json!(0.5)),
        ("partial_rotary_factor", json!(0.5)),
        ("quantization_config", json!({"quant_method": "gptq"})),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0}),
        ),
        ("rope_scaling", json!({"type": "mrope", "factor": 8.0})),
        ("rope_scaling", json!({"type": "linear", "factor": -8.0})),
        ("rope_theta", json!(1e4 + 0.5)),
        ("rms_norm_eps", json!(0.0)),
        ("head_dim", json!(7)),
        ("hidden_size", json!("16")),
        ("num_attention_heads", json!(0)),
    ];
    for (setting, value) in changes {
        let mut json = config_json();
        json[setting] = value.clone();
        let message = read_config(&json).expect_err(setting).to_string();
        assert!(!message.contains("safetensors"), "{message}");
        let is_shown = !value.is_string() || message.contains(&value.to_string());
        assert!(is_shown, "{setting}: {message}");
        let names = [
            setting,
            "low_freq_factor",
            "rope_type",
            "norm_epsilon",
            "string",
            "heads",
            "elements",
        ];
        assert!(
            names.iter().any(|name| message.contains(name)),
            "{setting}: {message}"
        );
    }
    let missing = LlamaConfig::from_hugging_face("nowhere").unwrap_err();
    assert!(matches!(missing, ModelError::File { .. }), "{missing}");
}

/// Transformers does not read these names for these families, so it would compute something else.
#[test]
fn rotary_settings_that_transformers_ignores_are_named() {
    let read = |family: &str, changes: Value| {
        let mut json = json!({
            "model_type": family, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 32
        });
        if family == "gemma3_text" {
            json["head_dim"] = json!(8);
            json["num_key_value_heads"] = json!(1);
        }
        let changes = changes.as_object().expect("an object").clone();
        json.as_object_mut().expect("an object").extend(changes);
        read_config(&json)
    };
    let linear = |name: &str| json!({"rope_scaling": {name: "linear", "factor": 8.0}});
    let yarn = |more: Value| {
        let mut yarn = json!({"rope_type": "yarn", "factor": 4.0});
        let more = more.as_object().expect("an object").clone();
        yarn.as_object_mut().expect("an object").extend(more);
        json!({"rope_scaling": yarn, "original_max_position_embeddings": 8})
    };
    let nested = |name: &str, number: f64| json!({"rope_parameters": {"rope_type": "default", name: number}});
    for (family, changes, word) in [
        ("gpt_neox", json!({"rope_theta": 50}), "rotary_emb_base"),
        (
            "gpt_neox",
            json!({"partial_rotary_factor": 0.5}),
            "rotary_pct",
        ),
        (
            "gpt_neox",
            nested("rotary_pct", 0.5),
            "partial_rotary_factor",
        ),
        ("gpt_neox", nested("rotary_emb_base", 50.0), "rope_theta"),
        ("gemma3_text", linear("type"), "rope_type"),
        (
            "gemma3_text",
            yarn(json!({})),
            "original_max_position_embeddings",
        ),
        (
            "gemma3_text",
            yarn(json!({"original_max_position_embeddings": 8, "truncate": false})),
            "truncate",
        ),
    ] {
        let message = read(family, changes).expect_err(word).to_string();
        assert!(message.contains(word), "{word}: {message}");
    }
    for (family, changes) in [
        (
            "gpt_neox",
            json!({"rotary_emb_base": 50, "rope_theta": 50, "rotary_pct": 0.5}),
        ),
        (
            "gpt_neox",
            json!({"rope_theta": 10000, "partial_rotary_factor": 0.25}),
        ),
        ("gpt_neox", nested("partial_rotary_factor", 0.5)),
        ("gpt_neox", nested("rope_theta", 50.0)),
        ("gemma3_text", linear("rope_type")),
        (
            "gemma3_text",
            yarn(json!({"original_max_position_embeddings": 8})),
        ),
        ("llama", linear("type")),
    ] {
        let read = read(family, changes.clone());
        assert!(read.is_ok(), "{changes}: {read:?}");
    }
}

/// Every choice that a file may make is the same after writing and reading.
#[test]
fn config_json_is_read_back() {
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    for (has_tied_head, norm_epsilon, rope_scaling) in [
        (false, 1e-5, RopeScaling::None),
        (true, 1e-6, llama3),
        (true, 1e-5, RopeScaling::Linear { factor: 2.5 }),
    ] {
        let variant = LlamaVariant {
            has_tied_head,
            norm_epsilon,
            rope_scaling,
            ..LlamaVariant::PLAIN
        };
        let config = LlamaConfig { variant, ..CONFIG };
        let json = config.to_hugging_face();
        assert_eq!(read_config(&json).unwrap(), config);
        let saved = serde_json::to_value(config).unwrap();
        assert_eq!(
            serde_json::from_value::<LlamaConfig>(saved).unwrap(),
            config
        );
    }
    // Transformers' own epsilon for a file without one, and sizes that were saved before there were variants.
    let mut json = config_json();
    json.as_object_mut().unwrap().remove("rms_norm_eps");
    assert_eq!(read_config(&json).unwrap().variant.norm_epsilon, 1e-6);
    let mut saved = serde_json::to_value(CONFIG).unwrap();
    saved.as_object_mut().unwrap().remove("variant");
    assert_eq!(
        serde_json::from_value::<LlamaConfig>(saved).unwrap(),
        CONFIG
    );
}

/// A file of a few bytes must not build models until memory is exhausted.
#[test]
fn excessive_layer_counts_are_rejected() {
    let mut json = config_json();
    json["num_hidden_layers"] = json!(1_000_000_000_000_u64);
    let message = read_config(&json).expect_err("too many").to_string();
    assert!(message.contains("layers"), "{message}");
}
