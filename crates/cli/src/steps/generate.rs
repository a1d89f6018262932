//! The `burn-fsdp generate` command.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp::checkpoint::{Step, TensorKind, restore_model};
use burn_fsdp::{LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, fully_shard, launch};
use burn_fsdp_models::{BYTE_VOCAB, GptConfig, ModelError};

use crate::args::GenerateArgs;
use crate::console;
use crate::error::{Failure, InputError, RankError};
use crate::host;
use crate::steps::open::with_step;
use crate::text::{Sample, printable};

/// Prints the prompt and the text that the model adds to it.
pub(crate) fn run(args: GenerateArgs) -> Result<(), Failure> {
    if args.prompt.is_empty() {
        return Err(InputError::EmptyPrompt.into());
    }
    let text = with_step(&args.step, |step| {
        let model = model_of(&step)?;
        let job = Arc::new((args.clone(), step, model));
        let texts = launch(LaunchConfig::new(1), move |world| {
            let (args, step, model) = &*job;
            generate(args, step, *model, &world)
        })?;
        Ok(texts.into_iter().next().unwrap_or_default())
    })?;
    console::answer(printable(&text))
}

/// Returns the configuration in the index, if the tensors beside it are of such a model.
///
/// The index may be from anyone, and its configuration may ask for a model of any size. That of the
/// tensors is bounded by the files, so it is compared before a model is made.
fn model_of(step: &Step) -> Result<GptConfig, InputError> {
    let unknown = |problem: String| InputError::UnknownModel {
        path: step.path().to_owned(),
        problem,
    };
    let model: Result<GptConfig, _> = serde_json::from_value(step.index().model.clone());
    let model = model.map_err(|error| unknown(error.to_string()))?;
    model.validate()?;
    if model.vocab < BYTE_VOCAB {
        return Err(ModelError::VocabTooSmall { vocab: model.vocab }.into());
    }
    step.check_sizes()?;
    let tensors = step.index().tensors.iter();
    let parameters: Vec<_> = tensors
        .filter(|tensor| tensor.kind == TensorKind::Parameter)
        .collect();
    let elements: usize = parameters.iter().map(|tensor| tensor.num_elements()).sum();
    // The number of elements first: it bounds how many parameters there can be.
    if elements != model.num_params() || parameters.len() != model.parameters().len() {
        return Err(unknown(format!(
            "its model would have {} parameters, but {elements} in {} tensors are saved",
            model.num_params(),
            parameters.len()
        )));
    }
    // Read and loaded, each element is there twice.
    let needed = 8 * elements as u128;
    match host::memory_bytes(1).map(u128::from) {
        Some(available) if needed > available => Err(InputError::TooLittleMemory {
            params: elements,
            ranks: 1,
            needed: needed.div_ceil(1 << 30),
            available: available >> 30,
        }),
        _ => Ok(model),
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
    let model = restore_model(model, step).map_err(|error| RankError::Restore {
        path: step.path().to_owned(),
        source: Box::new(error.into()),
    })?;
    let sample = Sample {
        seq: config.seq,
        num_bytes: args.bytes,
        seed: args.seed,
        device: Device::flex(),
    };
    let prompt = args.prompt.clone().into_bytes();
    sample.go_on(&model.valid(), prompt, world, || false)
}
