//! Broken files cause errors, and neither panics nor endless loops.

use std::fs;
use std::panic;
use std::sync::Arc;

use burn_fsdp_data::{DataConfig, DataError, Dataset, Fields, Position};

use crate::files::{self, Parts};
use crate::random::Random;
use crate::tokenizers::Bytes;

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(3) {
        let place = random.below(bytes.len().max(1));
        match random.below(4) {
            0 => bytes.truncate(place),
            1 if !bytes.is_empty() => bytes[place] = random.below(256) as u8,
            2 if !bytes.is_empty() => drop(bytes.remove(place)),
            _ => bytes.insert(
                place.min(bytes.len()),
                b"{}[]\",:\\\n\xff\x00"[random.below(11)],
            ),
        }
    }
}

fn read(config: &DataConfig, tokenizer: &Bytes) -> Result<(), DataError> {
    let data = Dataset::open(config.clone(), Arc::new(tokenizer.clone()))?;
    data.survey()?;
    let mut stream = data.training();
    for _ in 0..20 {
        stream.next_batch(2, 0..2)?;
    }
    Ok(())
}

#[test]
fn broken_lines_and_rows_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let chat = "{\"text\": \"x\", \"messages\": [{\"role\": \"user\", \"content\": \"a\\u00e9\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n";
    let documents: Vec<Parts> = ["one", "two", "three"]
        .map(|text| vec![text.repeat(20)])
        .to_vec();
    let rows = folder.path().join("rows.parquet");
    files::write_parquet(&rows, &["text"], &[&documents]);
    let bases = [
        ("jsonl", chat.repeat(4).into_bytes()),
        ("parquet", fs::read(&rows).expect("bytes")),
        ("txt", b"a\nb\xc3\xa9".to_vec()),
    ];
    let tokenizer = Bytes {
        template: Some("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}".to_owned()),
    };
    // The decoder's panics are caught; their messages only disturb.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let outcome = panic::catch_unwind(|| {
        let mut random = Random(5);
        let mut counts = [0, 0];
        for case in 0..6000 {
            let (extension, base) = &bases[case % 3];
            let mut bytes = base.clone();
            mutate(&mut bytes, &mut random);
            let path = folder.path().join(format!("case.{extension}"));
            files::write(&path, &bytes);
            let mut config = DataConfig::new(&path, 8);
            if *extension == "jsonl" && random.below(2) == 0 {
                config.fields = Fields::Chat("messages".to_owned());
            }
            counts[usize::from(read(&config, &tokenizer).is_err())] += 1;
        }
        counts
    });
    panic::set_hook(hook);
    let [valid, failed] = outcome.expect("no case panics");
    assert!(
        valid > 500 && failed > 1500,
        "{valid} valid, {failed} failed"
    );
}

#[test]
fn broken_positions_are_errors_or_continue() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("some.jsonl");
    let documents: Vec<Parts> = (0..40)
        .map(|index| vec![format!("document {index}")])
        .collect();
    files::write(&path, files::jsonl(&["text"], &documents));
    let data =
        Dataset::open(DataConfig::new(&path, 8), Arc::new(Bytes::default())).expect("it is data");
    let mut stream = data.training();
    stream.next_batch(5, 0..5).expect("a batch");
    let saved = serde_json::to_value(stream.position()).expect("it is JSON");
    let mut refused = 0;
    for (field, value) in [
        ("epoch", serde_json::json!(u64::MAX)),
        ("taken", serde_json::json!(41)),
        ("taken", serde_json::json!(u64::MAX)),
        ("pairs", serde_json::json!(1000)),
        ("window", serde_json::json!([0, 41])),
        ("window", serde_json::json!([u64::MAX, 0])),
        ("window", serde_json::json!([0, u64::MAX])),
        ("sequences", serde_json::json!(u64::MAX)),
    ] {
        let mut broken = saved.clone();
        broken["cursor"][field] = value.clone();
        let position: Position =
            serde_json::from_value(broken).expect("it has the form of a position");
        let read = data
            .resume(&position)
            .and_then(|mut stream| (0..60).try_for_each(|_| stream.next_batch(2, 0..2).map(drop)));
        if let Err(error) = read {
            assert!(
                matches!(error, DataError::Position { .. }),
                "{field} {value}: {error}"
            );
            refused += 1;
        }
    }
    assert!(refused >= 6, "{refused}");
}
