//! Checks of the files that a run will write, and writes that leave a file complete or unchanged.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Component, Path, PathBuf};

use burn_fsdp::internals::compile::GraphDump;
use burn_fsdp::optim::FileBackedOptimizer;
use tempfile::Builder;

use crate::args::TrainArgs;
use crate::codec::TokenizerArg;
use crate::error::InputError;

/// Checks that output files and the folder for graphs can be written, and that none overwrites another or an input.
///
/// Leaves no new files or folders.
pub(crate) fn check(args: &TrainArgs) -> Result<(), InputError> {
    let outputs = [
        ("--save-init", args.model.save_init.as_deref(), Kind::Whole),
        ("--metrics", args.output.metrics.as_deref(), Kind::Stream),
        ("--trace", args.output.trace.as_deref(), Kind::Whole),
        ("--curve", Some(args.output.curve.as_path()), Kind::Whole),
    ];
    let mut taken = inputs(args);
    if let (Some(data), Some(folder)) = (&args.data.data, &args.checkpoint.checkpoint_dir)
        && lies_among_steps(&identity(data), folder)
    {
        return Err(InputError::Output {
            flag: "--data",
            path: data.to_owned(),
            problem: "is among the saved steps; name text outside them".to_owned(),
        });
    }
    if let Some(folder) = &args.output.tensorboard {
        check_events(folder, args)?;
        taken.push(("--tensorboard", identity(folder)));
    }
    if let Some(folder) = &args.output.dump_graphs {
        check_graphs(folder, args, &taken)?;
        taken.push(("--dump-graphs", identity(folder)));
    }
    for (flag, path, kind) in outputs {
        let Some(path) = path else { continue };
        check_writable(path, kind).map_err(|problem| InputError::Output {
            flag,
            path: path.to_owned(),
            problem,
        })?;
        let identity = identity(path);
        if let Some(folder) = &args.checkpoint.checkpoint_dir
            && lies_among_steps(&identity, folder)
        {
            return Err(InputError::Output {
                flag,
                path: path.to_owned(),
                problem: "is among the saved steps; name a file next to them".to_owned(),
            });
        }
        let is_same = |other: &Path| other == identity || are_one_file(other, &identity);
        if let Some((first, _)) = taken.iter().find(|(_, other)| is_same(other)) {
            return Err(InputError::SameFile {
                first,
                second: flag,
                path: path.to_owned(),
            });
        }
        // The folders of the model and of its adapters.
        let mut read = taken.iter().filter(|(flag, _)| MODELS.contains(flag));
        let problem =
            read.find_map(|(flag, folder)| overwrites(&identity, Some((*flag, folder.as_path()))));
        if let Some(problem) = problem.or_else(|| overwrites(&identity, None)) {
            return Err(InputError::Output {
                flag,
                path: path.to_owned(),
                problem,
            });
        }
        taken.push((flag, identity));
    }
    Ok(())
}

/// Returns the flags that name files or folders to read, and what they name.
fn inputs(args: &TrainArgs) -> Vec<(&'static str, PathBuf)> {
    let mut taken: Vec<(&'static str, PathBuf)> = Vec::new();
    for (flag, path) in [
        ("--init", args.model.init.as_deref()),
        ("--adapter", args.model.lora.adapter.as_deref()),
        ("--data", args.data.data.as_deref()),
        (
            "--checkpoint-dir",
            args.checkpoint.checkpoint_dir.as_deref(),
        ),
        ("--offload", args.sharding.offload.as_deref()),
        (
            "--tokenizer",
            args.data.tokenizer.as_ref().and_then(TokenizerArg::file),
        ),
    ] {
        taken.extend(path.map(|path| (flag, identity(path))));
    }
    taken
}

/// Flags of folders whose files are not replaced.
const MODELS: [&str; 2] = ["--init", "--adapter"];

/// Returns a problem if writing a file would damage a saved step or a folder of a model. New files may be added to that
/// folder.
fn overwrites(file: &Path, model: Option<(&str, &Path)>) -> Option<String> {
    /// Extensions of model files.
    const MODEL: [&str; 8] = [
        "bin",
        "gguf",
        "json",
        "model",
        "pt",
        "pth",
        "safetensors",
        "txt",
    ];
    let mut above = file.ancestors().skip(1);
    if let Some(step) = above.find(|folder| folder.join("index.json.crc32").exists()) {
        return Some(format!(
            "is inside the saved step {}; name a file outside it",
            step.display()
        ));
    }
    let is_of_model = || {
        let end = file.extension().and_then(|end| end.to_str());
        end.is_some_and(|end| MODEL.contains(&end))
    };
    let (flag, _) = model.filter(|(_, folder)| file.starts_with(folder))?;
    (file.exists() && is_of_model())
        .then(|| format!("is a file of the {flag} folder; name another"))
}

/// Checks that a folder for TensorBoard's event files can be created, and that it is not a saved step.
fn check_events(folder: &Path, args: &TrainArgs) -> Result<(), InputError> {
    const FLAG: &str = "--tensorboard";
    check_folder(FLAG, folder)?;
    let own = identity(folder);
    let checkpoints = args.checkpoint.checkpoint_dir.as_ref();
    let problem = if checkpoints.is_some_and(|steps| lies_among_steps(&own, steps)) {
        Some("is among the saved steps; name a folder next to them".to_owned())
    } else {
        // The folder may be the step itself.
        overwrites(&own.join("events"), None)
    };
    let refused = |problem| InputError::Output {
        flag: FLAG,
        path: folder.to_owned(),
        problem,
    };
    problem.map_or(Ok(()), |problem| Err(refused(problem)))
}

/// Checks that graphs can be written into a folder, and that the folder is not among the paths in `taken`.
fn check_graphs(
    folder: &Path,
    args: &TrainArgs,
    taken: &[(&'static str, PathBuf)],
) -> Result<(), InputError> {
    const FLAG: &str = "--dump-graphs";
    let refused = |problem: &str| InputError::Output {
        flag: FLAG,
        path: folder.to_owned(),
        problem: problem.to_owned(),
    };
    check_dump(folder)?;
    let own = identity(folder);
    if let Some((first, _)) = taken.iter().find(|(_, other)| *other == own) {
        return Err(InputError::SameFile {
            first,
            second: FLAG,
            path: folder.to_owned(),
        });
    }
    let checkpoints = args.checkpoint.checkpoint_dir.as_ref();
    if checkpoints.is_some_and(|checkpoints| lies_among_steps(&own, checkpoints)) {
        return Err(refused(
            "is among the saved steps; name a folder next to them",
        ));
    }
    // The text of the next run would include the graphs of this one.
    let data = args.data.data.as_ref();
    if data.is_some_and(|data| identity(data).starts_with(&own)) {
        Err(refused("contains the text of --data; name another folder"))
    } else {
        Ok(())
    }
}

/// Checks that a folder for graphs can be written to, and that no file is in the way. Leaves no new files or folders.
pub(crate) fn check_dump(folder: &Path) -> Result<(), InputError> {
    const FLAG: &str = "--dump-graphs";
    check_folder(FLAG, folder)?;
    let checked = GraphDump::new(folder).check();
    checked.map_err(|error| InputError::Output {
        flag: FLAG,
        path: folder.to_owned(),
        problem: error.to_string(),
    })
}

/// Checks that an output can be written. Leaves no new file.
pub(crate) fn check_one(flag: &'static str, path: &Path) -> Result<(), InputError> {
    check_writable(path, Kind::Whole).map_err(|problem| InputError::Output {
        flag,
        path: path.to_owned(),
        problem,
    })
}

/// Checks that a page can be written: it replaces only other pages, none of the `inputs`, and nothing in a saved step.
pub(crate) fn check_page(
    flag: &'static str,
    path: &Path,
    inputs: &[PathBuf],
) -> Result<(), InputError> {
    check_one(flag, path)?;
    let own = identity(path);
    let is_input = inputs.iter().any(|input| {
        let input = identity(input);
        input == own || are_one_file(&input, &own)
    });
    if is_input {
        return Err(InputError::SameFile {
            first: "RUN",
            second: flag,
            path: path.to_owned(),
        });
    }
    let problem = overwrites(&own, None).or_else(|| is_other_file(path));
    let refused = |problem| InputError::Output {
        flag,
        path: path.to_owned(),
        problem,
    };
    problem.map_or(Ok(()), |problem| Err(refused(problem)))
}

/// Returns the reason not to replace a file, if it exists, is not empty, and is not an HTML page.
fn is_other_file(path: &Path) -> Option<String> {
    const START: &[u8] = b"<!doctype html";
    let mut start = Vec::new();
    let file = File::open(path).ok()?;
    file.take(START.len() as u64).read_to_end(&mut start).ok()?;
    let is_page = start.is_empty() || start.eq_ignore_ascii_case(START);
    (!is_page).then(|| "exists and is not an HTML page; name another file".to_owned())
}

/// Checks that a folder can be created: neither it nor any of its parents is a file.
pub(crate) fn check_folder(flag: &'static str, path: &Path) -> Result<(), InputError> {
    match path.ancestors().find(|above| above.exists()) {
        Some(above) if !above.is_dir() => Err(InputError::Output {
            flag,
            path: path.to_owned(),
            problem: if above == path {
                "is not a folder; name a folder".to_owned()
            } else {
                format!("{} is not a folder; name another path", above.display())
            },
        }),
        _ => Ok(()),
    }
}

/// Checks that a folder for the ranks' optimizer state can be created, and that no other run uses it. Removes the files
/// of a killed run, even if that run had more ranks.
pub(crate) fn check_offload(path: &Path, ranks: usize) -> Result<(), InputError> {
    const FLAG: &str = "--offload";
    check_folder(FLAG, path)?;
    let is_of_run = |rank: &usize| *rank < ranks || path.join(format!("rank-{rank}")).exists();
    for rank in (0..).take_while(is_of_run) {
        let cleaned = FileBackedOptimizer::clean(path, rank);
        cleaned.map_err(|error| InputError::Output {
            flag: FLAG,
            path: path.to_owned(),
            problem: error.to_string(),
        })?;
    }
    Ok(())
}

/// Writes a file completely or not at all.
pub(crate) fn write_whole(
    flag: &'static str,
    path: &Path,
    contents: &[u8],
) -> Result<(), InputError> {
    write_beside(path, contents).map_err(|error| InputError::Output {
        flag,
        path: path.to_owned(),
        problem: error.to_string(),
    })
}

/// Writes a new file with a random name, and renames it when it is on disk.
fn write_beside(path: &Path, contents: &[u8]) -> io::Result<()> {
    let folder = folder_of(path);
    let mut builder = Builder::new();
    builder.prefix(".").suffix(".part");
    #[cfg(unix)]
    {
        // As for any new file, the process's mask limits the permissions.
        let all = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666);
        builder.permissions(all);
    }
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(contents)?;
    if let Ok(replaced) = fs::metadata(path) {
        // The new file must not be more readable than the file that it replaces.
        file.as_file().set_permissions(replaced.permissions())?;
    }
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    // If folders cannot be synced, the rename becomes durable at a later time.
    if cfg!(unix) {
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
    }
    Ok(())
}

/// How an output is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One write of the whole file, which replaces an existing one. The existing file must be a regular file.
    Whole,
    /// A write per line, possibly into a pipe or a terminal.
    Stream,
}

fn check_writable(path: &Path, kind: Kind) -> Result<(), String> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err("is a folder; name a file".to_owned()),
        Ok(metadata) if metadata.is_file() => open_existing(path).map_err(|e| e.to_string()),
        Ok(_) if kind == Kind::Whole => {
            Err("is not a plain file and would be replaced by one; name another".to_owned())
        }
        // Opening a pipe waits for its reader, so the pipe is opened only when there is something to write.
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

/// A file's identity on this machine, which is the same for each of its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId(u64, u64);

impl FileId {
    /// Returns the identity of a regular file; `None` on systems that do not provide it.
    pub(crate) fn of(metadata: Option<&fs::Metadata>) -> Option<Self> {
        let metadata = metadata.filter(|metadata| metadata.is_file())?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            Some(Self(metadata.dev(), metadata.ino()))
        }
        #[cfg(not(unix))]
        {
            let _ = metadata;
            None
        }
    }
}

/// Returns true if two paths refer to the same existing file, including through hard links.
fn are_one_file(one: &Path, other: &Path) -> bool {
    let id = |path| FileId::of(fs::metadata(path).ok().as_ref());
    id(one).is_some_and(|one| Some(one) == id(other))
}

/// Returns a canonical path, the same for all paths to a file. The file need not exist.
pub(crate) fn identity(path: &Path) -> PathBuf {
    let parts: Vec<_> = path.components().collect();
    for there in (0..=parts.len()).rev() {
        let above: PathBuf = parts[..there].iter().collect();
        let above = if there == 0 { Path::new(".") } else { &above };
        let Ok(mut real) = above.canonicalize() else {
            continue;
        };
        for part in &parts[there..] {
            match part {
                Component::ParentDir => drop(real.pop()),
                Component::CurDir => {}
                other => real.push(other),
            }
        }
        return real;
    }
    path.to_owned()
}

/// Returns the folder that a file is in.
fn folder_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    parent.unwrap_or(Path::new("."))
}

/// Returns true if a file is in the checkpoint folder and has the name of a step, or a hidden name.
fn lies_among_steps(file: &Path, checkpoint_dir: &Path) -> bool {
    let inside = file.strip_prefix(identity(checkpoint_dir)).ok();
    let first = inside.and_then(|inside| inside.components().next());
    first.is_some_and(|first| {
        let name = first.as_os_str().to_string_lossy();
        name.starts_with('.') || name.starts_with("step-")
    })
}
