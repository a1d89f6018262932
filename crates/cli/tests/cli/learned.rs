//! `--prompt-field`, `--completion-field` and `--chat-field`: the loss is the mean over what the model is to answer, as
//! in plain Burn on one rank.

use std::path::Path;
use std::sync::Arc;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_data::{DataConfig, Dataset, Fields, Packing, Sequence, Stream, Tokenizer};
use burn_fsdp_models::{Gpt, GptConfig, LanguageModel};

use crate::checkpoints::metrics;
use crate::command::{Folder, Random, losses, relative_difference};

/// Sums of two numbers, with a question and an answer. Some have a second question.
const VOCABULARY: &str = "0123456789+=.▁\n";
const ROWS: usize = 12;
const STEPS: usize = 4;
const SEQ: usize = 24;

const GPT: GptConfig = GptConfig {
    layers: 2,
    dim: 16,
    heads: 2,
    vocab: 256,
    seq: SEQ,
};

/// Like the command's `TINY` model.
const RUN: &str = "--warmup 0 --sample 0 --steps 4 --seq 24 --seed 3";

/// A template without names for the roles, so the rendered chat is the texts one after the other.
const TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";

/// A tokenizer of characters that adds `▁` before a text, as Llama 2's does.
fn tokenizer() -> String {
    let vocab: serde_json::Map<_, _> = VOCABULARY
        .chars()
        .enumerate()
        .map(|(id, char)| (char.to_string(), id.into()))
        .collect();
    let parts = serde_json::json!({
        "version": "1.0", "added_tokens": [], "post_processor": null, "decoder": null,
        "normalizer": {"type": "Prepend", "prepend": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?s)."}, "behavior": "Isolated", "invert": false},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "."},
    });
    parts.to_string()
}

/// Writes 300 documents as prompts with completions, and as chats.
fn with_documents() -> Folder {
    let folder = Folder::new();
    let mut random = Random::new(8);
    let (mut pairs, mut chats) = (String::new(), String::new());
    for _ in 0..300 {
        let mut sum = || {
            let (a, b) = (random.below(100), random.below(100));
            (format!("{a}+{b}="), format!("{}.", a + b))
        };
        let (question, answer) = sum();
        let pair = serde_json::json!({"question": question, "answer": answer});
        pairs += &format!("{pair}\n");
        let mut messages = Vec::new();
        for (question, answer) in [(question, answer), sum()] {
            messages.push(serde_json::json!({"role": "user", "content": question}));
            messages.push(serde_json::json!({"role": "assistant", "content": answer}));
        }
        messages.truncate(2 + 2 * random.below(2) as usize);
        chats += &format!("{}\n", serde_json::json!({ "messages": messages }));
    }
    folder.write("pairs.jsonl", pairs);
    folder.write("chats.jsonl", chats);
    folder.write("tokenizer.json", tokenizer());
    folder.write("chat_template.jinja", TEMPLATE);
    folder
}

/// The characters of [`VOCABULARY`], or bytes.
struct Characters {
    are_bytes: bool,
}

impl Tokenizer for Characters {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        if self.are_bytes {
            return Ok(text.bytes().map(u32::from).collect());
        }
        let tokens = self.encode_continuation(text, 0)?;
        Ok([vec![13], tokens].concat())
    }

    fn encode_continuation(&self, text: &str, _: u32) -> Result<Vec<u32>, String> {
        if self.are_bytes {
            return self.encode(text);
        }
        let id = |char| VOCABULARY.chars().position(|other| other == char);
        let ids = text.chars().map(id);
        Ok(ids.map(|id| id.expect("known") as u32).collect())
    }

    fn eos(&self) -> Option<u32> {
        None
    }

    fn chat_template(&self) -> Option<String> {
        Some(TEMPLATE.to_owned())
    }

    fn identity(&self) -> String {
        "characters".to_owned()
    }
}

/// Reads the documents in the order of the command.
fn stream(path: &Path, fields: Fields, (are_bytes, packing): (bool, Packing)) -> [Stream; 2] {
    let mut config = DataConfig::new(path, SEQ);
    config.fields = fields;
    config.packing = packing;
    config.seed = 3;
    config.held_out = 0.05;
    let dataset = Dataset::open(config, Arc::new(Characters { are_bytes })).expect("documents");
    [dataset.training(), dataset.held_out()]
}

/// Returns the places of the targets in an answer, over all rows: from the token after `=` to the full stop.
fn answered(rows: &[Sequence], are_bytes: bool) -> Vec<i64> {
    let [equals, stop] = if are_bytes {
        [b'=', b'.'].map(u32::from)
    } else {
        [11, 12]
    };
    let mut places = Vec::new();
    for (row, sequence) in rows.iter().enumerate() {
        let mut is_answer = false;
        for (place, (input, target)) in sequence.inputs.iter().zip(&sequence.targets).enumerate() {
            is_answer |= *input == equals;
            if is_answer {
                places.push((row * SEQ + place) as i64);
            }
            is_answer &= *target != stop;
        }
    }
    places
}

/// Returns the log probabilities of the targets of a row, `[SEQ]`. Each document of the row is computed alone.
pub(crate) fn likelihoods<M: LanguageModel>(model: &M, row: &Sequence, on: &Device) -> Tensor<1> {
    let documents = row.segments.chunk_by(|a, b| a == b);
    let mut start = 0;
    let each = documents.map(|document| {
        let own = start..start + document.len();
        start = own.end;
        let tokens = |tokens: &[u32]| -> Tensor<2, Int> {
            let tokens: Vec<_> = tokens.iter().map(|token| i64::from(*token)).collect();
            let shape = [1, tokens.len()];
            Tensor::from_data(TensorData::new(tokens, shape), on)
        };
        let logits = model.logits_by(tokens(&row.inputs[own.clone()]), |block, x, shared| {
            M::run_block(block, x, shared, None)
        });
        let targets = tokens(&row.targets[own]).transpose();
        log_softmax(logits, 1).gather(1, targets).squeeze_dim(1)
    });
    Tensor::cat(each.collect(), 0)
}

/// Returns the mean loss of the answers in rows.
fn loss(model: &Gpt, rows: &[Sequence], are_bytes: bool, on: &Device) -> Tensor<1> {
    let places = answered(rows, are_bytes);
    assert!(
        places.len() < rows.len() * SEQ * 2 / 3,
        "many targets are not answers"
    );
    let places: Tensor<1, Int> = Tensor::from_data(places.as_slice(), on);
    let all = rows.iter().map(|row| likelihoods(model, row, on));
    Tensor::cat(all.collect(), 0).select(0, places).mean().neg()
}

/// Trains plain Burn on one rank. Returns the losses of the steps, and the loss of the held-out documents.
fn plainly(path: &Path, fields: Fields, (are_bytes, packing): (bool, Packing)) -> (Vec<f64>, f64) {
    let [mut training, mut held_out] = stream(path, fields, (are_bytes, packing));
    let device = Device::flex().autodiff();
    let mut model = GPT.init(&device, 3).expect("valid sizes");
    let adamw = AdamWConfig::new().with_epsilon(0.01);
    let mut optimizer = adamw.with_weight_decay(0.01).init();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let rows = training.next_batch(ROWS, 0..ROWS).expect("rows");
        let most = rows.iter().flat_map(|row| &row.segments).max();
        let is_packed = most.is_some_and(|most| *most > 1);
        assert_eq!(is_packed, packing == Packing::WholeDocuments);
        let loss = loss(&model, &rows, are_bytes, &device);
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.01, model, gradients);
    }
    let mut rows = Vec::new();
    while let Some(row) = held_out.next_batch(1, 0..1).expect("rows").pop() {
        rows.push(row);
    }
    assert!(rows.len() > 2);
    let held_out = loss(&model, &rows, are_bytes, &device);
    (losses, f64::from(held_out.into_scalar::<f32>()))
}

fn matches(folder: &Folder, flags: &str, (expected, held_out): &(Vec<f64>, f64)) {
    let report = folder.report(&format!("{RUN} {flags}"));
    let found = losses(&report);
    let difference = relative_difference(expected, &found);
    assert!(
        difference < 1e-5,
        "{flags}: {found:?} instead of {expected:?}"
    );
    let evaluated = report["eval_losses"][0][1].as_f64().expect("an evaluation");
    let difference = relative_difference(&[*held_out], &[evaluated]);
    assert!(
        difference < 1e-5,
        "{flags}: {evaluated} instead of {held_out}"
    );
}

/// Ways to pack, as the flag and in the stream.
const PACKINGS: [(&str, Packing); 2] = [
    ("", Packing::WholeDocuments),
    ("--packing single", Packing::OneDocument),
];

const SETTINGS: [&str; 8] = [
    "--ranks 1",
    "--ranks 2 --accumulate 3",
    "--ranks 3",
    "--ranks 4 --strategy no-shard",
    "--ranks 1 --compile",
    "--ranks 2 --accumulate 2 --compile --certify",
    "--ranks 3 --compile --strategy shard-grad-op",
    "--ranks 4 --activation-checkpointing",
];

#[test]
fn completions_are_learned_and_prompts_are_not() {
    let folder = with_documents();
    let fields = Fields::Completion {
        prompt: "question".to_owned(),
        completion: "answer".to_owned(),
    };
    let flags = "--data pairs.jsonl --prompt-field question --completion-field answer";
    for (are_bytes, tokenizer) in [(true, "bytes"), (false, "tokenizer.json")] {
        for (flag, packing) in PACKINGS {
            let path = folder.path("pairs.jsonl");
            let expected = plainly(&path, fields.clone(), (are_bytes, packing));
            for setting in SETTINGS {
                let flags = format!("{flags} --tokenizer {tokenizer} {setting} {flag}");
                matches(&folder, &flags, &expected);
            }
        }
    }
}

#[test]
fn the_assistants_messages_are_learned() {
    let folder = with_documents();
    let fields = Fields::Chat("messages".to_owned());
    let flags = "--data chats.jsonl --chat-field messages --tokenizer tokenizer.json";
    let [packed, single] = PACKINGS.map(|(flag, packing)| {
        let path = folder.path("chats.jsonl");
        let expected = plainly(&path, fields.clone(), (false, packing));
        for setting in SETTINGS {
            matches(&folder, &format!("{flags} {setting} {flag}"), &expected);
        }
        expected
    });
    assert_ne!(packed, single);
    let expected = packed;
    // The template may also be in the tokenizer's settings, among several.
    std::fs::remove_file(folder.path("chat_template.jinja")).expect("a file");
    let other = "{% for message in messages %}{{ message.content }} {% endfor %}";
    for template in [
        serde_json::json!(TEMPLATE),
        serde_json::json!([
            {"name": "tools", "template": other},
            {"name": "default", "template": TEMPLATE},
        ]),
    ] {
        let settings =
            serde_json::json!({"chat_template": template, "eos_token": {"content": "."}});
        folder.write("tokenizer_config.json", settings.to_string());
        matches(&folder, &format!("{flags} --ranks 2"), &expected);
    }
}

#[test]
fn resumed_runs_continue_with_the_next_answers() {
    let run = "--data pairs.jsonl --prompt-field question --completion-field answer --warmup 0 --sample 0 \
               --metrics metrics.jsonl --checkpoint-dir steps";
    for extra in ["--ranks 2", "--ranks 2 --compile"] {
        let whole = with_documents();
        whole.report(&format!("{run} --steps 6 {extra}"));
        let folder = with_documents();
        folder.report(&format!("{run} --steps 2 {extra}"));
        folder.report(&format!("{run} --steps 6 --resume {extra}"));
        assert_eq!(metrics(&folder), metrics(&whole), "{extra}");
        let other = format!("{run} --steps 8 --resume {extra}");
        let other = folder.train(&other.replace("answer", "question"));
        assert_ne!(other.code, 0, "other fields: {}", other.stderr);
    }
}

#[test]
fn missing_fields_and_templates_are_named() {
    let folder = with_documents();
    for (flags, words) in [
        (
            "--data pairs.jsonl --prompt-field question",
            &["--completion-field"][..],
        ),
        (
            "--data pairs.jsonl --prompt-field question --completion-field reply",
            &["pairs.jsonl", "`reply`"],
        ),
        (
            "--synthetic --chat-field messages",
            &["--synthetic", "--chat-field"],
        ),
        (
            "--data pairs.jsonl --chat-field messages --text-field question",
            &["--chat-field", "--text-field"],
        ),
        (
            "--data chats.jsonl --chat-field messages --tokenizer bytes",
            &["--chat-field", "chat template", "tokenizer.json"],
        ),
        (
            "--data chats.jsonl --chat-field messages --init smollm/instruct",
            &["--init smollm/instruct", "No such file", "hf download"],
        ),
    ] {
        let run = folder.train(&format!("{flags} --steps 2"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
        }
    }
    let chats = "--data chats.jsonl --chat-field messages --tokenizer tokenizer.json --steps 2";
    for (file, text, word) in [
        ("chat_template.jinja", "{% for %}", "chat template"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
    ] {
        let folder = with_documents();
        folder.write(file, text);
        let run = folder.train(chats);
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(run.stderr.contains(word), "{}", run.stderr);
    }
    std::fs::remove_file(folder.path("chat_template.jinja")).expect("a file");
    let run = folder.train(chats);
    assert_eq!(run.code, 2, "{}", run.stderr);
    for word in [
        "chat_template.jinja",
        "tokenizer_config.json",
        "--chat-field",
    ] {
        assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
    }
}
