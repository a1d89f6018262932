//! A tokenizer of 300 tokens in Hugging Face's form, byte pairs of a few lines, which cuts text to 8 tokens and fills it up to as many
//! in other programs. The ids are those of the Python package `tokenizers` 0.23.

use std::path::{Path, PathBuf};

use burn_fsdp_models::{Batches, ByteText, ModelError, TextCodec, Tokenizer};
use tempfile::TempDir;

const JSON: &str = include_str!("tokenizer.json");

const TEXT: &str = "the cat's  mat\n\n  fn main() {}";
const IDS: [u32; 16] = [
    258, 267, 271, 221, 265, 259, 199, 199, 221, 221, 278, 265, 275, 273, 287, 93,
];

fn file(folder: &TempDir, contents: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, contents).expect("a writable folder");
    path
}

fn tokenizer() -> Tokenizer {
    let folder = TempDir::new().expect("a folder");
    Tokenizer::open(file(&folder, JSON)).expect("a tokenizer")
}

#[test]
fn ids_are_those_of_other_programs_and_nothing_is_cut() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.num_ids(), 300);
    for (text, ids) in [
        (TEXT, &IDS[..]),
        (
            "äöü 🦀 x",
            &[
                128, 98, 128, 115, 128, 121, 221, 173, 254, 100, 223, 221, 88,
            ],
        ),
        ("", &[]),
    ] {
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids);
        let begun = tokenizer.encode(text, true).unwrap();
        assert_eq!(begun, [&[0], ids].concat());
        assert_eq!(tokenizer.decode(&begun).unwrap(), text);
    }
}

#[test]
fn a_codec_goes_both_ways() {
    for (codec, num_ids) in [
        (TextCodec::Bytes, 256),
        (TextCodec::Tokenizer(tokenizer()), 300),
    ] {
        assert_eq!(codec.num_ids(), num_ids);
        let tokens = codec.encode(TEXT).unwrap();
        assert_eq!(codec.decode(&tokens).unwrap(), TEXT.as_bytes());
        assert!(codec.check_vocab(num_ids).is_ok());
        let error = codec.check_vocab(num_ids - 1).unwrap_err().to_string();
        assert!(error.contains(&format!("{}", num_ids - 1)), "{error}");
    }
}

/// A text of several pieces is the tokens of its lines, one after the other.
#[test]
fn long_text_is_tokenized_in_pieces() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("text");
    let line = "the cat sat on the mat\n";
    std::fs::write(&path, line.repeat(20_000)).expect("a writable folder");
    let text = ByteText::read(&path, usize::MAX).expect("text");
    let tokenizer = tokenizer();
    let tokens = text.tokenized(&tokenizer).expect("tokens");
    let [training, held_out] = text.parts();
    let of_line = tokenizer.encode(line, false).unwrap();
    let period = |stream: burn_fsdp_models::TokenStream| stream.period().unwrap();
    // The split is within a line.
    let of_both = period(tokens.training()) + period(tokens.held_out());
    assert!(of_both.abs_diff(20_000 * of_line.len()) < 10, "{of_both}");
    let batches = Batches {
        stream: tokens.training(),
        batch: 1,
        seq: of_line.len(),
    };
    let want: Vec<i64> = of_line.iter().map(|id| i64::from(*id)).collect();
    // Also where one piece ends and the next begins.
    for row in 0..training.len() / line.len() {
        assert_eq!(batches.rows(row, 0..1).inputs(), want, "line {row}");
    }
    assert!(!held_out.is_empty());
}

#[test]
fn wrong_files_are_named() {
    let folder = TempDir::new().expect("a folder");
    let open = |path: &Path| Tokenizer::open(path).unwrap_err();
    let missing = open(&folder.path().join("missing.json"));
    assert!(matches!(missing, ModelError::File { .. }), "{missing}");
    let empty = JSON.find("\"vocab\":{").expect("a vocabulary");
    for wrong in [
        "",
        "{}",
        "[1, 2]",
        "no tokenizer",
        &JSON[..JSON.floor_char_boundary(JSON.len() / 2)],
        &JSON[..empty],
        &JSON.replace("\"BPE\"", "\"Unheard\""),
    ] {
        let error = open(&file(&folder, wrong));
        assert!(matches!(error, ModelError::NotATokenizer { .. }), "{error}");
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
    let error = open(folder.path());
    assert!(matches!(error, ModelError::NotATokenizer { .. }), "{error}");
}

/// Files may be from anyone: one that was changed anywhere is a tokenizer or an error.
#[test]
fn changed_files_are_tokenizers_or_errors() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("tokenizer.json");
    for place in (0..JSON.len()).step_by(37) {
        let mut bytes = JSON.as_bytes().to_vec();
        bytes[place] = b'9';
        std::fs::write(&path, bytes).expect("a writable folder");
        if let Ok(tokenizer) = Tokenizer::open(&path) {
            let ids = tokenizer.encode(TEXT, true).unwrap_or_default();
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.num_ids()));
            let _ = tokenizer.decode(&ids);
        }
    }
}
