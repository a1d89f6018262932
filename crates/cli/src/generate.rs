//! `burn-fsdp generate`.

use std::io::{self, Write};
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp::steps::Step;
use burn_fsdp::{
    LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, fully_shard, launch, restore_model,
};
use burn_fsdp_models::{BYTE_VOCAB, GptConfig, ModelError};

use crate::args::GenerateArgs;
use crate::error::{Failure, InputError, RankError};
use crate::sample::{Sample, printable};
use crate::saving;

/// Prints the prompt and what the model adds to it.
pub(crate) fn run(args: GenerateArgs) -> Result<(), Failure> {
    if args.prompt.is_empty() {
        return Err(InputError::EmptyPrompt.into());
    }
    let step = saving::open(args.step.clone()).map_err(InputError::from)?;
    let model = model_of(&step)?;
    let job = Arc::new((args, step, model));
    let texts = launch(LaunchConfig::new(1), move |world| {
        let (args, step, model) = &*job;
        generate(args, step, *model, &world)
    })?;
    for text in texts {
        // Whoever reads may have stopped reading.
        let _ = writeln!(io::stdout(), "{}", printable(&text));
    }
    Ok(())
}

fn model_of(step: &Step) -> Result<GptConfig, InputError> {
    let model: GptConfig = serde_json::from_value(step.index().model.clone()).map_err(|error| {
        InputError::UnknownModel {
            path: step.path().to_owned(),
            problem: error.to_string(),
        }
    })?;
    model.validate()?;
    match model.vocab < BYTE_VOCAB {
        true => Err(ModelError::VocabTooSmall { vocab: model.vocab }.into()),
        false => Ok(model),
    }
}

fn generate(
    args: &GenerateArgs,
    step: &Step,
    config: GptConfig,
    world: &ProcessGroup,
) -> Result<Vec<u8>, RankError> {
    let device = Device::flex().autodiff();
    let mesh = ProcessMesh::new(world, Mesh::line("shard", 1)?)?;
    let model = config.init(&device, args.seed)?;
    let model = fully_shard(model, &mesh, ShardPolicy::new())?;
    let model = restore_model(model, step)?;
    let sample = Sample {
        seq: config.seq,
        num_bytes: args.bytes,
        seed: args.seed,
    };
    sample.go_on(&model.valid(), args.prompt.clone().into_bytes(), world)
}
