//! The step that a run resumes from.

use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::{Check, Step};
use burn_fsdp_models::ModelConfig;

use crate::adapters::{self, AdapterSizes};
use crate::args::ResumeFrom;
use crate::console;
use crate::error::InputError;
use crate::train::settings::Settings;

/// The saved step that a run resumes from. It is found before any rank starts, because verification may take longer
/// than ranks wait for each other, and an error in a file is not a rank's failure.
#[derive(Debug)]
pub(crate) struct Resumed {
    pub(crate) step: Step,
    /// Numbers of damaged steps that were skipped. The run replaces these steps when it reaches them.
    pub(crate) skipped: Vec<u64>,
    /// Warnings to the user.
    pub(crate) warnings: Vec<String>,
}

impl Resumed {
    /// Returns the number of steps completed before this run.
    pub(crate) fn first_step(&self) -> usize {
        usize::try_from(self.step.index().training.step).unwrap_or(usize::MAX)
    }

    /// Returns a warning if the resumed run trains no step or ignores `--init`.
    pub(crate) fn idle(&self, steps: usize, is_init_idle: bool) -> Option<String> {
        let first = self.first_step();
        match () {
            () if first > steps => Some(format!(
                "step {first} is beyond the {steps} steps of --warmup and --steps; nothing is trained"
            )),
            () if is_init_idle => Some(format!(
                "--init has no effect: the weights are those of step {first}"
            )),
            () => None,
        }
    }

    /// Finds the step to resume from. Returns `None` to start fresh, if there are no steps at all.
    pub(crate) fn find(
        folder: &Checkpoints,
        which: ResumeFrom,
        (model, adapters, settings): (&ModelConfig, Option<&AdapterSizes>, &Settings),
    ) -> Result<Option<Self>, InputError> {
        if !folder.is_begun()? {
            return Ok(None);
        }
        let mut warnings = Vec::new();
        let mut skipped = Vec::new();
        let step = match which {
            ResumeFrom::Newest => {
                let step = folder.newest()?;
                step.check_sizes()?;
                step
            }
            ResumeFrom::NewestGood => {
                let found = folder.newest_good(Check::Everything)?;
                for step in found.skipped {
                    warnings.push(format!("{} skipped: {}", step.path.display(), step.error));
                    skipped.push(step.step);
                }
                match found.step {
                    Some(step) => step,
                    None => return Ok(None),
                }
            }
        };
        check_model(&step, model)?;
        adapters::check_sizes(&step.index().training, adapters, model)?;
        settings.check_optimizer(&step.index().training)?;
        warnings.extend(settings.differences(&step.index().training));
        // Print them at once: the report would be too late to stop the run.
        warnings
            .iter()
            .for_each(|warning| console::tell(format_args!("warning: {warning}")));
        Ok(Some(Self {
            step,
            skipped,
            warnings,
        }))
    }
}

/// Checks that a step has this model. The shapes of its tensors would not suffice, because they do not depend on the
/// number of heads.
fn check_model(step: &Step, expected: &ModelConfig) -> Result<(), InputError> {
    let found: Result<ModelConfig, _> = serde_json::from_value(step.index().model.clone());
    match found {
        Ok(found) if found == *expected => Ok(()),
        found => Err(InputError::other_model(step, expected, found.ok().as_ref())),
    }
}
