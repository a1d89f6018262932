//! The command in a folder of its own.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Once};
use std::time::Duration;

use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGQUIT};
use signal_hook::flag;
use tempfile::TempDir;

/// A model that trains in milliseconds.
const TINY: &str =
    "--layers 2 --dim 16 --heads 2 --vocab 256 --seq 8 --batch 12 --eps 0.01 --lr 0.01";

/// A folder that only contains the test's files.
pub(crate) struct Folder(TempDir);

/// The result of a run.
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Folder {
    pub(crate) fn new() -> Self {
        // A script's background jobs ignore SIGINT and SIGQUIT, and so would the command.
        static HEARS_INTERRUPTS: Once = Once::new();
        HEARS_INTERRUPTS.call_once(|| {
            for (signal, code) in [(SIGINT, 130), (SIGQUIT, 131)] {
                let always = Arc::new(AtomicBool::new(true));
                let heard = flag::register_conditional_shutdown(signal, code, always);
                heard.expect("a handler");
            }
        });
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), contents).expect("a writable folder");
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Returns the header and data of a safetensors file.
    pub(crate) fn weights(&self, name: &str) -> (String, Vec<u8>) {
        let bytes = std::fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header = String::from_utf8(header.to_vec()).expect("a header of text");
        (header, data.to_vec())
    }

    /// Returns the values of a tensor in a safetensors file.
    pub(crate) fn tensor(&self, file: &str, name: &str) -> Vec<f32> {
        let (header, data) = self.weights(file);
        let header: Value = serde_json::from_str(&header).expect("a header");
        let offsets = &header[name]["data_offsets"];
        let offset = |index: usize| offsets[index].as_u64().expect("an offset") as usize;
        let bytes = data[offset(0)..offset(1)].chunks_exact(4);
        let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        bytes.map(value).collect()
    }

    /// Returns the sorted names of the files in this folder.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).expect("a readable folder");
        let mut names: Vec<String> = entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    }

    /// Returns the sorted names of the files in a subfolder.
    pub(crate) fn names_in(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).expect("a readable folder");
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<_> = entries.map(name).collect();
        names.retain(|name| !name.to_string_lossy().starts_with('.'));
        names.sort();
        let texts = names
            .into_iter()
            .map(|name| name.to_string_lossy().into_owned());
        texts.collect()
    }

    /// Returns the command with these arguments, separated by spaces, in this folder.
    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-fsdp"));
        command
            .current_dir(self.0.path())
            .args(arguments.split_whitespace())
            .env_remove("BURN_FSDP_FAULT");
        command
    }

    /// Runs the command with these arguments.
    pub(crate) fn run(&self, arguments: &str) -> Run {
        Run::of(
            self.command(arguments)
                .output()
                .expect("the command starts"),
        )
    }

    /// Runs `burn-fsdp train` with the tiny model and these arguments, separated by spaces. A size in the arguments
    /// replaces the tiny model's.
    pub(crate) fn train(&self, arguments: &str) -> Run {
        self.train_with(arguments, None)
    }

    pub(crate) fn train_with_fault(&self, arguments: &str, fault: &str) -> Run {
        self.train_with(arguments, Some(fault))
    }

    /// Trains, and parses the last line of stdout.
    pub(crate) fn report(&self, arguments: &str) -> Value {
        let run = self.train(&format!("{arguments} --json"));
        assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
        last_report(&run)
    }

    /// Returns `burn-fsdp train` with the tiny model and these arguments.
    pub(crate) fn train_command(&self, arguments: &str) -> Command {
        let mut command = self.command("train");
        command.args(merged(arguments));
        command
    }

    fn train_with(&self, arguments: &str, fault: Option<&str>) -> Run {
        let mut command = self.train_command(arguments);
        if let Some(fault) = fault {
            command.env("BURN_FSDP_FAULT", fault);
        }
        Run::of(command.output().expect("the command starts"))
    }
}

impl Run {
    pub(crate) fn of(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).expect("UTF-8 on stdout"),
            // An error names the given path, which may contain any bytes.
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Parses the last line of stdout, which `--json` prints.
pub(crate) fn last_report(run: &Run) -> Value {
    let last = run.stdout.lines().last().unwrap_or_default();
    serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {last}: {}", run.stderr))
}

/// Returns the result of a command. Returns `None` if it does not end: it is killed after a time that no command needs.
pub(crate) fn bounded(mut command: Command) -> Option<Run> {
    const FAR_TOO_LONG: Duration = Duration::from_secs(120);
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.expect("the command starts");
    let id = child.id();
    let (done, is_done) = channel::<()>();
    let guard = std::thread::spawn(move || {
        let is_late = is_done.recv_timeout(FAR_TOO_LONG) == Err(RecvTimeoutError::Timeout);
        if is_late {
            let _ = Command::new("kill")
                .args(["-KILL", &id.to_string()])
                .status();
        }
        is_late
    });
    let output = child.wait_with_output().expect("an end");
    drop(done);
    let is_late = guard.join().expect("no panic");
    (!is_late).then(|| Run::of(output))
}

/// Sends a signal, such as `-TERM`, to a process.
pub(crate) fn send(signal: &str, process: u32) {
    let kill = Command::new("kill")
        .args([signal, &process.to_string()])
        .status();
    assert!(kill.expect("kill").success());
}

/// Returns true if the long forms of tests should run, which take minutes.
pub(crate) fn is_long() -> bool {
    std::env::var_os("BURN_FSDP_LONG").is_some_and(|value| value != "0" && !value.is_empty())
}

/// Random numbers that are the same in every run (xorshift).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ (seed << 1))
    }

    /// Returns a number in the range 0 to `end`, excluding `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    pub(crate) fn choice<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

pub(crate) fn losses(report: &Value) -> Vec<f64> {
    let losses = report["losses"].as_array().expect("a list of losses");
    losses
        .iter()
        .map(|loss| loss.as_f64().expect("a number"))
        .collect()
}

/// Returns the warnings of a report, except the one that such a small model has one large unit.
pub(crate) fn warnings(report: &Value) -> Vec<&str> {
    let warnings = report["warnings"].as_array().expect("a list");
    let warnings = warnings.iter().map(|text| text.as_str().expect("a text"));
    warnings
        .filter(|text| !text.starts_with("unit `root`"))
        .collect()
}

/// Returns the largest difference relative to the first list.
pub(crate) fn relative_difference(want: &[f64], got: &[f64]) -> f64 {
    assert_eq!(want.len(), got.len());
    let differences = want.iter().zip(got).map(|(w, g)| ((w - g) / w).abs());
    differences.fold(0.0, f64::max)
}

/// Returns the tiny model's arguments, without those that are overridden, followed by the given arguments.
fn merged(arguments: &str) -> Vec<String> {
    let given: Vec<&str> = arguments.split_whitespace().collect();
    let tiny: Vec<&str> = TINY.split_whitespace().collect();
    let mut merged: Vec<&str> = Vec::new();
    for pair in tiny.chunks(2) {
        if !given.contains(&pair[0]) {
            merged.extend(pair);
        }
    }
    merged.extend(given);
    merged.into_iter().map(str::to_owned).collect()
}

/// Returns the folder of this crate at run time. The test may have been compiled in another clone with a shared target
/// folder.
pub(crate) fn crate_folder() -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR");
    folder.expect("cargo runs the test").into()
}

/// Returns true unless these tests were started to ignore SIGHUP, as by `nohup`. Their children inherit that, and ignore
/// it too.
pub(crate) fn hears_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let hears = ignored.is_some_and(|mask| mask & 1 == 0);
    if !hears {
        crate::skipped::skipped("SIGHUP is ignored here, as by `nohup`");
    }
    hears
}
