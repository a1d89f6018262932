//! A run trains on documents, and a resumed run continues with the next one.

use crate::checkpoints::metrics;
use crate::command::{Folder, Random, losses};

const RUN: &str =
    "--data docs.jsonl --warmup 0 --sample 0 --metrics metrics.jsonl --checkpoint-dir steps";

/// Writes 600 documents of a few words.
fn with_documents() -> Folder {
    let folder = Folder::new();
    let mut random = Random::new(5);
    let words = [
        "the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "dog",
    ];
    let line = |_| {
        let len = 2 + random.below(12);
        let text: Vec<&str> = (0..len).map(|_| random.choice(&words)).collect();
        format!("{{\"text\": \"{}\", \"id\": 1}}\n", text.join(" "))
    };
    let lines: String = (0..600).map(line).collect();
    folder.write("docs.jsonl", lines);
    folder
}

#[test]
fn resumed_runs_continue_with_the_next_document() {
    for extra in ["", "--compile", "--ranks 3 --accumulate 2"] {
        let whole = with_documents();
        let report = whole.report(&format!("{RUN} --steps 8 {extra}"));
        assert!(
            report["data"]
                .as_str()
                .is_some_and(|data| data.contains("1 file of")),
            "{report}"
        );
        let folder = with_documents();
        folder.report(&format!("{RUN} --steps 3 {extra}"));
        let report = folder.report(&format!("{RUN} --steps 8 --resume {extra}"));
        assert_eq!(report["first_step"], 3);
        assert_eq!(metrics(&folder), metrics(&whole), "{extra}");
    }
}

#[test]
fn other_numbers_of_ranks_train_on_the_same_batches() {
    let whole = with_documents();
    let expected = losses(&whole.report(&format!("{RUN} --steps 8 --ranks 1")));
    let folder = with_documents();
    folder.report(&format!("{RUN} --steps 3 --ranks 2"));
    let found = losses(&folder.report(&format!("{RUN} --steps 8 --ranks 4 --resume")));
    for (found, expected) in found.iter().zip(&expected[3..]) {
        assert!((found - expected).abs() < 1e-4, "{found} and {expected}");
    }
}

#[test]
fn fields_and_globs_select_the_documents() {
    let folder = with_documents();
    let lines = folder.read("docs.jsonl");
    let expected = losses(&folder.report(&format!("{RUN} --steps 2")));
    folder.write("other.data", lines.replace("\"text\"", "\"body\""));
    for data in [
        "--data other.data --data-format jsonl --text-field body",
        "--data oth*.data --data-format jsonl --text-field body",
    ] {
        let report = folder.report(&format!("{data} --warmup 0 --sample 0 --steps 2"));
        assert_eq!(losses(&report), expected, "{data}");
    }
}

#[test]
fn broken_and_changed_documents_are_rejected() {
    let folder = with_documents();
    folder.report(&format!("{RUN} --steps 2"));
    let refused = |arguments: &str, words: &[&str]| {
        let run = folder.train(&format!("--warmup 0 --sample 0 --steps 4 {arguments}"));
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
        }
    };
    let lines = folder.read("docs.jsonl");
    folder.write("docs.jsonl", lines.replacen("the", "her", 1));
    refused(
        "--data docs.jsonl --checkpoint-dir steps --resume",
        &["docs.jsonl", "has changed"],
    );
    folder.write("docs.jsonl", &lines);
    refused(
        "--data docs.jsonl --checkpoint-dir steps --resume --seed 9",
        &["the seed", "but now it is 9"],
    );
    refused(
        "--data docs.jsonl --text-field body",
        &["docs.jsonl", "line ", "`body`", "`text`"],
    );
    refused("--data absent.jsonl", &["absent.jsonl"]);
    std::fs::create_dir(folder.path("docs")).expect("a writable folder");
    folder.write("docs/one.jsonl", &lines);
    refused(
        "--data docs --data-format jsonl --metrics docs/metrics.jsonl",
        &["--metrics", "metrics.jsonl", "documents of --data"],
    );
    folder.write("docs/log.txt", "loss 1");
    refused(
        "--data docs --data-format text --trace docs/log.txt",
        &["log.txt", "documents of --data"],
    );
    folder.write("bad.parquet", "PAR1");
    refused("--data bad.parquet", &["bad.parquet", "Parquet"]);
}
