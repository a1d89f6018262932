//! `burn-fsdp inspect`.

use std::io::{self, Write};

use burn_fsdp::steps::Inspection;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::args::InspectArgs;
use crate::error::{Failure, InputError};
use crate::saving;

/// What is in a step, and what is wrong with it.
#[derive(Serialize)]
struct Findings {
    #[serde(flatten)]
    inspection: Inspection,
    /// Absent if nothing was verified.
    damage: Option<Vec<String>>,
}

/// Shows a step; damage is the error.
pub(crate) fn run(args: InspectArgs) -> Result<(), Failure> {
    let step = saving::open(args.step).map_err(InputError::from)?;
    let inspection = Inspection::new(&step);
    let damage = (!args.no_verify).then(|| {
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
    });
    let mut out = io::stdout();
    // Whoever reads may have stopped reading: the exit code says what was found.
    let _ = match args.json {
        true => {
            let texts = |errors: &Vec<_>| errors.iter().map(ToString::to_string).collect();
            let findings = Findings {
                inspection,
                damage: damage.as_ref().map(texts),
            };
            let text = serde_json::to_string(&findings).unwrap_or_default();
            writeln!(out, "{text}")
        }
        false => {
            let verdict = match &damage {
                None => "not verified",
                Some(damage) if damage.is_empty() => "verified: every byte is as it was written",
                Some(_) => "damaged",
            };
            writeln!(out, "{inspection}\n{verdict}")
        }
    };
    let mut damage = damage.unwrap_or_default().into_iter();
    let first = damage.next();
    for error in damage {
        eprintln!("error: {error}");
    }
    match first {
        Some(error) => Err(InputError::from(error).into()),
        None => Ok(()),
    }
}
