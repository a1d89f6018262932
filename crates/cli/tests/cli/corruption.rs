//! Steps that are damaged or maliciously crafted, passed to every command.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::command::{Folder, Random, Run, bounded, is_long};

const RUN: &str = "--synthetic --warmup 0 --checkpoint-dir steps";

const FILES: [&str; 4] = [
    "index.json",
    "index.json.crc32",
    "rank-00000.safetensors",
    "rank-00001.safetensors",
];

/// Creates a folder with steps 2 and 4.
fn saved() -> Folder {
    let folder = Folder::new();
    folder.report(&format!("{RUN} --steps 4 --save-every 2"));
    folder
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir_all(to).expect("makes");
    for entry in std::fs::read_dir(from).expect("lists") {
        let entry = entry.expect("reads");
        if entry.path().is_dir() {
            copy(&entry.path(), &to.join(entry.file_name()));
        } else {
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copies");
        }
    }
}

fn ends(folder: &Folder, arguments: &str) -> Run {
    let mut command = folder.command("");
    command.args(arguments.split_whitespace());
    let run = bounded(command).unwrap_or_else(|| panic!("{arguments} does not end"));
    assert!(
        [0, 2, 3].contains(&run.code),
        "{arguments}: {} {}",
        run.code,
        run.stderr
    );
    assert!(
        !run.stderr.contains("panicked"),
        "{arguments}: {}",
        run.stderr
    );
    run
}

/// Damages a file. Returns a description of the damage.
fn damage(path: &Path, other: &Path, random: &mut Random) -> String {
    let mut bytes = std::fs::read(path).expect("reads");
    let place = random.below(bytes.len() as u64) as usize;
    let remove = || std::fs::remove_file(path).expect("removes");
    let kind = random.below(8);
    match kind {
        0 | 1 => {
            bytes[place] ^= 1 << random.below(8);
            std::fs::write(path, bytes).expect("writes");
        }
        2 => std::fs::write(path, &bytes[..place]).expect("writes"),
        3 => {
            bytes.push(0);
            std::fs::write(path, bytes).expect("writes");
        }
        4 => remove(),
        5 => {
            remove();
            std::fs::create_dir(path).expect("makes");
        }
        6 => {
            // A sparse file takes no disk space, but reading it would take all memory.
            let file = std::fs::File::create(path).expect("makes");
            file.set_len(1 << 40).expect("grows");
        }
        _ => {
            let swapped = std::fs::read(other).expect("reads");
            std::fs::write(path, swapped).expect("writes");
        }
    }
    format!("{} kind {kind} at {place}", path.display())
}

#[test]
fn every_command_detects_damage_and_runs_resume_from_older_steps() {
    let pristine = saved();
    let folder = Folder::new();
    let mut random = Random::new(3);
    let count = if is_long() { 150 } else { 8 };
    for _ in 0..count {
        copy(&pristine.path("steps"), &folder.path("steps"));
        let number = random.below(FILES.len() as u64) as usize;
        let path = |number: usize| -> PathBuf {
            folder
                .path("steps/step-000004")
                .join(FILES[number % FILES.len()])
        };
        let what = damage(&path(number), &path(number + 1), &mut random);
        for command in [
            "inspect steps",
            "consolidate steps out --overwrite",
            "generate steps --prompt a --bytes 1",
        ] {
            let run = ends(&folder, command);
            // A damaged optimizer tensor does not matter to commands that only read the model.
            if command == "inspect steps" {
                assert_eq!(run.code, 2, "{what}: {}", run.stderr);
            }
            assert!(
                run.code == 0 || run.code == 2,
                "{command}, {what}: {}",
                run.stderr
            );
            if run.code == 2 {
                assert!(
                    run.stderr.contains("step-000004"),
                    "{command}, {what}: {}",
                    run.stderr
                );
            }
        }
        let run = folder.train(&format!("{RUN} --steps 5 --resume"));
        assert_eq!(run.code, 2, "{what}: {}", run.stderr);
        let run = folder.train(&format!("{RUN} --steps 5 --resume=newest-good"));
        assert_eq!(run.code, 0, "{what}: {}", run.stderr);
        assert!(
            run.stderr.contains("step-000004 skipped"),
            "{what}: {}",
            run.stderr
        );
        assert_eq!(ends(&folder, "inspect steps/step-000002").code, 0);
        assert_eq!(ends(&folder, "inspect steps/step-000005").code, 0);
    }
    println!("{count} damages");
}

/// Changes the index of a step and updates its checksum.
fn reseal(step: &Path, edit: impl FnOnce(&mut Value)) {
    let text = std::fs::read(step.join("index.json")).expect("reads");
    let mut index: Value = serde_json::from_slice(&text).expect("JSON");
    edit(&mut index);
    let text = index.to_string();
    let seal = format!("{:08x} {}\n", crc32fast::hash(text.as_bytes()), text.len());
    std::fs::write(step.join("index.json"), text).expect("writes");
    std::fs::write(step.join("index.json.crc32"), seal).expect("writes");
}

#[test]
fn oversized_configurations_take_no_memory() {
    let pristine = saved();
    let folder = Folder::new();
    for (field, value) in [
        ("seq", json!(1_000_000_000)),
        ("layers", json!(1_000_000)),
        ("layers", json!(100_000_000)),
        ("vocab", json!(10_000_000_000_u64)),
        ("dim", json!(1_000_000)),
        ("layers", json!(u64::MAX)),
        ("heads", json!(0)),
        ("heads", json!(-1)),
        ("seq", json!(1e308)),
        ("dim", json!(null)),
    ] {
        copy(&pristine.path("steps"), &folder.path("steps"));
        reseal(&folder.path("steps/step-000004"), |index| {
            index["model"][field] = value.clone()
        });
        let run = ends(&folder, "generate steps --prompt a --bytes 1");
        assert_eq!(run.code, 2, "{field} {value}: {}", run.stderr);
        let run = folder.train(&format!("{RUN} --steps 5 --resume"));
        assert_eq!(run.code, 2, "{field} {value}: {}", run.stderr);
    }
}

#[test]
fn any_index_is_accepted_or_rejected() {
    let pristine = saved();
    let folder = Folder::new();
    let values = [
        json!(0),
        json!(-1),
        json!(1),
        json!(9),
        json!(1u64 << 63),
        json!(u64::MAX),
        json!(1e308),
        json!(null),
        json!(true),
        json!("x"),
        json!([]),
        json!({}),
        json!("../../x"),
        json!("x".repeat(1 << 16)),
    ];
    let mut random = Random::new(8);
    let count = if is_long() { 200 } else { 8 };
    for _ in 0..count {
        copy(&pristine.path("steps"), &folder.path("steps"));
        let step = folder.path("steps/step-000004");
        let mut what = String::new();
        reseal(&step, |index| {
            // Walk to a random value of the tree.
            let mut at = index;
            loop {
                let size = match &*at {
                    Value::Object(map) => map.len(),
                    Value::Array(list) => list.len(),
                    _ => 0,
                };
                if size == 0 || random.below(8) == 0 {
                    break;
                }
                let number = random.below(size as u64) as usize;
                at = match at {
                    Value::Object(map) => {
                        let (key, value) = map.iter_mut().nth(number).expect("counted");
                        what.push_str(&format!("/{key}"));
                        value
                    }
                    Value::Array(list) => {
                        what.push_str(&format!("/{number}"));
                        &mut list[number]
                    }
                    _ => unreachable!("leaves have no size"),
                };
            }
            *at = values[random.below(values.len() as u64) as usize].clone();
        });
        for command in [
            "inspect steps",
            "consolidate steps out --overwrite",
            "generate steps --prompt a --bytes 1",
        ] {
            let run = ends(&folder, command);
            assert!(run.code != 3, "{command}, {what}: {}", run.stderr);
        }
        let run = folder.train(&format!("{RUN} --steps 5 --resume=newest-good"));
        assert!(
            [0, 2].contains(&run.code),
            "{what}: {} {}",
            run.code,
            run.stderr
        );
        assert!(!run.stderr.contains("panicked"), "{what}: {}", run.stderr);
        assert_eq!(ends(&folder, "inspect steps/step-000002").code, 0, "{what}");
    }
    println!("{count} edits");
}
