//! `burn-fsdp consolidate`.

use std::io::{self, Write};

use burn_fsdp::steps::{
    ConsolidationConfig, TensorEntry, consolidate_to_file, consolidate_to_folder,
};

use crate::args::ConsolidateArgs;
use crate::error::{Failure, InputError};
use crate::saving;

/// Writes the model of a step as plain safetensors.
pub(crate) fn run(args: ConsolidateArgs) -> Result<(), Failure> {
    let step = saving::open(args.step).map_err(InputError::from)?;
    let config = ConsolidationConfig {
        max_shard_size: args.max_shard_size,
        replace: args.overwrite,
        ..ConsolidationConfig::default()
    };
    let all = |_: &TensorEntry| true;
    let written = match args.max_shard_size {
        None => consolidate_to_file(&step, &args.out, &config, all),
        Some(_) => consolidate_to_folder(&step, &args.out, &config, all),
    };
    let written = written.map_err(InputError::from)?;
    // Whoever reads may have stopped reading; the files are there all the same.
    let _ = writeln!(
        io::stdout(),
        "{} tensors, {} bytes, in {} files: {}",
        written.num_tensors,
        written.total_size,
        written.files.len(),
        args.out.display()
    );
    Ok(())
}
