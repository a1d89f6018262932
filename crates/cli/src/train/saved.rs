//! What the step that a run resumes from says about its training.

use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::TrainingState;

use crate::args::{CheckpointArgs, PackingArg, TrainArgs};
use crate::error::InputError;
use crate::train::documents;
use crate::train::settings::{packing_of, tokenizer_of};

/// Sets the packing of a resumed run to that of its step, and rejects one with other sequences.
pub(super) fn with_packing(mut args: TrainArgs) -> Result<TrainArgs, InputError> {
    if !documents::are_meant(&args.data) {
        return Ok(args);
    }
    let saved = saved(&args.checkpoint);
    let was = saved.as_ref().and_then(packing_of);
    // The other two divide a text into the same sequences.
    let is_single = |packing| packing == PackingArg::Single;
    match (args.data.packing, was, saved) {
        (Some(given), Some(was), Some(saved)) if is_single(given) != is_single(was) => {
            Err(InputError::OtherPacking {
                given: given.name(),
                was: was.name(),
                step: saved.step,
            })
        }
        (None, was, _) => {
            args.data.packing = was;
            Ok(args)
        }
        _ => Ok(args),
    }
}

/// Returns true if the step that a run resumes from was trained on bytes.
pub(super) fn goes_on_in_bytes(args: &CheckpointArgs) -> bool {
    saved(args).is_some_and(|step| tokenizer_of(&step).is_none())
}

/// Returns what the newest step says about its training, if the run resumes and the step can be read.
fn saved(args: &CheckpointArgs) -> Option<TrainingState> {
    let folder = args.checkpoint_dir.as_ref();
    let folder = folder.filter(|_| args.resume.is_some())?;
    let newest = Checkpoints::new(folder).newest().ok()?;
    Some(newest.index().training.clone())
}
