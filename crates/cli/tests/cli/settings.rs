//! A resumed run reports its differences from the saved run.

use crate::command::Folder;

const RUN: &str = "--synthetic --warmup 0 --checkpoint-dir steps";

#[test]
fn settings_that_differ_are_named() {
    let folder = Folder::new();
    folder.report(&format!("{RUN} --steps 4"));
    folder.report(&format!("{RUN} --steps 4 --resume --save-init init"));
    folder.write(
        "text",
        "to be or not to be, that is the question. ".repeat(100),
    );
    for (change, sentence) in [
        ("--seed 2", "--seed is 2, but was 1 when step 4 was saved"),
        ("--lr 0.5", "--lr is 0.5, but was 0.01"),
        ("--beta1 0.8", "--beta1 is 0.8"),
        ("--beta2 0.9", "--beta2 is 0.9"),
        ("--eps 0.5", "--eps is 0.5"),
        ("--weight-decay 0.5", "--weight-decay is 0.5, but was 0.01"),
        ("--no-decay vectors", "--no-decay is vectors, but was none"),
        (
            "--lr-schedule cosine",
            "--lr-schedule is cosine, but was constant",
        ),
        ("--lr-warmup 3", "--lr-warmup is 3, but was 0"),
        ("--batch 24", "--batch is 24, but was 12"),
        (
            "--batch 24",
            "continues with sample 96 of the data, but step 4 was saved after sample 48",
        ),
        ("--precision bf16", "--precision is bf16, but was f32"),
        (
            "--clip-grad-norm 1",
            "--clip-grad-norm is 1.0, but was none",
        ),
        ("--accumulate 2", "--accumulate is 2, but was 1"),
        (
            "--accumulate 2 --no-sync",
            "--no-sync is true, but was false",
        ),
        ("--reduce-dtype bf16", "--reduce-dtype is bf16, but was f32"),
        ("--init init", "--init has no effect"),
    ] {
        let run = folder.train(&format!("{RUN} --steps 4 --resume {change}"));
        assert_eq!(run.code, 0, "{change}: {}", run.stderr);
        assert!(
            run.stderr.contains(&sentence.to_string()),
            "{change}: {}",
            run.stderr
        );
    }
    let text = "--data text --warmup 0 --checkpoint-dir steps --sample 0";
    let run = folder.train(&format!("{text} --steps 4 --resume"));
    assert!(
        run.stderr.contains("--data is") && run.stderr.contains("but was synthetic tokens"),
        "{}",
        run.stderr
    );
    // Longer, with other ranks and another sharding, none of which affects the numbers.
    let report = folder.report(&format!(
        "{RUN} --steps 6 --resume --ranks 3 --strategy no-shard --save-every 1 --nan continue --compile"
    ));
    let warnings = report["warnings"].to_string();
    assert!(!warnings.contains("was saved"), "{warnings}");
    let report = folder.report(&format!("{RUN} --steps 8 --resume --seed 3"));
    assert!(
        report["warnings"].to_string().contains("--seed is 3"),
        "{report}"
    );
}

/// If gradients are reduced in 16 bits, each rank rounds what it sends.
#[test]
fn ranks_are_named_where_they_round() {
    let folder = Folder::new();
    let run = format!("{RUN} --precision bf16");
    folder.report(&format!("{run} --steps 4"));
    for (change, sentence) in [
        ("--ranks 3", "--ranks is 3, but was 2 when step 4 was saved"),
        (
            "--strategy no-shard",
            "--strategy is no-shard, but was full-shard",
        ),
        (
            "--ranks 4 --strategy hybrid-shard",
            "--replicate-size is 2, but was 1",
        ),
    ] {
        let run = folder.train(&format!("{run} --steps 4 --resume {change}"));
        assert!(run.stderr.contains(sentence), "{change}: {}", run.stderr);
    }
    let same = folder.report(&format!("{run} --steps 6 --resume"));
    assert!(
        !same["warnings"].to_string().contains("was saved"),
        "{same}"
    );
}

/// A warning about ranks needs only one of the two runs to round. In 32 bits, there is no such warning.
#[test]
fn ranks_are_named_where_one_of_the_runs_rounds() {
    let rounded = "--reduce-dtype bf16";
    for (first, then, is_named) in [("", rounded, true), (rounded, "", true), ("", "", false)] {
        let folder = Folder::new();
        folder.report(&format!("{RUN} {first} --steps 4"));
        let run = folder.train(&format!("{RUN} {then} --steps 4 --resume --ranks 3"));
        let named = run.stderr.contains("--ranks is 3, but was 2");
        assert_eq!(named, is_named, "`{first}`, `{then}`: {}", run.stderr);
    }
}

/// A step without a setting, because older versions did not compare it, causes no warning about it.
#[test]
fn settings_missing_from_a_step_are_not_compared() {
    let folder = Folder::new();
    folder.report(&format!("{RUN} --steps 4"));
    let index = "steps/step-000004/index.json";
    let mut step: serde_json::Value = serde_json::from_str(&folder.read(index)).expect("an index");
    let settings = &mut step["training"]["sections"]["settings"];
    let settings = settings.as_object_mut().expect("the settings");
    for name in ["--seq", "--accumulate", "--no-sync"] {
        assert!(settings.remove(name).is_some(), "{name}");
    }
    let text = format!("{step}\n");
    let seal = format!("{:08x} {}\n", crc32fast::hash(text.as_bytes()), text.len());
    folder.write(index, &text);
    folder.write("steps/step-000004/index.json.crc32", seal);
    let report = folder.report(&format!("{RUN} --steps 6 --resume --accumulate 2"));
    assert!(
        !report["warnings"].to_string().contains("was saved"),
        "{report}"
    );
}
