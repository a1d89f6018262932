//! `consolidate --merge`: adapters of a step or a peft folder, added to the weights that they were trained on.

use std::fs;
use std::path::Path;

use burn::tensor::TensorData;
use burn_fsdp::internals::checkpoint::{
    Consolidated, Error as StepError, Step, check_outside_steps,
};
use burn_fsdp_models::{
    Architecture, ModelConfig, ModelError, ParameterSpec, WeightsFile, write_weights,
};

use crate::adapters::{AdapterSizes, Adapters, Factors, PeftFolder, Use};
use crate::args::ConsolidateArgs;
use crate::error::{Failure, InputError};
use crate::steps::beside::{Beside, text_of};
use crate::steps::generate::{adapted_model, model_of_folder};

/// The file of the merged weights.
const FILE: &str = "model.safetensors";

/// Writes a folder with a step's adapters, merged into the weights of `init`. It is written under a hidden name and
/// renamed, so it appears complete or not at all. One parameter at a time is in memory, and all factors.
pub(super) fn write(
    args: &ConsolidateArgs,
    step: &Step,
    init: &Path,
) -> Result<Consolidated, Failure> {
    let Some(adapters) = Adapters::of_step(&step.index().training) else {
        return Err(InputError::Excludes {
            first: "--merge",
            second: "a step of a whole model",
            reason: "it has no adapters",
        }
        .into());
    };
    check_outside_steps(step, &args.out).map_err(InputError::from)?;
    check_out(args)?;
    let model = adapted_model(step, true, init)?;
    let factors = Factors::of_step(step)?;
    let sizes = adapters.sizes;
    if !(sizes.is_valid(&model) && factors.fit(&sizes, &model)) {
        let (path, problem) = (step.path().to_owned(), "its adapters do not fit the model");
        let problem = problem.to_owned();
        return Err(InputError::UnknownModel { path, problem }.into());
    }
    let product = Product { sizes, factors };
    merge(args, &args.step, (init, model), (product, Some(step)))
}

/// Writes a folder with the adapters of a peft folder, merged into the weights of `init`.
pub(super) fn write_folder(args: &ConsolidateArgs, init: &Path) -> Result<Consolidated, Failure> {
    let is_full = || fs::read_dir(&args.out).is_ok_and(|mut entries| entries.next().is_some());
    if args.overwrite && is_full() {
        let path = args.out.clone();
        return Err(InputError::FullFolder { path }.into());
    }
    check_out(args)?;
    let model = model_of_folder(init)?;
    let PeftFolder { sizes, factors } = PeftFolder::read(&args.step, &model, Use::Merging)?;
    let product = Product { sizes, factors };
    merge(args, &args.step, (init, model), (product, None))
}

/// Checks that nothing is at the output's path. An empty folder may be replaced, by --overwrite.
fn check_out(args: &ConsolidateArgs) -> Result<(), InputError> {
    if args.out.symlink_metadata().is_ok() && !(args.overwrite && args.out.is_dir()) {
        let path = args.out.clone();
        return Err(StepError::Exists { path }.into());
    }
    Ok(())
}

fn merge(
    args: &ConsolidateArgs,
    from: &Path,
    (init, model): (&Path, ModelConfig),
    adapters: (Product, Option<&Step>),
) -> Result<Consolidated, Failure> {
    match model {
        ModelConfig::Gpt(_) => {
            let (path, model) = (from.to_owned(), "gpt");
            Err(InputError::NotInTransformers { path, model }.into())
        }
        ModelConfig::Llama(sizes) => merged(args, (init, model), sizes, adapters),
        ModelConfig::Gpt2(sizes) => merged(args, (init, model), sizes, adapters),
    }
}

fn merged<A: Architecture>(
    args: &ConsolidateArgs,
    (init, model): (&Path, ModelConfig),
    sizes: A,
    (product, step): (Product, Option<&Step>),
) -> Result<Consolidated, Failure> {
    let weights = WeightsFile::open(init, sizes).map_err(InputError::from)?;
    if let Some(step) = step {
        let base = Adapters::of_weights(&product.sizes, &weights).map_err(InputError::from)?;
        base.check(&step.index().training).map_err(|error| *error)?;
    }
    let beside = Beside::of(&model, init)?;
    let mut config = model.to_hugging_face().unwrap_or_default();
    beside.complete(&mut config);
    let failed = |source| {
        let (operation, path) = ("write", args.out.clone());
        InputError::from(StepError::Io {
            operation,
            path,
            source,
        })
    };
    let parent = args.out.parent().filter(|parent| *parent != Path::new(""));
    let parent = parent.unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(failed)?;
    let partial = tempfile::Builder::new()
        .prefix(".merge-")
        .tempdir_in(parent);
    let partial = partial.map_err(failed)?;
    let own = vec![("config.json".to_owned(), text_of(&config))];
    for (name, bytes) in own.into_iter().chain(beside.files) {
        fs::write(partial.path().join(name), bytes).map_err(failed)?;
    }
    let table = sizes.parameters();
    let written = write_weights(sizes, &partial.path().join(FILE), move |spec| {
        product.added_to(&weights, spec)
    });
    written.map_err(InputError::from)?;
    open_to_others(partial.path()).map_err(failed)?;
    fs::rename(partial.path(), &args.out).map_err(failed)?;
    // Nothing is left at the hidden name.
    let _ = partial.keep();
    Ok(Consolidated {
        files: vec![args.out.join(FILE)],
        num_tensors: table.len(),
        total_size: 4 * model.num_params() as u64,
    })
}

/// Gives a temporary folder the permissions of a new folder, which the process's umask limits.
fn open_to_others(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(".probe");
    fs::create_dir(&probe)?;
    let permissions = probe.metadata()?.permissions();
    fs::remove_dir(&probe)?;
    fs::set_permissions(folder, permissions)
}

/// The products of factors, scaled for each matrix.
struct Product {
    sizes: AdapterSizes,
    factors: Factors,
}

impl Product {
    /// Returns a parameter, merged with its adapter if it has one.
    fn added_to<A: Architecture>(
        &self,
        weights: &WeightsFile<A>,
        spec: &ParameterSpec,
    ) -> Result<TensorData, ModelError> {
        let shape = spec.module_shape();
        let values = weights.read(&spec.path, 0..shape.iter().product())?;
        let values = self.sizes.as_trained_on::<A>(spec, values);
        let values = TensorData::new(values, shape);
        let Some(scale) = self.sizes.scale_of(&spec.path) else {
            return Ok(values);
        };
        let merged = self.factors.merged(&spec.path, values.clone(), scale);
        Ok(merged.unwrap_or(values))
    }
}
