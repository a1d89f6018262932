//! The sizes of the model that a run trains.

use std::path::Path;

use burn_fsdp_models::{GptConfig, ModelConfig, TextCodec};

use crate::adapters::TrainedAdapters;
use crate::args::{ModelArgs, TrainedModelArg};
use crate::error::InputError;

/// The default sizes of a GPT.
const GPT: GptConfig = GptConfig {
    layers: 3,
    dim: 128,
    heads: 4,
    vocab: 256,
    seq: 128,
};

/// Finds the sizes: from the command line for a GPT, and from the folder of `--init` for other models.
pub(crate) fn model(args: &ModelArgs, codec: &TextCodec) -> Result<ModelConfig, InputError> {
    let folder = args.init.as_deref().filter(|path| path.is_dir());
    let has_sizes = folder.is_some_and(|folder| folder.join("config.json").exists());
    let model = match (args.model, folder) {
        (Some(TrainedModelArg::Gpt), _) => gpt(args, codec),
        (None, Some(folder)) if has_sizes => of_folder(args, folder)?,
        (None, _) => gpt(args, codec),
        (Some(_), Some(folder)) => of_folder(args, folder)?,
        (Some(asked), None) => {
            return Err(InputError::NeedsFolder {
                model: name_of(asked),
            });
        }
    };
    model.validate()?;
    match args.model {
        Some(asked) if name_of(asked) != name(&model) => Err(InputError::OtherKind {
            asked: name_of(asked),
            found: name(&model),
        }),
        _ => Ok(model),
    }
}

fn gpt(args: &ModelArgs, codec: &TextCodec) -> ModelConfig {
    ModelConfig::Gpt(GptConfig {
        layers: args.layers.unwrap_or(GPT.layers),
        dim: args.dim.unwrap_or(GPT.dim),
        heads: args.heads.unwrap_or(GPT.heads),
        vocab: args.vocab.unwrap_or_else(|| codec.num_ids().max(GPT.vocab)),
        seq: args.seq,
    })
}

/// Reads the sizes from a folder in Hugging Face's format. The command line must not specify any.
fn of_folder(args: &ModelArgs, folder: &Path) -> Result<ModelConfig, InputError> {
    let given = [
        ("--layers", args.layers),
        ("--dim", args.dim),
        ("--heads", args.heads),
        ("--vocab", args.vocab),
    ];
    if let Some((flag, _)) = given.into_iter().find(|(_, given)| given.is_some()) {
        return Err(InputError::SizeOfFolder {
            flag,
            path: folder.join("config.json"),
        });
    }
    let model = ModelConfig::from_hugging_face(folder)?;
    if args.seq > model.seq() {
        Err(InputError::TooLongSequence {
            seq: args.seq,
            longest: model.seq(),
        })
    } else {
        Ok(model)
    }
}

/// Returns warnings about settings of the model's folder with which transformers trains differently.
pub(crate) fn other_training(
    args: &ModelArgs,
    model: &ModelConfig,
) -> Result<Vec<String>, InputError> {
    let folder = args.init.as_deref().filter(|path| path.is_dir());
    let Some(folder) = folder.filter(|_| !matches!(model, ModelConfig::Gpt(_))) else {
        return Ok(Vec::new());
    };
    let mut warnings = Vec::new();
    let dropouts = ModelConfig::dropouts(folder)?.into_iter();
    let named: Vec<_> = dropouts
        .map(|(name, share)| format!("`{name}` {share}"))
        .collect();
    if !named.is_empty() {
        warnings.push(format!(
            "config.json of --init sets {}: unlike transformers, this command trains without dropout",
            named.join(", ")
        ));
    }
    let padding = ModelConfig::padding_in_text(folder)?;
    if let Some(token) = padding.filter(|_| args.lora.flag().is_none()) {
        warnings.push(format!(
            "config.json of --init has {token} as padding and at the start or end of texts: unlike transformers, this \
             command also trains the embedding of that token"
        ));
    }
    Ok(warnings)
}

/// Returns the command line's name for the kind of a model.
fn name(model: &ModelConfig) -> &'static str {
    name_of(match model {
        ModelConfig::Llama(_) => TrainedModelArg::Llama,
        ModelConfig::Gpt2(_) => TrainedModelArg::Gpt2,
        ModelConfig::Gpt(_) => TrainedModelArg::Gpt,
    })
}

fn name_of(model: TrainedModelArg) -> &'static str {
    match model {
        TrainedModelArg::Gpt => "gpt",
        TrainedModelArg::Llama => "llama",
        TrainedModelArg::Gpt2 => "gpt2",
    }
}

/// Returns the adapters to train, if any, after checking them against the model and other flags.
pub(crate) fn adapters(
    args: &ModelArgs,
    model: &ModelConfig,
) -> Result<Option<TrainedAdapters>, InputError> {
    let adapters = TrainedAdapters::of_args(&args.lora, model)?;
    match args.lora.flag().filter(|_| args.save_init.is_some()) {
        None => Ok(adapters),
        Some(second) => Err(InputError::Excludes {
            first: "--save-init",
            second,
            reason: "the initial weights are those of --init, which do not change",
        }),
    }
}
