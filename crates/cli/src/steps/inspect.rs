//! The `burn-fsdp inspect` command.

use burn_fsdp::internals::checkpoint::{Error as StepError, Inspection, Step};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::args::InspectArgs;
use crate::console;
use crate::error::{Failure, InputError};
use crate::steps::open::with_step;

/// The contents of a step, and the damage to it.
#[derive(Serialize)]
struct Findings {
    #[serde(flatten)]
    inspection: Inspection,
    /// The damage that was found; `None`, in JSON `null`, if nothing was verified.
    damage: Option<Vec<String>>,
}

/// Prints the contents of a step. Damage is returned as an error.
pub(crate) fn run(args: InspectArgs) -> Result<(), Failure> {
    let (inspection, damage) = with_step(&args.step, |step| {
        let inspection = Inspection::new(&step);
        let damage = (!args.no_verify).then(|| damage_of(&step));
        match damage {
            // A step that was removed in the meantime is not damaged.
            Some(mut damage) if !damage.is_empty() && !step.path().exists() => {
                Err(InputError::from(damage.swap_remove(0)).into())
            }
            damage => Ok((inspection, damage)),
        }
    })?;
    let text = if args.json {
        let texts = |errors: &Vec<_>| errors.iter().map(ToString::to_string).collect();
        let findings = Findings {
            inspection,
            damage: damage.as_ref().map(texts),
        };
        serde_json::to_string(&findings).unwrap_or_default()
    } else {
        let verdict = match &damage {
            None => "not verified",
            Some(damage) if damage.is_empty() => "verified: every byte matches its checksum",
            Some(_) => "damaged",
        };
        format!("{inspection}\n{verdict}")
    };
    let printed = console::answer(text);
    let mut damage = damage.unwrap_or_default().into_iter();
    let first = damage.next();
    for error in damage {
        console::tell(format_args!("error: {error}"));
    }
    match first {
        Some(error) => Err(InputError::from(error).into()),
        None => printed,
    }
}

fn damage_of(step: &Step) -> Vec<StepError> {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("verifying {bar:32} {bytes}/{total_bytes} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let damage = step.damage(|progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(progress.file.to_owned());
    });
    bar.finish_and_clear();
    damage
}
