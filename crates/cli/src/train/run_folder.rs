//! The folder of checkpoints of a run, locked before anything is trained, and held to its end.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp_models::GptConfig;

use crate::args::CheckpointArgs;
use crate::console;
use crate::error::InputError;
use crate::output;
use crate::train::meeting::Meeting;
use crate::train::resumed::Resumed;
use crate::train::settings::Settings;

/// The folder of checkpoints, with the steps to save and to go on from.
#[derive(Debug)]
pub(crate) struct CheckpointConfig {
    /// Folder of checkpoints, locked against other runs as long as this lives.
    pub(crate) folder: Checkpoints,
    pub(crate) save_every: Option<usize>,
    pub(crate) keep_last: Option<NonZeroUsize>,
    /// The saved step that the run goes on from, if it does not start fresh.
    pub(crate) resumed: Option<Resumed>,
    /// True if the steps that are there are to be removed.
    pub(crate) overwrite: bool,
    pub(crate) meeting: Meeting,
    /// Flag that a signal sets: the run then finishes the step, saves, and ends.
    pub(crate) stop: Arc<AtomicBool>,
}

impl CheckpointConfig {
    /// Locks the folder for the life of the run, and finds the step to go on from.
    pub(crate) fn take(
        args: CheckpointArgs,
        ranks: usize,
        model: &GptConfig,
        settings: &Settings,
    ) -> Result<Option<Self>, InputError> {
        let Some(path) = args.checkpoint_dir else {
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
                problem: "is no name; give one, such as steps".to_owned(),
            });
        }
        let folder = Checkpoints::new(&path);
        let may_have_steps = args.resume.is_some() || args.overwrite;
        if !may_have_steps && folder.is_begun()? {
            return Err(InputError::HasSteps { path });
        }
        let folder = folder.acquire()?;
        if !folder.is_exclusive() {
            console::tell(format_args!(
                "warning: the file system of {} has no locks; let no other run use that folder",
                path.display()
            ));
        }
        // What a run that died in the midst of a replacement left is back only now.
        if !may_have_steps && folder.is_begun()? {
            return Err(InputError::HasSteps { path });
        }
        let find = |which| Resumed::find(&folder, which, model, settings);
        Ok(Some(Self {
            resumed: args.resume.map(find).transpose()?.flatten(),
            folder,
            save_every: args.save_every,
            keep_last: args.keep_last,
            overwrite: args.overwrite,
            meeting: Meeting::new(ranks, Duration::from_secs(args.save_deadline)),
            stop: Arc::default(),
        }))
    }

    /// Returns true if a signal has told the run to end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Returns true if a save may replace a step of this number: one that was found damaged.
    pub(crate) fn may_replace(&self, step: u64) -> bool {
        let resumed = self.resumed.as_ref();
        resumed.is_some_and(|resumed| resumed.skipped.contains(&step))
    }
}
