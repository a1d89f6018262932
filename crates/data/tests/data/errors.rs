//! Each error names the file, the line or row, what was expected and found, and a remedy.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use burn_fsdp_data::{
    DataConfig, DataError, Dataset, Fields, Format, Position, Shuffle, Tokenizer,
};

use crate::files::{self, Parts};
use crate::tokenizers::Bytes;

/// Part of a message, and a change that causes it.
type Change = (&'static str, fn(&mut DataConfig));

const GOOD: &str = "{\"text\": \"good\"}\n";

fn tokenizer(template: Option<&str>) -> Bytes {
    Bytes {
        template: template.map(str::to_owned),
    }
}

fn read_with(
    config: DataConfig,
    tokenizer: impl Tokenizer + 'static,
) -> Result<Position, DataError> {
    let mut stream = Dataset::open(config, Arc::new(tokenizer))?.training();
    for _ in 0..8 {
        stream.next_batch(1, 0..1)?;
    }
    Ok(stream.position().clone())
}

fn config(path: &Path) -> DataConfig {
    let mut config = DataConfig::new(path, 4);
    config.shuffle = None;
    config
}

/// Writes a file, reads it, and asserts that the message has all of these parts.
#[track_caller]
fn assert_fails(name: &str, bytes: impl AsRef<[u8]>, fields: Option<Fields>, parts: &[&str]) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    files::write(&path, bytes);
    let mut config = config(&path);
    config.fields = fields.unwrap_or(config.fields);
    let template = "{% for m in messages %}{% if m.content == 'boom' %}{{ raise_exception('no boom') }}{% endif %}{{ m.content }}{% endfor %}";
    let error = read_with(config, tokenizer(Some(template))).expect_err("it must fail");
    assert_message(&error, &[name], parts);
}

#[track_caller]
fn assert_message(error: &DataError, names: &[&str], parts: &[&str]) {
    let message = error.to_string();
    for part in names.iter().chain(parts) {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
    assert!(message.contains("; "), "`{message}` has no remedy");
}

fn chat() -> Option<Fields> {
    Some(Fields::Chat("chat".to_owned()))
}

#[test]
fn missing_fields_are_named() {
    let lines = format!("{GOOD}\n{{\"body\": \"x\", \"id\": 1}}\n");
    assert_fails(
        "a.jsonl",
        lines,
        None,
        &["line 3", "`text`", "found `body`, `id`"],
    );
    let lines = "{\"chat\": [{\"role\": \"user\"}, {\"content\": \"x\"}]}\n";
    assert_fails(
        "a.jsonl",
        lines,
        chat(),
        &["line 1", "`chat[1].role`", "`content`"],
    );
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.parquet");
    files::write_parquet(&path, &["body"], &[&[vec!["x".to_owned()]]]);
    let error = read_with(config(&path), tokenizer(None)).expect_err("it must fail");
    assert!(matches!(error, DataError::MissingField { .. }));
    assert_message(
        &error,
        &["a.parquet"],
        &["the schema", "`text`", "found `body`"],
    );
}

#[test]
fn wrong_types_are_named() {
    let lines = format!("{GOOD}{{\"text\": 5}}\n");
    assert_fails(
        "a.jsonl",
        lines,
        None,
        &["line 2", "`text` to be text", "found a number"],
    );
    assert_fails(
        "a.jsonl",
        "{\"chat\": \"x\"}\n",
        chat(),
        &["line 1", "a list of messages", "found text"],
    );
    assert_fails(
        "a.jsonl",
        "{\"chat\": [[]]}\n",
        chat(),
        &["`chat[0]`", "found a list"],
    );
    assert_fails(
        "a.jsonl",
        "{\"chat\": [{\"role\": 1}]}\n",
        chat(),
        &["`chat[0].role`", "found a number"],
    );
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.parquet");
    files::write_chats(&path, &[&[["user", "x"]]]);
    let mut config = config(&path);
    config.fields = Fields::Text("messages".to_owned());
    let error = read_with(config, tokenizer(None)).expect_err("it must fail");
    assert_message(
        &error,
        &["a.parquet"],
        &["row 1", "`messages` to be text", "found a list"],
    );
}

#[test]
fn broken_json_is_named() {
    let lines = format!("{GOOD}{{\"text\": \"a\n");
    assert_fails(
        "a.jsonl",
        lines,
        None,
        &["line 2", "expected a JSON object", "column"],
    );
    assert_fails(
        "a.jsonl",
        "[1]\n",
        None,
        &["line 1", "expected a JSON object", "found a list"],
    );
    // Values that a template would print as other numbers.
    for (value, is_changed) in [
        ("98765432109876543210", true),
        ("-9223372036854775809", true),
        ("-0", true),
        ("[0, {\"b\": -99999999999999999999}]", true),
        ("18446744073709551615", false),
        ("-9223372036854775808", false),
        ("-0.0", false),
        ("1e99", false),
        ("\"98765432109876543210\\\\\"", false),
        ("\"\\\" -0 98765432109876543210\"", false),
    ] {
        let line = format!(
            "{{\"chat\": [{{\"role\": \"assistant\", \"content\": \"abcdefgh\", \"x\": {value}}}]}}\n"
        );
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.jsonl");
        files::write(&path, line.repeat(3));
        let mut config = config(&path);
        config.fields = chat().expect("a field");
        let read = read_with(
            config,
            tokenizer(Some("{% for m in messages %}{{ m.content }}{% endfor %}")),
        );
        match read {
            Err(error) if is_changed => {
                assert_message(&error, &["a.jsonl"], &["line 1", "integer"])
            }
            read => assert!(!is_changed && read.is_ok(), "{value}: {:?}", read.err()),
        }
    }
    // Blocks start in the middle of a file, and still count lines from its start.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.jsonl");
    files::write(&path, format!("{}{{]\n", GOOD.repeat(30)));
    let mut config = config(&path);
    config.shuffle = Some(Shuffle {
        block_bytes: 50,
        ..Shuffle::default()
    });
    let error = read_with(config, tokenizer(None)).expect_err("it must fail");
    assert_message(&error, &["a.jsonl"], &["line 31", "column 2"]);
}

#[test]
fn broken_parquet_is_named() {
    assert_fails(
        "a.parquet",
        b"PAR1 but not really PAR1",
        None,
        &["the footer", "expected Parquet"],
    );
    assert_fails("a.parquet", b"", None, &["the footer"]);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.parquet");
    let documents: Vec<Parts> = (0..400)
        .map(|index| vec![format!("{index} {}", index * index)])
        .collect();
    files::write_parquet(&path, &["text"], &[&documents]);
    let mut bytes = fs::read(&path).expect("bytes");
    bytes[30..900].fill(0xff);
    files::write(&path, bytes);
    let error = read_with(config(&path), tokenizer(None)).expect_err("it must fail");
    assert!(matches!(error, DataError::Parquet { .. }), "{error}");
    assert_message(&error, &["a.parquet"], &["row", "expected Parquet"]);
}

#[test]
fn other_encodings_are_named() {
    assert_fails(
        "a.jsonl",
        [GOOD.as_bytes(), b"{\"text\": \"\xff\"}\n"].concat(),
        None,
        &["line 2", "UTF-8", "iconv"],
    );
    assert_fails("a.txt", b"ab\xffc", None, &["byte 2", "UTF-8", "iconv"]);
    let folder = tempfile::tempdir().expect("a folder");
    for column in ["required binary text (UTF8);", "required binary text;"] {
        let path = folder.path().join("a.parquet");
        files::write_parquet(
            &path,
            &["text"],
            &[&[vec!["good".to_owned()], vec!["zzzz".to_owned()]]],
        );
        files::write_binary(
            &path,
            column,
            1,
            &[&[vec!["zzzz".to_owned()], vec!["good".to_owned()]]],
        );
        let mut bytes = fs::read(&path).expect("bytes");
        let places: Vec<usize> = (0..bytes.len() - 4)
            .filter(|place| &bytes[*place..*place + 4] == b"zzzz")
            .collect();
        places.iter().for_each(|place| bytes[*place] = 0xff);
        files::write(&path, bytes);
        let error = read_with(config(&path), tokenizer(None)).expect_err("it must fail");
        assert!(matches!(error, DataError::NotUtf8 { .. }), "{error}");
        assert_message(&error, &["a.parquet"], &["row", "UTF-8"]);
    }
}

#[test]
fn empty_data_is_named() {
    for name in ["a.txt", "a.jsonl"] {
        assert_fails(
            name,
            "",
            None,
            &["no training documents", "all files are empty"],
        );
    }
    assert_fails(
        "a.jsonl",
        "\n{\"text\": \"\"}\n",
        None,
        &["no training documents", "add documents"],
    );
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.jsonl");
    files::write(&path, GOOD);
    let mut config = config(&path);
    config.held_out = 1.0 - f64::EPSILON;
    let data = Dataset::open(config, Arc::new(tokenizer(None))).expect("it is data");
    let error = data.survey().expect_err("all is held out");
    assert_message(&error, &["a.jsonl"], &["held-out"]);
    assert!(matches!(
        data.training().next_batch(1, 0..1),
        Err(DataError::Empty { .. })
    ));
}

#[test]
fn files_that_cannot_be_read_are_named() {
    assert_fails(
        "a.json",
        GOOD,
        None,
        &["extension `json`", "jsonl", "parquet"],
    );
    assert_fails("noextension", GOOD, None, &["extension ``"]);
    assert_fails("a.txt", GOOD, chat(), &["plain text", "no fields"]);
    let folder = tempfile::tempdir().expect("a folder");
    let error = |path: &str| {
        read_with(config(&folder.path().join(path)), tokenizer(None)).expect_err("it must fail")
    };
    assert_message(&error("absent.jsonl"), &["absent.jsonl"], &["cannot read"]);
    assert_message(&error("*.jsonl"), &["*.jsonl"], &["matches no files"]);
    assert_message(&error("a***.jsonl"), &["a***.jsonl"], &["is not a glob"]);
    assert_message(&error(""), &[], &["contains no files"]);
}

#[test]
fn long_lines_are_named() {
    let line = format!("{GOOD}{{\"text\": \"{}\"}}\n", "x".repeat(17 << 20));
    assert_fails("a.jsonl", line, None, &["line 2", "at most 16777216 bytes"]);
}

#[test]
fn templates_are_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.jsonl");
    files::write(
        &path,
        "{\"chat\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n",
    );
    let mut config = config(&path);
    config.fields = Fields::Chat("chat".to_owned());
    let error = read_with(config.clone(), tokenizer(None)).expect_err("it must fail");
    assert_message(&error, &[], &["chat template", "is missing"]);
    let error = read_with(config.clone(), tokenizer(Some("{% if %}"))).expect_err("it must fail");
    assert_message(&error, &[], &["chat template", "cannot be parsed"]);
    let error =
        read_with(config, tokenizer(Some("{{ messages|length }}"))).expect_err("it must fail");
    assert!(
        matches!(error, DataError::NoAssistantMask { .. }),
        "{error}"
    );
    assert_message(&error, &["a.jsonl"], &["line 1", "{% generation %}"]);
    assert_fails(
        "a.jsonl",
        "{\"chat\": [{\"role\": \"user\", \"content\": \"boom\"}]}\n",
        chat(),
        &["line 1", "no boom"],
    );
}

#[test]
fn the_tokenizers_errors_are_located() {
    assert_fails(
        "a.jsonl",
        format!("{GOOD}{{\"text\": \"\\u007f\"}}\n"),
        None,
        &["line 2", "no token for DEL"],
    );
}

#[test]
fn impossible_settings_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.jsonl");
    files::write(&path, GOOD);
    let changes: [Change; 4] = [
        ("the sequence length is 0", |config| config.seq = 0),
        ("the held-out fraction is 1", |config| config.held_out = 1.0),
        ("the held-out fraction is NaN", |config| {
            config.held_out = f64::NAN
        }),
        ("the shuffle is 0 bytes a block", |config| {
            config.shuffle = Some(Shuffle {
                block_bytes: 0,
                ..Shuffle::default()
            });
        }),
    ];
    for (part, change) in changes {
        let mut config = config(&path);
        change(&mut config);
        assert_message(
            &read_with(config, tokenizer(None)).expect_err("it must fail"),
            &[],
            &[part],
        );
    }
    let mut stream = Dataset::open(config(&path), Arc::new(tokenizer(None)))
        .expect("it is data")
        .training();
    assert_message(
        &stream.next_batch(2, 1..3).expect_err("it must fail"),
        &[],
        &["range of rows is 1..3", "0..2"],
    );
}

struct Renamed;

impl Tokenizer for Renamed {
    fn encode(&self, _text: &str) -> Result<Vec<u32>, String> {
        Ok(vec![1, 2, 3])
    }

    fn eos(&self) -> Option<u32> {
        Some(257)
    }

    fn bos(&self) -> Option<u32> {
        Some(256)
    }

    fn identity(&self) -> String {
        "words".to_owned()
    }
}

#[test]
fn positions_of_other_data_are_rejected_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let [one, two] = ["one.jsonl", "two.jsonl"].map(|name| folder.path().join(name));
    files::write(&one, GOOD.repeat(9));
    files::write(&two, GOOD.repeat(9));
    let config = config(folder.path());
    let position = read_with(config.clone(), tokenizer(None)).expect("it is data");
    let resume = |config: DataConfig| {
        let data = Dataset::open(config, Arc::new(tokenizer(None))).expect("it is data");
        data.resume(&position).map(drop)
    };
    resume(config.clone()).expect("nothing has changed");
    let changes: [Change; 7] = [
        ("the seed 0, but now it is 1", |config| config.seed = 1),
        ("the sequence length 4, but now it is 5", |config| {
            config.seq = 5
        }),
        ("the held-out fraction 0, but now it is 0.5", |config| {
            config.held_out = 0.5
        }),
        ("the packing Continuous", |config| {
            config.packing = burn_fsdp_data::Packing::OneDocument
        }),
        ("the shuffle None", |config| {
            config.shuffle = Some(Shuffle::default())
        }),
        ("the fields Text(\"text\")", |config| {
            config.fields = Fields::Text("other".to_owned())
        }),
        ("the format None", |config| {
            config.format = Some(Format::Jsonl)
        }),
    ];
    for (part, change) in changes {
        let mut config = config.clone();
        change(&mut config);
        let error = resume(config).expect_err("it must fail");
        assert!(matches!(error, DataError::OtherSetting { .. }));
        assert_message(&error, &[], &[part]);
    }
    let data = Dataset::open(config.clone(), Arc::new(Renamed)).expect("it is data");
    let error = data.resume(&position).map(drop).expect_err("it must fail");
    assert_message(&error, &[], &["the tokenizer bytes, but now it is words"]);

    // The same size, but another letter.
    files::write(&two, GOOD.repeat(9).replacen("good", "gold", 1));
    let error = resume(config.clone()).expect_err("it must fail");
    assert!(matches!(error, DataError::Changed { .. }));
    assert_message(
        &error,
        &["two.jsonl"],
        &[
            "expected 153 bytes with checksum",
            "found 153 bytes with checksum",
        ],
    );
    files::write(&two, GOOD.repeat(8));
    assert_message(
        &resume(config.clone()).expect_err("it must fail"),
        &["two.jsonl"],
        &["found 136 bytes"],
    );
    fs::rename(&two, folder.path().join("zwei.jsonl")).expect("renamed");
    assert_message(
        &resume(config.clone()).expect_err("it must fail"),
        &[],
        &["expected the file `two.jsonl`", "`zwei.jsonl`"],
    );
    fs::remove_file(folder.path().join("zwei.jsonl")).expect("removed");
    assert_message(
        &resume(config.clone()).expect_err("it must fail"),
        &[],
        &["`two.jsonl`", "no such file"],
    );
    files::write(&two, GOOD.repeat(9));
    files::write(&folder.path().join("three.jsonl"), GOOD);
    assert_message(
        &resume(config).expect_err("it must fail"),
        &[],
        &["expected the file `two.jsonl`", "`three.jsonl`"],
    );
}

#[test]
fn a_changed_byte_of_a_large_file_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.jsonl");
    let lines = GOOD.repeat(100_000);
    files::write(&path, &lines);
    let config = config(&path);
    let position = read_with(config.clone(), tokenizer(None)).expect("it is data");
    for at in [1_000_003, 65_999, 1_699_990] {
        let letter = lines[at..].find("good").map(|good| at + good);
        let mut changed = lines.clone().into_bytes();
        changed[letter.expect("a good one")] = b'f';
        files::write(&path, &changed);
        let data = Dataset::open(config.clone(), Arc::new(tokenizer(None))).expect("it is data");
        let error = data.resume(&position).map(drop).expect_err("it must fail");
        assert!(matches!(error, DataError::Changed { .. }), "{at}");
    }
    files::write(&path, &lines);
    let data = Dataset::open(config, Arc::new(tokenizer(None))).expect("it is data");
    data.resume(&position)
        .map(drop)
        .expect("nothing has changed");
}

#[cfg(target_os = "linux")]
#[test]
fn a_glob_that_meets_another_encoding_is_an_error() {
    use std::os::unix::ffi::OsStrExt;

    let folder = tempfile::tempdir().expect("a folder");
    files::write(&folder.path().join("a.jsonl"), GOOD);
    let other = folder
        .path()
        .join(std::ffi::OsStr::from_bytes(b"\xff.jsonl"));
    files::write(&other, GOOD);
    let error = read_with(config(&folder.path().join("*.jsonl")), tokenizer(None));
    assert_message(&error.expect_err("it must fail"), &[], &["UTF-8"]);
}

#[test]
fn data_moves_with_its_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let [old, new] = ["old", "new"].map(|name| folder.path().join(name));
    files::write(&old.join("sub/a.jsonl"), GOOD.repeat(9));
    let position = read_with(config(&old), tokenizer(None)).expect("it is data");
    fs::rename(&old, &new).expect("renamed");
    for path in [new.clone(), new.join("*/*.jsonl"), new.join("**/a.*")] {
        let is_folder = path == new;
        let data = Dataset::open(config(&path), Arc::new(tokenizer(None))).expect("it is data");
        data.resume(&position)
            .map(drop)
            .unwrap_or_else(|error| panic!("{is_folder}: {error}"));
    }
}

#[test]
fn files_that_change_during_a_run_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.jsonl");
    files::write(&path, GOOD.repeat(9));
    let data = Dataset::open(config(&path), Arc::new(tokenizer(None))).expect("it is data");
    files::write(&path, GOOD.repeat(10));
    let error = data
        .training()
        .next_batch(1, 0..1)
        .expect_err("it must fail");
    assert_message(
        &error,
        &["a.jsonl"],
        &["has changed", "expected 153 bytes", "found 170 bytes"],
    );
}
