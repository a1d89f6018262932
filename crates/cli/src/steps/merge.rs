//! `consolidate --merge`: a step's adapters, added to the weights that they were trained on.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp::internals::checkpoint::{
    Consolidated, Error as StepError, Step, check_outside_steps,
};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp_models::{
    Architecture, ModelConfig, ModelError, ParameterSpec, WeightsFile, write_weights,
};

use crate::adapters::{AdapterSizes, Adapters};
use crate::args::ConsolidateArgs;
use crate::error::{Failure, InputError};
use crate::steps::beside::{Beside, text_of};
use crate::steps::generate::adapted_model;

/// The file of the merged weights.
const FILE: &str = "model.safetensors";

/// Writes a folder with the merged model. It is written under a hidden name and renamed, so it appears complete or not
/// at all. One parameter at a time is in memory, and all factors.
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
    // An empty folder may be replaced, by --overwrite.
    if args.out.symlink_metadata().is_ok() && !(args.overwrite && args.out.is_dir()) {
        let path = args.out.clone();
        return Err(InputError::from(StepError::Exists { path }).into());
    }
    match adapted_model(step, Some(adapters.sizes), init)? {
        ModelConfig::Gpt(_) => {
            let (path, model) = (step.path().to_owned(), "gpt");
            Err(InputError::NotInTransformers { path, model }.into())
        }
        model @ ModelConfig::Llama(sizes) => merged(args, step, (init, model), sizes, adapters),
        model @ ModelConfig::Gpt2(sizes) => merged(args, step, (init, model), sizes, adapters),
    }
}

fn merged<A: Architecture>(
    args: &ConsolidateArgs,
    step: &Step,
    (init, model): (&Path, ModelConfig),
    sizes: A,
    adapters: Adapters,
) -> Result<Consolidated, Failure> {
    let adapters = adapters.sizes;
    let weights = WeightsFile::open(init, sizes).map_err(InputError::from)?;
    let base = Adapters::of_weights(adapters, &weights).map_err(InputError::from)?;
    base.check(&step.index().training).map_err(|error| *error)?;
    let factors = Factors::read(step, adapters)?;
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
        factors.added_to(&weights, spec)
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

/// The factors of adapters, by the path of their matrix.
struct Factors {
    /// Alpha divided by the rank.
    scale: f64,
    of_matrices: BTreeMap<String, [TensorData; 2]>,
}

impl Factors {
    fn read(step: &Step, adapters: AdapterSizes) -> Result<Self, InputError> {
        let mut of_matrices = BTreeMap::new();
        let first_factors = step.index().tensors.iter().filter_map(|tensor| {
            let path = tensor.name.strip_suffix(".lora.a")?;
            tensor.kind.is_model().then_some(path)
        });
        for path in first_factors {
            let factor = |name: &str| -> Result<TensorData, InputError> {
                let name = format!("{path}.lora.{name}");
                let shape = step.tensor(&name)?.shape.clone();
                let whole = Region::Flat(0..shape.iter().product());
                let bytes = step.read(&name, &whole)?;
                let values = bytes.chunks_exact(4).map(|bytes| {
                    let bytes = bytes.try_into().unwrap_or_default();
                    f32::from_ne_bytes(bytes)
                });
                Ok(TensorData::new(values.collect::<Vec<_>>(), shape))
            };
            of_matrices.insert(path.to_owned(), [factor("a")?, factor("b")?]);
        }
        let scale = adapters.alpha / adapters.rank as f64;
        Ok(Self { scale, of_matrices })
    }

    /// Returns a parameter with the product of its factors, as peft merges them: the product is scaled, then added.
    fn added_to<A: Architecture>(
        &self,
        weights: &WeightsFile<A>,
        spec: &ParameterSpec,
    ) -> Result<TensorData, ModelError> {
        let shape = spec.module_shape();
        let values = weights.read(&spec.path, 0..shape.iter().product())?;
        let values = TensorData::new(values, shape);
        let Some(factors) = self.of_matrices.get(&spec.path) else {
            return Ok(values);
        };
        let matrix = |data: &TensorData| Tensor::<2>::from_data(data.clone(), &Device::flex());
        let [a, b] = [matrix(&factors[0]), matrix(&factors[1])];
        Ok((matrix(&values) + a.matmul(b).mul_scalar(self.scale)).into_data())
    }
}
