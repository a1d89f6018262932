//! Tests of the exact `config.json` contents of folders on the hub. They are read as transformers reads them, or
//! refused with the name of the setting that differs.
//!
//! `cards/cards.py` names their origins and computes the expected results.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::{Device, Tensor};
use burn_fsdp_models::{
    Architecture, LanguageModel, ModelConfig, ModelError, ParameterSpec, WeightsFile,
};
use half::{bf16, f16};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::hugging_face::{targets, tokens};
use crate::safetensors::{Container, formula_values};

const CARDS: &str = include_str!("cards/cards.json");

#[derive(Deserialize)]
struct Card {
    name: String,
    config: Value,
    layout: Layout,
    /// The mean loss in transformers.
    loss: Option<f32>,
    /// The logits in transformers after the last token.
    last: Option<Vec<f32>>,
}

/// The differences of files from a single 32-bit file with the names of the whole model.
#[derive(Deserialize)]
#[serde(default)]
struct Layout {
    dtype: String,
    head: String,
    bare: bool,
    files: usize,
    extras: Vec<(String, String, Vec<usize>)>,
    index_only: Vec<String>,
    refused: Option<String>,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            dtype: "F32".to_owned(),
            head: "own".to_owned(),
            bare: false,
            files: 1,
            extras: Vec::new(),
            index_only: Vec::new(),
            refused: None,
        }
    }
}

/// A tensor of a file: its type, its shape and its bytes.
type Stored = (String, Vec<usize>, Vec<u8>);

fn encoded(dtype: &str, values: &[f32]) -> Vec<u8> {
    let bytes = values.iter().flat_map(|&value| match dtype {
        "F32" => value.to_le_bytes().to_vec(),
        "BF16" => bf16::from_f32(value).to_le_bytes().to_vec(),
        "F16" => f16::from_f32(value).to_le_bytes().to_vec(),
        "BOOL" => vec![1],
        other => panic!("{other}"),
    });
    bytes.collect()
}

/// Returns the tensors of the files, as `cards.py` generates them.
fn tensors(mut parameters: Vec<ParameterSpec>, layout: &Layout) -> BTreeMap<String, Stored> {
    parameters.sort_by(|a, b| a.name.cmp(&b.name));
    let mut made = BTreeMap::new();
    for (number, spec) in parameters.iter().enumerate() {
        let bytes = encoded(&layout.dtype, &formula_values(number, spec));
        let stored = (layout.dtype.clone(), spec.shape.clone(), bytes);
        let is_table = ["wte.weight", "embed_tokens.weight", "embed_in.weight"]
            .iter()
            .any(|end| spec.name.ends_with(end));
        if is_table && ["equal", "only"].contains(&layout.head.as_str()) {
            made.insert("lm_head.weight".to_owned(), stored.clone());
        }
        if is_table && layout.head == "only" {
            continue;
        }
        let (top, bare) = spec.name.split_once('.').expect("a module in a module");
        let is_short = layout.bare && ["model", "transformer", "gpt_neox"].contains(&top);
        made.insert(
            if is_short { bare } else { spec.name.as_str() }.to_owned(),
            stored,
        );
    }
    for (name, dtype, shape) in &layout.extras {
        let values = vec![0.5; shape.iter().product()];
        let stored = (dtype.clone(), shape.clone(), encoded(dtype, &values));
        made.insert(name.clone(), stored);
    }
    made
}

/// Writes the weights into a folder.
fn write_weights(folder: &Path, tensors: BTreeMap<String, Stored>, layout: &Layout) {
    let each = tensors.len().div_ceil(layout.files);
    let mut parts: Vec<Container> = Vec::new();
    let mut map = Map::new();
    for (number, (name, (dtype, shape, bytes))) in tensors.into_iter().enumerate() {
        if number % each == 0 {
            parts.push(Container::empty());
        }
        let file = format!(
            "model-{:05}-of-{:05}.safetensors",
            parts.len(),
            layout.files
        );
        parts
            .last_mut()
            .expect("a part")
            .push_stored(&name, &dtype, &shape, &bytes);
        map.insert(name, json!(file));
    }
    if layout.files == 1 {
        parts[0].write(&folder.join("model.safetensors"));
        return;
    }
    for (number, part) in parts.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", number + 1, layout.files);
        part.write(&folder.join(file));
    }
    let first = map.values().next().expect("a tensor").clone();
    let absent = layout.index_only.iter().cloned();
    map.extend(absent.map(|name| (name, first.clone())));
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(
        folder.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .expect("writable");
}

/// Returns the loss for the weights of a folder, and the logits after the last token.
fn computed<A: Architecture>(folder: &Path, sizes: A) -> Result<(f32, Vec<f32>), ModelError> {
    let device = Device::flex();
    let model = WeightsFile::open(folder, sizes)?.load(&device)?;
    let logits: Tensor<2> = model.logits_by(tokens(), |block, x, shared| {
        A::Model::run_block(block, x, shared, None)
    });
    let last = logits.narrow(0, 15, 1).into_data();
    Ok((
        model.mean_loss(tokens(), targets()).into_scalar(),
        last.try_to_vec().expect("floats"),
    ))
}

fn read(folder: &Path, card: &Card) -> Result<(f32, Vec<f32>), ModelError> {
    fs::write(folder.join("config.json"), card.config.to_string()).expect("writable");
    let sizes = ModelConfig::from_hugging_face(folder)?;
    let tensors = tensors(sizes.parameters()?, &card.layout);
    write_weights(folder, tensors, &card.layout);
    match sizes {
        ModelConfig::Llama(sizes) => computed(folder, sizes),
        ModelConfig::Gpt2(sizes) => computed(folder, sizes),
        ModelConfig::Gpt(_) => panic!("transformers has none"),
    }
}

/// Returns the maximum difference of two logits. Gemma's later norms amplify rounding of the small numbers that formulas
/// lead to: with 64 bits, transformers differs from itself by up to 5e-5.
fn tolerance(card: &Card) -> f32 {
    let model_type = card.config["model_type"].as_str().unwrap_or_default();
    if model_type.starts_with("gemma") {
        1e-4
    } else {
        1e-5
    }
}

#[test]
fn folders_of_public_models_load_as_in_transformers() {
    let cards: Vec<Card> = serde_json::from_str(CARDS).expect("cards");
    let (mut num_read, mut num_refused) = (0, 0);
    for card in &cards {
        let name = &card.name;
        let folder = TempDir::new().expect("a temporary folder");
        let found = read(folder.path(), card);
        match (&card.layout.refused, card.loss, &card.last) {
            (None, Some(loss), Some(last)) => {
                let (ours, logits) = found.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert!(
                    (ours / loss - 1.0).abs() < 1e-5,
                    "{name}: {ours}, there {loss}"
                );
                assert_eq!(logits.len(), last.len(), "{name}");
                for (ours, theirs) in logits.iter().zip(last) {
                    assert!(
                        (ours - theirs).abs() < tolerance(card),
                        "{name}: {ours}, there {theirs}"
                    );
                }
                num_read += 1;
            }
            (Some(word), ..) => {
                let error = found.expect_err(name).to_string();
                assert!(error.contains(word), "{name}: {error}");
                assert!(error.contains("your own Burn module"), "{name}: {error}");
                num_refused += 1;
            }
            _ => panic!("{name}: neither read nor refused"),
        }
    }
    println!("{num_read} folders are read, {num_refused} refused");
    assert!(
        num_read >= 90 && num_refused >= 16,
        "{num_read}, {num_refused}"
    );
}
