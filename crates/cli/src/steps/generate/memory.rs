//! The memory that a generation needs.

use std::collections::BTreeMap;

use burn_fsdp_models::{DecodeRows, ModelConfig};

use crate::adapters::AdapterSizes;
use crate::args::{ResidenceArg, least_bytes};
use crate::enough;
use crate::error::InputError;
use crate::host;
use crate::text::bytes_moved_by_placements;
use crate::train::Ranks;

const ELEMENT: u128 = 4;

/// Where the weights of a generation are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Residence {
    /// Each process has one copy of all weights, which its ranks share.
    Whole,
    /// Each rank has a part of each matrix, which does not move.
    Placed,
    /// Each rank has its shards, and one full unit while it is used.
    Sharded,
}

/// The memory that a generation needs in this process, in bytes.
struct Needs {
    whole: u128,
    placed: u128,
    sharded: u128,
}

/// Returns the reason why weights cannot be placed, if there is one.
fn why_not_placed(model: &ModelConfig, adapters: Option<&AdapterSizes>) -> Option<&'static str> {
    if adapters.is_some() {
        return Some(
            "the model has adapters, which only `consolidate --merge` adds to the weights",
        );
    }
    let depends = model.depends_on_length(model.seq());
    depends.then_some("the rotations of its positions depend on the length of a text")
}

/// Returns true if a token of each of `batch` texts moves less with placed weights than with gathers of all weights.
fn moves_less_if_placed(model: &ModelConfig, batch: usize, ranks: usize) -> bool {
    let moved = match model {
        ModelConfig::Gpt(sizes) => bytes_moved_by_placements(sizes, batch, ranks),
        ModelConfig::Llama(sizes) => bytes_moved_by_placements(sizes, batch, ranks),
        ModelConfig::Gpt2(sizes) => bytes_moved_by_placements(sizes, batch, ranks),
    };
    moved <= ELEMENT * model.num_params() as u128
}

/// Returns where the weights are on a GPU, whose memory is not known.
pub(super) fn residence_on_gpu(
    wanted: ResidenceArg,
    (model, adapters): (&ModelConfig, Option<&AdapterSizes>),
) -> Result<Residence, InputError> {
    match (wanted, why_not_placed(model, adapters)) {
        (ResidenceArg::Auto | ResidenceArg::Whole, _) => Ok(Residence::Whole),
        (ResidenceArg::Sharded, _) => Ok(Residence::Sharded),
        (ResidenceArg::Placed, None) => Ok(Residence::Placed),
        (ResidenceArg::Placed, Some(reason)) => Err(InputError::NotPlaced { reason }),
    }
}

/// Returns where the weights are on the CPU. `lengths` are the most tokens of each prompt with its answer.
///
/// # Errors
///
/// If this process does not have the memory for the weights, and for the keys and values of `batch` of the prompts, which
/// all ranks divide.
pub(super) fn residence(
    wanted: ResidenceArg,
    (model, adapters): (&ModelConfig, Option<&AdapterSizes>),
    ranks: &Ranks,
    lengths: &[usize],
    batch: usize,
) -> Result<Residence, InputError> {
    let available = host::memory_bytes(ranks.processes_here());
    let needs = Needs::of((model, adapters), ranks, lengths, batch)?;
    let fits = |needed| available.is_none_or(|available| needed <= u128::from(available));
    let obstacle = why_not_placed(model, adapters);
    // Beyond the longest sequence, each new token shifts the others, and a step computes all of them.
    let stays_short = lengths.iter().all(|len| *len <= model.seq());
    let can_be_placed = || {
        obstacle.is_none()
            && stays_short
            && ranks.number() > 1
            && fits(needs.placed)
            && moves_less_if_placed(model, batch.min(lengths.len()), ranks.number())
    };
    let (residence, needed) = match (wanted, obstacle) {
        (ResidenceArg::Placed, Some(reason)) => return Err(InputError::NotPlaced { reason }),
        (ResidenceArg::Placed, None) => (Residence::Placed, needs.placed),
        (ResidenceArg::Whole, _) => (Residence::Whole, needs.whole),
        (ResidenceArg::Auto, _) if fits(needs.whole) => (Residence::Whole, needs.whole),
        (ResidenceArg::Auto, _) if can_be_placed() => (Residence::Placed, needs.placed),
        (ResidenceArg::Auto | ResidenceArg::Sharded, _) => (Residence::Sharded, needs.sharded),
    };
    if let Some(available) = available {
        enough::memory(model.num_params(), ranks.number(), needed, available)?;
    }
    Ok(residence)
}

impl Needs {
    fn of(
        (model, adapters): (&ModelConfig, Option<&AdapterSizes>),
        ranks: &Ranks,
        lengths: &[usize],
        batch: usize,
    ) -> Result<Self, InputError> {
        let params = model.num_params();
        let held = least_bytes(adapters.and_then(AdapterSizes::base_bits), params as u128);
        let shards = held.div_ceil(ranks.number() as u128);
        let unit = ELEMENT * largest_unit(model)? as u128;
        // The longest prompts may all be on one rank.
        let mut longest: Vec<_> = lengths.iter().map(|len| (*len).min(model.seq())).collect();
        longest.sort_unstable_by(|a, b| b.cmp(a));
        let here = batch
            .div_ceil(ranks.number())
            .saturating_mul(ranks.of_process());
        // A cache has room for a quarter more.
        let seen: usize = longest.iter().take(here).map(|len| len + len / 4).sum();
        let seen = seen as u128;
        let width = model.kv_heads() * model.head_dim();
        let of_token = 2 * ELEMENT * (model.num_layers() as u128) * (width as u128);
        let cache = of_token * seen;
        // All texts are on all ranks, each with as many columns as the longest may need. If the heads do not divide
        // among the ranks, each rank has all of them.
        let columns = longest
            .first()
            .map_or(0, |len| DecodeRows::most_columns(*len));
        let here = ranks.of_process() as u128;
        let rows = of_token.saturating_mul((batch.min(lengths.len()) * columns) as u128);
        let rows = rows.saturating_mul(here);
        let rows = if model.kv_heads().is_multiple_of(ranks.number()) {
            rows.div_ceil(ranks.number() as u128)
        } else {
            rows
        };
        let parts = shards + vectors_of(model)?;
        Ok(Self {
            whole: ELEMENT * params as u128 + unit + cache,
            placed: parts.saturating_mul(here) + rows,
            sharded: (shards + unit).saturating_mul(ranks.of_process() as u128) + cache,
        })
    }
}

/// Returns the bytes of all parameters that are not matrices, which each rank has whole.
fn vectors_of(model: &ModelConfig) -> Result<u128, InputError> {
    let table = model.parameters()?;
    let vectors = table.iter().filter(|spec| spec.shape.len() != 2);
    let elements: usize = vectors
        .map(|spec| spec.shape.iter().product::<usize>())
        .sum();
    Ok(ELEMENT * elements as u128)
}

/// Returns the number of elements of the largest unit: a block, or the parameters outside all blocks.
fn largest_unit(model: &ModelConfig) -> Result<usize, InputError> {
    let mut units: BTreeMap<String, usize> = BTreeMap::new();
    for spec in model.parameters()? {
        let block = spec.path.split('.').take(2).collect::<Vec<_>>();
        let unit = match block[..] {
            [list, index] if index.parse::<usize>().is_ok() => format!("{list}.{index}"),
            _ => String::new(),
        };
        *units.entry(unit).or_default() += spec.shape.iter().product::<usize>();
    }
    Ok(units.into_values().max().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use burn_fsdp_models::{GptConfig, LlamaConfig, RopeFactors, RopeScaling};

    use super::*;

    #[test]
    fn threads_share_one_copy_and_shards_are_divided() {
        let sizes = GptConfig {
            vocab: 50,
            seq: 8,
            layers: 3,
            dim: 16,
            heads: 2,
        };
        let model = ModelConfig::Gpt(sizes);
        let weights = ELEMENT * model.num_params() as u128;
        let unit = ELEMENT * largest_unit(&model).expect("a model") as u128;
        // Ten keys and values in each layer: 8 tokens and a quarter more.
        let cache = |prompts: u128| 2 * ELEMENT * 3 * 16 * 10 * prompts;
        for ranks in [1, 2, 4] {
            let needs =
                Needs::of((&model, None), &Ranks::Threads(ranks), &[99; 5], 4).expect("a model");
            assert_eq!(needs.whole, weights + unit + cache(4), "{ranks}");
            let shards = ranks as u128 * (weights.div_ceil(ELEMENT).div_ceil(ranks as u128));
            let sharded = ELEMENT * shards + ranks as u128 * unit + cache(4);
            assert_eq!(needs.sharded, sharded, "{ranks}");
            // All ranks have the vectors: two norms and the biases of a block, and the last norm. Four prompts have 64
            // columns of keys and values, which two ranks divide; four ranks cannot divide two heads.
            let vectors = ELEMENT * (3 * (4 + 3 + 1 + 4 + 1) + 2) * 16;
            let columns = cache(4) / 10 * 64 * if ranks == 4 { 4 } else { 1 };
            let placed = ELEMENT * shards + ranks as u128 * vectors + columns;
            assert_eq!(needs.placed, placed, "{ranks}");
        }
    }

    #[test]
    fn products_of_few_tokens_are_smaller_than_weights() {
        let gpt = |dim| {
            ModelConfig::Gpt(GptConfig {
                vocab: 100,
                seq: 64,
                layers: 2,
                dim,
                heads: 2,
            })
        };
        assert!(moves_less_if_placed(&gpt(512), 16, 2));
        assert!(moves_less_if_placed(&gpt(512), 16, 4));
        assert!(!moves_less_if_placed(&gpt(8), 64, 2));
        let llama = LlamaConfig::preset("7b").expect("a preset");
        assert!(moves_less_if_placed(&ModelConfig::Llama(llama), 64, 8));
    }

    #[test]
    fn rotations_that_depend_on_the_length_are_not_placed() {
        let mut llama = LlamaConfig::preset("7b").expect("a preset");
        assert_eq!(why_not_placed(&ModelConfig::Llama(llama), None), None);
        llama.variant.rope_scaling = RopeScaling::LongRope {
            short_factor: RopeFactors::new(&[1.0]),
            long_factor: RopeFactors::new(&[1.0]),
            attention_factor: 1.0,
            original_max_position_embeddings: llama.seq - 1,
        };
        let reason = why_not_placed(&ModelConfig::Llama(llama), None);
        assert!(reason.is_some_and(|reason| reason.contains("length of a text")));
    }

    #[test]
    fn the_largest_unit_is_a_block_or_the_root() {
        let sizes = |vocab| GptConfig {
            vocab,
            seq: 8,
            layers: 3,
            dim: 16,
            heads: 2,
        };
        // The difference between three blocks and two is one block.
        let of = |layers| ModelConfig::Gpt(GptConfig { layers, ..sizes(5) }).num_params();
        let block = of(3) - of(2);
        assert_eq!(largest_unit(&ModelConfig::Gpt(sizes(5))).ok(), Some(block));
        let wide = ModelConfig::Gpt(sizes(9_000));
        let root = wide.num_params() - 3 * block;
        assert!(root > block);
        assert_eq!(largest_unit(&wide).ok(), Some(root));
        let llama = LlamaConfig::preset("7b").expect("a preset");
        let one = ModelConfig::Llama(LlamaConfig { layers: 1, ..llama }).num_params();
        let two = ModelConfig::Llama(LlamaConfig { layers: 2, ..llama }).num_params();
        let largest = largest_unit(&ModelConfig::Llama(llama)).ok();
        assert_eq!(largest, Some((two - one).max(one - (two - one))));
    }
}
