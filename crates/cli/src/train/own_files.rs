//! The files and folders that a run itself reads and writes, which are excluded from its training text.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use burn_fsdp_runs::EVENT_FILE_PREFIX;

use crate::args::TrainArgs;
use crate::codec::TokenizerArg;
use crate::output::{self, FileId};
use crate::process::Process;

/// Prefixes of the names of entries in the run's folders.
const NAMES: [&str; 6] = [
    "step-",
    "rank-",
    ".step-",
    ".lock",
    ".seen-by-all-",
    EVENT_FILE_PREFIX,
];

/// The run's own files and folders inside the `--data` folder.
#[derive(Debug)]
pub(crate) struct OwnFiles {
    /// Paths from flags that are inside the text, with links resolved.
    inside: Vec<(&'static str, PathBuf)>,
    /// The run's folders that contain the text.
    around: Vec<PathBuf>,
    /// The files that receive the run's output.
    streams: Vec<FileId>,
    /// True once one of these files was found in the text.
    has_met_stream: Cell<bool>,
    /// Number of saved steps of other runs that were found.
    num_steps: Cell<usize>,
}

impl OwnFiles {
    pub(crate) fn of(args: &TrainArgs, data: &Path) -> Self {
        let data = output::identity(data);
        let folders = [
            ("--checkpoint-dir", &args.checkpoint.checkpoint_dir),
            ("--tensorboard", &args.output.tensorboard),
            ("--operations", &args.output.operations),
            ("--dump-graphs", &args.output.dump_graphs),
            ("--offload", &args.sharding.offload),
        ];
        let files = [
            ("--init", &args.model.init),
            ("--adapter", &args.model.lora.adapter),
            ("--save-init", &args.model.save_init),
            ("--metrics", &args.output.metrics),
            ("--trace", &args.output.trace),
        ];
        let known = |(flag, path): (&'static str, &Option<PathBuf>)| {
            Some((flag, output::identity(path.as_deref()?)))
        };
        let folders: Vec<_> = folders.into_iter().filter_map(known).collect();
        let around = folders.iter().map(|(_, path)| path);
        let around = around.filter(|path| data.starts_with(path)).cloned();
        let around = around.collect();
        let curve = ("--curve", output::identity(&args.output.curve));
        let tokenizer = args.data.tokenizer.as_ref().and_then(TokenizerArg::file);
        let tokenizer = tokenizer.map(|path| ("--tokenizer", output::identity(path)));
        let files = files.into_iter().filter_map(known);
        let files = files.chain(tokenizer).chain([curve]);
        let is_inside = |path: &Path| path != data && path.starts_with(&data);
        let all = folders.into_iter().chain(files);
        Self {
            inside: all.filter(|(_, path)| is_inside(path)).collect(),
            around,
            streams: streams(),
            has_met_stream: Cell::new(false),
            num_steps: Cell::new(0),
        }
    }

    /// Returns true if a path with links resolved belongs to the run or is a saved step of another run, and is
    /// therefore not text.
    pub(crate) fn has(&self, path: &Path) -> bool {
        let is_named = self.inside.iter().any(|(_, own)| own == path);
        let is_in = |folder: &PathBuf| path.parent() == Some(folder.as_path());
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_of_run = NAMES.iter().any(|start| name.starts_with(start));
        let is_stream = !is_named
            && !self.streams.is_empty()
            && FileId::of(fs::metadata(path).ok().as_ref())
                .is_some_and(|id| self.streams.contains(&id));
        if is_stream {
            self.has_met_stream.set(true);
        }
        let is_own = is_named || is_stream || is_of_run && self.around.iter().any(is_in);
        let is_step = name.starts_with("step-") && path.join("index.json").is_file();
        if is_step && !is_own {
            self.num_steps.set(self.num_steps.get() + 1);
        }
        is_own || is_step
    }

    /// Returns the paths from flags that are inside the data, with links resolved, whether or not they already exist.
    pub(crate) fn inside(&self) -> &[(&'static str, PathBuf)] {
        &self.inside
    }

    /// Returns the number of other runs' saved steps that were skipped.
    pub(crate) fn num_steps(&self) -> usize {
        self.num_steps.get()
    }

    /// Returns the flags whose files are inside the text, whether or not the files already exist. A resumed run
    /// therefore reports the same flags.
    pub(crate) fn flags(&self) -> Vec<&'static str> {
        let mut flags: Vec<_> = self.inside.iter().map(|(flag, _)| *flag).collect();
        flags.extend(self.has_met_stream.get().then_some("the output"));
        flags
    }
}

/// Returns the regular files that receive the run's output. These are the files that this process prints to, and the
/// files of the run's other processes: other ranks, `mpirun`, which may write the ranks' output to files, and `tee`.
fn streams() -> Vec<FileId> {
    let others = Process::of_this_run();
    let others = others.iter().flat_map(Process::written);
    let others = others.filter_map(|metadata| FileId::of(Some(&metadata)));
    own_streams().into_iter().chain(others).collect()
}

/// Returns the regular files that this process prints to, even if the system does not list processes.
fn own_streams() -> Vec<FileId> {
    #[cfg(unix)]
    {
        use std::os::fd::AsFd;
        let owned = [
            std::io::stdout().as_fd().try_clone_to_owned(),
            std::io::stderr().as_fd().try_clone_to_owned(),
        ];
        let files = owned.into_iter().flatten().map(fs::File::from);
        let metadata = files.filter_map(|file| file.metadata().ok());
        metadata
            .filter_map(|metadata| FileId::of(Some(&metadata)))
            .collect()
    }
    #[cfg(not(unix))]
    {
        Vec::new()
    }
}
