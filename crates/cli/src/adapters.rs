//! Low-rank adapters on frozen weights. Saved steps contain only the adapters and a checksum of the base weights.

pub(crate) mod error;
mod factors;
mod folder;
mod names;
mod sizes;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn::module::Module;
use burn_fsdp::compile::{Batch, CompiledStep};
use burn_fsdp::internals::checkpoint::TrainingState;
use burn_fsdp::internals::compile::BackendIr;
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::state::{LocalPart, local_state};
use burn_fsdp::{ProcessGroup, ProcessMesh};
use burn_fsdp_models::{Architecture, ModelConfig, ModelError, WeightsFile};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::args::{ForTarget, LoraArgs};
use crate::error::{InputError, RankError};
use crate::random::mixed;

use error::AdapterError;
pub(crate) use factors::{Factors, initial_magnitudes};
pub(crate) use folder::{PeftFolder, Use};
use names::selected;
pub(crate) use names::{ends_of, module_of, numbered};
pub(crate) use sizes::{AdapterSizes, MatrixSizes, Method, Scaling, matrices_of};

/// Name of the adapters' section in a saved step.
const SECTION: &str = "adapters";

/// The adapters that a run trains.
#[derive(Debug)]
pub(crate) struct TrainedAdapters {
    pub(crate) sizes: AdapterSizes,
    /// The initial values; if `None`, Burn draws them.
    pub(crate) factors: Option<Factors>,
}

impl TrainedAdapters {
    /// Returns the adapters that the flags select, if any, after checking them against the model.
    pub(crate) fn of_args(
        args: &LoraArgs,
        model: &ModelConfig,
    ) -> Result<Option<Self>, InputError> {
        if let Some(path) = &args.adapter {
            let folder = PeftFolder::read(path, model, Use::Training)?;
            return Ok(Some(Self {
                sizes: folder.sizes.on_base(args.base_bits),
                factors: Some(folder.factors),
            }));
        }
        let Some(rank) = args.lora else {
            return Ok(None);
        };
        let sizes = sizes_of_args(args, rank, model)?;
        let factors = None;
        Ok(Some(Self { sizes, factors }))
    }
}

/// Returns the matrices that `--lora` and its flags select, with ranks and alphas.
fn sizes_of_args(
    args: &LoraArgs,
    rank: usize,
    model: &ModelConfig,
) -> Result<AdapterSizes, InputError> {
    if rank == 0 {
        return Err(InputError::Zero { flag: "--lora" });
    }
    let alpha = args.lora_alpha.unwrap_or(2.0 * rank as f64);
    for (flag, value, is_valid, expected) in [
        (
            "--lora-alpha",
            alpha,
            alpha.is_finite() && alpha > 0.0,
            "a number above 0",
        ),
        (
            "--lora",
            rank as f64,
            rank <= model.dim(),
            "at most the hidden size of the model",
        ),
    ] {
        if !is_valid {
            return Err(InputError::OutOfRange {
                flag,
                value,
                expected,
            });
        }
    }
    let all = matrices_of(model)?;
    let everything: Vec<_> = all.iter().collect();
    let mut adapted = everything.clone();
    if !args.lora_targets.is_empty() {
        let mut paths = BTreeSet::new();
        for target in &args.lora_targets {
            let found = selected("--lora-targets", target, &everything)?;
            paths.extend(found.into_iter().map(|spec| spec.path.as_str()));
        }
        adapted.retain(|spec| paths.contains(spec.path.as_str()));
    }
    let mut ranks: BTreeMap<_, _> = adapted.iter().map(|spec| (&spec.path, rank)).collect();
    for ForTarget { target, value } in &args.lora_rank_pattern {
        let flag = "--lora-rank-pattern";
        if !(1..=model.dim()).contains(value) {
            let expected = "from 1 to the hidden size of the model";
            return Err(wrong(flag, target, *value as f64, expected).into());
        }
        let found = selected(flag, target, &adapted)?;
        ranks.extend(found.into_iter().map(|spec| (&spec.path, *value)));
    }
    let sizes = ranks.into_iter().map(|(path, rank)| {
        let alpha = args.lora_alpha.unwrap_or(2.0 * rank as f64);
        (path.clone(), MatrixSizes { rank, alpha })
    });
    let mut sizes: BTreeMap<_, _> = sizes.collect();
    for ForTarget { target, value } in &args.lora_alpha_pattern {
        let flag = "--lora-alpha-pattern";
        if !(value.is_finite() && *value > 0.0) {
            return Err(wrong(flag, target, *value, "above 0").into());
        }
        for spec in selected(flag, target, &adapted)? {
            if let Some(sizes) = sizes.get_mut(&spec.path) {
                sizes.alpha = *value;
            }
        }
    }
    let usual = MatrixSizes { rank, alpha };
    let sizes = AdapterSizes::new(usual, kind_of(args), sizes, &all);
    Ok(sizes.on_base(args.base_bits))
}

fn kind_of(args: &LoraArgs) -> (Scaling, Method) {
    let scaling = if args.rslora {
        Scaling::ByRootOfRank
    } else {
        Scaling::ByRank
    };
    let method = if args.dora {
        Method::Dora
    } else {
        Method::Lora
    };
    (scaling, method)
}

fn wrong(flag: &'static str, target: &str, value: f64, expected: &'static str) -> AdapterError {
    AdapterError::Number {
        flag,
        target: target.chars().take(100).collect(),
        value,
        expected,
    }
}

/// The adapters of a step, and a checksum of the frozen weights that they belong to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Adapters {
    #[serde(flatten)]
    pub(crate) sizes: AdapterSizes,
    /// Checksum of the frozen weights, in hexadecimal digits.
    base: String,
}

/// Returns true for the path of an adapter's factor or magnitudes.
pub(crate) fn is_factor(path: &str) -> bool {
    path.contains(".lora.")
}

/// Returns a predicate that is true for the paths of saved tensors. With adapters, only their factors are saved.
pub(crate) fn is_saved(adapters: Option<&Adapters>) -> impl Fn(&str) -> bool + use<> {
    let saves_all = adapters.is_none();
    move |path| saves_all || is_factor(path)
}

impl Adapters {
    /// Describes the adapters of a sharded model whose frozen weights are loaded. Collective.
    pub(crate) fn of<M: Module>(
        sizes: &AdapterSizes,
        model: &M,
        mesh: &ProcessMesh,
    ) -> Result<Self, RankError> {
        let base = format!("{:016x}", checksum(model, mesh)?);
        let sizes = sizes.clone();
        Ok(Self { sizes, base })
    }

    /// Describes the adapters of a compiled step whose frozen weights are loaded. Collective.
    pub(crate) fn of_compiled<B: Batch, Be: BackendIr, O>(
        sizes: &AdapterSizes,
        step: &mut CompiledStep<B, Be, O>,
        mesh: &ProcessMesh,
    ) -> Result<Self, RankError> {
        let base = format!("{:016x}", checksum_compiled(step, mesh)?);
        let sizes = sizes.clone();
        Ok(Self { sizes, base })
    }

    /// Returns the adapters of a saved step. Returns `None` for a step of a whole model, or if the section cannot be
    /// read.
    pub(crate) fn of_step(saved: &TrainingState) -> Option<Self> {
        let section = saved.sections.get(SECTION)?;
        serde_json::from_value(section.clone()).ok()
    }

    /// Adds the description of the adapters to the state to be saved.
    pub(crate) fn save_into(&self, training: &mut TrainingState) {
        training.sections.insert(SECTION.to_owned(), json!(self));
    }

    /// Describes the adapters of a model whose frozen weights are in a file or folder. Reads all of them, one at a time.
    pub(crate) fn of_weights<A: Architecture>(
        sizes: &AdapterSizes,
        weights: &WeightsFile<A>,
    ) -> Result<Self, ModelError> {
        let mut sum = 0_u64;
        for spec in weights.config().parameters() {
            let elements = 0..spec.shape.iter().product();
            let values = weights.read(&spec.path, elements.clone())?;
            let values = sizes.as_trained_on::<A>(&spec, values);
            let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_ne_bytes).collect();
            sum = sum.wrapping_add(checksum_of(&spec.path, elements, &bytes));
        }
        let base = format!("{sum:016x}");
        let sizes = sizes.clone();
        Ok(Self { sizes, base })
    }

    /// Checks that a step's adapters belong to these frozen weights.
    pub(crate) fn check(&self, saved: &TrainingState) -> Result<(), Box<InputError>> {
        match Self::of_step(saved) {
            Some(found) if found.base != self.base => {
                let (expected, found) = (found.base, self.base.clone());
                let error = AdapterError::OtherBase { expected, found };
                Err(Box::new(error.into()))
            }
            _ => Ok(()),
        }
    }
}

/// Checks, before any rank starts, that a step has adapters of the sizes `own`, or none if `own` is `None`.
pub(crate) fn check_sizes(
    saved: &TrainingState,
    own: Option<&AdapterSizes>,
    model: &ModelConfig,
) -> Result<(), AdapterError> {
    let found = Adapters::of_step(saved).map(|adapters| adapters.sizes);
    let step = saved.step;
    match (&found, own) {
        (found, own) if found.as_ref() == own => Ok(()),
        (Some(found), Some(own)) if described(Some(found)) == described(Some(own)) => {
            let path = found.first_difference(own, model).unwrap_or_default();
            let on = |sizes: &AdapterSizes| match sizes.of(&path) {
                None => "no adapter".to_owned(),
                Some(MatrixSizes { rank, alpha }) => {
                    format!("an adapter of rank {rank} and alpha {alpha}")
                }
            };
            let (found, expected) = (on(found), on(own));
            Err(AdapterError::OtherMatrix {
                step,
                path,
                found,
                expected,
            })
        }
        (found, own) => Err(AdapterError::OtherAdapters {
            step,
            found: described(found.as_ref()),
            expected: described(own),
        }),
    }
}

fn described(sizes: Option<&AdapterSizes>) -> String {
    let Some(sizes) = sizes else {
        return "the whole model".to_owned();
    };
    let scaling = match sizes.scaling {
        Scaling::ByRank => "",
        Scaling::ByRootOfRank => " --rslora",
    };
    let method = match sizes.method {
        Method::Lora => "",
        Method::Dora => " --dora",
    };
    let base = sizes
        .base_bits()
        .map(|bits| format!(" --base-bits {}", bits.number()));
    let base = base.unwrap_or_default();
    let AdapterSizes { rank, alpha, .. } = sizes;
    format!("adapters of --lora {rank} --lora-alpha {alpha}{scaling}{method}{base}")
}

/// Returns a checksum of the frozen weights of a sharded model. It does not depend on the sharding, because each
/// element is hashed with its path and position, and the hashes are added. Collective.
fn checksum<M: Module>(model: &M, mesh: &ProcessMesh) -> Result<u64, RankError> {
    let mut sum = 0_u64;
    for tensor in local_state(model)? {
        let is_divided = matches!(tensor.part, LocalPart::Shard { .. });
        if !is_factor(&tensor.path) && is_counted_here(is_divided, mesh)? {
            let elements = tensor.elements.as_bytes();
            sum = sum.wrapping_add(checksum_of(&tensor.path, tensor.range(), elements));
        }
    }
    total(mesh.world(), sum)
}

/// Returns the same checksum for the weights of a compiled step. Each weight is either divided into flat shards, or
/// whole on each rank. Collective.
fn checksum_compiled<B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    mesh: &ProcessMesh,
) -> Result<u64, RankError> {
    let (own_mesh, rank) = (step.mesh()?, step.rank());
    let mut sum = 0_u64;
    for spec in step.parameters().to_vec() {
        let layout = step.layout(&spec.path)?;
        let is_divided = !layout.is_whole();
        if is_factor(&spec.path) || !is_counted_here(is_divided, mesh)? {
            continue;
        }
        let Region::Flat(range) = layout.region(&spec.shape, &own_mesh, rank)? else {
            unreachable!("the command divides parameters into flat shards, not by {layout:?}");
        };
        let shard = step.shard(&spec.path)?;
        sum = sum.wrapping_add(checksum_of(&spec.path, range, shard.as_bytes()));
    }
    total(mesh.world(), sum)
}

/// Returns true if the checksum includes this rank's elements: of several equal copies, only the first is included.
fn is_counted_here(is_divided: bool, mesh: &ProcessMesh) -> Result<bool, RankError> {
    let rank = mesh.world().rank();
    if !is_divided {
        return Ok(rank == 0);
    }
    let mesh = mesh.mesh();
    Ok(mesh.axis("replicate").is_err() || mesh.index_on("replicate", rank)? == 0)
}

/// Returns the checksum of the elements in a range of a tensor.
fn checksum_of(path: &str, range: Range<usize>, elements: &[u8]) -> u64 {
    let of_path = path.bytes();
    let of_path = of_path.fold(0, |hash, byte| mixed(hash ^ u64::from(byte)));
    let placed = range.zip(elements.chunks_exact(4));
    placed.fold(0, |sum: u64, (place, element)| {
        let bits = element
            .iter()
            .fold(0, |bits, byte| bits << 8 | u64::from(*byte));
        sum.wrapping_add(mixed(mixed(of_path ^ place as u64) ^ bits))
    })
}

fn total(world: &ProcessGroup, own: u64) -> Result<u64, RankError> {
    let notes = world.exchange("checksum of the weights", own.to_le_bytes().to_vec())?;
    let numbers = notes
        .iter()
        .filter_map(|note| note.as_slice().try_into().ok());
    Ok(numbers.fold(0, |sum, bytes| sum.wrapping_add(u64::from_le_bytes(bytes))))
}
