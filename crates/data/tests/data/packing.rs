//! Sequences written out by hand.

use std::sync::Arc;

use burn_fsdp_data::{DataConfig, Dataset, Fields, Packing, Sequence};

use crate::files;
use crate::tokenizers::{BOS, Bytes, EOS};

fn sequences(lines: &str, seq: usize, change: impl FnOnce(&mut DataConfig)) -> Vec<Sequence> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("some.jsonl");
    files::write(&path, lines);
    let mut config = DataConfig::new(&path, seq);
    config.shuffle = None;
    change(&mut config);
    let data = Dataset::open(config, Arc::new(Bytes::default())).expect("it is data");
    let mut stream = data.training();
    let mut all = Vec::new();
    loop {
        let batch = stream.next_batch(1, 0..1).expect("a batch");
        if stream.position().epoch() > 0 {
            return all;
        }
        all.extend(batch);
    }
}

const LINES: &str =
    "{\"text\": \"ab\"}\n{\"text\": \"\"}\n{\"text\": \"c\"}\n{\"text\": \"defgh\"}\n";

fn byte(text: &str) -> u32 {
    u32::from(text.as_bytes()[0])
}

#[test]
fn documents_continue_in_the_next_sequence() {
    let [a, b, c, d, e, f, g, h] = ["a", "b", "c", "d", "e", "f", "g", "h"].map(byte);
    let found = sequences(LINES, 4, |_| {});
    let expected = [
        Sequence {
            inputs: vec![BOS, a, b, BOS],
            targets: vec![a, b, EOS, c],
            learned: vec![true; 4],
            segments: vec![1, 1, 1, 2],
            positions: vec![0, 1, 2, 0],
        },
        Sequence {
            inputs: vec![c, BOS, d, e],
            targets: vec![EOS, d, e, f],
            learned: vec![true; 4],
            segments: vec![1, 2, 2, 2],
            positions: vec![0, 0, 1, 2],
        },
        Sequence {
            inputs: vec![f, g, h, EOS],
            targets: vec![g, h, EOS, EOS],
            learned: vec![true, true, true, false],
            segments: vec![1, 1, 1, 0],
            positions: vec![0, 1, 2, 0],
        },
    ];
    assert_eq!(found, expected);
}

#[test]
fn whole_documents_start_a_sequence_if_they_do_not_fit() {
    let found = sequences(LINES, 4, |config| config.packing = Packing::WholeDocuments);
    let segments: Vec<_> = found.iter().map(|row| row.segments.clone()).collect();
    assert_eq!(
        segments,
        [
            vec![1, 1, 1, 0],
            vec![1, 1, 0, 0],
            vec![1, 1, 1, 1],
            vec![1, 1, 0, 0]
        ]
    );
}

#[test]
fn a_sequence_can_have_one_document_only() {
    let found = sequences(LINES, 6, |config| config.packing = Packing::OneDocument);
    let segments: Vec<_> = found.iter().map(|row| row.segments.clone()).collect();
    assert_eq!(
        segments,
        [vec![1, 1, 1, 0, 0, 0], vec![1, 1, 0, 0, 0, 0], vec![1; 6]]
    );
}

#[test]
fn prompts_are_inputs_but_not_learned() {
    let lines =
        "{\"q\": \"ab\", \"a\": \"c\"}\n{\"q\": \"d\", \"a\": \"\"}\n{\"q\": \"\", \"a\": \"e\"}\n";
    let found = sequences(lines, 6, |config| {
        config.fields = Fields::Completion {
            prompt: "q".to_owned(),
            completion: "a".to_owned(),
        };
    });
    let [a, b, c, e] = ["a", "b", "c", "e"].map(byte);
    let expected = Sequence {
        inputs: vec![BOS, a, b, c, BOS, e],
        targets: vec![a, b, c, EOS, e, EOS],
        learned: vec![false, false, true, true, true, true],
        segments: vec![1, 1, 1, 1, 2, 2],
        positions: vec![0, 1, 2, 3, 0, 1],
    };
    assert_eq!(found, [expected]);
}

#[test]
fn sequences_without_anything_to_learn_are_left_out() {
    let lines = "{\"q\": \"abcdefgh\", \"a\": \"c\"}\n";
    let found = sequences(lines, 4, |config| {
        config.fields = Fields::Completion {
            prompt: "q".to_owned(),
            completion: "a".to_owned(),
        };
    });
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].learned, [true, true, false, false]);
}
