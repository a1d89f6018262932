//! The held-out part is never trained on.

use std::collections::BTreeSet;
use std::sync::Arc;

use burn_fsdp_data::{DataConfig, Dataset, Packing, Sequence, Stream};

use crate::files::{self, Parts};
use crate::tokenizers::Bytes;

fn texts(stream: &mut Stream, count: usize) -> Vec<Vec<u32>> {
    let rows = stream.next_batch(count, 0..count).expect("a batch");
    let text = |row: Sequence| {
        row.targets
            .into_iter()
            .take_while(|token| *token < 256)
            .collect()
    };
    rows.into_iter().map(text).collect()
}

#[test]
fn held_out_documents_are_apart_whatever_the_seed() {
    let folder = tempfile::tempdir().expect("a folder");
    // Every document exists twice.
    let documents: Vec<Parts> = (0..2000)
        .map(|index| vec![format!("document {}.", index % 1000)])
        .collect();
    files::write(
        &folder.path().join("1.jsonl"),
        files::jsonl(&["text"], &documents[..1500]),
    );
    files::write(
        &folder.path().join("2.jsonl"),
        files::jsonl(&["text"], &documents[1500..]),
    );
    files::write(&folder.path().join("3.jsonl"), "{\"text\": \"\"}\n");
    let mut parts = Vec::new();
    for seed in 0..2 {
        let mut config = DataConfig::new(folder.path(), 32);
        config.packing = Packing::OneDocument;
        config.seed = seed;
        config.held_out = 0.1;
        let data = Dataset::open(config, Arc::new(Bytes::default())).expect("it is data");
        assert!(data.to_string().starts_with("3 files of "), "{data}");
        let survey = data.survey().expect("it can be read");
        let held_out = texts(&mut data.held_out(), 2000);
        let training = texts(&mut data.training(), 2 * (2000 - held_out.len()));
        assert_eq!(survey.held_out.documents, held_out.len() as u64);
        assert_eq!(survey.training.documents, (2000 - held_out.len()) as u64);
        let bytes: usize = held_out.iter().map(Vec::len).sum();
        assert_eq!((survey.held_out.bytes, survey.empty), (bytes as u64, 1));
        assert!(
            (150..250).contains(&held_out.len()),
            "{} are held out",
            held_out.len()
        );
        let [held_out, training] = [held_out, training].map(BTreeSet::from_iter);
        assert!(held_out.is_disjoint(&training));
        assert_eq!(held_out.len() + training.len(), 1000);
        parts.push(held_out);
    }
    assert_eq!(parts[0], parts[1]);
}
