//! The fuzz targets on stable: the corpus and seeded mutations of it.
//!
//! `FUZZ_CASES` sets the number of mutations of each file; the default is 300. The files of the corpus are compared
//! with the current output. `WRITE_FUZZ_CORPUS=1` writes them again, after a change of the format.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_fsdp_checkpoint::storage::Memory;
use burn_fsdp_checkpoint::{
    Checkpoints, Dtype, Error, Layout, TensorKind, TensorSpec, WritePlan, fuzzing,
};
use common::Kind;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

type Target = fn(&[u8]) -> Result<(), Error>;

const TARGETS: [(&str, Target); 3] = [
    ("index", fuzzing::index),
    ("shard_header", fuzzing::shard_header),
    ("step", fuzzing::step),
];

/// Texts that often break parsers, inserted anywhere.
const TOKENS: [&str; 16] = [
    "18446744073709551615",
    "9223372036854775807",
    "4294967296",
    "-1",
    "0",
    "1e400",
    "null",
    "[",
    "{",
    "\"",
    "..",
    "/",
    "\\u0000",
    "__metadata__",
    "box",
    "flat",
];

/// The corpus in the folder where the test runs. The compiled test may come from another clone, through a shared target
/// folder.
fn corpus(target: &str) -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the test");
    Path::new(&folder).join("fuzz/corpus").join(target)
}

fn read(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = std::fs::read_dir(corpus(target)).expect("there is a corpus");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("reads").path()).collect();
    paths.sort();
    let read = |path: PathBuf| {
        let bytes = std::fs::read(&path).expect("reads");
        (path, bytes)
    };
    paths.into_iter().map(read).collect()
}

fn mutate(bytes: &mut Vec<u8>, random: &mut StdRng) {
    for _ in 0..random.random_range(1..4) {
        let place = random.random_range(0..=bytes.len());
        let end = (place + random.random_range(0..32)).min(bytes.len());
        match random.random_range(0..6) {
            0 if place < bytes.len() => bytes[place] ^= 1 << random.random_range(0..8),
            1 => bytes.truncate(place),
            2 => drop(bytes.drain(place..end)),
            3 => {
                let copy = bytes[place..end].to_vec();
                let to = random.random_range(0..=bytes.len());
                drop(bytes.splice(to..to, copy));
            }
            4 => {
                // Replaces a digit: digits are the most frequent content of valid JSON.
                let digit = bytes[place..].iter().position(u8::is_ascii_digit);
                let Some(start) = digit.map(|digit| place + digit) else {
                    continue;
                };
                let len = bytes[start..]
                    .iter()
                    .take_while(|b| b.is_ascii_digit())
                    .count();
                let token = TOKENS[random.random_range(0..6)].bytes();
                drop(bytes.splice(start..start + len, token));
            }
            _ => {
                let token = TOKENS[random.random_range(0..TOKENS.len())].bytes();
                drop(bytes.splice(place..end, token));
            }
        }
    }
}

#[test]
fn corpus_and_mutations_neither_panic_nor_hang() {
    let cases = std::env::var("FUZZ_CASES").ok();
    let cases: usize = cases.and_then(|cases| cases.parse().ok()).unwrap_or(300);
    for (name, target) in TARGETS {
        let files = read(name);
        assert!(files.len() >= 2, "{name} has a corpus");
        for (number, (path, bytes)) in files.into_iter().enumerate() {
            let is_valid = path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("valid"));
            let result = target(&bytes);
            assert_eq!(result.is_ok(), is_valid, "{}: {result:?}", path.display());
            let mut random = StdRng::seed_from_u64(number as u64);
            for _ in 0..cases {
                let mut bytes = bytes.clone();
                mutate(&mut bytes, &mut random);
                // Errors are allowed.
                let _ = target(&bytes);
            }
        }
    }
}

#[test]
fn written_files_are_the_corpus() {
    let is_written_anew = std::env::var_os("WRITE_FUZZ_CORPUS").is_some();
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let path = corpus(target).join(name);
        if is_written_anew {
            std::fs::create_dir_all(corpus(target)).expect("makes a folder");
            std::fs::write(path, bytes).expect("writes");
            return;
        }
        let there = std::fs::read(&path).expect("a file of the corpus");
        assert!(
            there == bytes,
            "the format has changed: {} is not what is written now; read the older one as well, or \
             raise the version, and write the corpus anew with WRITE_FUZZ_CORPUS=1",
            path.display()
        );
    };
    let in_step = |memory: &Memory, file: &str| {
        let path = Path::new("run/step-000001").join(file);
        memory.read(&path).expect("there")
    };
    for kind in common::KINDS {
        let memory = Memory::new();
        let checkpoints = Checkpoints::with_storage(Arc::new(memory.clone()), "run");
        common::save_step(&checkpoints, &common::plan(&common::line(2), kind), 1);
        let name = format!("valid-{kind:?}").to_lowercase();
        write("index", &name, &in_step(&memory, "index.json"));
        write(
            "shard_header",
            &name,
            &in_step(&memory, "rank-00000.safetensors"),
        );
    }
    for kind in [Kind::Flat, Kind::Columns] {
        let mesh = common::line(1);
        let layout = |shape: &[usize]| common::layout(kind, &mesh, shape);
        let tensor = |name: &str, shape: &[usize], dtype| {
            TensorSpec::new(name, shape, dtype, TensorKind::Parameter, layout(shape))
        };
        let mut tensors = vec![
            tensor("a", &[2, 3], Dtype::F32),
            tensor("b", &[], Dtype::BF16),
            tensor("c", &[0], Dtype::U8),
        ];
        tensors[1].layout = Layout::replicated(&mesh);
        let memory = Memory::new();
        let checkpoints = Checkpoints::with_storage(Arc::new(memory.clone()), "run");
        let plan = Arc::new(WritePlan::new(&mesh, tensors).expect("fits"));
        common::save_step(&checkpoints, &plan, 1);
        let mut whole = in_step(&memory, "index.json");
        whole.push(0);
        whole.extend(in_step(&memory, "rank-00000.safetensors"));
        let name = format!("valid-{kind:?}").to_lowercase();
        write("step", &name, &whole);
        let last = whole.len() - 1;
        whole[last] ^= 1;
        write("step", &name.replace("valid", "flipped"), &whole);
    }
    write("index", "deep", "[".repeat(2000).as_bytes());
    write(
        "index",
        "head",
        br#"{"format":"burn-fsdp-checkpoint","version":1}"#,
    );
    write("shard_header", "huge", &[255; 16]);
    write("shard_header", "short", b"abc");
}
