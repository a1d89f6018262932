//! Tests of each family of decoders against Hugging Face's transformers, in both directions.
//!
//! `families/families.py` writes the folders in `families` with transformers, together with the numbers that it
//! computes from them. Tests that run transformers are skipped if it is not installed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_models::{
    Architecture, KeyValueCache, LanguageModel, Llama, LlamaConfig, ModelConfig, WeightsFile,
};
use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::skipped::python;

/// Maximum difference of two numbers.
const TOLERANCE: f32 = 1e-5;

const TOKENS: [[i64; 12]; 2] = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    [30, 12, 3, 11, 3, 9, 2, 2, 39, 1, 30, 0],
];
const TARGETS: [[i64; 12]; 2] = [
    [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    [12, 3, 11, 3, 9, 2, 2, 39, 1, 30, 0, 7],
];

/// Number of tokens of the short sequences.
const SHORT: usize = 5;

/// Number of tokens before those that a model chooses.
const PROMPT: usize = 4;

fn tokens(width: usize, rows: usize) -> Tensor<2, Int> {
    of(&TOKENS, width, rows)
}

fn of(all: &[[i64; 12]; 2], width: usize, rows: usize) -> Tensor<2, Int> {
    let taken = all.iter().take(rows).flat_map(|row| &row[..width]);
    let taken: Vec<i64> = taken.copied().collect();
    Tensor::from_data(TensorData::new(taken, [rows, width]), &Device::flex())
}

pub(crate) fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the test");
    Path::new(&here).join("tests/models/families")
}

/// Returns the folders by name.
pub(crate) fn folders() -> BTreeMap<String, PathBuf> {
    let entries = fs::read_dir(root()).expect("a folder of folders");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let folders = paths.filter(|path| path.join("config.json").exists());
    let named = folders.map(|path| {
        let name = path.file_name().expect("a name").to_string_lossy();
        (name.into_owned(), path)
    });
    let all: BTreeMap<_, _> = named.collect();
    assert!(all.len() >= 4, "{all:?}");
    all
}

/// Returns the tensors of a well-formed file, with their shapes.
fn tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = fs::read(path).expect("a file");
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&rest[..length]).expect("a header");
    let data = &rest[length..];
    let numbers = |value: &Value| -> Vec<usize> {
        serde_json::from_value(value.clone()).expect("whole numbers")
    };
    let entries = header.iter().filter(|(name, _)| *name != "__metadata__");
    let read = entries.map(|(name, entry)| {
        let range = numbers(&entry["data_offsets"]);
        let bytes = &data[range[0]..range[1]];
        let values = match entry["dtype"].as_str() {
            Some("F32") => bytes
                .chunks_exact(4)
                .map(|four| f32::from_le_bytes(four.try_into().expect("four bytes")))
                .collect(),
            Some("BF16") => bytes
                .chunks_exact(2)
                .map(|two| half::bf16::from_le_bytes([two[0], two[1]]).to_f32())
                .collect(),
            other => panic!("{other:?}"),
        };
        (name.clone(), (numbers(&entry["shape"]), values))
    });
    read.collect()
}

fn sizes_of(folder: &Path) -> LlamaConfig {
    match ModelConfig::from_hugging_face(folder) {
        Ok(ModelConfig::Llama(sizes)) => sizes,
        other => panic!("{}: {other:?}", folder.display()),
    }
}

pub(crate) fn loaded(folder: &Path, device: &Device) -> Llama {
    let weights = WeightsFile::open(folder, sizes_of(folder)).expect("it fits the model");
    weights.load(device).expect("readable")
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("floats")
}

/// Returns the largest difference, of numbers above one relative to the number.
fn difference(ours: &[f32], theirs: &[f32]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let pairs = ours.iter().zip(theirs);
    let each = pairs.map(|(ours, theirs)| (ours - theirs).abs() / theirs.abs().max(1.0));
    each.fold(0.0, |most, each| {
        if each.is_nan() {
            f32::INFINITY
        } else {
            most.max(each)
        }
    })
}

/// The gradients by the path of their parameter.
struct Found<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    found: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Found<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let gradient = self.gradients.get::<D>(param.id).expect("a gradient");
        self.found.insert(path, values(gradient));
    }
}

/// Returns the gradients of a loss by the path of their parameter.
pub(crate) fn gradients_of<M: Module>(model: &M, loss: Tensor<1>) -> BTreeMap<String, Vec<f32>> {
    let gradients = GradientsParams::from_grads(loss.backward(), model);
    let mut found = Found {
        gradients: &gradients,
        path: Vec::new(),
        found: BTreeMap::new(),
    };
    model.visit(&mut found);
    found.found
}

/// Returns values of a matrix of `[rows, columns]` with the dims exchanged.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let element = |index: usize| values[index % rows * columns + index / rows];
    (0..values.len()).map(element).collect()
}

#[test]
fn folders_of_transformers_have_its_logits_loss_and_gradients() {
    for (name, folder) in folders() {
        let expected = tensors(&folder.join("expected.safetensors"));
        let device = Device::flex().autodiff();
        let model = loaded(&folder, &device);
        let sizes = sizes_of(&folder);
        assert_eq!(model.num_params(), sizes.num_params(), "{name}");
        let on = |tokens: Tensor<2, Int>| tokens.to_device(&device);
        let logits = values(model.forward(on(tokens(12, 2))));
        let short = values(model.forward(on(tokens(SHORT, 2))));
        let loss = model.loss(on(tokens(12, 2)), on(of(&TARGETS, 12, 2)));
        let mut differences = vec![
            ("logits", difference(&logits, &expected["logits"].1)),
            ("short", difference(&short, &expected["short"].1)),
            (
                "loss",
                difference(&values(loss.clone()), &expected["loss"].1),
            ),
        ];
        let mut gradients = gradients_of(&model, loss);
        let mut worst: f32 = 0.0;
        for spec in sizes.parameters() {
            let ours = gradients.remove(&spec.path).expect(&spec.path);
            let (shape, theirs) = &expected[&format!("grad.{}", spec.name)];
            assert_eq!(*shape, spec.shape, "{name}: {}", spec.name);
            let ours = if spec.is_transposed {
                transposed(&ours, shape[1], shape[0])
            } else {
                ours
            };
            let apart = difference(&ours, theirs);
            assert!(apart < TOLERANCE, "{name}: {} by {apart:e}", spec.name);
            worst = worst.max(apart);
        }
        assert!(gradients.is_empty(), "{name}: {:?}", gradients.keys());
        differences.push(("gradients", worst));
        println!("{name}: {differences:?}");
        for (of, apart) in differences {
            assert!(apart < TOLERANCE, "{name}: {of} differ by {apart:e}");
        }
    }
}

/// With cached keys and values, all tokens have the logits of the whole sequence, also where windows begin and where
/// rotations change with the length.
#[test]
fn cached_generation_chooses_the_tokens_of_transformers() {
    for (name, folder) in folders() {
        let expected = tensors(&folder.join("expected.safetensors"));
        let model = loaded(&folder, &Device::flex());
        let mut cache = KeyValueCache::new();
        let greedy: Vec<i64> = expected["greedy"].1.iter().map(|id| *id as i64).collect();
        let mut chosen = TOKENS[0][..PROMPT].to_vec();
        let mut next = tokens(PROMPT, 1);
        while chosen.len() < greedy.len() {
            let logits = values(model.next_logits(next, &mut cache));
            let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            let best = best.expect("a token").0 as i64;
            chosen.push(best);
            next = Tensor::from_data([[best]], &Device::flex());
        }
        assert_eq!(chosen, greedy, "{name}");

        let mut cache = KeyValueCache::new();
        let all = tokens(12, 2);
        let mut last = Vec::new();
        for part in [0..3, 3..4, 4..9, 9..10, 10..11, 11..12] {
            let part = all.clone().narrow(1, part.start, part.len());
            last = values(model.next_logits(part, &mut cache));
        }
        let vocab = last.len() / 2;
        let whole = &expected["logits"].1;
        let of_row = |row: usize| &whole[(12 * row + 11) * vocab..][..vocab];
        let apart = difference(&last, &[of_row(0), of_row(1)].concat());
        assert!(apart < TOLERANCE, "{name}: {apart:e}");
    }
}

#[test]
fn written_folders_are_the_folders_that_were_read() {
    for (name, folder) in folders() {
        let sizes = sizes_of(&folder);
        let model = loaded(&folder, &Device::flex());
        let written = TempDir::new().expect("a temporary folder");
        model.save_hugging_face(written.path()).expect("writable");
        assert_eq!(sizes_of(written.path()), sizes, "{name}");
        let file = "model.safetensors";
        let (ours, theirs) = (
            tensors(&written.path().join(file)),
            tensors(&folder.join(file)),
        );
        assert!(
            ours == theirs,
            "{name}: {:?}, there {:?}",
            ours.keys(),
            theirs.keys()
        );
        // The configuration also survives in a checkpoint.
        let json = serde_json::to_value(ModelConfig::Llama(sizes)).expect("a configuration");
        let read: ModelConfig = serde_json::from_value(json).expect("the same");
        assert_eq!(read, ModelConfig::Llama(sizes), "{name}");
    }
}

#[test]
fn transformers_reads_written_folders() {
    let Some(python) = python("torch, transformers") else {
        return;
    };
    let written = TempDir::new().expect("a temporary folder");
    let mut command = Command::new(python);
    command.arg(root().join("families.py")).arg("logits");
    let folders = folders();
    for (name, folder) in &folders {
        let target = written.path().join(name);
        fs::create_dir(&target).expect("writable");
        let model = loaded(folder, &Device::flex());
        model.save_hugging_face(&target).expect("writable");
        command.arg(&target);
    }
    let output = command.output().expect("Python starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let all: Vec<Vec<f32>> = serde_json::from_slice(&output.stdout).expect("logits");
    assert_eq!(all.len(), folders.len());
    for ((name, folder), theirs) in folders.iter().zip(&all) {
        let ours = values(loaded(folder, &Device::flex()).forward(tokens(12, 2)));
        let apart = difference(&ours, theirs);
        println!("{name}: {apart:e}");
        assert!(apart < TOLERANCE, "{name}: {apart:e}");
    }
}

/// Models whose sizes are narrowed keep their form.
#[test]
fn narrowed_models_are_valid() {
    for (name, folder) in folders() {
        let narrow = sizes_of(&folder).narrowed(2, 4);
        narrow.validate().expect(&name);
        narrow.init(&Device::flex(), 1).expect(&name);
    }
}
