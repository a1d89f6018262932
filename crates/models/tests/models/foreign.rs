//! Tests of folders from other programs: names, forms and settings that are accepted, or refused with their true
//! cause.

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use burn_fsdp_models::{
    Gpt2Config, LlamaConfig, LlamaVariant, ModelConfig, ModelError, ParameterSpec, RopeScaling,
    WeightsFile,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::hugging_face::{CONFIG, TIED};
use crate::safetensors::Container;

const GPT2: Gpt2Config = Gpt2Config {
    layers: 2,
    dim: 12,
    heads: 3,
    hidden: 48,
    vocab: 13,
    seq: 8,
};

fn folder() -> TempDir {
    TempDir::new().expect("a temporary folder")
}

/// Writes the table's tensors under other names.
fn renamed(parameters: Vec<ParameterSpec>, folder: &Path, rename: impl Fn(&str) -> String) {
    let mut container = Container::of_parameters(parameters);
    let header = std::mem::take(&mut container.header).into_iter();
    container.header = header.map(|(name, entry)| (rename(&name), entry)).collect();
    container.write(&folder.join("model.safetensors"));
}

#[test]
fn prefixes_of_wrappers_are_named() {
    for prefix in [
        "module.",
        "_orig_mod.",
        "base_model.model.",
        "module._orig_mod.",
        "model.",
    ] {
        let llama = folder();
        renamed(CONFIG.parameters(), llama.path(), |name| {
            format!("{prefix}{name}")
        });
        let llama = WeightsFile::open(llama.path(), CONFIG).expect_err(prefix);
        let gpt2 = folder();
        renamed(GPT2.parameters(), gpt2.path(), |name| {
            let bare = name.strip_prefix("transformer.").expect("theirs");
            format!("{prefix}{bare}")
        });
        let gpt2 = WeightsFile::open(gpt2.path(), GPT2).expect_err(prefix);
        for error in [llama, gpt2] {
            let text = error.to_string();
            assert!(text.contains(&format!("`{prefix}`")), "{prefix}: {text}");
            assert!(text.contains("rename the tensors"), "{text}");
            assert!(matches!(error, ModelError::WrappedNames { .. }), "{text}");
        }
    }
    // Not a wrapper: a tensor is missing.
    let other = folder();
    renamed(CONFIG.parameters(), other.path(), |name| {
        name.replace("model.norm.weight", "model.final.weight")
    });
    let error = WeightsFile::open(other.path(), CONFIG).expect_err("another name");
    assert!(matches!(error, ModelError::MissingTensor { .. }), "{error}");
}

#[test]
fn the_format_of_a_folder_without_safetensors_is_named() {
    for (file, word) in [
        ("pytorch_model.bin", "PyTorch's form"),
        ("pytorch_model.bin.index.json", "PyTorch's form"),
        ("adapter_model.safetensors", "a PEFT adapter"),
        ("model-00001-of-00002.safetensors", "without its index"),
        ("consolidated.00.pth", "Meta's form"),
        ("tf_model.h5", "TensorFlow's form"),
    ] {
        let folder = folder();
        fs::write(folder.path().join(file), "").expect("writable");
        let error = WeightsFile::open(folder.path(), CONFIG).expect_err(file);
        let text = error.to_string();
        assert!(text.contains(file) && text.contains(word), "{text}");
        assert!(!text.contains("valid safetensors"), "{text}");
        // It is ignored if there are also supported files.
        renamed(CONFIG.parameters(), folder.path(), str::to_owned);
        WeightsFile::open(folder.path(), CONFIG).expect("weights");
    }
}

#[test]
fn files_that_were_not_fetched_are_named() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 1234\n";
    fs::write(&path, pointer).expect("writable");
    let error = WeightsFile::open(folder.path(), CONFIG).expect_err("a pointer");
    assert!(error.to_string().contains("git lfs pull"), "{error}");
    #[cfg(unix)]
    {
        fs::remove_file(&path).expect("ours");
        std::os::unix::fs::symlink("nowhere", &path).expect("a link");
        let error = WeightsFile::open(folder.path(), CONFIG).expect_err("a link");
        assert!(error.to_string().contains("a missing file"), "{error}");
    }
}

#[test]
fn each_rejected_tensor_has_its_own_reason() {
    let one = |names: [&str; 3]| names.map(str::to_owned);
    for (name, shape, words) in [
        (
            "model.layers.2.self_attn.q_proj.weight",
            vec![16, 16],
            one(["fewer blocks", "this configuration", ""]),
        ),
        (
            "model.layers.1.self_attn.q_proj.bias",
            vec![16],
            one(["no bias there", "this configuration", ""]),
        ),
        (
            "model.embed_positions.weight",
            vec![16, 16],
            one(["not part of the model", "this configuration", ""]),
        ),
        (
            "embed_tokens.weight",
            vec![13, 16],
            one(["occurs twice", "remove one", ""]),
        ),
    ] {
        let folder = folder();
        let path = folder.path().join("model.safetensors");
        let mut container = Container::of_parameters(CONFIG.parameters());
        container.push(name, &shape, &vec![0.5; shape.iter().product()]);
        container.write(&path);
        let error = WeightsFile::open(&path, CONFIG)
            .expect_err(name)
            .to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    // A missing head in a model with an untied head.
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let mut container = Container::of_parameters(CONFIG.parameters());
    container.header.remove("lm_head.weight");
    let len: usize = container.data.len() - 4 * 13 * 16;
    container.data.truncate(len);
    container.write(&path);
    let error = WeightsFile::open(&path, CONFIG)
        .expect_err("no head")
        .to_string();
    assert!(error.contains("tie_word_embeddings"), "{error}");
}

/// A head differs at a position that was not compared when the file was opened. A rank that reads it reports an
/// error, and no other rank reads wrong numbers.
#[test]
fn a_tied_head_is_compared_wherever_it_is_read() {
    let config = LlamaConfig {
        layers: 1,
        vocab: 20_000,
        ..TIED
    };
    let table = 0..config.vocab * config.dim;
    let write = |changed: Option<usize>| {
        let folder = folder();
        let mut container = Container::of_parameters(config.parameters());
        let at = container.header["model.embed_tokens.weight"]["data_offsets"][0].clone();
        let start = at.as_u64().expect("a number") as usize;
        let mut bytes = container.data[start..start + 4 * table.end].to_vec();
        if let Some(element) = changed {
            bytes[4 * element] ^= 1;
        }
        container.push_stored("lm_head.weight", "F32", &[config.vocab, config.dim], &bytes);
        container.write(&folder.path().join("model.safetensors"));
        folder
    };
    let path = "tok_embeddings.weight";
    let equal = write(None);
    let equal = WeightsFile::open(equal.path(), config).expect("equal");
    assert_eq!(
        equal.read(path, table.clone()).expect("equal").len(),
        table.end
    );
    equal.load(&Device::flex()).expect("equal");
    // The first is in the first block that is compared when the file is opened, and the second is between two such
    // blocks.
    let early = write(Some(5));
    let error = WeightsFile::open(early.path(), config).expect_err("another head");
    assert!(error.to_string().contains("tie_word_embeddings"), "{error}");
    let late = write(Some(18_000));
    let late = WeightsFile::open(late.path(), config).expect("not compared yet");
    late.read(path, 0..18_000).expect("equal up to there");
    late.read(path, 18_001..table.end)
        .expect("equal from there");
    for range in [17_999..18_001, table] {
        let error = late.read(path, range).expect_err("another head");
        let text = error.to_string();
        assert!(text.contains("tie_word_embeddings"), "{text}");
        assert!(text.contains("lm_head.weight"), "{text}");
    }
    assert!(late.load(&Device::flex()).is_err());
}

/// NaN is equal to itself here, because diverged models are also written and read.
#[test]
fn the_tied_head_of_a_diverged_model_equals_its_table() {
    let open = |table: u32, head: u32| {
        let folder = folder();
        let mut container = Container::of_parameters(TIED.parameters());
        let at = container.header["model.embed_tokens.weight"]["data_offsets"][0].clone();
        let start = at.as_u64().expect("a number") as usize;
        container.data[start + 12..start + 16].copy_from_slice(&table.to_le_bytes());
        let mut bytes = container.data[start..start + 4 * TIED.vocab * TIED.dim].to_vec();
        bytes[12..16].copy_from_slice(&head.to_le_bytes());
        container.push_stored("lm_head.weight", "F32", &[TIED.vocab, TIED.dim], &bytes);
        container.write(&folder.path().join("model.safetensors"));
        WeightsFile::open(folder.path(), TIED).map(|_| ())
    };
    let nan = f32::NAN.to_bits();
    open(nan, nan).expect("equal");
    open(0.0f32.to_bits(), (-0.0f32).to_bits()).expect("equal numbers");
    open(nan, nan + 1).expect_err("another head");
    open(nan, 0).expect_err("another head");
}

fn config_of(json: &Value) -> Result<ModelConfig, ModelError> {
    let folder = folder();
    fs::write(folder.path().join("config.json"), json.to_string()).expect("writable");
    ModelConfig::from_hugging_face(folder.path())
}

/// Returns the settings with some of them changed.
fn with(mut json: Value, changes: Value) -> Value {
    let Value::Object(changes) = changes else {
        panic!("an object");
    };
    for (name, value) in changes {
        json[name] = value;
    }
    json
}

#[test]
fn two_names_of_one_setting_must_agree() {
    let llama = || CONFIG.to_hugging_face();
    let linear = |kind: &str| json!({"rope_type": "linear", "type": kind, "factor": 2.0});
    for (changes, names) in [
        (
            json!({"rope_scaling": linear("llama3")}),
            ["`rope_type` is \"linear\"", "`type` is \"llama3\""],
        ),
        (
            json!({"rope_scaling": linear("default")}),
            ["`rope_type`", "`type`"],
        ),
        (
            json!({"rope_scaling": {"rope_type": null, "type": "linear", "factor": 2.0}}),
            ["`rope_type` is null", "`type`"],
        ),
        (
            json!({"rope_scaling": linear("linear"), "rope_parameters": {"rope_type": "default"}}),
            ["`rope_scaling`", "`rope_parameters`"],
        ),
        (
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
            ["`rope_theta` is 10000.0", "is 500000.0"],
        ),
        (
            json!({
                "original_max_position_embeddings": 4,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8,
                },
            }),
            ["`original_max_position_embeddings` is 4", "is 8"],
        ),
    ] {
        let error = config_of(&with(llama(), changes)).expect_err(names[0]);
        let text = error.to_string();
        assert!(names.iter().all(|name| text.contains(name)), "{text}");
        assert!(text.contains("remove the wrong one"), "{text}");
    }
    for (name, alias) in [
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_positions", "max_position_embeddings"),
    ] {
        let gpt2 = GPT2.to_hugging_face();
        let same = with(gpt2.clone(), json!({alias: gpt2[name]}));
        assert_eq!(
            config_of(&same).expect("one value"),
            ModelConfig::Gpt2(GPT2)
        );
        let error = config_of(&with(gpt2, json!({alias: 6}))).expect_err(alias);
        let text = error.to_string();
        assert!(text.contains(name) && text.contains(alias), "{text}");
    }
}

#[test]
fn absent_settings_have_the_defaults_of_transformers() {
    let llama = config_of(&json!({"model_type": "llama", "id2label": [1, {"a": null}]}));
    let default = LlamaConfig {
        layers: 32,
        dim: 4096,
        heads: 32,
        kv_heads: 32,
        hidden: 11_008,
        vocab: 32_000,
        seq: 2048,
        rope_base: 10_000,
        variant: LlamaVariant {
            norm_epsilon: 1e-6,
            ..LlamaVariant::PLAIN
        },
    };
    assert_eq!(llama.expect("a Llama"), ModelConfig::Llama(default));
    let gpt2 = config_of(&json!({"model_type": "gpt2"})).expect("a GPT-2");
    let default = Gpt2Config {
        layers: 12,
        dim: 768,
        heads: 12,
        hidden: 3072,
        vocab: 50_257,
        seq: 1024,
    };
    assert_eq!(gpt2, ModelConfig::Gpt2(default));
    // Files that are older than `model_type` name the class.
    for (class, name) in [("LlamaForCausalLM", "Llama"), ("GPT2LMHeadModel", "GPT-2")] {
        let json = json!({"architectures": [class]});
        assert_eq!(config_of(&json).expect(class).name(), name);
    }
    let error = config_of(&json!({"hidden_size": 16})).expect_err("of nothing");
    assert!(error.to_string().contains("model_type"), "{error}");
}

#[test]
fn settings_that_are_null_are_absent_or_named() {
    let scaled = RopeScaling::Linear { factor: 2.0 };
    let scaled = LlamaConfig {
        kv_heads: CONFIG.heads,
        variant: LlamaVariant {
            rope_scaling: scaled,
            ..LlamaVariant::PLAIN
        },
        ..CONFIG
    };
    let json = with(
        CONFIG.to_hugging_face(),
        json!({
            "head_dim": null, "num_key_value_heads": null, "partial_rotary_factor": null, "quantization_config": null,
            "rope_parameters": null, "rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": null},
        }),
    );
    assert_eq!(
        config_of(&json).expect("a Llama"),
        ModelConfig::Llama(scaled)
    );
    let json = with(GPT2.to_hugging_face(), json!({"n_inner": null}));
    assert_eq!(config_of(&json).expect("a GPT-2"), ModelConfig::Gpt2(GPT2));
    // Transformers rejects these.
    for (of, names) in [
        (
            CONFIG.to_hugging_face(),
            &[
                "hidden_size",
                "hidden_act",
                "rms_norm_eps",
                "rope_theta",
                "tie_word_embeddings",
                "attention_bias",
                "vocab_size",
            ][..],
        ),
        (
            GPT2.to_hugging_face(),
            &[
                "n_embd",
                "activation_function",
                "layer_norm_epsilon",
                "scale_attn_weights",
            ],
        ),
    ] {
        for name in names {
            let error = config_of(&with(of.clone(), json!({*name: null}))).expect_err(name);
            let text = error.to_string();
            assert!(text.contains(&format!("`{name}` is null")), "{text}");
        }
    }
}

/// The safetensors writer creates files that only their owner can read.
#[cfg(unix)]
#[test]
fn written_files_have_default_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    let mode = |name: &str| {
        let metadata = fs::metadata(folder.path().join(name)).expect("a file");
        metadata.permissions().mode() & 0o777
    };
    fs::write(folder.path().join("any"), "").expect("writable");
    let device = Device::flex();
    let llama = CONFIG.init(&device, 1).expect("valid sizes");
    let gpt2 = GPT2.init(&device, 1).expect("valid sizes");
    llama.save(folder.path().join("llama")).expect("writable");
    gpt2.save(folder.path().join("gpt2")).expect("writable");
    llama.save_hugging_face(folder.path()).expect("writable");
    for name in ["llama", "gpt2", "model.safetensors", "config.json"] {
        assert_eq!(mode(name), mode("any"), "{name}");
    }
    // A replaced file keeps its permissions.
    for kept in [0o640, 0o604, 0o600] {
        let permissions = fs::Permissions::from_mode(kept);
        fs::set_permissions(folder.path().join("gpt2"), permissions).expect("ours");
        gpt2.save(folder.path().join("gpt2")).expect("writable");
        assert_eq!(mode("gpt2"), kept);
    }
    let names = fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(names, 5, "nothing else is left");
}
