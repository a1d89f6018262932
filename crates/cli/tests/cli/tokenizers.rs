//! A tokenizer belongs to a model. Other formats are rejected, and the layout of its file does not matter.

use burn::tensor::Device;
use burn_fsdp_models::{LlamaConfig, LlamaVariant};
use serde_json::{Value, json};

use crate::command::{Folder, Run, last_report, losses, warnings};

const TOKENIZER: &str = include_str!("../../../models/tests/models/tokenizer.json");

const RUN: &str = "--warmup 0 --batch 4 --seq 8 --lr 0.01 --eps 0.01 --sample 0 --eval-batches 0";

/// Creates a folder with a `text` and a model `d` in Hugging Face's format, with this vocabulary size.
fn folder(vocab: usize) -> Folder {
    let folder = Folder::new();
    let sizes = LlamaConfig {
        layers: 1,
        dim: 16,
        heads: 2,
        kv_heads: 1,
        hidden: 12,
        vocab,
        seq: 16,
        rope_base: 100,
        variant: LlamaVariant::PLAIN,
    };
    std::fs::create_dir(folder.path("d")).expect("makes");
    let model = sizes.init(&Device::flex(), 5).expect("valid sizes");
    model.save_hugging_face(folder.path("d")).expect("writes");
    folder.write("text", "the cat sat on the mat\n".repeat(300));
    folder
}

fn train(folder: &Folder, arguments: &str) -> Run {
    folder.run(&format!("train {RUN} {arguments} --json"))
}

fn report(folder: &Folder, arguments: &str) -> Value {
    let run = train(folder, arguments);
    assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
    last_report(&run)
}

fn generate(folder: &Folder, arguments: &str) -> Run {
    folder.run(&format!("generate {arguments} --prompt the --tokens 5"))
}

fn refuses(run: &Run, words: &[&str]) {
    assert_eq!(run.code, 2, "{}", run.stderr);
    for word in words {
        assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
    }
}

#[test]
fn unsupported_tokenizer_formats_do_not_fall_back_to_bytes() {
    for files in [
        &["tokenizer.model", "tokenizer_config.json"][..],
        &["vocab.json", "merges.txt"],
        &["merges.txt"],
        &["vocab.txt", "special_tokens_map.json"],
        &["qwen.tiktoken"],
        &["tekken.json"],
        &["spiece.model"],
        &["tokenizer_config.json"],
    ] {
        let folder = folder(300);
        for file in files {
            folder.write(&format!("d/{file}"), "{}");
        }
        let words = [files[0], "tokenizer.json", "--tokenizer bytes"];
        refuses(&train(&folder, "--init d --data text --steps 1"), &words);
        refuses(&generate(&folder, "--init d"), &words);
        // An explicit request for bytes is accepted. Without text, there is no warning.
        let given = report(&folder, "--init d --data text --steps 1 --tokenizer bytes");
        assert!(warnings(&given).is_empty(), "{given}");
        let run = generate(&folder, "--init d --tokenizer bytes");
        assert_eq!((run.code, run.stderr.as_str()), (0, ""));
        report(&folder, "--init d --synthetic --steps 1");
    }
}

#[test]
fn a_run_that_began_with_bytes_resumes() {
    let folder = folder(300);
    report(
        &folder,
        "--init d --data text --steps 2 --checkpoint-dir run",
    );
    folder.write("d/tokenizer.model", "x");
    let run = "--init d --data text --steps 4 --checkpoint-dir run --resume";
    let resumed = report(&folder, run);
    assert_eq!(resumed["first_step"], 2);
    let warnings = warnings(&resumed).join("; ");
    assert!(warnings.contains("each byte is a token"), "{warnings}");
    assert!(!warnings.contains("but was"), "{warnings}");
    report(
        &folder,
        "--init d --data text --tokenizer bytes --steps 2 --lora 2 --checkpoint-dir adapted",
    );
    assert_eq!(generate(&folder, "adapted --init d").code, 0);
    // A run that starts fresh is rejected.
    let fresh = "--init d --data text --steps 4 --checkpoint-dir fresh --resume";
    refuses(&train(&folder, fresh), &["tokenizer.model"]);
}

#[cfg(unix)]
#[test]
fn unreadable_tokenizers_do_not_fall_back_to_bytes() {
    let folder = folder(300);
    std::os::unix::fs::symlink("gone", folder.path("d/tokenizer.json")).expect("links");
    for run in [
        train(&folder, "--init d --data text --steps 1"),
        generate(&folder, "--init d"),
    ] {
        refuses(&run, &["d/tokenizer.json"]);
    }
}

#[test]
fn bytes_with_a_larger_vocabulary_are_warned_about() {
    let of_300 = folder(300);
    let words = "has 300 tokens and no tokenizer";
    let run = train(&of_300, "--init d --data text --steps 1");
    assert!(
        last_report(&run)["warnings"].to_string().contains(words),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains(words), "{}", run.stderr);
    let run = generate(&of_300, "--init d");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains(words), "{}", run.stderr);
    // There is no warning for a vocabulary of bytes, for a new model, and for a saved step.
    let of_256 = folder(256);
    let bytes = report(&of_256, "--init d --data text --steps 1");
    assert!(warnings(&bytes).is_empty(), "{bytes}");
    assert_eq!(generate(&of_256, "--init d").stderr, "");
    let gpt =
        "--layers 1 --dim 16 --heads 2 --vocab 300 --data text --steps 1 --checkpoint-dir run";
    let begun = report(&of_300, gpt);
    assert!(warnings(&begun).is_empty(), "{begun}");
    assert_eq!(generate(&of_300, "run").stderr, "");
}

#[test]
fn a_tokenizer_that_differs_from_the_folders_is_warned_about() {
    let folder = folder(300);
    folder.write("d/tokenizer.json", TOKENIZER);
    let mut other: Value = serde_json::from_str(TOKENIZER).expect("JSON");
    folder.write(
        "same.json",
        serde_json::to_string_pretty(&other).expect("JSON"),
    );
    other["normalizer"] = json!({"type": "Lowercase"});
    folder.write("other.json", other.to_string());
    let with = |name: &str| {
        let run = format!("--init d --data text --steps 1 --tokenizer {name}");
        warnings(&report(&folder, &run)).join("; ")
    };
    assert_eq!(with("same.json"), "");
    assert!(
        with("other.json").contains("the tokenizer of the model"),
        "{}",
        with("other.json")
    );
}

/// The same tokenizer, written by another program, in a different order, and with merges in their older format.
fn same_tokenizers() -> [String; 3] {
    let json: Value = serde_json::from_str(TOKENIZER).expect("JSON");
    let pretty = serde_json::to_string_pretty(&json).expect("JSON");
    let mut older = json.clone();
    for merge in older["model"]["merges"].as_array_mut().expect("merges") {
        let part = |index: usize| merge[index].as_str().expect("a token").to_owned();
        *merge = json!(format!("{} {}", part(0), part(1)));
    }
    let mut without = json;
    let parts = without.as_object_mut().expect("parts");
    parts.retain(|name, _| !["truncation", "padding"].contains(&name.as_str()));
    [pretty, older.to_string(), without.to_string()]
}

#[test]
fn tokenizers_are_compared_by_behavior() {
    let folder = folder(300);
    folder.write("one.json", TOKENIZER);
    let run = "--layers 1 --dim 16 --heads 2 --data text --checkpoint-dir run";
    report(&folder, &format!("{run} --steps 2 --tokenizer one.json"));
    let want = generate(&folder, "run --tokenizer one.json").stdout;
    for (index, same) in same_tokenizers().iter().enumerate() {
        folder.write("two.json", same);
        let two = generate(&folder, "run --tokenizer two.json");
        assert_eq!((two.code, two.stderr.as_str()), (0, ""), "{index}");
        assert_eq!(two.stdout, want);
        let resumed = report(
            &folder,
            &format!("{run} --steps 3 --resume --tokenizer two.json"),
        );
        assert!(warnings(&resumed).is_empty(), "{index}: {resumed}");
        std::fs::remove_dir_all(folder.path("run/step-000003")).expect("removes");
    }
    for change in [
        |json: &mut Value| {
            json["model"]["merges"]
                .as_array_mut()
                .expect("merges")
                .swap(0, 1)
        },
        |json: &mut Value| json["normalizer"] = json!({"type": "Lowercase"}),
        |json: &mut Value| json["added_tokens"][0]["lstrip"] = json!(true),
    ] {
        let mut other: Value = serde_json::from_str(TOKENIZER).expect("JSON");
        change(&mut other);
        folder.write("other.json", other.to_string());
        let run = generate(&folder, "run --tokenizer other.json");
        refuses(&run, &["was trained on the tokens of a tokenizer"]);
    }
}

#[test]
fn tokens_after_a_text_are_not_added_to_prompts() {
    let folder = folder(300);
    let mut json: Value = serde_json::from_str(TOKENIZER).expect("JSON");
    folder.write("d/tokenizer.json", json.to_string());
    let want = generate(&folder, "--init d --temperature 0");
    assert_eq!(want.code, 0, "{}", want.stderr);
    let end = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let single = json["post_processor"]["single"]
        .as_array_mut()
        .expect("a template");
    single.push(end);
    folder.write("d/tokenizer.json", json.to_string());
    assert_eq!(
        generate(&folder, "--init d --temperature 0").stdout,
        want.stdout
    );
}

/// A normalizer's prefix appears only once, however long the text is.
#[test]
fn long_text_is_tokenized_as_a_whole() {
    let folder = folder(300);
    let mut json: Value = serde_json::from_str(TOKENIZER).expect("JSON");
    json["normalizer"] = json!({"type": "Prepend", "prepend": "#"});
    folder.write("marked.json", json.to_string());
    folder.write("text", "the cat sat on the mat\n".repeat(20_000));
    let num_tokens = |tokenizer: &str| -> usize {
        let run =
            format!("--layers 1 --dim 16 --heads 2 --data text --steps 1 --tokenizer {tokenizer}");
        let report = report(&folder, &run);
        assert!(losses(&report)[0].is_finite());
        let data = report["data"].as_str().expect("a text").to_owned();
        let tokens = data
            .split(", ")
            .find_map(|part| part.strip_suffix(" tokens"));
        tokens.expect("a number").parse().expect("a number")
    };
    folder.write("plain.json", TOKENIZER);
    assert_eq!(num_tokens("marked.json"), num_tokens("plain.json") + 1);
}
