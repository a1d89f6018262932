//! Metrics files, whole, damaged and foreign.

use std::path::{Path, PathBuf};

use burn_fsdp_runs::{Run, page};
use proptest::prelude::*;
use tempfile::TempDir;

/// A folder with a metrics file of this text, and the path of the file.
fn written(text: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics.jsonl");
    std::fs::write(&path, text).expect("it is written");
    (folder, path)
}

fn read(text: impl AsRef<[u8]>) -> Run {
    let (_folder, path) = written(text);
    Run::read(&path).expect("a run")
}

fn steps(run: &Run) -> Vec<u64> {
    run.steps.iter().map(|line| line.step).collect()
}

fn line(step: u64) -> String {
    format!("{{\"step\":{step},\"loss\":{step}.5}}\n")
}

#[test]
fn every_key_of_a_line_is_read() {
    let run = read(
        "{\"step\":7,\"loss\":2.5,\"tokens_per_s\":1000.5,\"step_ms\":4,\"lr\":0.002,\"measured\":false,\
         \"eval_loss\":2.75,\"grad_norm\":0.5,\"ranks\":2,\"flops_per_s\":1e9,\"rss_bytes\":4096,\
         \"unsharded_bytes\":512,\"of a later version\":[{}]}\n",
    );
    let line = &run.steps[0];
    let again = serde_json::to_string(line).expect("JSON");
    assert_eq!(
        again,
        "{\"step\":7,\"loss\":2.5,\"tokens_per_s\":1000.5,\"step_ms\":4.0,\"lr\":0.002,\"measured\":false,\
         \"eval_loss\":2.75,\"grad_norm\":0.5,\"ranks\":2,\"flops_per_s\":1000000000.0,\"rss_bytes\":4096,\
         \"unsharded_bytes\":512}"
    );
    assert_eq!((run.num_restarts, run.num_skipped), (0, 0));
}

#[test]
fn a_line_needs_only_a_step_and_a_loss() {
    let run = read("{\"step\":0,\"loss\":null,\"eval_loss\":null}\r\n\n{\"loss\":1,\"step\":1}");
    assert_eq!(steps(&run), [0, 1]);
    assert!(run.steps[0].loss.is_nan());
    assert_eq!(run.steps[1].loss, 1.0);
    assert!(run.steps[1].measured && run.steps[1].eval_loss.is_none());
    assert_eq!(run.num_skipped, 1);
    let nan = serde_json::to_string(&run.steps[0]).expect("JSON");
    assert!(nan.contains("\"loss\":null"), "{nan}");
}

#[test]
fn an_incomplete_last_line_is_not_a_step() {
    let whole = [line(0), line(1), line(2)].concat();
    // Without its line break, the last line is still complete.
    let last = whole.len() - line(2).len();
    for end in last + 1..whole.len() - 1 {
        let run = read(&whole[..end]);
        assert_eq!((steps(&run), run.num_skipped), (vec![0, 1], 1), "{end}");
    }
    assert_eq!(steps(&read(&whole[..whole.len() - 1])), [0, 1, 2]);
    assert_eq!(steps(&read(&whole[..last])), [0, 1]);
}

#[test]
fn repeated_steps_replace_earlier_ones() {
    let text = [0, 1, 2, 3, 2, 3, 4].map(line).concat();
    let run = read(text.replace("\"loss\":3.5", "\"loss\":9"));
    assert_eq!((steps(&run), run.num_restarts), (vec![0, 1, 2, 3, 4], 1));
    // Steps that were not repeated were not part of the run that went on.
    let run = read([5, 6, 7, 8, 6].map(line).concat());
    assert_eq!((steps(&run), run.num_restarts), (vec![5, 6], 1));
    let run = read([5, 6, 0, 1].map(line).concat());
    assert_eq!((steps(&run), run.num_restarts), (vec![0, 1], 1));
}

#[test]
fn other_lines_are_skipped() {
    let long = format!(
        "{{\"step\":9,\"loss\":1,\"text\":\"{}\"}}\n",
        "x".repeat(200_000)
    );
    let text = [
        line(0).as_bytes(),
        b"warning: something\n",
        b"\xff\xfe\n",
        b"[1]\n{\"step\":-1,\"loss\":1}\n{\"step\":1}\n{\"step\":1,\"loss\":\"x\"}\n",
        long.as_bytes(),
        line(1).as_bytes(),
    ]
    .concat();
    let run = read(text);
    assert_eq!((steps(&run), run.num_skipped), (vec![0, 1], 7));
    // The last part of a long line looks like a line.
    let parts = format!("{}{}", "x".repeat(2 << 16), line(5));
    assert_eq!(steps(&read([parts, line(1)].concat())), [1]);
}

fn refused(path: &Path, words: &[&str]) {
    let error = Run::read(path).expect_err("no run").to_string();
    for word in words {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn errors_name_the_path_and_the_remedy() {
    let (folder, path) = written("");
    refused(&path, &["metrics.jsonl is empty", "name another file"]);
    refused(
        folder.path(),
        &["contains no metrics file", "train --metrics FILE"],
    );
    refused(&folder.path().join("a"), &["a cannot be read"]);
    std::fs::write(&path, "text\n").expect("it is written");
    refused(
        &path,
        &["metrics.jsonl has no line", "train --metrics FILE"],
    );
    std::fs::write(&path, line(0)).expect("it is written");
    assert_eq!(Run::read(folder.path()).expect("a run").steps.len(), 1);
    // Files of other programs do not make the folder ambiguous.
    std::fs::write(folder.path().join("rank-0.jsonl"), "{\"step\":0}\n").expect("it is written");
    std::fs::write(folder.path().join("text"), line(0)).expect("it is written");
    assert_eq!(Run::read(folder.path()).expect("a run").steps.len(), 1);
    std::fs::write(folder.path().join("b.jsonl"), line(0)).expect("it is written");
    refused(
        folder.path(),
        &["2 metrics files (b.jsonl, metrics.jsonl)", "name one"],
    );
}

#[cfg(unix)]
#[test]
fn a_device_without_an_end_is_not_read_to_its_end() {
    refused(Path::new("/dev/zero"), &["/dev/zero has no line"]);
}

#[test]
fn runs_are_named_by_their_file_or_folder() {
    let (folder, path) = written(line(0));
    assert_eq!(Run::read(&path).expect("a run").name, "metrics");
    let name = folder.path().file_name().expect("a name").to_string_lossy();
    assert_eq!(Run::read(folder.path()).expect("a run").name, name);
    let dots = folder.path().join("../").join(&*name).join(".");
    assert_eq!(Run::read(&dots).expect("a run").name, name);
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(
        parts in prop::collection::vec(
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..40),
                (0u64..6, any::<f64>()).prop_map(|(step, loss)| {
                    format!("{{\"step\":{step},\"loss\":{loss:e},\"lr\":{loss:e}}}\n").into_bytes()
                }),
                any::<u64>().prop_map(|step| line(step).into_bytes()),
            ],
            0..12,
        ),
    ) {
        let (_folder, path) = written(parts.concat());
        if let Ok(run) = Run::read(&path) {
            prop_assert!(run.steps.windows(2).all(|pair| pair[0].step < pair[1].step));
            let page = page(&[run]);
            prop_assert!(!page.contains("NaN") && !page.contains("=\"inf"), "{}", page);
        }
    }
}
