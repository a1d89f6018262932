//! PyTorch's programs, and the Python that runs them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::args::BenchArgs;
use crate::case::PeerCommand;
use crate::error::Error;
use crate::program::json_of;

/// The programs that this command contains.
const SCRIPTS: [(&str, &str); 6] = [
    ("train_peer.py", include_str!("../peers/train_peer.py")),
    ("encoder_peer.py", include_str!("../peers/encoder_peer.py")),
    ("product_peer.py", include_str!("../peers/product_peer.py")),
    ("bench_common.py", include_str!("../peers/bench_common.py")),
    ("torch_common.py", include_str!("../peers/torch_common.py")),
    (
        "safetensors_io.py",
        include_str!("../peers/safetensors_io.py"),
    ),
];

/// PyTorch on this machine.
#[derive(Debug)]
pub(crate) struct Peers {
    folder: PathBuf,
    python: PathBuf,
    /// Version of PyTorch.
    pub(crate) version: String,
}

impl Peers {
    /// Writes the programs into their folder. Also installs PyTorch there unless a Python with PyTorch is given or
    /// already exists.
    pub(crate) fn prepare(args: &BenchArgs) -> Result<Self, Error> {
        let folder = args.peers.clone().or_else(default_folder);
        let folder = folder.ok_or_else(|| Error::CannotRun {
            program: "PyTorch".to_owned(),
            problem: "there is no home folder to install it into; give --peers FOLDER".to_owned(),
        })?;
        let failed = |error: std::io::Error| Error::Output {
            flag: "--peers",
            path: folder.clone(),
            source: error,
        };
        fs::create_dir_all(&folder).map_err(failed)?;
        for (name, text) in SCRIPTS {
            fs::write(folder.join(name), text).map_err(failed)?;
        }
        let python = match &args.python {
            Some(python) => python.clone(),
            None => installed(&folder)?,
        };
        let mut peers = Self {
            folder,
            python,
            version: String::new(),
        };
        let about = peers.product_limit(1)?;
        peers.version = about.1;
        Ok(peers)
    }

    /// Returns the command line of a peer's program: its program and arguments.
    pub(crate) fn words(&self, command: &PeerCommand, form: &[&str]) -> Vec<String> {
        let script = self.folder.join(command.script);
        let mut words = vec![script.to_string_lossy().into_owned()];
        words.extend(command.words.iter().cloned());
        words.extend(form.iter().map(|word| (*word).to_owned()));
        words
    }

    pub(crate) fn python(&self) -> &Path {
        &self.python
    }

    /// Returns the operations per second that PyTorch's matrix products reach, and its version.
    pub(crate) fn product_limit(&self, threads: usize) -> Result<(f64, String), Error> {
        let command = PeerCommand {
            script: "product_peer.py",
            words: vec!["--threads".to_owned(), threads.to_string()],
            forms: &[],
        };
        let about = json_of(&self.python, &self.words(&command, &[]))?;
        let version = about["version"].as_str().unwrap_or("unknown");
        Ok((
            about["flop_per_s"].as_f64().unwrap_or(0.0),
            version.to_owned(),
        ))
    }
}

/// Returns the folder in the user's cache.
fn default_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")))?;
    Some(cache.join("burn-fsdp").join("peers"))
}

/// Returns the folder's Python with PyTorch, which is installed if it is missing.
fn installed(folder: &Path) -> Result<PathBuf, Error> {
    let venv = folder.join("venv");
    let python = venv.join("bin").join("python");
    let has_torch = |python: &Path| {
        let mut command = Command::new(python);
        command.args(["-c", "import torch, numpy"]);
        let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if has_torch(&python) {
        return Ok(python);
    }
    let _ = writeln!(
        io::stderr(),
        "installing PyTorch into {}; this takes a few minutes, only once",
        venv.display()
    );
    let of_venv = ["-m".into(), "venv".into(), venv.into_os_string()];
    run(Path::new("python3"), &of_venv)?;
    let of_pip = ["-m", "pip", "install", "--quiet", "torch", "numpy"].map(Into::into);
    run(&python, &of_pip)?;
    Ok(python)
}

fn run(program: &Path, words: &[std::ffi::OsString]) -> Result<(), Error> {
    let cannot = |problem: String| Error::CannotRun {
        program: format!("{}", program.display()),
        problem: format!(
            "{problem}; pass --python a Python with torch and numpy, or pass --no-peers"
        ),
    };
    let mut command = Command::new(program);
    let output = command.args(words).stdin(Stdio::null()).output();
    let output = output.map_err(|error| cannot(error.to_string()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(cannot(format!(
            "it ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )))
    }
}
