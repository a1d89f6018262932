//! Tests of the benchmark as a user runs it, with a script as the peer.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

struct Folder(TempDir);

/// The result of a run.
struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, contents: &str) {
        std::fs::write(self.path(name), contents).expect("a writable folder");
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Returns the benchmark's command with these arguments, separated by spaces, in this folder.
    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-fsdp-bench"));
        command.current_dir(self.0.path());
        command.args(arguments.split_whitespace());
        command
    }

    fn run(&self, arguments: &str) -> Run {
        Run::of(self.command(arguments).output().expect("it starts"))
    }
}

impl Run {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Returns the command whose training is measured, which another package builds.
fn trained() -> PathBuf {
    let bench = PathBuf::from(env!("CARGO_BIN_EXE_burn-fsdp-bench"));
    let command = bench.with_file_name("burn-fsdp");
    assert!(
        command.is_file(),
        "build the workspace first: `cargo build --release`"
    );
    command
}

/// A substitute for Python that prints the output of every program of the peer. One variant is faster than the
/// others.
const PEER: &str = r#"#!/bin/sh
case "$*" in
    *product_peer*) echo '{"version": "0.0", "flop_per_s": 1e15}' ;;
    *--compile*) echo 'there is no compiler' >&2; exit 1 ;;
    *--save-init*) cp "$BURN_FSDP_TEST_WEIGHTS" "$(echo "$*" | sed 's/.*--save-init //')"; echo '{}' ;;
    *keep-heap*) echo '{"tokens_per_s": 2.0, "peak_delta_mib": [3, 5], "losses": [8.0, 4.0]}' ;;
    *) echo 'a line of another kind'; echo '{"tokens_per_s": 1.0, "losses": [8.0, 4.0]}' ;;
esac
"#;

fn with_peer() -> Folder {
    let folder = Folder::new();
    folder.write("python", PEER);
    let path = folder.path("python");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

#[test]
fn only_our_side_can_be_measured() {
    let folder = Folder::new();
    let run = folder.run(
        "--no-peers --case encoder-one-rank --pairs 2 --steps 1 --warmup 0 --out all.json --json",
    );
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    let case = &report["cases"][0];
    assert_eq!(case["name"], "encoder-one-rank");
    assert!(case["ours"]["tokens_per_s"].as_f64().unwrap() > 0.0);
    assert!(case["ours"]["share"].as_f64().unwrap() > 0.0);
    assert_eq!(case["ratio"], Value::Null);
    assert_eq!(case["measured"]["pairs"].as_array().unwrap().len(), 2);
    assert_eq!(folder.read("all.json"), run.stdout.trim());
}

#[test]
fn ratios_use_the_fastest_form_of_the_peer() {
    let folder = with_peer();
    let shape = "--layers 6 --dim 384 --heads 6 --vocab 4096 --seq 256 --batch 8";
    let train =
        format!("train --synthetic --steps 1 --warmup 0 --save-init weights.safetensors {shape}");
    let mut training = Command::new(trained());
    training.current_dir(folder.0.path());
    let trained = training.args(train.split_whitespace()).output();
    assert!(trained.expect("it starts").status.success());
    let mut command = folder.command(
        "--case one-rank --pairs 2 --steps 1 --warmup 0 --peers peers --out all.json --svg ratios.svg",
    );
    command.arg("--python").arg(folder.path("python"));
    command.env("BURN_FSDP_TEST_WEIGHTS", folder.path("weights.safetensors"));
    let run = Run::of(command.output().unwrap());
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("| one-rank |"), "{}", run.stdout);
    let report: Value = serde_json::from_str(&folder.read("all.json")).unwrap();
    let case = &report["cases"][0];
    assert_eq!(case["measured"]["peer_form"], "--malloc keep-heap");
    assert_eq!(case["peer"]["tokens_per_s"], 2.0);
    assert_eq!(case["peer"]["peak_bytes"], f64::from(5 << 20));
    let ours = case["measured"]["pairs"][0]["ours"]["tokens_per_s"].as_f64();
    let all = case["ratio"]["all"].as_array().unwrap();
    let ratio = ours.unwrap() / 2.0;
    assert!(all.iter().any(|of| of.as_f64() == Some(ratio)), "{case}");
    assert!(case["losses_differ"].as_f64().is_some());
    assert!(folder.read("ratios.svg").contains("one-rank"));
}

#[test]
fn a_failing_peer_is_reported_with_its_output() {
    let folder = with_peer();
    folder.write(
        "python",
        "#!/bin/sh\necho no module named torch >&2\nexit 1\n",
    );
    let run = folder.run("--case encoder --pairs 1 --peers peers --python ./python");
    assert_eq!(run.code, 2);
    assert!(
        run.stderr.contains("no module named torch"),
        "{}",
        run.stderr
    );
}

#[test]
fn wrong_arguments_are_refused_before_anything_is_measured() {
    let folder = Folder::new();
    for (arguments, says) in [
        ("--pairs 0", "--pairs is 0"),
        ("--steps 0", "--steps is 0"),
        ("--case none", "invalid value"),
        ("--no-peers --python python3", "cannot be used with"),
        ("--no-peers --out nowhere/all.json", "--out"),
        ("--no-peers --out a.svg --svg a.svg", "same file"),
        ("--no-peers --command nowhere/burn-fsdp", "cargo build"),
        (
            "--case encoder --peers peers --python nowhere/python",
            "nowhere/python",
        ),
    ] {
        let run = folder.run(arguments);
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(run.stderr.contains(says), "{arguments}: {}", run.stderr);
    }
}
