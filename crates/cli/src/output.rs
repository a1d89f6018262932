//! The files that a run writes: checked before it starts, whole or absent after it ends.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process;

use crate::args::TrainArgs;
use crate::error::InputError;

/// Checks that every output can be written, and that none overwrites another or an input.
///
/// Leaves nothing behind.
pub(crate) fn check(args: &TrainArgs) -> Result<(), InputError> {
    let outputs = [
        ("--save-init", args.model.save_init.as_deref(), Kind::Whole),
        ("--metrics", args.output.metrics.as_deref(), Kind::Stream),
        ("--trace", args.output.trace.as_deref(), Kind::Whole),
        ("--curve", Some(args.output.curve.as_path()), Kind::Whole),
    ];
    let mut taken: Vec<(&'static str, PathBuf)> = Vec::new();
    for (flag, path) in [
        ("--init", args.model.init.as_deref()),
        ("--data", args.data.data.as_deref()),
    ] {
        taken.extend(path.map(|path| (flag, identity(path))));
    }
    for (flag, path, kind) in outputs {
        let Some(path) = path else { continue };
        check_writable(path, kind).map_err(|problem| InputError::Output {
            flag,
            path: path.to_owned(),
            problem,
        })?;
        let identity = identity(path);
        if let Some((first, _)) = taken.iter().find(|(_, other)| *other == identity) {
            return Err(InputError::SameFile {
                first,
                second: flag,
                path: path.to_owned(),
            });
        }
        taken.push((flag, identity));
    }
    Ok(())
}

/// Checks that one output can be written, and leaves nothing behind.
pub(crate) fn check_one(flag: &'static str, path: &Path) -> Result<(), InputError> {
    check_writable(path, Kind::Whole).map_err(|problem| InputError::Output {
        flag,
        path: path.to_owned(),
        problem,
    })
}

/// Puts a file in its place only when it is complete.
pub(crate) fn write_whole(
    flag: &'static str,
    path: &Path,
    contents: &[u8],
) -> Result<(), InputError> {
    let temporary = beside(path);
    let result = fs::write(&temporary, contents).and_then(|()| fs::rename(&temporary, path));
    result.map_err(|error| {
        // The error that matters is the one that is reported.
        let _ = fs::remove_file(&temporary);
        InputError::Output {
            flag,
            path: path.to_owned(),
            problem: error.to_string(),
        }
    })
}

/// How an output is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// In one go, by replacing what is there; so that must be a plain file.
    Whole,
    /// Line by line, also into a pipe or a terminal.
    Stream,
}

fn check_writable(path: &Path, kind: Kind) -> Result<(), String> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err("is a folder; name a file".to_owned()),
        Ok(metadata) if metadata.is_file() => open_existing(path).map_err(|e| e.to_string()),
        Ok(_) if kind == Kind::Whole => {
            Err("is not a plain file, and would be replaced by one; name another".to_owned())
        }
        // Opening a pipe waits for its reader, so it is left for when there is something to write.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            create_and_remove(path).map_err(|e| e.to_string())
        }
        Err(error) => Err(error.to_string()),
    }
}

fn open_existing(path: &Path) -> io::Result<()> {
    OpenOptions::new().append(true).open(path).map(|_| ())
}

fn create_and_remove(path: &Path) -> io::Result<()> {
    File::create_new(path)?;
    fs::remove_file(path)
}

/// Equal for paths of one file, also of one that is not there yet.
fn identity(path: &Path) -> PathBuf {
    if let Ok(path) = path.canonicalize() {
        return path;
    }
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    let parent = parent.unwrap_or(Path::new("."));
    match (parent.canonicalize(), path.file_name()) {
        (Ok(parent), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    }
}

/// A name in the same folder, and so on the same disk, that no other process uses.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.part", process::id()))
}
