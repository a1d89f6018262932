//! Low-rank adapters on frozen weights. Saved steps contain only the adapters and a checksum of the base weights.

use std::ops::Range;

use burn::module::{Lora, Module, ParamGroup};
use burn_fsdp::compile::{Batch, CompiledStep};
use burn_fsdp::internals::checkpoint::TrainingState;
use burn_fsdp::internals::compile::BackendIr;
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::state::{LocalPart, local_state};
use burn_fsdp::{ProcessGroup, ProcessMesh};
use burn_fsdp_models::{Architecture, ModelError, WeightsFile};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::{InputError, RankError};
use crate::random::mixed;

/// Name of the adapters' section in a saved step.
const SECTION: &str = "adapters";

/// The rank and alpha of adapters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdapterSizes {
    /// Rank: the dimension between the two factors of an adapter.
    pub(crate) rank: usize,
    /// LoRA alpha: the product of the factors is scaled by alpha / rank.
    pub(crate) alpha: f64,
}

/// The adapters of a step, and a checksum of the frozen weights that they belong to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Adapters {
    #[serde(flatten)]
    pub(crate) sizes: AdapterSizes,
    /// Checksum of the frozen weights, in hexadecimal digits.
    base: String,
}

impl AdapterSizes {
    /// Returns true if the rank is from 1 to `dim`, the model's width, and alpha is positive and finite.
    pub(crate) fn is_valid(&self, dim: usize) -> bool {
        let has_alpha = self.alpha.is_finite() && self.alpha > 0.0;
        has_alpha && (1..=dim).contains(&self.rank)
    }

    /// Returns Burn's LoRA configuration for the matrices of the blocks.
    pub(crate) fn lora<A: Architecture>(&self, model: A) -> Lora {
        let adapted = ParamGroup::from_paths(adapted(model).map(|(path, _)| path).collect());
        Lora::new(self.rank, self.alpha).set_param_group(adapted)
    }

    /// Returns the number of elements of all factors.
    pub(crate) fn num_params<A: Architecture>(&self, model: A) -> usize {
        let elements = adapted(model).map(|(_, sides)| self.rank * sides);
        elements.sum()
    }
}

/// Returns the path of each adapted matrix, with the sum of its two dims.
fn adapted<A: Architecture>(model: A) -> impl Iterator<Item = (String, usize)> {
    let blocks = A::BLOCKS.trim_end_matches('*');
    let table = model.parameters().into_iter();
    let matrices = table.filter(move |spec| spec.path.starts_with(blocks) && spec.shape.len() == 2);
    matrices.map(|spec| (spec.path, spec.shape.iter().sum()))
}

/// Returns true for the path of an adapter's factor.
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
        sizes: AdapterSizes,
        model: &M,
        mesh: &ProcessMesh,
    ) -> Result<Self, RankError> {
        let base = format!("{:016x}", checksum(model, mesh)?);
        Ok(Self { sizes, base })
    }

    /// Describes the adapters of a compiled step whose frozen weights are loaded. Collective.
    pub(crate) fn of_compiled<B: Batch, Be: BackendIr, O>(
        sizes: AdapterSizes,
        step: &mut CompiledStep<B, Be, O>,
        mesh: &ProcessMesh,
    ) -> Result<Self, RankError> {
        let base = format!("{:016x}", checksum_compiled(step, mesh)?);
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
        sizes: AdapterSizes,
        weights: &WeightsFile<A>,
    ) -> Result<Self, ModelError> {
        let mut sum = 0_u64;
        for spec in weights.config().parameters() {
            let elements = 0..spec.shape.iter().product();
            let values = weights.read(&spec.path, elements.clone())?;
            let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_ne_bytes).collect();
            sum = sum.wrapping_add(checksum_of(&spec.path, elements, &bytes));
        }
        let base = format!("{sum:016x}");
        Ok(Self { sizes, base })
    }

    /// Checks that a step's adapters belong to these frozen weights.
    pub(crate) fn check(&self, saved: &TrainingState) -> Result<(), Box<InputError>> {
        match Self::of_step(saved) {
            Some(found) if found.base != self.base => Err(Box::new(InputError::OtherBase {
                expected: found.base,
                found: self.base.clone(),
            })),
            _ => Ok(()),
        }
    }
}

/// Checks, before any rank starts, that a step has adapters of the sizes `own`, or none if `own` is `None`.
pub(crate) fn check_sizes(
    saved: &TrainingState,
    own: Option<AdapterSizes>,
) -> Result<(), InputError> {
    let found = Adapters::of_step(saved).map(|adapters| adapters.sizes);
    if found == own {
        Ok(())
    } else {
        Err(InputError::OtherAdapters {
            step: saved.step,
            found: described(found),
            expected: described(own),
        })
    }
}

fn described(sizes: Option<AdapterSizes>) -> String {
    match sizes {
        None => "the whole model".to_owned(),
        Some(AdapterSizes { rank, alpha }) => {
            format!("adapters of --lora {rank} --lora-alpha {alpha}")
        }
    }
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
