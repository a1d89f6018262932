//! Damaged and malicious files cause a precise error, never a wrong byte and never a panic.

mod common;

use burn_fsdp_checkpoint::storage::{FileSystem, Memory, Storage};
use burn_fsdp_checkpoint::{
    Check, Checkpoints, Dtype, Error, ExpectedTensor, Extra, Limits, Region, TensorSpec, fuzzing,
};
use common::stored::{FILES, assert_names, checkpoints, copy, in_step, plan, with_index_text};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

#[test]
fn bit_flips_and_truncations_are_located() {
    let memory = Memory::new();
    let plan = plan();
    common::save_step(&checkpoints(&memory), &plan, 1);
    common::save_step(&checkpoints(&memory), &plan, 2);
    let whole = copy(&memory, 2);
    let index = checkpoints(&memory).open(2).expect("opens").index().clone();
    let mut random = StdRng::seed_from_u64(4);
    for case in 0..1000 {
        let number = random.random_range(0..FILES.len());
        let mut bytes = whole[number].clone();
        // Half of the positions are in the first kilobytes, where the headers are.
        let most = if random.random_bool(0.5) {
            bytes.len()
        } else {
            bytes.len().min(4096)
        };
        let place = random.random_range(0..most);
        let is_flip = random.random_bool(0.7);
        match is_flip {
            true => bytes[place] ^= 1 << random.random_range(0..8),
            false if random.random_bool(0.1) => bytes.push(0),
            false => bytes.truncate(place),
        }
        memory
            .write(&in_step(2, FILES[number]), bytes)
            .expect("in memory");

        let found = checkpoints(&memory).newest_good(Check::Everything);
        let found = found.expect("lists");
        let good = found.step.expect("the older step is good");
        assert_eq!(
            good.index().training.step,
            1,
            "case {case}: {place} of {number}"
        );
        assert_eq!(found.skipped.len(), 1);
        let error = &found.skipped[0].error;
        assert!(error.is_damage());
        assert_names(error, FILES[number]);
        if number >= 2 && is_flip {
            let flipped = index.tensors.iter().find(|tensor| {
                let mut parts = tensor.parts.iter();
                parts.any(|part| part.file == number - 2 && part.bytes.contains(&(place as u64)))
            });
            match flipped {
                Some(tensor) => assert_names(error, &format!("{:?}", tensor.name)),
                None => assert_names(error, "bytes 0 to"),
            }
            // A reader that does not verify everything first still gets no wrong byte.
            let step = checkpoints(&memory).open(2).expect("the index is whole");
            let mut num_errors = 0;
            for tensor in plan.tensors().iter().filter(|_| case % 50 == 0) {
                match step.read(&tensor.name, &Region::whole(&tensor.shape)) {
                    Ok(got) => {
                        let truth = common::part_of(tensor, &Region::whole(&tensor.shape));
                        assert!(got == truth, "{} is wrong", tensor.name);
                    }
                    Err(error) => {
                        assert!(error.is_damage());
                        num_errors += 1;
                    }
                }
            }
            assert!(case % 50 != 0 || num_errors > 0);
        }
        memory
            .write(&in_step(2, FILES[number]), whole[number].clone())
            .expect("in memory");
    }
    let step = checkpoints(&memory).newest().expect("opens");
    step.verify(|_| ()).expect("restored");
}

#[test]
fn all_damage_is_reported_and_progress_reaches_the_end() {
    let memory = Memory::new();
    common::save_step(&checkpoints(&memory), &plan(), 1);
    for file in &FILES[2..] {
        let mut bytes = memory.read(&in_step(1, file)).expect("there");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        memory.write(&in_step(1, file), bytes).expect("in memory");
    }
    let step = checkpoints(&memory).newest().expect("opens");
    let mut last = (0, 0);
    let damage = step.damage(|progress| {
        assert!(progress.done >= last.0);
        last = (progress.done, progress.total);
    });
    assert_eq!(damage.len(), 2);
    assert_names(&damage[0], FILES[2]);
    assert_names(&damage[1], FILES[3]);
    assert_eq!(last.0, last.1);
}

#[test]
fn a_missing_file_is_named() {
    for file in FILES {
        let memory = Memory::new();
        common::save_step(&checkpoints(&memory), &plan(), 1);
        memory.remove_file(&in_step(1, file)).expect("there");
        let error = checkpoints(&memory)
            .newest_good(Check::Sizes)
            .expect_err("there are steps, and none is good");
        assert!(
            matches!(error, Error::NoGoodStep { count: 1, .. }),
            "{error}"
        );
        assert_names(&error, file);
    }
    let error = checkpoints(&Memory::new()).newest().expect_err("nothing");
    assert!(matches!(error, Error::NoStep { .. }));
    assert!(
        error.to_string().contains("has no complete step"),
        "{error}"
    );
}

#[test]
fn inconsistent_headers_are_rejected() {
    // The index describes a header with another length.
    let memory = Memory::new();
    common::save_step(&checkpoints(&memory), &plan(), 1);
    let mut bytes = memory.read(&in_step(1, FILES[2])).expect("there");
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let json = memory.read(&in_step(1, FILES[0])).expect("there");
    let mut index: Value = serde_json::from_slice(&json).expect("JSON");
    let header_bytes = index["files"][0]["header_bytes"].as_u64().expect("a size") as usize;
    index["files"][0]["header_crc32"] = crc32fast::hash(&bytes[..header_bytes]).into();
    memory
        .write(&in_step(1, FILES[2]), bytes.clone())
        .expect("in memory");
    let step = with_index_text(&memory, index.to_string()).expect("the index is fine");
    let error = step.verify(|_| ()).expect_err("a lie");
    assert_names(&error, "its header should have");
    // The header describes other tensors.
    bytes[..8].copy_from_slice(&(header_bytes as u64 - 8).to_le_bytes());
    let place = bytes
        .windows(6)
        .position(|text| text == b"scalar")
        .expect("a name");
    bytes[place] = b'S';
    index["files"][0]["header_crc32"] = crc32fast::hash(&bytes[..header_bytes]).into();
    memory
        .write(&in_step(1, FILES[2]), bytes)
        .expect("in memory");
    let step = with_index_text(&memory, index.to_string()).expect("the index is fine");
    let error = step.verify(|_| ()).expect_err("a lie");
    assert_names(&error, "\"scalar\"");
    // Larger than the limits.
    let limits = Limits {
        header_bytes: 16,
        ..Limits::default()
    };
    let step = checkpoints(&memory).limits(limits).open(1).expect("opens");
    assert!(matches!(
        step.verify(|_| ()),
        Err(Error::Limit { limit: 16, .. })
    ));

    let header = |json: &str| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes
    };
    let tensor = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    fuzzing::shard_header(&header(&format!(r#"{{"a":{tensor}}}"#))).expect("fine");
    for (expected, json) in [
        ("occurs twice", format!(r#"{{"a":{tensor},"a":{tensor}}}"#)),
        (
            "is inconsistent",
            r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}"#.to_owned(),
        ),
        (
            "is inconsistent",
            r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}}"#.to_owned(),
        ),
        (
            "is inconsistent",
            format!(
                r#"{{"a":{{"dtype":"F64","shape":[{0},{0}],"data_offsets":[0,8]}}}}"#,
                u64::MAX
            ),
        ),
        (
            "tensors take 3 bytes",
            r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#.to_owned(),
        ),
    ] {
        let error = fuzzing::shard_header(&header(&json)).expect_err(&json);
        assert_names(&error, expected);
    }
}

#[cfg(unix)]
#[test]
fn only_regular_files_are_opened() {
    let dir = tempfile::tempdir().expect("a folder");
    let checkpoints = Checkpoints::new(dir.path());
    common::save_step(&checkpoints, &plan(), 1);
    let file = checkpoints.path(1).join(FILES[2]);
    let outside = dir.path().join("outside");
    std::fs::rename(&file, &outside).expect("renames");
    std::os::unix::fs::symlink(&outside, &file).expect("links");
    let step = checkpoints.open(1).expect("the index is fine");
    let error = step.verify(|_| ()).expect_err("a link");
    assert_names(&error, "not a regular file");
    // A pipe that nobody writes to would block a process that opens it.
    std::fs::remove_file(&file).expect("removes");
    let made = std::process::Command::new("mkfifo").arg(&file).status();
    if made.is_ok_and(|status| status.success()) {
        let error = step.verify(|_| ()).expect_err("a pipe");
        assert_names(&error, "not a regular file");
    }
    assert!(FileSystem.open_file(dir.path()).is_err());
}

#[test]
fn wrong_calls_are_errors() {
    let memory = Memory::new();
    common::save_step(&checkpoints(&memory), &plan(), 1);
    let step = checkpoints(&memory).open(1).expect("opens");
    let flat = |range| Region::Flat(range);
    assert!(matches!(
        step.read("none", &flat(0..1)),
        Err(Error::Missing { .. })
    ));
    let error = step.read("scalar", &flat(0..2)).expect_err("one element");
    assert!(matches!(error, Error::Region { .. }), "{error}");
    #[expect(clippy::reversed_empty_ranges)]
    let error = step.read("scalar", &flat(1..0)).expect_err("backwards");
    assert!(matches!(error, Error::Region { .. }), "{error}");
    let error = step
        .read_into("scalar", &flat(0..1), &mut [0; 5])
        .expect_err("five bytes");
    assert!(
        matches!(
            error,
            Error::Length {
                expected: 4,
                got: 5,
                ..
            }
        ),
        "{error}"
    );
    assert!(step.read("empty", &flat(0..0)).expect("nothing").is_empty());
}

#[test]
fn differing_models_are_reported() {
    let memory = Memory::new();
    let plan = plan();
    common::save_step(&checkpoints(&memory), &plan, 1);
    let step = checkpoints(&memory).open(1).expect("opens");
    let expected = |tensor: &TensorSpec| ExpectedTensor {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        dtype: Some(tensor.dtype),
    };
    let all: Vec<_> = plan.tensors().iter().map(expected).collect();
    step.compare(&all, |_| true, Extra::Refuse)
        .expect("the same");
    let model: Vec<_> = plan
        .tensors()
        .iter()
        .filter(|tensor| tensor.kind.is_model())
        .map(expected)
        .collect();
    step.compare(&model, |tensor| tensor.kind.is_model(), Extra::Refuse)
        .expect("the same model");
    step.compare(&model[1..], |_| true, Extra::Ignore)
        .expect("a part");
    let error = step.compare(&model[1..], |t| t.kind.is_model(), Extra::Refuse);
    let error = error.expect_err("one too many");
    assert!(matches!(&error, Error::Unexpected { names, .. } if names == &[model[0].name.clone()]));
    let mut other = model.clone();
    other[2].name = "other".to_owned();
    other[3].name = "another".to_owned();
    let error = step
        .compare(&other, |_| true, Extra::Ignore)
        .expect_err("two too few");
    assert_names(&error, "\"other\", \"another\"");
    let mut other = model.clone();
    other[0].shape = vec![15, 7];
    let error = step
        .compare(&other, |_| true, Extra::Ignore)
        .expect_err("a shape");
    assert_names(&error, "[7, 15]");
    assert_names(&error, "[15, 7]");
    let mut other = model;
    other[0].dtype = Some(Dtype::BF16);
    let error = step
        .compare(&other, |_| true, Extra::Ignore)
        .expect_err("a dtype");
    assert_names(&error, "F32");
}
