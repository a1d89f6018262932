//! A modified index with a valid seal causes a precise error and little memory use.

mod common;

use burn_fsdp_checkpoint::storage::Memory;
use burn_fsdp_checkpoint::{Error, Limits, Step};
use common::stored::{FILES, assert_names, checkpoints, in_step, plan, with_index_text};
use serde_json::{Value, json};

/// Opens a step whose index was modified and sealed again, as an attacker would do.
fn with_index(edit: impl FnOnce(&mut Value)) -> Result<Step, Error> {
    let memory = Memory::new();
    common::save_step(&checkpoints(&memory), &plan(), 1);
    let json = memory.read(&in_step(1, FILES[0])).expect("there");
    let mut index: Value = serde_json::from_slice(&json).expect("JSON");
    edit(&mut index);
    with_index_text(&memory, index.to_string())
}

#[test]
fn malicious_indices_are_refused() {
    with_index(|_| ()).expect("an unchanged index is fine");
    type Edit = fn(&mut Value);
    let edits: &[(&str, Edit)] = &[
        ("format version 2", |i| i["version"] = json!(2)),
        ("format", |i| i["format"] = json!("x".repeat(10_000))),
        ("chunk_bytes", |i| i["chunk_bytes"] = json!(0)),
        ("chunk_bytes", |i| i["chunk_bytes"] = json!(1u64 << 40)),
        ("world_size", |i| i["world_size"] = json!(3)),
        ("world_size", |i| i["mesh"][0]["size"] = json!(u64::MAX)),
        ("at most 64", |i| {
            i["mesh"] = vec![json!({"name": "a", "size": 1}); 65].into()
        }),
        ("plain name", |i| {
            i["files"][0]["name"] = json!("../rank.safetensors")
        }),
        ("plain name", |i| {
            i["files"][0]["name"] = json!("/tmp/rank.safetensors")
        }),
        ("plain name", |i| {
            i["files"][0]["name"] = json!("a\\rank.safetensors")
        }),
        ("plain name", |i| i["files"][0]["name"] = json!("..")),
        ("plain name", |i| {
            i["files"][0]["name"] = json!("\u{202e}.safetensors")
        }),
        ("plain name", |i| {
            i["files"][0]["name"] = json!("index.json")
        }),
        ("occurs twice", |i| {
            i["files"][0]["name"] = i["files"][1]["name"].clone()
        }),
        ("impossible sizes", |i| {
            i["files"][0]["bytes"] = json!(u64::MAX)
        }),
        ("impossible sizes", |i| {
            i["files"][0]["header_bytes"] = json!(u64::MAX)
        }),
        ("impossible sizes", |i| {
            i["files"][0]["header_bytes"] = json!(7)
        }),
        ("to count", |i| {
            i["files"][0]["bytes"] = json!(i64::MAX);
            i["files"][1]["bytes"] = json!(i64::MAX);
        }),
        ("two tensors have this name", |i| {
            i["tensors"][1]["name"] = i["tensors"][0]["name"].clone()
        }),
        ("name must be", |i| i["tensors"][0]["name"] = json!("")),
        ("name must be", |i| {
            i["tensors"][0]["name"] = json!("__metadata__")
        }),
        ("too large", |i| {
            i["tensors"][0]["shape"] = json!([u64::MAX, 2])
        }),
        ("at most 16", |i| {
            i["tensors"][0]["shape"] = vec![1; 17].into()
        }),
        ("whole bytes", |i| i["tensors"][0]["dtype"] = json!("F4")),
        ("unknown variant", |i| {
            i["tensors"][0]["dtype"] = json!("F31")
        }),
        ("unknown field", |i| i["more"] = json!(1)),
        ("missing field", |i| {
            i.as_object_mut().expect("a map").remove("training");
        }),
        ("parts hold", |i| {
            i["tensors"][0]["parts"]
                .as_array_mut()
                .expect("a list")
                .pop();
        }),
        ("two parts in file", |i| {
            let part = i["tensors"][0]["parts"][0].clone();
            i["tensors"][0]["parts"]
                .as_array_mut()
                .expect("a list")
                .push(part);
        }),
        ("does not exist", |i| {
            i["tensors"][0]["parts"][0]["file"] = json!(2)
        }),
        ("bytes after byte", |i| {
            i["tensors"][0]["parts"][0]["bytes"]["end"] = json!(1u64 << 60)
        }),
        ("bytes after byte", |i| {
            i["tensors"][0]["parts"][0]["bytes"]["start"] = json!(1u64 << 61)
        }),
        ("bytes after byte", |i| {
            i["tensors"][0]["parts"][0]["bytes"] = json!({"start": 0, "end": 212})
        }),
        ("instead of", |i| {
            // Overlapping bytes of two tensors in one file.
            let first = i["tensors"][9]["parts"][0]["bytes"].clone();
            i["tensors"][10]["parts"][0]["bytes"] = first;
        }),
        ("parts hold elements", |i| {
            // Overlapping elements of one tensor, with matching bytes and checksums.
            i["tensors"][0]["parts"][1]["region"] = json!({"flat": {"start": 52, "end": 104}});
        }),
        ("it has no elements", |i| {
            i["tensors"][0]["parts"][1]["region"] = json!({"flat": {"start": 53, "end": 1000}});
        }),
        ("it has no elements", |i| {
            i["tensors"][0]["parts"][1]["region"] = json!({"flat": {"start": 50, "end": 3}});
        }),
        ("overlap", |i| {
            let parts = &mut i["tensors"][11]["parts"];
            assert!(
                parts[0]["region"]["box"].is_object(),
                "shards of dim 1 are boxes"
            );
            parts[1]["region"]["box"]["offsets"] = json!([0, 0]);
        }),
        ("it has no box", |i| {
            i["tensors"][11]["parts"][1]["region"]["box"]["offsets"] = json!([0, u64::MAX]);
        }),
        ("it has no box", |i| {
            i["tensors"][11]["parts"][1]["region"]["box"]["offsets"] = json!([0]);
        }),
        ("all ranges or all boxes", |i| {
            i["tensors"][11]["parts"][1]["region"] =
                json!({"flat": {"start": 0, "end": 700 * 500}});
        }),
        ("checksums for", |i| {
            i["tensors"][0]["parts"][0]["crc32"] = json!("")
        }),
        ("hexadecimal", |i| {
            i["tensors"][0]["parts"][0]["crc32"] = json!("0123456")
        }),
        ("hexadecimal", |i| {
            i["tensors"][0]["parts"][0]["crc32"] = json!("+1234567")
        }),
        ("hexadecimal", |i| {
            i["tensors"][0]["parts"][0]["crc32"] = json!("\u{e9}\u{e9}\u{e9}\u{e9}")
        }),
        ("invalid type", |i| i["training"] = json!(null)),
        ("loss scale", |i| {
            i["training"]["loss_scale"] = json!({"scale": -1.0, "good_steps": 0})
        }),
        ("loss scale", |i| {
            i["training"]["loss_scale"] = json!({"scale": 1e300, "good_steps": 0})
        }),
        ("loss scale", |i| {
            i["training"]["loss_scale"] = json!({"scale": 0.0, "good_steps": 0})
        }),
        ("it is step 9", |i| i["training"]["step"] = json!(9)),
        ("it is step 18446744073709551615", |i| {
            i["training"]["step"] = json!(u64::MAX)
        }),
    ];
    for (expected, edit) in edits {
        let error = with_index(edit).expect_err(expected);
        assert_names(&error, "index.json");
        assert_names(&error, expected);
    }
}

#[test]
fn malicious_text_is_refused_without_much_memory_or_stack() {
    let memory = Memory::new();
    common::save_step(&checkpoints(&memory), &plan(), 1);
    let head = r#"{"format":"burn-fsdp-checkpoint","version":1,"model":"#;
    let depth = 1 << 20;
    let deep = format!("{head}{}{}}}", "[".repeat(depth), "]".repeat(depth));
    let error = with_index_text(&memory, deep).expect_err("too deep");
    assert_names(&error, "recursion limit");
    let twice = format!("{head}1,\"model\":2}}");
    let error = with_index_text(&memory, twice).expect_err("two models");
    assert_names(&error, "duplicate field");
    for text in ["", "null", "[]", "{}", "\u{0}", "{\"format\":\"x\""] {
        let error = with_index_text(&memory, text.to_owned()).expect_err(text);
        assert_names(&error, "index.json");
    }
    let limits = Limits {
        index_bytes: 100,
        ..Limits::default()
    };
    let error = checkpoints(&memory).limits(limits);
    let error = with_index_text(&memory, " ".repeat(101))
        .and(error.open(1))
        .expect_err("too large");
    assert_names(&error, "index.json");
    let error = checkpoints(&memory)
        .limits(limits)
        .open(1)
        .expect_err("too large");
    assert!(
        matches!(
            error,
            Error::Limit {
                limit: 100,
                got: 101,
                ..
            }
        ),
        "{error}"
    );
}
