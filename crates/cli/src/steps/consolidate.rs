//! The `burn-fsdp consolidate` command.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use burn_fsdp::internals::checkpoint::{
    Consolidated, ConsolidationConfig, PlainTensor, Step, TensorEntry, consolidate_to_file,
    consolidate_to_folder,
};
use burn_fsdp_models::{Architecture, ModelConfig, ParameterSpec, WeightsFile};

use crate::adapters::{Adapters, PeftFolder};
use crate::args::{ConsolidateArgs, FormatArg, NamesArg};
use crate::console;
use crate::error::{Failure, InputError};
use crate::steps::beside::{Beside, text_of};
use crate::steps::merge;
use crate::steps::open::with_step;
use crate::steps::peft;

/// Writes the model of a step as plain safetensors or as a Hugging Face folder.
pub(crate) fn run(args: ConsolidateArgs) -> Result<(), Failure> {
    let written = match &args.init {
        Some(init) if args.merge && PeftFolder::is_at(&args.step) => {
            merge::write_folder(&args, init)?
        }
        _ => with_step(&args.step, |step| write(&args, &step))?,
    };
    console::answer(format_args!(
        "{} tensors, {} bytes, in {} files: {}",
        written.num_tensors,
        written.total_size,
        written.files.len(),
        args.out.display()
    ))
}

fn write(args: &ConsolidateArgs, step: &Step) -> Result<Consolidated, Failure> {
    let is_hugging_face = args.format == FormatArg::HuggingFace || args.merge;
    let is_folder = is_hugging_face || args.max_shard_size.is_some();
    let is_full = || fs::read_dir(&args.out).is_ok_and(|mut entries| entries.next().is_some());
    if args.overwrite && is_folder && is_full() {
        let path = args.out.clone();
        return Err(InputError::FullFolder { path }.into());
    }
    if is_hugging_face {
        return match (args.merge, &args.init) {
            (true, Some(init)) => merge::write(args, step, init),
            _ => write_hugging_face(args, step),
        };
    }
    if args.init.is_some() {
        return Err(InputError::Excludes {
            first: "--init",
            second: "--format safetensors",
            reason: "it writes only tensors",
        }
        .into());
    }
    let adapters = Adapters::of_step(&step.index().training);
    let table = match args.names {
        Some(NamesArg::Burn) => None,
        None if adapters.is_some() => {
            console::tell(format_args!(
                "note: the step has only adapters; names and layout are Burn's (--format hugging-face writes peft's)"
            ));
            None
        }
        Some(NamesArg::Torch) => Some(table(step)?),
        None => match model_of(step) {
            Some(_) => Some(table(step)?),
            None => {
                console::tell(format_args!(
                    "note: the model has no table of names; names and layout are Burn's"
                ));
                None
            }
        },
    };
    let defaults = ConsolidationConfig::default();
    let config = ConsolidationConfig {
        max_shard_size: args.max_shard_size,
        replace: args.overwrite,
        // The default, `format: pt`, marks files that PyTorch can read.
        metadata: match table {
            Some(_) => defaults.metadata,
            None => HashMap::from([("producer".to_owned(), "burn-fsdp".to_owned())]),
        },
        ..defaults
    };
    let write_as = |tensor: &TensorEntry| match &table {
        None => Some(PlainTensor::unchanged(tensor)),
        Some(table) => table.get(&tensor.name).cloned(),
    };
    let written = match args.max_shard_size {
        None => consolidate_to_file(step, &args.out, &config, write_as),
        Some(_) => consolidate_to_folder(step, &args.out, &config, write_as),
    };
    Ok(written.map_err(InputError::from)?)
}

/// Writes a folder with all files that readers of Hugging Face models need.
fn write_hugging_face(args: &ConsolidateArgs, step: &Step) -> Result<Consolidated, Failure> {
    if args.names == Some(NamesArg::Burn) {
        return Err(InputError::Excludes {
            first: "--names burn",
            second: "--format hugging-face",
            reason: "that format uses the names of transformers",
        }
        .into());
    }
    let path = step.path().to_owned();
    let Some(model) = model_of(step) else {
        return Err(no_table(step).into());
    };
    let beside = args.init.as_deref().map(|init| Beside::of(&model, init));
    let beside = beside.transpose()?;
    let beside = beside.unwrap_or_default();
    let Some(mut sizes) = model.to_hugging_face() else {
        let model = model.name();
        return Err(InputError::NotInTransformers { path, model }.into());
    };
    beside.complete(&mut sizes);
    let adapters = Adapters::of_step(&step.index().training);
    if let (Some(adapters), Some(init)) = (&adapters, &args.init) {
        check_base(step, &model, adapters, init)?;
    }
    let (table, file_name, config_name, config) = match adapters {
        None => (table(step)?, "model", "config.json", sizes),
        Some(adapters) => {
            let parameters = bounded_table(step, &model)?;
            (
                peft::table(step, &parameters),
                "adapter_model",
                "adapter_config.json",
                peft::config(&model, &parameters, &adapters.sizes),
            )
        }
    };
    let mut files = vec![(config_name.to_owned(), text_of(&config))];
    files.extend(beside.files);
    let config = ConsolidationConfig {
        max_shard_size: args.max_shard_size,
        replace: args.overwrite,
        file_name: file_name.to_owned(),
        beside: files,
        ..ConsolidationConfig::default()
    };
    let write_as = |tensor: &TensorEntry| table.get(&tensor.name).cloned();
    let written = consolidate_to_folder(step, &args.out, &config, write_as);
    Ok(written.map_err(InputError::from)?)
}

/// Checks that a step's adapters belong to the weights of a folder, if it has any.
fn check_base(
    step: &Step,
    model: &ModelConfig,
    adapters: &Adapters,
    init: &Path,
) -> Result<(), InputError> {
    fn base<A: Architecture>(sizes: A, adapters: &Adapters, init: &Path) -> Option<Adapters> {
        let weights = WeightsFile::open(init, sizes).ok()?;
        Adapters::of_weights(&adapters.sizes, &weights).ok()
    }
    let base = match *model {
        ModelConfig::Gpt(sizes) => base(sizes, adapters, init),
        ModelConfig::Llama(sizes) => base(sizes, adapters, init),
        ModelConfig::Gpt2(sizes) => base(sizes, adapters, init),
    };
    match base {
        Some(base) => base.check(&step.index().training).map_err(|error| *error),
        None => Ok(()),
    }
}

/// Returns the configuration of the saved model, if this command supports it.
fn model_of(step: &Step) -> Option<ModelConfig> {
    serde_json::from_value(step.index().model.clone()).ok()
}

/// Returns the name and orientation with which each tensor of the step's model is written, by path. Checks that the
/// step's model has exactly these tensors.
fn table(step: &Step) -> Result<BTreeMap<String, PlainTensor>, InputError> {
    let model = model_of(step).ok_or_else(|| no_table(step))?;
    let other = |expected: String, found: String| other_tensors(step, &model, expected, found);
    let parameters = bounded_table(step, &model)?;
    let mut saved: BTreeMap<&str, &[usize]> = step
        .index()
        .tensors
        .iter()
        .filter(|tensor| tensor.kind.is_model())
        .map(|tensor| (tensor.name.as_str(), &tensor.shape[..]))
        .collect();
    for spec in &parameters {
        let (name, shape) = (&spec.path, spec.module_shape());
        let expected = format!("{name} of shape {shape:?}");
        match saved.remove(name.as_str()) {
            Some(found) if *found == shape => {}
            Some(found) => return Err(other(expected, format!("it with shape {found:?}"))),
            None => return Err(other(expected, "no such tensor".to_owned())),
        }
    }
    if let Some((name, shape)) = saved.into_iter().next() {
        let found = format!("{name} of shape {shape:?}");
        return Err(other("no such tensor".to_owned(), found));
    }
    let entry = |spec: ParameterSpec| {
        let plain = PlainTensor {
            name: spec.name,
            is_transposed: spec.is_transposed,
        };
        (spec.path, plain)
    };
    Ok(parameters.into_iter().map(entry).collect())
}

/// Returns the table of a model. The sizes come from a file and may be anything, so the number of layers must not
/// exceed the number of tensors.
fn bounded_table(step: &Step, model: &ModelConfig) -> Result<Vec<ParameterSpec>, InputError> {
    let num_tensors = step.index().tensors.len();
    if model.num_layers() > num_tensors {
        let expected = format!("{} layers", model.num_layers());
        let found = format!("{num_tensors} tensors");
        return Err(other_tensors(step, model, expected, found));
    }
    Ok(model.parameters()?)
}

fn no_table(step: &Step) -> InputError {
    InputError::NoTable {
        path: step.path().to_owned(),
        model: step.index().model.to_string().chars().take(100).collect(),
    }
}

fn other_tensors(step: &Step, model: &ModelConfig, expected: String, found: String) -> InputError {
    InputError::OtherTensors {
        path: step.path().to_owned(),
        model: model.name(),
        expected,
        found,
    }
}
