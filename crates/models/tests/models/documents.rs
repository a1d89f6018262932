//! Tests of documents that share sequences: each is computed as if it were alone.

use std::collections::BTreeMap;
use std::process::Command;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_models::{
    Activation, Architecture, AttentionScores, Family, Gpt2Config, GptConfig, InputTokens,
    LanguageModel, Llama, LlamaConfig, LlamaVariant, ModelConfig, RopeFactors, RopeScaling,
    SlidingWindow, Targets,
};

use crate::families::{self, gradients_of, values};
use crate::skipped::python;

const SEQ: usize = 24;

/// Lengths of the documents in each sequence: one that fills it, short ones, and one of 38 tokens in three parts.
const DOCUMENTS: [&[usize]; 5] = [&[24], &[2, 9, 2, 11], &[17, 7], &[24], &[7, 2, 15]];

const GPT: GptConfig = GptConfig {
    layers: 2,
    dim: 16,
    heads: 2,
    vocab: 31,
    seq: SEQ,
};

const GPT2: Gpt2Config = Gpt2Config {
    layers: 3,
    dim: 12,
    heads: 3,
    hidden: 20,
    vocab: 29,
    seq: SEQ + 3,
};

const LLAMA: LlamaConfig = LlamaConfig {
    layers: 3,
    dim: 24,
    heads: 6,
    kv_heads: 2,
    hidden: 20,
    vocab: 37,
    seq: 32,
    rope_base: 100,
    variant: LlamaVariant::PLAIN,
};

/// Returns the configurations of Llamas that differ in what attention and positions do.
fn llamas() -> Vec<(&'static str, LlamaConfig)> {
    let plain = LLAMA.variant;
    let of = |variant| LlamaConfig { variant, ..LLAMA };
    let scaled = |rope_scaling| {
        of(LlamaVariant {
            rope_scaling,
            ..plain
        })
    };
    let scored = |scores| of(LlamaVariant { scores, ..plain });
    let all = SlidingWindow::All { size: 4 };
    let some = SlidingWindow::AllBut { size: 3, period: 2 };
    let window = |window| AttentionScores {
        window,
        ..plain.scores
    };
    let factors = |numbers: [f64; 2]| RopeFactors::new(&numbers);
    vec![
        ("plain", LLAMA),
        ("windows", scored(window(all))),
        ("windows in some layers", scored(window(some))),
        (
            "long windows",
            scored(window(SlidingWindow::All { size: SEQ })),
        ),
        (
            "soft caps",
            scored(AttentionScores {
                softcap: Some(5.0),
                query_scalar: Some(9.0),
                window: some,
            }),
        ),
        (
            "query scalar",
            scored(AttentionScores {
                query_scalar: Some(9.0),
                ..plain.scores
            }),
        ),
        ("linear", scaled(RopeScaling::Linear { factor: 2.0 })),
        // No document is longer than the model's maximum.
        ("dynamic", scaled(RopeScaling::Dynamic { factor: 2.0 })),
        (
            "llama 3",
            scaled(RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8,
            }),
        ),
        (
            "yarn",
            scaled(RopeScaling::Yarn {
                factor: 4.0,
                attention_factor: 1.1,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: true,
                original_max_position_embeddings: 8,
            }),
        ),
        (
            "longrope within the original length",
            scaled(RopeScaling::LongRope {
                short_factor: factors([1.0, 1.5]),
                long_factor: factors([2.0, 40.0]),
                attention_factor: 1.2,
                original_max_position_embeddings: SEQ,
            }),
        ),
        (
            "gemma 3",
            of(LlamaVariant {
                family: Family::Gemma3,
                local_rope_base: Some(10),
                has_tied_head: true,
                activation: Activation::GeluTanh,
                scores: window(some),
                ..plain
            }),
        ),
        (
            "gpt-neox",
            LlamaConfig {
                kv_heads: 6,
                variant: LlamaVariant {
                    family: Family::GptNeox,
                    rotated_dim: Some(2),
                    is_parallel: true,
                    ..plain
                },
                ..LLAMA
            },
        ),
        (
            "qwen 3",
            of(LlamaVariant {
                family: Family::Qwen3,
                ..plain
            }),
        ),
    ]
}

/// Returns a model with larger weights, because initial weights are too small to distinguish tokens.
fn model<A: Architecture>(sizes: A, device: &Device) -> A::Model {
    struct Larger;
    impl ModuleMapper for Larger {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|weight| {
                let larger = if D == 1 { weight } else { weight * 8.0 };
                larger.detach().require_grad()
            })
        }
    }
    sizes.init(device, 7).expect("valid sizes").map(&mut Larger)
}

fn ints(values: Vec<i64>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Returns token `at` of all, and its successor.
fn token(at: usize, vocab: usize) -> [i64; 2] {
    [at, at + 1].map(|at| (at * at * 7 + at / 3) as i64 % vocab as i64)
}

/// The loss of each token, and the gradients of their weighted mean by the path of the parameter.
type Results = (Vec<f32>, BTreeMap<String, Vec<f32>>);

fn weight(at: usize) -> f32 {
    [0.5, 2.0, 0.0, 1.0, 1.5][at % 5]
}

fn results<M: LanguageModel>(model: &M, losses: Tensor<1>, mean: Tensor<1>) -> Results {
    (values(losses), gradients_of(model, mean))
}

fn losses<M: LanguageModel>(
    model: &M,
    tokens: impl Into<InputTokens>,
    targets: Tensor<2, Int>,
) -> Tensor<1> {
    let run = |block: &M::Block, x, shared: &M::Shared| M::run_block(block, x, shared, None);
    let logits = model.logits_by(tokens, run);
    let [rows, _] = logits.dims();
    let targets = targets.reshape([rows, 1]);
    log_softmax(logits, 1)
        .gather(1, targets)
        .neg()
        .reshape([rows])
}

/// Each document alone, in a forward of its own.
fn alone<M: LanguageModel>(model: &M, vocab: usize, device: &Device) -> Results {
    let (mut start, mut all) = (0, Vec::new());
    for len in DOCUMENTS.iter().flat_map(|lens| lens.iter()) {
        let pairs: Vec<_> = (start..start + len).map(|at| token(at, vocab)).collect();
        start += len;
        let part = |index: usize| {
            let tokens = pairs.iter().map(|pair| pair[index]).collect();
            ints(tokens, [1, *len], device)
        };
        all.push(losses(model, part(0), part(1)));
    }
    let all = Tensor::cat(all, 0);
    let weights: Vec<f32> = (0..start).map(weight).collect();
    let weights = Tensor::<1>::from_data(TensorData::new(weights, [start]), device);
    let mean = (all.clone() * weights).sum() / start as f64;
    results(model, all, mean)
}

/// All documents packed into sequences.
fn packed<M: LanguageModel>(model: &M, vocab: usize, device: &Device) -> Results {
    let shape = [DOCUMENTS.len(), SEQ];
    let all = 0..DOCUMENTS.len() * SEQ;
    let part = |index: usize| {
        let tokens = all.clone().map(|at| token(at, vocab)[index]).collect();
        ints(tokens, shape, device)
    };
    let lens = DOCUMENTS.iter().flat_map(|lens| lens.iter());
    let positions = ints(lens.flat_map(|len| 0..*len as i64).collect(), shape, device);
    let inputs = || InputTokens::in_documents(part(0), positions.clone());
    let each = losses(model, inputs(), part(1));
    let weights: Vec<f32> = all.clone().map(weight).collect();
    let weights = Tensor::<2>::from_data(TensorData::new(weights, shape), device);
    let mean = model.mean_loss(inputs(), Targets::weighted(part(1), weights));
    results(model, each, mean)
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let is_close = (found - expected).abs() <= 1e-5 * largest.max(1.0);
        assert!(is_close, "{what} at {index}: {found} is not {expected}");
    }
}

fn assert_alone<A: Architecture>(name: &str, sizes: A, vocab: usize) {
    let device = Device::flex().autodiff();
    let model = model(sizes, &device);
    let (losses, gradients) = packed(&model, vocab, &device);
    let (expected, of_expected) = alone(&model, vocab, &device);
    assert_close(&format!("{name}: losses"), &losses, &expected);
    assert_eq!(gradients.len(), of_expected.len());
    for (path, gradient) in &gradients {
        assert_close(&format!("{name}: {path}"), gradient, &of_expected[path]);
    }
    // Documents differ from one text, so the comparison above says something.
    let whole = |inputs: InputTokens, targets| values(self::losses(&model, inputs, targets));
    let part = |index: usize| {
        let tokens = (0..SEQ).map(|at| token(at + SEQ, vocab)[index]).collect();
        ints(tokens, [1, SEQ], &device)
    };
    let joined = whole(part(0).into(), part(1));
    let apart = &expected[SEQ..2 * SEQ];
    let largest = joined.iter().zip(apart).map(|(a, b)| (a - b).abs());
    assert!(largest.fold(0.0, f32::max) > 1e-2, "{name}");
}

#[test]
fn documents_in_a_gpt_are_computed_alone() {
    assert_alone("gpt", GPT, GPT.vocab);
    assert_alone("gpt-2", GPT2, GPT2.vocab);
}

#[test]
fn documents_in_a_llama_are_computed_alone() {
    for (name, sizes) in llamas() {
        assert_alone(name, sizes, sizes.vocab);
    }
}

#[test]
fn the_rotation_of_documents_may_depend_on_their_length() {
    for (name, sizes) in llamas() {
        let depends = ModelConfig::Llama(sizes).depends_on_length(SEQ);
        assert!(!depends, "{name}");
        let depends = ModelConfig::Llama(sizes).depends_on_length(SEQ + 1);
        assert_eq!(depends, name.starts_with("longrope"), "{name}");
        let depends = ModelConfig::Llama(sizes).depends_on_length(33);
        assert_eq!(
            depends,
            ["longrope within the original length", "dynamic"].contains(&name)
        );
    }
}

/// Rows of tokens, and of their positions.
type Rows = [Vec<Vec<i64>>; 2];

/// Returns two sequences with several documents for a model.
fn rows_for(name: &str) -> Rows {
    let documents: [&[i64]; 2] = match name {
        // The rotations of longer sequences depend on their length.
        "llama-dynamic" | "phi3-longrope" => [&[4, 2], &[1, 5]],
        _ => [&[5, 7], &[2, 2, 8]],
    };
    let positions = documents.map(|lens| lens.iter().flat_map(|len| 0..*len).collect());
    let width = documents[0].iter().sum::<i64>() as usize;
    let row = |row: usize| (0..width).map(|at| token(row * 50 + at, 40)[0]).collect();
    [vec![row(1), row(2)], positions.to_vec()]
}

/// Transformers finds the documents of sequences by `position_ids`.
#[test]
fn documents_have_the_logits_of_transformers() {
    let Some(python) = python("torch, transformers") else {
        return;
    };
    let folders = families::folders();
    let cases: Vec<_> = folders
        .iter()
        .map(|(name, folder)| {
            let [tokens, positions] = rows_for(name);
            serde_json::json!([folder, tokens, positions])
        })
        .collect();
    let output = Command::new(&python)
        .arg(families::root().join("../packed_logits.py"))
        .arg(serde_json::json!(cases).to_string())
        .output()
        .expect("Python starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let all: Vec<Vec<f32>> = serde_json::from_slice(&output.stdout).expect("lists");
    assert_eq!(all.len(), folders.len());
    let device = Device::flex();
    for ((name, folder), theirs) in folders.iter().zip(all) {
        let [tokens, positions] = rows_for(name);
        let shape = [tokens.len(), tokens[0].len()];
        let inputs = InputTokens::in_documents(
            ints(tokens.concat(), shape, &device),
            ints(positions.concat(), shape, &device),
        );
        let model = families::loaded(folder, &device);
        let ours = model.logits_by(inputs, |block, x, shared| {
            Llama::run_block(block, x, shared, None)
        });
        let (ours, mut worst) = (values(ours), 0.0_f32);
        for (ours, theirs) in ours.iter().zip(&theirs) {
            worst = worst.max((ours - theirs).abs());
        }
        println!("{name}: at most {worst:e} apart");
        assert_close(name, &ours, &theirs);
    }
}
