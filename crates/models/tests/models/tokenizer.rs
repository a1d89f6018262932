//! Tests of a tokenizer with 300 tokens in Hugging Face's form: byte pairs of a few lines. Other programs truncate
//! and pad text to 8 tokens with it. The ids are those of the Python package `tokenizers` 0.23.

use std::path::{Path, PathBuf};

use burn_fsdp_models::{Batches, ByteText, ModelError, TextCodec, TokenStream, Tokenizer};
use serde_json::{Value, json};
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
fn ids_match_other_programs_without_truncation() {
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

/// The tokens of a text with several pieces are the tokens of its lines, one after the other.
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
    // The split is between tokens.
    let of_both = period(tokens.training()) + period(tokens.held_out());
    assert_eq!(of_both, 20_000 * of_line.len());
    let batches = Batches {
        stream: tokens.training(),
        batch: 1,
        seq: of_line.len(),
    };
    let want: Vec<i64> = of_line.iter().map(|id| i64::from(*id)).collect();
    // Also at the boundary between two pieces.
    for row in 0..training.len() / line.len() {
        assert_eq!(batches.rows(row, 0..1).inputs(), want, "line {row}");
    }
    assert!(!held_out.is_empty());
}

/// Returns the tokenizer with some parts changed.
fn changed(change: impl FnOnce(&mut Value)) -> Tokenizer {
    let mut json: Value = serde_json::from_str(JSON).expect("JSON");
    change(&mut json);
    let folder = TempDir::new().expect("a folder");
    Tokenizer::open(file(&folder, json.to_string())).expect("a tokenizer")
}

/// Tokens that a template adds after a text would be in the middle of a text that continues.
#[test]
fn only_tokens_in_front_of_a_text_are_added() {
    let token = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let own = tokenizer().encode(TEXT, true).unwrap();
    let (front, plain) = (&own[..1], &own[1..]);
    let special = json!({"t": {"id": "t", "ids": [0], "tokens": ["t"]}, "u": {"id": "u", "ids": [3, 4], "tokens": ["u", "v"]}});
    for (single, want) in [
        (json!([token("t"), text]), [front, plain].concat()),
        (json!([text, token("t")]), plain.to_vec()),
        (
            json!([token("t"), text, token("u")]),
            [front, plain].concat(),
        ),
        (
            json!([token("u"), token("t"), text, token("t")]),
            [&[3, 4, 0], plain].concat(),
        ),
        (json!([text]), plain.to_vec()),
    ] {
        let template = json!({"type": "TemplateProcessing", "single": single, "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special});
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let both = json!({"type": "Sequence", "processors": [byte_level, template]});
        for processor in [template, both] {
            let tokenizer = changed(|json| json["post_processor"] = processor);
            assert_eq!(tokenizer.encode(TEXT, true).unwrap(), want, "{single}");
            assert_eq!(tokenizer.encode(TEXT, false).unwrap(), plain, "{single}");
            let begun = tokenizer.encode("", true).unwrap();
            assert_eq!(begun, want[..want.len() - plain.len()], "{single}");
        }
    }
    let roberta = json!({"type": "RobertaProcessing", "sep": ["!", 1], "cls": ["t", 0], "trim_offsets": true, "add_prefix_space": false});
    let tokenizer = changed(|json| json["post_processor"] = roberta);
    assert_eq!(tokenizer.encode(TEXT, true).unwrap(), own);
}

#[test]
fn hashes_depend_on_behavior() {
    let own = tokenizer();
    let folder = TempDir::new().expect("a folder");
    let json: Value = serde_json::from_str(JSON).expect("JSON");
    // The same tokenizer in a different order and form.
    let pretty = serde_json::to_string_pretty(&json).expect("JSON");
    let indented = Tokenizer::open(file(&folder, pretty)).expect("a tokenizer");
    assert_ne!(indented.checksum(), own.checksum());
    let pairs = changed(|json| {
        for merge in json["model"]["merges"].as_array_mut().expect("merges") {
            *merge = match merge.as_str() {
                Some(pair) => pair.split(' ').collect(),
                None => json!(format!(
                    "{} {}",
                    merge[0].as_str().unwrap(),
                    merge[1].as_str().unwrap()
                )),
            };
        }
    });
    let bare = changed(|json| {
        for name in ["truncation", "padding"] {
            json[name] = Value::Null;
        }
        json["model"]
            .as_object_mut()
            .expect("a model")
            .remove("ignore_merges");
    });
    let random = changed(|json| json["model"]["dropout"] = json!(0.5));
    for same in [&indented, &pairs, &bare, &random] {
        assert_eq!(same.hash(), own.hash());
        assert_eq!(
            same.encode(TEXT, true).unwrap(),
            own.encode(TEXT, true).unwrap()
        );
    }
    // Other tokenizers: other tokens, merges, rules, or added tokens.
    let others = [
        changed(|json| {
            let vocab = json["model"]["vocab"].as_object_mut().expect("tokens");
            let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
            vocab.insert("a".to_owned(), b);
            vocab.insert("b".to_owned(), a);
        }),
        changed(|json| {
            json["model"]["merges"]
                .as_array_mut()
                .expect("merges")
                .swap(0, 1)
        }),
        changed(|json| json["normalizer"] = json!({"type": "Lowercase"})),
        changed(|json| json["pre_tokenizer"]["add_prefix_space"] = json!(true)),
        changed(|json| json["post_processor"] = Value::Null),
        changed(|json| {
            let added = json["added_tokens"].as_array_mut().expect("tokens");
            let mut more = added[0].clone();
            more["id"] = json!(300);
            more["content"] = json!("<more>");
            added.push(more);
        }),
    ];
    for (index, other) in others.iter().enumerate() {
        assert_ne!(other.hash(), own.hash(), "{index}");
    }
}

/// Wherever the held-out end begins, even within words and characters, the two parts have the tokens of the whole
/// text.
#[test]
fn an_end_is_held_out_between_tokens() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("text");
    let ids = |stream: TokenStream| -> Vec<i64> {
        let TokenStream::Text(tokens) = stream else {
            panic!("of a text");
        };
        (0..tokens.num_tokens())
            .map(|at| tokens.token(at))
            .collect()
    };
    for unit in ["the cat sat on the mat ", "thecat", "é", "ö🦀cat "] {
        for extra in 0..8 {
            let text = format!("{}{}", "x".repeat(extra), unit.repeat(60));
            std::fs::write(&path, &text).expect("a writable folder");
            let read = ByteText::read(&path, usize::MAX).expect("text");
            let tokens = read.tokenized(&tokenizer()).expect("tokens");
            let got = [ids(tokens.training()), ids(tokens.held_out())].concat();
            let whole = tokenizer().encode(&text, false).unwrap();
            let whole: Vec<i64> = whole.into_iter().map(i64::from).collect();
            assert_eq!(got, whole, "{unit} behind {extra}");
        }
    }
}

#[test]
fn invalid_utf8_is_counted_and_half_characters_are_dropped() {
    let folder = TempDir::new().expect("a folder");
    let read = |bytes: &[u8], most: usize| {
        let path = folder.path().join("text");
        std::fs::write(&path, bytes).expect("a writable folder");
        let text = ByteText::read(&path, most).expect("text");
        text.tokenized(&tokenizer())
    };
    let text = "é".repeat(100);
    // Both the split and the end are within a character.
    for most in 100..110 {
        let tokens = read(text.as_bytes(), most).expect("tokens");
        assert_eq!(tokens.num_replaced(), 0, "{most}");
    }
    let tokens = read(&b"the cat, caf\xe9, na\xefve\n".repeat(20), usize::MAX).expect("tokens");
    assert_eq!(tokens.num_replaced(), 40);
    let error = read(&b"\x83e\x83X\x83g\x83\xff".repeat(20), usize::MAX).unwrap_err();
    assert!(error.to_string().contains("not in UTF-8"), "{error}");
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

/// Files may come from untrusted sources: a file that is changed anywhere must be a tokenizer or an error.
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
