//! Memory does not grow with the files.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use burn_fsdp_data::{DataConfig, Dataset, Shuffle, Tokenizer};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Tests share the allocator's peak.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const FILE_BYTES: usize = 200 << 20;

/// A window of 4 MiB, a block, a page of Parquet in both forms, and what their decoding needs.
const MOST_BYTES: usize = 16 << 20;

struct Bytes;

impl Tokenizer for Bytes {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn eos(&self) -> Option<u32> {
        Some(256)
    }

    fn identity(&self) -> String {
        "bytes".to_owned()
    }
}

/// Returns a document of about 2 KiB that does not compress.
fn document(index: u64) -> String {
    let mut state = index;
    let mut word = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        format!("{:08x} ", state >> 32)
    };
    (0..227).map(|_| word()).collect()
}

fn write_jsonl(path: &Path) {
    let mut file = BufWriter::new(File::create(path).expect("a file"));
    let mut bytes = 0;
    for index in 0.. {
        let line = format!("{{\"text\": \"{}\"}}\n", document(index));
        bytes += line.len();
        file.write_all(line.as_bytes()).expect("written");
        if bytes > FILE_BYTES {
            break;
        }
    }
    file.flush().expect("written");
}

/// Writes row groups of 50 MiB.
fn write_parquet(path: &Path) {
    let schema =
        parse_message_type("message schema { required binary text (UTF8); }").expect("a schema");
    let file = File::create(path).expect("a file");
    let properties = WriterProperties::builder()
        .set_dictionary_enabled(false)
        .build();
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).expect("a writer");
    let mut index = 0;
    for _ in 0..4 {
        let mut rows = writer.next_row_group().expect("a row group");
        let mut column = rows.next_column().expect("a column").expect("one");
        for _ in 0..100 {
            let values: Vec<ByteArray> = (index..index + 256)
                .map(|index| ByteArray::from(document(index).into_bytes()))
                .collect();
            column
                .typed::<ByteArrayType>()
                .write_batch(&values, None, None)
                .expect("written");
            index += 256;
        }
        column.close().expect("closed");
        rows.close().expect("closed");
    }
    writer.close().expect("closed");
}

fn write_text(path: &Path) {
    let mut file = BufWriter::new(File::create(path).expect("a file"));
    for index in 0..FILE_BYTES as u64 / 2043 {
        writeln!(file, "{}", document(index)).expect("written");
    }
    file.flush().expect("written");
}

/// Surveys a file, trains on some of it, and asserts that both need little memory.
#[track_caller]
fn assert_small(name: &str, write: fn(&Path)) {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    write(&path);
    let size = path.metadata().expect("it exists").len();
    assert!(size > FILE_BYTES as u64 * 9 / 10, "{size}");
    let mut config = DataConfig::new(&path, 1024);
    config.held_out = 0.01;
    config.shuffle = Some(Shuffle {
        window_bytes: 4 << 20,
        ..Shuffle::default()
    });
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let data = Dataset::open(config, Arc::new(Bytes)).expect("it is data");
    let survey = data.survey().expect("it can be read");
    assert!(survey.training.bytes > size * 9 / 10);
    let mut stream = data.training();
    for _ in 0..300 {
        assert_eq!(stream.next_batch(64, 0..8).expect("a batch").len(), 8);
    }
    let mut stream = data.resume(stream.position()).expect("it is the same data");
    stream.next_batch(64, 0..64).expect("a batch");
    let peak = ALLOCATOR.peak_usage() - before;
    println!(
        "{name}: {:.1} MiB of {:.1}",
        peak as f64 / f64::from(1 << 20),
        size as f64 / f64::from(1 << 20)
    );
    assert!(
        peak < MOST_BYTES,
        "{peak} bytes at the peak, of at most {MOST_BYTES}"
    );
}

#[test]
fn memory_does_not_grow_with_jsonl() {
    assert_small("big.jsonl", write_jsonl);
}

#[test]
fn memory_does_not_grow_with_parquet() {
    assert_small("big.parquet", write_parquet);
}

#[test]
fn memory_does_not_grow_with_plain_text() {
    assert_small("big.txt", write_text);
}
