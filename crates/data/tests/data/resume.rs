//! The stream equals the oracle's, on any number of ranks, and continues exactly from every position.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn_fsdp_data::{
    DataConfig, DataError, Dataset, Fields, Packing, Position, Sequence, Shuffle, Stream,
};

use crate::files::{self, Parts};
use crate::oracle::{self, Oracle};
use crate::random::Random;
use crate::tokenizers::Bytes;

const PROMPTS: [&str; 2] = ["question", "answer"];

fn documents(random: &mut Random, num_parts: usize) -> Vec<Parts> {
    let count = random.below(30);
    let part = |random: &mut Random| {
        let len = match random.below(10) {
            0 => 0,
            1 => 100 + random.below(200),
            _ => random.below(25),
        };
        random.text(len)
    };
    (0..count)
        .map(|_| (0..num_parts).map(|_| part(random)).collect())
        .collect()
}

/// Writes random files, and returns their blocks.
fn write_files(
    folder: &Path,
    random: &mut Random,
    names: &[&str],
    block_bytes: u64,
) -> Vec<Vec<Parts>> {
    let mut blocks = Vec::new();
    for file in 0..1 + random.below(4) {
        let all = documents(random, names.len());
        match random.below(if names.len() == 1 { 5 } else { 4 }) {
            0 | 1 => {
                let mut text = files::jsonl(names, &all).replace(
                    "}\n",
                    if random.below(2) == 0 {
                        "}\n"
                    } else {
                        "}\n \n"
                    },
                );
                if random.below(2) == 0 {
                    text.truncate(text.trim_end().len());
                }
                files::write(&folder.join(format!("{file}.jsonl")), &text);
                blocks.extend(oracle::jsonl_blocks(&text, &all, block_bytes));
            }
            2 | 3 => {
                let (first, rest) = all.split_at(random.below(all.len() + 1));
                let groups: Vec<&[Parts]> = [first, rest]
                    .into_iter()
                    .filter(|group| !group.is_empty())
                    .collect();
                files::write_parquet(&folder.join(format!("{file}.parquet")), names, &groups);
                blocks.extend(groups.into_iter().map(<[Parts]>::to_vec));
            }
            _ => {
                let len = [0, 20, 150_000][random.below(3)];
                let mut text = random.text(len);
                if random.below(2) == 0 {
                    text = text.replace('\n', "");
                }
                files::write(&folder.join(format!("{file}.txt")), &text);
                blocks.extend(oracle::text_blocks(&text));
            }
        }
    }
    blocks
}

fn case(folder: &Path, random: &mut Random) -> (DataConfig, Oracle) {
    let names = if random.below(3) == 0 {
        &PROMPTS[..]
    } else {
        &["text"][..]
    };
    let shuffle = (random.below(4) > 0).then(|| Shuffle {
        block_bytes: 1 + random.below(400) as u64,
        window_documents: 1 + random.below(12),
        window_bytes: 1 + random.below(800),
    });
    let block_bytes = shuffle.unwrap_or_default().block_bytes;
    let blocks = write_files(folder, random, names, block_bytes);
    let mut config = DataConfig::new(folder, 1 + random.below(60));
    config.packing = [
        Packing::Continuous,
        Packing::FullSequences,
        Packing::WholeDocuments,
        Packing::OneDocument,
    ][random.below(4)];
    config.seed = random.below(1000) as u64;
    config.shuffle = shuffle;
    config.held_out = [0.0, 0.1, 0.5][random.below(3)];
    if names.len() == 2 {
        let [prompt, completion] = PROMPTS.map(str::to_owned);
        config.fields = Fields::Completion { prompt, completion };
    }
    let oracle = Oracle {
        blocks,
        seq: config.seq,
        packing: config.packing,
        shuffle,
        seed: config.seed,
        held_out: config.held_out,
    };
    (config, oracle)
}

fn rows(batch: usize, rank: usize, ranks: usize) -> Range<usize> {
    rank * batch / ranks..(rank + 1) * batch / ranks
}

/// Reads a batch on several ranks, which must agree on the position, and saves it.
fn batch_of_ranks(
    data: &Dataset,
    from: &Position,
    batch: usize,
    ranks: usize,
) -> (Vec<Sequence>, Position) {
    let mut all = Vec::new();
    let mut positions = Vec::new();
    for rank in 0..ranks {
        let mut stream = data.resume(from).expect("it is the same data");
        all.extend(
            stream
                .next_batch(batch, rows(batch, rank, ranks))
                .expect("a batch"),
        );
        positions.push(serde_json::to_string(stream.position()).expect("it is JSON"));
    }
    assert!(positions.iter().all(|position| *position == positions[0]));
    (
        all,
        serde_json::from_str(&positions[0]).expect("it is a position"),
    )
}

#[test]
fn random_streams_equal_the_oracle_after_every_resume() {
    let (mut with_epochs, mut refused, mut long) = (0, 0, 0);
    for seed in 0..250 {
        let folder = tempfile::tempdir().expect("a folder");
        let mut random = Random(seed);
        let (config, oracle) = case(folder.path(), &mut random);
        let opened = Dataset::open(config, Arc::new(Bytes::default()));
        let most = oracle.sequences(0, false).len();
        if most == 0 {
            let error = match opened {
                Ok(data) => data
                    .training()
                    .next_batch(1, 0..1)
                    .expect_err("there is nothing"),
                Err(error) => error,
            };
            assert!(
                matches!(error, DataError::Empty { .. }),
                "case {seed}: {error}"
            );
            refused += 1;
            continue;
        }
        let data = opened.expect("it is data");
        let batch = 1 + random.below(6);
        let steps = (5 * most / 2 / batch).clamp(2, 40);
        let expected = oracle.training(steps * batch);
        let mut uninterrupted = data.training();
        let mut position = uninterrupted.position().clone();
        for step in 0..steps {
            let expected = &expected[step * batch..(step + 1) * batch];
            let found = uninterrupted.next_batch(batch, 0..batch).expect("a batch");
            assert_eq!(found, expected, "case {seed}, step {step}");
            let (found, next) = batch_of_ranks(&data, &position, batch, 1 + random.below(4));
            assert_eq!(found, expected, "case {seed}, step {step} resumed");
            assert_eq!(&next, uninterrupted.position(), "case {seed}, step {step}");
            position = next;
        }
        assert_eq!(position.num_sequences(), (steps * batch) as u64);
        with_epochs += usize::from(position.epoch() > 0);
        long += usize::from(steps == 40);
        let held_out = oracle.sequences(0, true);
        let mut stream = data.held_out();
        let found = stream
            .next_batch(held_out.len() + 3, 0..held_out.len() + 3)
            .expect("the rest");
        assert_eq!(found, held_out, "case {seed}, held out");
        assert!(stream.next_batch(2, 0..2).expect("an end").is_empty());
    }
    assert!(
        with_epochs > 100 && refused > 5 && long > 10,
        "{with_epochs} {refused} {long}"
    );
}

#[test]
fn streams_can_move_to_other_threads() {
    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}
    is_send::<Stream>();
    is_shared::<Dataset>();
}

#[test]
fn an_epoch_contains_every_training_document_once_in_a_new_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("all.jsonl");
    let documents: Vec<Parts> = (0..500)
        .map(|index| vec![format!("document {index}.")])
        .collect();
    files::write(&path, files::jsonl(&["text"], &documents));
    let mut config = DataConfig::new(&path, 32);
    config.packing = Packing::OneDocument;
    config.shuffle = Some(Shuffle {
        block_bytes: 500,
        window_documents: 64,
        window_bytes: 1 << 20,
    });
    let data = Dataset::open(config, Arc::new(Bytes::default())).expect("it is data");
    let mut stream = data.training();
    let mut orders = Vec::new();
    for _ in 0..2 {
        let rows = stream.next_batch(500, 0..500).expect("an epoch");
        let text = |row: Sequence| {
            let bytes = row
                .targets
                .iter()
                .map_while(|token| u8::try_from(*token).ok());
            String::from_utf8(bytes.collect()).expect("it is text")
        };
        orders.push(rows.into_iter().map(text).collect::<Vec<_>>());
    }
    assert_ne!(orders[0], orders[1]);
    let mut expected: Vec<String> = documents.concat();
    let in_order = orders[0]
        .iter()
        .zip(&expected)
        .filter(|(one, other)| one == other)
        .count();
    assert!(
        in_order < 20,
        "{in_order} documents are in the order of the file"
    );
    expected.sort();
    for mut order in orders {
        order.sort();
        assert_eq!(order, expected);
    }
}
