//! `burn-fsdp consolidate`.

use burn_fsdp::steps::{
    ConsolidationConfig, TensorEntry, consolidate_to_file, consolidate_to_folder,
};

use crate::args::ConsolidateArgs;
use crate::console;
use crate::error::{Failure, InputError};
use crate::resuming;

/// Writes the model of a step as plain safetensors.
pub(crate) fn run(args: ConsolidateArgs) -> Result<(), Failure> {
    let config = ConsolidationConfig {
        max_shard_size: args.max_shard_size,
        replace: args.overwrite,
        ..ConsolidationConfig::default()
    };
    let written = resuming::with_step(&args.step, |step| {
        let all = |_: &TensorEntry| true;
        let written = match args.max_shard_size {
            None => consolidate_to_file(&step, &args.out, &config, all),
            Some(_) => consolidate_to_folder(&step, &args.out, &config, all),
        };
        Ok(written.map_err(InputError::from)?)
    })?;
    console::answer(format_args!(
        "{} tensors, {} bytes, in {} files: {}",
        written.num_tensors,
        written.total_size,
        written.files.len(),
        args.out.display()
    ))
}
