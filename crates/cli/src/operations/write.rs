//! The record of a run's operations.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use burn_fsdp::ProcessGroup;
use burn_fsdp::internals::collectives::Carried;

use super::line::{Header, Line, file_name};
use crate::console;
use crate::error::InputError;

/// The warning about operations that could not be written, once there is one.
pub(crate) type Lost = Arc<OnceLock<String>>;

/// Starts writing a line for each operation of this rank into the rank's file in the folder. Creates the folder if
/// necessary. The first line that cannot be written causes a warning, and training continues. Returns a handle to that
/// warning, for the report.
pub(crate) fn write(folder: &Path, world: &ProcessGroup) -> Result<Lost, InputError> {
    let path = folder.join(file_name(world.rank()));
    let created = fs::create_dir_all(folder)
        .and_then(|()| remove_others(folder, world))
        .and_then(|()| File::create(&path))
        .and_then(|mut file| {
            let (rank, ranks) = (world.rank(), world.size());
            let header = serde_json::to_string(&Header { rank, ranks })?;
            file.write_all(format!("{header}\n").as_bytes())?;
            Ok(file)
        });
    let mut file = created.map_err(|error| InputError::Output {
        flag: "--operations",
        path: path.clone(),
        problem: error.to_string(),
    })?;
    let lost = Lost::default();
    let told = lost.clone();
    world.watch(move |carried: Carried| {
        if told.get().is_some() {
            return;
        }
        let written = serde_json::to_string(&Line::from(carried))
            .map_err(io::Error::from)
            // One write, so a rank that is stopped does not leave half a line.
            .and_then(|line| file.write_all(format!("{line}\n").as_bytes()));
        if let Err(error) = written {
            let path = path.display();
            let problem = format!("no more operations are written to {path}: {error}");
            console::tell(format_args!("warning: {problem}"));
            // The warning is set only here.
            let _ = told.set(problem);
        }
    });
    Ok(lost)
}

/// Removes the files that a run of more ranks left in the folder. Only rank 0 does this.
fn remove_others(folder: &Path, world: &ProcessGroup) -> io::Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let others = (world.size()..).map(|rank| folder.join(file_name(rank)));
    for other in others.take_while(|path| path.exists()) {
        fs::remove_file(other)?;
    }
    Ok(())
}
