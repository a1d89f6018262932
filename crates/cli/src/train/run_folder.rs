//! The checkpoint folder of a run. It is locked from before the training until the end of the run.

use std::env;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn_fsdp::ProcessGroup;
use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::Error;
use burn_fsdp_models::ModelConfig;
use serde::{Deserialize, Serialize};
use tempfile::Builder;

use crate::adapters::AdapterSizes;
use crate::args::CheckpointArgs;
use crate::console;
use crate::error::{InputError, RankError};
use crate::launch::RESTART;
use crate::output;
use crate::train::meeting::Meeting;
use crate::train::ranks::{self, Ranks};
use crate::train::resumed::Resumed;
use crate::train::settings::Settings;

/// Maximum wait until a file from another machine is visible.
const PATIENCE: Duration = Duration::from_secs(15);

/// Time for which a restarted run waits for the end of the previous run.
const AFTER_RESTART: Duration = Duration::from_secs(300);

/// Time between two checks for rank 0's file in the folder.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The values that a step is compared with before a run resumes from it: the model, its adapters, and the settings.
type RunState<'a> = (&'a ModelConfig, Option<&'a AdapterSizes>, &'a Settings);

/// Rank 0's findings about the folder, for other processes.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    /// Name of a file in the folder that exists until all processes have looked for it.
    token: Option<String>,
    /// Number of the step to resume from.
    step: Option<u64>,
    /// Numbers of damaged steps that were skipped.
    skipped: Vec<u64>,
}

/// The checkpoint folder, with the schedule of saves and the step to resume from.
#[derive(Debug)]
pub(crate) struct CheckpointConfig {
    /// The checkpoint folder, which rank 0's process keeps locked against other runs for the lifetime of this value.
    pub(crate) folder: Checkpoints,
    pub(crate) save_every: Option<usize>,
    pub(crate) keep_last: Option<NonZeroUsize>,
    /// The saved step that the run resumes from; `None` for a fresh run. Unset until a process has it from rank 0.
    resumed: OnceLock<Option<Resumed>>,
    /// True if existing steps must be removed.
    pub(crate) overwrite: bool,
    /// The maximum duration of a save.
    pub(crate) save_deadline: Duration,
    pub(crate) meeting: Meeting,
}

impl CheckpointConfig {
    /// Checks the arguments. In the process of rank 0, also locks the folder for the lifetime of the run, and finds the
    /// step to resume from. Other processes receive it in [`agree`](Self::agree).
    pub(crate) fn new(
        args: CheckpointArgs,
        ranks: &Ranks,
        state: RunState<'_>,
    ) -> Result<Option<Self>, InputError> {
        let Some(path) = args.checkpoint_dir.clone() else {
            return Ok(None);
        };
        for (flag, value) in [
            ("--save-every", args.save_every.map(|every| every as u64)),
            ("--save-deadline", Some(args.save_deadline)),
        ] {
            if value == Some(0) {
                return Err(InputError::Zero { flag });
            }
        }
        output::check_folder("--checkpoint-dir", &path)?;
        if path.as_os_str().is_empty() {
            return Err(InputError::Output {
                flag: "--checkpoint-dir",
                path,
                problem: "is empty; give a name, such as steps".to_owned(),
            });
        }
        let (folder, resumed) = if ranks.have_first() {
            let (folder, resumed) = take(&args, path, state)?;
            (folder, OnceLock::from(resumed))
        } else {
            (Checkpoints::new(&path), OnceLock::new())
        };
        let deadline = Duration::from_secs(args.save_deadline.min(1 << 31));
        Ok(Some(Self {
            folder,
            resumed,
            save_every: args.save_every,
            keep_last: args.keep_last,
            overwrite: args.overwrite,
            save_deadline: deadline,
            meeting: Meeting::new(ranks, deadline),
        }))
    }

    /// Returns the saved step that the run resumes from, if it does not start fresh.
    pub(crate) fn resumed(&self) -> Option<&Resumed> {
        self.resumed.get()?.as_ref()
    }

    /// Sends the other processes rank 0's findings about the folder, and checks that they see the same folder.
    /// Collective if each rank is a process.
    ///
    /// # Errors
    ///
    /// [`RankError::FolderNotShared`] on every rank, if one rank does not see the folder.
    pub(crate) fn agree(&self, world: &ProcessGroup, deadline: Duration) -> Result<(), RankError> {
        let path = self.folder.root();
        let mut own = Found::default();
        let token = match world.rank() {
            0 => Some(Builder::new().prefix(".seen-by-all-").tempfile_in(path)),
            _ => None,
        };
        if let Some(token) = &token {
            own.token = match token {
                Ok(file) => file
                    .path()
                    .file_name()
                    .map(|name| name.to_string_lossy().into_owned()),
                Err(_) => None,
            };
            own.step = self.resumed().map(|resumed| resumed.first_step() as u64);
            own.skipped = self
                .resumed()
                .map(|resumed| resumed.skipped.clone())
                .unwrap_or_default();
        }
        let note = serde_json::to_vec(&own).unwrap_or_default();
        let notes = world.exchange("folder of checkpoints", note)?;
        let found: Found = notes
            .first()
            .and_then(|note| serde_json::from_slice(note).ok())
            .unwrap_or_default();
        let problem = match world.rank() {
            // The file stays until all processes have looked for it.
            0 => {
                let token = token.as_ref().and_then(|token| token.as_ref().err());
                token.map(ToString::to_string)
            }
            _ => self.follow(&found, deadline).err(),
        };
        let notes = world.exchange(
            "is the folder shared",
            problem.unwrap_or_default().into_bytes(),
        )?;
        let hosts = ranks::hosts(world)?;
        match notes.iter().position(|note| !note.is_empty()) {
            Some(rank) => Err(RankError::FolderNotShared {
                path: path.to_owned(),
                rank,
                host: hosts.get(rank).cloned().unwrap_or_default(),
                problem: String::from_utf8_lossy(&notes[rank]).into_owned(),
            }),
            None => Ok(()),
        }
    }

    /// Opens the step that rank 0 found.
    fn follow(&self, found: &Found, deadline: Duration) -> Result<(), String> {
        let Some(token) = &found.token else {
            return Ok(());
        };
        let path = self.folder.root().join(token);
        let until = Instant::now() + PATIENCE.min(deadline / 2);
        // Network file systems show a new file with a delay.
        while !path.exists() {
            if Instant::now() > until {
                return Err("the files of rank 0 do not appear there".to_owned());
            }
            sleep(LOOK_EVERY);
        }
        let resumed = match found.step {
            Some(number) => {
                let step = self
                    .folder
                    .open(number)
                    .map_err(|error| error.to_string())?;
                Some(Resumed {
                    step,
                    skipped: found.skipped.clone(),
                    // Rank 0 has warned the user.
                    warnings: Vec::new(),
                })
            }
            None => None,
        };
        // Only set here, once.
        let _ = self.resumed.set(resumed);
        Ok(())
    }

    /// Returns true if a save may replace the step with this number because it was found damaged.
    pub(crate) fn may_replace(&self, step: u64) -> bool {
        self.resumed()
            .is_some_and(|resumed| resumed.skipped.contains(&step))
    }
}

/// Locks the folder for the lifetime of the run, and finds the step to resume from.
fn take(
    args: &CheckpointArgs,
    path: PathBuf,
    state: RunState<'_>,
) -> Result<(Checkpoints, Option<Resumed>), InputError> {
    let folder = Checkpoints::new(&path);
    let may_have_steps = args.resume.is_some() || args.overwrite;
    if !may_have_steps && folder.is_begun()? {
        return Err(InputError::HasSteps { path });
    }
    let folder = acquire(folder)?;
    if !folder.is_exclusive() {
        console::tell(format_args!(
            "warning: the file system of {} has no locks; let no other run use that folder",
            path.display()
        ));
    }
    // The lock has restored files that a run left when it died during a replacement.
    if !may_have_steps && folder.is_begun()? {
        return Err(InputError::HasSteps { path });
    }
    let find = |which| Resumed::find(&folder, which, state);
    let resumed = args.resume.map(find).transpose()?.flatten();
    Ok((folder, resumed))
}

/// Locks the folder. After a restart, waits for the previous run, which may still be shutting down on another machine.
fn acquire(folder: Checkpoints) -> Result<Checkpoints, InputError> {
    let is_restart = env::var(RESTART).is_ok_and(|restart| restart != "0");
    let until = Instant::now() + AFTER_RESTART;
    loop {
        match folder.clone().acquire() {
            Err(Error::Locked { .. }) if is_restart && Instant::now() < until => {}
            other => return Ok(other?),
        }
    }
}
