//! A run trains on the intended text. Files that are skipped are counted, and each held-out token counts once.

use std::fs;

use burn::tensor::Device;
use burn_fsdp_models::{GptConfig, LanguageModel, WeightsFile};
use serde_json::Value;

use crate::command::{Folder, Random, Run, last_report, losses, warnings};

const RUN: &str = "--steps 2 --warmup 0 --sample 0 --eval-batches 0";

/// Returns lines of words that are the same in every run.
fn prose(bytes: usize) -> String {
    let words = [
        "the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "dog",
    ];
    let mut random = Random::new(7);
    let mut text = String::new();
    while text.len() < bytes {
        let ends = [" ", " ", " ", "\n"];
        text += random.choice(&words);
        text += random.choice(&ends);
    }
    text.truncate(bytes);
    text
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut random = Random::new(3);
    (0..bytes).map(|_| random.below(256) as u8).collect()
}

fn write(folder: &Folder, name: &str, contents: impl AsRef<[u8]>) {
    let path = folder.path(name);
    fs::create_dir_all(path.parent().expect("a folder")).expect("makes");
    fs::write(path, contents).expect("writes");
}

fn data(report: &Value) -> &str {
    report["data"].as_str().expect("a text")
}

fn assert_warned(report: &Value, words: &[&str]) {
    let warnings = warnings(report).join("; ");
    for word in words {
        assert!(warnings.contains(word), "{word}: {warnings}");
    }
}

fn refused(folder: &Folder, arguments: &str, words: &[&str]) {
    let run = folder.train(&format!("{RUN} {arguments}"));
    assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
    for word in words {
        assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
    }
}

#[test]
fn hidden_and_binary_files_are_skipped_and_counted() {
    let folder = Folder::new();
    write(&folder, "proj/notes.txt", prose(50_000));
    let want = folder.report(&format!("{RUN} --data proj"));
    assert_eq!(
        data(&want),
        "50000 bytes of text in 1 files, the last 5 % held out"
    );
    assert!(warnings(&want).is_empty(), "{want}");
    for name in [
        "proj/.git/objects/pack/pack-1.pack",
        "proj/.hg/store/data",
        "proj/.svn/wc.db",
        "proj/.DS_Store",
        "proj/a.png",
        "proj/a.tar.gz",
        "proj/CVS/Entries",
        "proj/model/weights.safetensors",
    ] {
        write(&folder, name, noise(20_000));
    }
    let run = folder.train(&format!("{RUN} --data proj --json"));
    let report = last_report(&run);
    assert_eq!(
        data(&report),
        "50000 bytes of text in 1 files, the last 5 % held out; left out: 5 hidden, 3 binary"
    );
    assert_eq!(losses(&report), losses(&want));
    assert_warned(&report, &["5 hidden", ".DS_Store", "3 binary", "a.png"]);
    // The warnings are also printed at once, because the report comes only at the end.
    assert!(
        run.stderr.contains("warning: left out of the text"),
        "{}",
        run.stderr
    );
    // No usable text is left.
    fs::remove_file(folder.path("proj/notes.txt")).expect("removes");
    refused(&folder, "--data proj", &["but 0 were found", "3 binary"]);
    write(&folder, "proj/short", "abcdefgh");
    refused(
        &folder,
        "--data proj",
        &["6 bytes to train on", "5 hidden, 3 binary"],
    );
}

#[test]
fn encodings_are_detected() {
    let folder = Folder::new();
    let text: String = prose(20_000).replace("cat", "chäte").replace("dog", "🦀");
    write(&folder, "utf8/a", &text);
    let want = folder.report(&format!("{RUN} --data utf8"));
    let units = text.encode_utf16();
    let big: Vec<u8> = units.clone().flat_map(u16::to_be_bytes).collect();
    let little: Vec<u8> = units.flat_map(u16::to_le_bytes).collect();
    let wide: Vec<u8> = text
        .chars()
        .map(u32::from)
        .flat_map(u32::to_le_bytes)
        .collect();
    for (mark, bytes, word) in [
        (
            &b"\xef\xbb\xbf"[..],
            text.as_bytes(),
            "1 with a UTF-8 byte order mark",
        ),
        (b"\xfe\xff", &big, "1 in UTF-16"),
        (b"\xff\xfe", &little, "1 in UTF-16"),
        (b"\xff\xfe\0\0", &wide, "1 in UTF-16 or UTF-32"),
    ] {
        write(&folder, "other/a", [mark, bytes].concat());
        for path in ["other", "other/a"] {
            let report = folder.report(&format!("{RUN} --data {path}"));
            assert_eq!(losses(&report), losses(&want), "{path}: {word}");
            assert!(data(&report).contains(word), "{}", data(&report));
        }
    }
    // Without a byte order mark, the encoding is unknown.
    write(&folder, "other/a", &little);
    refused(&folder, "--data other", &["but 0 were found", "1 binary"]);
    let latin: Vec<u8> = text
        .chars()
        .map(|char| u8::try_from(char).unwrap_or(b'?'))
        .collect();
    write(&folder, "other/a", latin);
    let report = folder.report(&format!("{RUN} --data other"));
    assert_warned(&report, &["1 files", "not in UTF-8", "other/a"]);
    // A file that is named explicitly is read, with a warning.
    write(&folder, "packed", noise(5000));
    let report = folder.report(&format!("{RUN} --data packed"));
    assert!(data(&report).starts_with("5000 bytes"), "{}", data(&report));
    assert_warned(&report, &["packed is not text"]);
}

#[test]
fn text_beyond_16_mib_is_reported() {
    let folder = Folder::new();
    let line = prose(1 << 20);
    write(&folder, "whole/a", line.repeat(16));
    let report = folder.report(&format!("{RUN} --data whole"));
    let whole = "16777216 bytes of text in 1 files, ";
    assert_eq!(data(&report), format!("{whole}the last 5 % held out"));
    let losses_of_16 = losses(&report);
    for (name, bytes, said) in [
        ("whole/b", 8 << 20, "the first 16 MiB of 24.0"),
        ("whole/sub/c", 1 << 20, "the first 16 MiB of 25.0"),
    ] {
        write(&folder, name, &line.repeat(8)[..bytes]);
        let report = folder.report(&format!("{RUN} --data whole"));
        assert_eq!(
            data(&report),
            format!("{whole}{said}, the last 5 % held out")
        );
        assert_warned(&report, &[said, "whole/b"]);
        assert_eq!(losses(&report), losses_of_16);
    }
    write(&folder, "one", line.repeat(24));
    let report = folder.report(&format!("{RUN} --data one"));
    assert!(
        data(&report).contains("the first 16 MiB of 24.0"),
        "{}",
        data(&report)
    );
    assert_warned(&report, &["the first 16 MiB of 24.0", "one"]);
}

/// Runs twice, the second time from the first run's step, and returns both reports.
fn twice(folder: &Folder, arguments: &str) -> [Value; 2] {
    [4, 8].map(|steps| {
        let run = folder.train(&format!("{arguments} --steps {steps} --resume --json"));
        assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
        last_report(&run)
    })
}

/// A run does not read its own outputs, whichever path named them, and reports this from the first run on.
#[test]
fn outputs_inside_the_text_folder_are_skipped() {
    const COMMON: &str = "--warmup 0 --sample 0 --eval-batches 0 --ranks 2";
    for (data_is, outputs, of_run) in [
        (".", "--checkpoint-dir run --metrics m.jsonl", 3),
        (
            "..",
            "--checkpoint-dir ../a/b --metrics ../m.jsonl --trace sub/../t.json",
            4,
        ),
        (
            "link",
            "--checkpoint-dir link/run --metrics sub/m.jsonl --curve sub/new.svg",
            3,
        ),
        (
            "sub",
            "--checkpoint-dir link-to-sub/run --operations sub/operations",
            2,
        ),
        (
            "sub",
            "--checkpoint-dir sub/run --compile --dump-graphs link-to-sub/graphs",
            2,
        ),
        (
            "sub",
            "--checkpoint-dir link-to-sub/run --tensorboard sub/logs",
            2,
        ),
        (
            "sub",
            "--checkpoint-dir sub --tensorboard sub --metrics sub/m.jsonl",
            1,
        ),
        (
            "sub",
            "--checkpoint-dir .. --save-init sub/init.safetensors",
            1,
        ),
    ] {
        let folder = Folder::new();
        write(&folder, "q/sub/zz.txt", prose(40_000));
        write(&folder, "q/a.txt", prose(1_000));
        #[cfg(unix)]
        for (target, link) in [(".", "q/link"), ("sub", "q/link-to-sub")] {
            std::os::unix::fs::symlink(target, folder.path(link)).expect("links");
        }
        let in_folder = |steps: usize| -> Value {
            let mut command = folder.train_command(&format!(
                "--data {data_is} {COMMON} {outputs} --steps {steps} --resume --json"
            ));
            command.current_dir(folder.path("q"));
            let run = Run::of(command.output().expect("runs"));
            assert_eq!(run.code, 0, "{data_is} {outputs}: {}", run.stderr);
            last_report(&run)
        };
        let [first, second] = [in_folder(4), in_folder(8)];
        assert_eq!(second["first_step"], 4);
        assert_eq!(data(&first), data(&second), "{data_is} {outputs}");
        let counted = format!("{of_run} of this run");
        assert!(
            data(&first).contains(&counted),
            "{data_is}: {}",
            data(&first)
        );
        assert_warned(&first, &["inside --data"]);
        let warnings = warnings(&second).join("; ");
        assert!(!warnings.contains("was saved"), "{warnings}");
    }
}

/// The steps of an earlier run are also excluded, although no flag names their folder any more.
#[test]
fn saved_steps_of_other_runs_are_skipped() {
    let folder = Folder::new();
    write(&folder, "text/a", prose(20_000));
    write(&folder, "text/step-by-step/index.txt", prose(1_000));
    let run = "--data text --steps 2 --warmup 0 --sample 0 --eval-batches 0";
    let want = folder.report(&format!("{run} --checkpoint-dir text/first"));
    let report = folder.report(&format!("{run} --checkpoint-dir text/second"));
    assert_eq!(
        data(&report),
        "21000 bytes of text in 2 files, the last 5 % held out; left out: 1 of this run, 1 saved steps, 1 hidden"
    );
    assert_eq!(losses(&report), losses(&want));
    assert_warned(&report, &["1 saved steps of other runs"]);
}

#[cfg(unix)]
#[test]
fn output_printed_into_the_text_folder_is_skipped() {
    let folder = Folder::new();
    write(&folder, "text/a", prose(20_000));
    let mut seen = Vec::new();
    for steps in [2, 4] {
        let log = fs::File::options()
            .append(true)
            .create(true)
            .open(folder.path("text/log"));
        let log = log.expect("a file");
        let arguments =
            "--data text --checkpoint-dir run --resume --warmup 0 --sample 0 --eval-batches 0";
        let mut command = folder.train_command(&format!("{arguments} --steps {steps}"));
        let also = log.try_clone().expect("a file");
        let status = command.stdout(log).stderr(also).status().expect("runs");
        assert!(status.success());
        let said = folder.read("text/log");
        let line = said.lines().rfind(|line| line.starts_with("trained"));
        seen.push(line.expect("a report").to_owned());
    }
    assert!(
        seen[0].contains("20000 bytes of text in 1 files"),
        "{}",
        seen[0]
    );
    assert_eq!(seen[0], seen[1]);
}

/// Files that other processes of the run write are also excluded: a surrounding shell, `tee`, another rank.
#[cfg(target_os = "linux")]
#[test]
fn files_written_around_a_run_are_skipped() {
    let folder = Folder::new();
    write(&folder, "text/a", prose(20_000));
    let train =
        folder.train_command("--data text --steps 2 --warmup 0 --sample 0 --eval-batches 0 --json");
    let script = "exec 5>>text/log; head -c 3000 text/a >&5; \"$@\" 5>&- | tee text/printed";
    let mut command = std::process::Command::new("bash");
    command
        .args(["-c", script, "bash"])
        .arg(train.get_program());
    let output = command
        .args(train.get_args())
        .current_dir(folder.path(""))
        .output();
    let run = Run::of(output.expect("bash runs"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = last_report(&run);
    assert!(
        data(&report).contains("20000 bytes of text in 1 files"),
        "{}",
        data(&report)
    );
    assert_warned(&report, &["the output"]);
}

#[test]
fn text_among_the_steps_is_refused() {
    let folder = Folder::new();
    write(&folder, "run/step-000001/text", prose(20_000));
    refused(
        &folder,
        "--data run/step-000001/text --checkpoint-dir run --overwrite",
        &["--data", "among the saved steps"],
    );
    // Next to the steps, it is text.
    write(&folder, "more/text", prose(20_000));
    let [first, second] = twice(
        &folder,
        "--data more/text --checkpoint-dir more --warmup 0 --sample 0",
    );
    assert_eq!(data(&first), data(&second));
    assert_eq!(
        folder.names_in("more"),
        ["step-000004", "step-000008", "text"]
    );
}

#[cfg(unix)]
#[test]
fn links_in_a_folder_of_text_are_followed() {
    use std::os::unix::fs::symlink;
    let folder = Folder::new();
    let text = prose(30_000);
    write(&folder, "plain/a", &text[..10_000]);
    write(&folder, "plain/b/c", &text[10_000..]);
    let want = folder.report(&format!("{RUN} --data plain"));
    // Like a cache: names that link to blobs.
    write(&folder, "cache/.blobs/0", &text[..10_000]);
    write(&folder, "elsewhere/c", &text[10_000..]);
    fs::create_dir_all(folder.path("cache/snapshot")).expect("makes");
    symlink("../.blobs/0", folder.path("cache/snapshot/a")).expect("links");
    symlink("../../elsewhere", folder.path("cache/snapshot/b")).expect("links");
    let report = folder.report(&format!("{RUN} --data cache/snapshot"));
    assert_eq!(data(&report), data(&want));
    assert_eq!(losses(&report), losses(&want));
    // A cycle, a duplicate and a dangling link.
    symlink("..", folder.path("cache/snapshot/up")).expect("links");
    symlink("a", folder.path("cache/snapshot/once-more")).expect("links");
    symlink("gone", folder.path("cache/snapshot/z")).expect("links");
    let report = folder.report(&format!("{RUN} --data cache/snapshot"));
    assert!(
        data(&report).ends_with("; left out: 2 repeated, 1 broken links"),
        "{}",
        data(&report)
    );
    assert_eq!(losses(&report), losses(&want));
    assert_warned(&report, &["snapshot/z"]);
}

/// Computes the mean loss of the tokens in a text's held-out end, in consecutive rows of `seq`, with plain Burn.
fn held_out_loss(folder: &Folder, text: &str, seq: usize) -> f64 {
    let sizes = GptConfig {
        layers: 2,
        dim: 16,
        heads: 2,
        vocab: 256,
        seq,
    };
    let device = Device::flex();
    let weights = WeightsFile::open(folder.path("init.safetensors"), sizes).expect("weights");
    let model = weights.load(&device).expect("a model");
    let held_out = &text.as_bytes()[text.len() - text.len() / 20..];
    let (mut sum, mut count) = (0.0, 0);
    for start in (0..held_out.len() - 1).step_by(seq) {
        let len = seq.min(held_out.len() - 1 - start);
        let tokens = |from: usize| {
            let tokens: Vec<i64> = held_out[from..from + len]
                .iter()
                .map(|b| i64::from(*b))
                .collect();
            burn::tensor::Tensor::<2, burn::tensor::Int>::from_data(
                burn::tensor::TensorData::new(tokens, [1, len]),
                &device,
            )
        };
        let mean = model
            .mean_loss(tokens(start), tokens(start + 1))
            .into_scalar::<f32>();
        sum += f64::from(mean) * len as f64;
        count += len;
    }
    sum / count as f64
}

#[test]
fn each_held_out_token_counts_once() {
    let folder = Folder::new();
    let text = prose(3_000);
    folder.write("text", &text);
    // The weights do not change.
    let still =
        "--data text --steps 1 --warmup 0 --lr 0 --weight-decay 0 --sample 0 --eval-batches 100";
    folder.report(&format!("{still} --save-init init.safetensors --batch 2"));
    // 149 of the 150 tokens have a predecessor: 18 rows of 8, and 5 tokens.
    let want = held_out_loss(&folder, &text, 8);
    for (batch, ranks, engine) in [
        (2, 1, ""),
        (2, 2, ""),
        (4, 2, ""),
        (6, 3, ""),
        (16, 4, ""),
        (32, 1, ""),
        (32, 4, ""),
        (18, 2, ""),
        (4, 4, "--compile"),
        (32, 3, "--compile"),
        (10, 2, "--compile --strategy no-shard"),
    ] {
        let batch = batch / ranks * ranks;
        let report = folder.report(&format!("{still} --batch {batch} --ranks {ranks} {engine}"));
        let got = report["eval_loss"].as_f64().expect("a loss");
        let difference = (got - want).abs() / want;
        assert!(
            difference < 1e-6,
            "batch {batch}, {ranks} ranks {engine}: {got}, not {want}"
        );
    }
    // As many batches as requested.
    let report = folder.report(&format!("{still} --batch 4").replace("batches 100", "batches 2"));
    assert_ne!(report["eval_loss"].as_f64().expect("a loss"), want);
    // A held-out text with too few tokens for a row.
    let short = &text[..200];
    folder.write("text", short);
    let want = held_out_loss(&folder, short, 8);
    let report = folder
        .report(&format!("{still} --batch 4 --ranks 2 --seq 16").replace("--seq 16", "--seq 8"));
    assert!((report["eval_loss"].as_f64().expect("a loss") - want).abs() < 1e-5);
}

#[test]
fn the_sources_of_burn_are_read_as_before() {
    let folder = Folder::new();
    let report = folder.report("--steps 1 --warmup 0 --sample 0 --eval-batches 0");
    assert_eq!(
        data(&report),
        "5767902 bytes of text in 440 files, 22 of them held out"
    );
    assert!(warnings(&report).is_empty(), "{report}");
}
