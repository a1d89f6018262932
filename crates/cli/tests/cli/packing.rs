//! `--packing`: documents that share sequences are computed as if each were alone, as in plain Burn on one rank.

use std::path::Path;
use std::sync::Arc;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_fsdp_data::{DataConfig, Dataset, Packing, Sequence, Tokenizer};
use burn_fsdp_models::{LanguageModel, ModelConfig};

use crate::checkpoints::metrics;
use crate::command::{Folder, Random, losses, warnings};
use crate::families;
use crate::hugging_face::{self, GPT2, assert_close, loaded, report, train};
use crate::learned::likelihoods;

const ROWS: usize = 4;
const STEPS: usize = 3;

/// Words by their numbers, as in the folders' tokenizers.
struct Words {
    end: Option<u32>,
}

impl Tokenizer for Words {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let number = |word: &str| word.trim_start_matches('w').parse();
        let words = text.split_whitespace().map(number);
        Ok(words.map(|word| word.expect("a number")).collect())
    }

    fn eos(&self) -> Option<u32> {
        self.end
    }

    fn identity(&self) -> String {
        "words".to_owned()
    }
}

/// Writes documents of 2 to 40 tokens, among them many of 2 and of 13, whose pairs fill a sequence of 12.
fn write_documents(folder: &Folder, vocab: u64) {
    let mut random = Random::new(11);
    let lines = (0..200).map(|number| {
        let len = match number % 5 {
            0 => 2,
            1 => 13,
            _ => 2 + random.below(39),
        };
        let words: Vec<String> = (1..len)
            .map(|_| format!("w{}", random.below(vocab)))
            .collect();
        format!(
            "{{\"text\": \"{}\", \"answer\": \"w1 w2\"}}\n",
            words.join(" ")
        )
    });
    folder.write("docs.jsonl", lines.collect::<String>());
}

/// Returns the batches of the command, and checks that they test something.
fn batches(path: &Path, end: Option<u32>, seq: usize) -> Vec<Vec<Sequence>> {
    let mut config = DataConfig::new(path, seq);
    config.packing = Packing::FullSequences;
    config.seed = 1;
    config.held_out = 0.05;
    let dataset = Dataset::open(config, Arc::new(Words { end })).expect("documents");
    let mut stream = dataset.training();
    let batches = (0..STEPS).map(|_| stream.next_batch(ROWS, 0..ROWS).expect("rows"));
    let batches: Vec<_> = batches.collect();
    let is_whole = |row: &Sequence| row.segments.iter().all(|segment| *segment == 1);
    let mut rows = batches.iter().flatten();
    let has_whole = rows.clone().any(is_whole);
    assert!(has_whole, "a part of a document fills a sequence");
    let has_short = rows.any(|row| row.segments.contains(&3));
    assert!(has_short, "short documents share a sequence");
    batches
}

/// Trains plain Burn on each document alone.
fn plainly<M: LanguageModel>(mut model: M, batches: &[Vec<Sequence>], on: &Device) -> Vec<f64> {
    let optimizer = AdamWConfig::new()
        .with_epsilon(0.01)
        .with_weight_decay(0.01);
    let mut optimizer = optimizer.with_cautious_weight_decay(false).init();
    let losses = batches.iter().map(|rows| {
        let each = rows.iter().map(|row| likelihoods(&model, row, on));
        let loss = Tensor::cat(each.collect(), 0).mean().neg();
        let value = loss.clone().into_scalar::<f32>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.01, model.clone(), gradients);
        f64::from(value)
    });
    losses.collect()
}

fn end_of(folder: &Folder, name: &str) -> Option<u32> {
    let ends = ModelConfig::ends_of_text(folder.path(name)).expect("a folder");
    ends.first().copied()
}

#[test]
fn documents_of_each_family_are_trained_alone() {
    let (folder, names) = families::folders();
    write_documents(&folder, families::VOCAB as u64);
    let device = Device::flex().autodiff();
    for name in names {
        // Rotations that depend on the length of a document are refused.
        let seq = match name.as_str() {
            "llama-dynamic" => 6,
            "phi3-longrope" => 8,
            _ => 12,
        };
        let sizes = families::sizes(&folder, &name);
        let batches = batches(&folder.path("docs.jsonl"), end_of(&folder, &name), seq);
        let want = plainly(loaded(&folder, &name, sizes), &batches, &device);
        let run = format!("--init {name} --data docs.jsonl --seq {seq} --steps {STEPS} --sample 0");
        for extra in [
            "--ranks 1",
            "--ranks 2 --activation-checkpointing --accumulate 2",
            "--ranks 4 --compile",
            "--ranks 2 --compile --certify --activation-checkpointing",
        ] {
            let found = losses(&report(&folder, &format!("{run} {extra}")));
            assert_close(&want, &found, &format!("{name} {extra}"));
        }
        let low = losses(&report(
            &folder,
            &format!("{run} --precision bf16 --compile"),
        ));
        assert!(
            (low[0] / want[0] - 1.0).abs() < 0.05,
            "{name}: {low:?}, {want:?}"
        );
        let joined = losses(&report(&folder, &format!("{run} --packing joined")));
        assert!(
            joined[0] != want[0],
            "{name}: attention sees other documents"
        );
    }
}

#[test]
fn documents_of_a_gpt2_are_trained_alone() {
    let folder = hugging_face::folders();
    folder.write("gpt2/tokenizer.json", families::tokenizer());
    write_documents(&folder, families::VOCAB as u64);
    let device = Device::flex().autodiff();
    let batches = batches(&folder.path("docs.jsonl"), end_of(&folder, "gpt2"), 12);
    let want = plainly(loaded(&folder, "gpt2", GPT2), &batches, &device);
    let run = format!("--init gpt2 --data docs.jsonl --seq 12 --steps {STEPS} --sample 0");
    for extra in [
        "--ranks 1",
        "--ranks 2 --accumulate 2 --strategy no-shard",
        "--ranks 4 --strategy hybrid-shard --activation-checkpointing",
        "--ranks 1 --compile --memory-budget 1GiB",
        "--ranks 4 --compile --certify",
    ] {
        let found = losses(&report(&folder, &format!("{run} {extra}")));
        assert_close(&want, &found, extra);
    }
}

#[test]
fn adapters_are_trained_on_documents_alone_in_both_engines() {
    let folder = hugging_face::folders();
    folder.write("llama/tokenizer.json", families::tokenizer());
    write_documents(&folder, families::VOCAB as u64);
    let run =
        format!("--init llama --lora 2 --data docs.jsonl --seq 12 --steps {STEPS} --sample 0");
    let eager = losses(&report(&folder, &format!("{run} --ranks 2")));
    let compiled = losses(&report(
        &folder,
        &format!("{run} --ranks 4 --compile --certify"),
    ));
    assert_close(&eager, &compiled, "adapters");
    // The factors begin with zeros, so the first loss is that of the base.
    let device = Device::flex().autodiff();
    let batches = batches(&folder.path("docs.jsonl"), end_of(&folder, "llama"), 12);
    let base = loaded(&folder, "llama", hugging_face::LLAMA);
    let want = plainly(base, &batches[..1], &device);
    assert_close(&want, &eager[..1], "the base");
}

const RUN: &str = "--data docs.jsonl --tokenizer bytes --warmup 0 --sample 0 --metrics metrics.jsonl --checkpoint-dir steps";

fn documents() -> Folder {
    let folder = Folder::new();
    write_documents(&folder, 40);
    folder
}

#[test]
fn a_resumed_run_packs_as_before() {
    for packing in ["documents", "joined", "single"] {
        let whole = documents();
        whole.report(&format!("{RUN} --steps 6 --packing {packing}"));
        let folder = documents();
        folder.report(&format!("{RUN} --steps 2 --packing {packing}"));
        let report = folder.report(&format!("{RUN} --steps 6 --resume"));
        assert_eq!(metrics(&folder), metrics(&whole), "{packing}");
        assert!(warnings(&report).is_empty(), "{report}");
    }
    let folder = documents();
    folder.report(&format!("{RUN} --steps 2 --packing joined"));
    let report = folder.report(&format!("{RUN} --steps 3 --resume --packing documents"));
    let warnings = warnings(&report).join("\n");
    let expected = "--packing is documents, but was joined when step 2 was saved";
    assert!(warnings.contains(expected), "{warnings}");
    // The stream of single documents is another one.
    let run = folder.train(&format!("{RUN} --steps 4 --resume --packing single"));
    assert_eq!(run.code, 2);
    let expected =
        "--packing is single, but was documents when step 3 was saved, and the sequences";
    assert!(run.stderr.contains(expected), "{}", run.stderr);
}

/// Removes the setting from a step, because older versions had no choice.
fn without_packing(folder: &Folder, step: &str) {
    let index = format!("{step}/index.json");
    let mut saved: serde_json::Value =
        serde_json::from_str(&folder.read(&index)).expect("an index");
    let settings = saved["training"]["sections"]["settings"].as_object_mut();
    let removed = settings.expect("the settings").remove("--packing");
    assert!(removed.is_some());
    let text = format!("{saved}\n");
    let seal = format!("{:08x} {}\n", crc32fast::hash(text.as_bytes()), text.len());
    folder.write(&index, &text);
    folder.write(&format!("{index}.crc32"), seal);
}

#[test]
fn steps_without_the_setting_go_on_as_they_were_trained() {
    let pairs = "--prompt-field text --completion-field answer";
    for (fields, former) in [("", "joined"), (pairs, "single")] {
        let whole = documents();
        whole.report(&format!("{RUN} {fields} --steps 6 --packing {former}"));
        let folder = documents();
        folder.report(&format!("{RUN} {fields} --steps 2 --packing {former}"));
        without_packing(&folder, "steps/step-000002");
        let report = folder.report(&format!("{RUN} {fields} --steps 6 --resume"));
        assert_eq!(metrics(&folder), metrics(&whole), "{former}");
        let is_of_packing = |warning: &&str| warning.contains("packing");
        assert!(!warnings(&report).iter().any(is_of_packing), "{report}");
        without_packing(&folder, "steps/step-000006");
        let other = format!("{RUN} {fields} --steps 7 --resume --packing documents");
        let run = folder.train(&other);
        let expected = format!("--packing is documents, but was {former} when step 6 was saved");
        assert!(run.stderr.contains(&expected), "{}", run.stderr);
    }
}

#[test]
fn packings_that_cannot_be_followed_are_refused() {
    let folder = documents();
    let refused = |run: crate::command::Run, words: &[&str]| {
        assert_eq!(run.code, 2, "{}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
        }
    };
    let fields = "--data docs.jsonl --prompt-field text --completion-field text --steps 1";
    let run = folder.train(&format!("{fields} --packing joined"));
    refused(
        run,
        &["--packing joined", "--prompt-field", "documents or single"],
    );
    refused(
        folder.train("--synthetic --packing single"),
        &["--packing", "--synthetic"],
    );
    let (folder, _) = families::folders();
    write_documents(&folder, families::VOCAB as u64);
    let run = "--init phi3-longrope --data docs.jsonl --seq 12 --steps 1 --sample 0";
    let words = ["`rope_scaling`", "--packing single or joined", "--seq"];
    refused(train(&folder, run), &words);
    for packing in ["single", "joined"] {
        report(&folder, &format!("{run} --packing {packing}"));
    }
}
