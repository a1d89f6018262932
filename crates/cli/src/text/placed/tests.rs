//! Tests of placed weights against a whole model, for all families.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param};
use burn::store::ModuleSnapshot;
use burn::tensor::{Device, Tensor};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::{LaunchConfig, launch};
use burn_fsdp_models::{GptConfig, TextCodec};
use serde_json::Value;

use super::*;
use crate::choice::Choice;
use crate::text::Cached;
use crate::train::start_memory::alone;

/// The configurations of folders on the hub, with smaller sizes.
const CARDS: &str = include_str!("../../../../models/tests/models/cards/cards.json");

/// The parameters of a model, `[rows, columns]` for matrices.
type Values = BTreeMap<String, Vec<f32>>;

/// Initial matrices are too small to distinguish tokens.
struct Larger;

impl ModuleMapper for Larger {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|values| if D == 1 { values } else { values * 12.0 })
    }
}

fn values_of<M: ModuleSnapshot>(model: &M) -> Values {
    let tensors = model.collect(None, None, false).into_iter();
    let values = tensors.map(|tensor| {
        let bytes = tensor.to_bytes().expect("in memory");
        let (values, _) = bytes.as_chunks();
        let values = values.iter().copied().map(f32::from_ne_bytes);
        (tensor.name, values.collect())
    });
    values.collect()
}

/// Returns this rank's part of a parameter.
fn part_of(values: &Values, part: &ShardSpec<'_>) -> Vec<f32> {
    let all = &values[&*part.whole.path];
    match &part.region {
        Region::Flat(range) => all[range.clone()].to_vec(),
        Region::Box { offsets, sizes } => {
            let width = part.whole.shape[1];
            let rows = all.chunks(width).skip(offsets[0]).take(sizes[0]);
            let own = rows.flat_map(|row| &row[offsets[1]..offsets[1] + sizes[1]]);
            own.copied().collect()
        }
    }
}

fn sample(codec: &TextCodec, seq: usize) -> Sample<'_> {
    Sample {
        codec,
        seq,
        num_tokens: 9,
        ends: Vec::new(),
        stops: Vec::new(),
        choice: Choice::by_temperature(0.0),
        device: Device::flex(),
    }
}

/// Sequences that begin and end at different steps, the longest beyond the longest sequence of the model.
fn sequences(step: usize, vocab: usize, seq: usize) -> Vec<(usize, Vec<i64>)> {
    let of = |prompt: usize, first: usize, last: usize, len: usize| {
        let tokens = (0..len + step).map(|index| ((index * 7 + prompt * 5) % vocab) as i64);
        (first..last)
            .contains(&step)
            .then(|| (prompt, tokens.collect()))
    };
    let all = [
        of(0, 0, 5, 3),
        of(1, 0, 9, seq - 4),
        of(2, 2, 9, 1),
        of(3, 5, 8, 6),
    ];
    all.into_iter().flatten().collect()
}

/// Returns the bytes that a rank gives to the collectives of the last step.
fn bytes_of_collectives(decoder: &PlacedDecoder<'_, Flex>) -> u128 {
    let graph = decoder.forward.graph().expect("a graph");
    let given = graph.collectives().flat_map(|(index, _)| {
        let inputs = graph.nodes()[index].operation.inputs();
        inputs.map(|input| input.shape.num_elements() * input.dtype.size())
    });
    given.sum::<usize>() as u128
}

fn placed<'a, A: Architecture>(
    of: (A, &ModelConfig),
    sample: &'a Sample<'a>,
    batch: usize,
    world: &ProcessGroup,
    read: impl FnMut(&ShardSpec<'_>) -> Result<Vec<f32>, RankError>,
) -> Result<PlacedDecoder<'a, Flex>, RankError> {
    PlacedDecoder::new(of, sample, batch, world, Default::default(), read)
}

fn assert_equal_logits<A: Architecture>(name: &str, sizes: A, model: ModelConfig, ranks: usize) {
    let plain = sizes
        .init(&Device::flex(), 7)
        .expect("valid sizes")
        .map(&mut Larger);
    let values = Arc::new(values_of(&plain));
    let all = launch(LaunchConfig::new(ranks), move |world| {
        let codec = TextCodec::Bytes;
        let sample = sample(&codec, model.seq());
        let mut decoder = placed((sizes, &model), &sample, 3, &world, |part| {
            Ok(part_of(&values, part))
        })?;
        let mut all = Vec::new();
        for step in 0..9 {
            let sequences = sequences(step, model.vocab(), model.seq());
            let given = sequences.iter().map(|(prompt, tokens)| Sequence {
                prompt: *prompt,
                tokens,
            });
            all.push(decoder.next_logits(&given.collect::<Vec<_>>())?);
        }
        Ok::<_, RankError>(all)
    });
    let all = all.unwrap_or_else(|error| panic!("{name}: {error}"));
    let codec = TextCodec::Bytes;
    let sample = sample(&codec, model.seq());
    let mut whole = Cached::new(&plain, &sample);
    for step in 0..9 {
        let sequences = sequences(step, model.vocab(), model.seq());
        let given = sequences.iter().map(|(prompt, tokens)| Sequence {
            prompt: *prompt,
            tokens,
        });
        let expected = whole
            .next_logits(&given.collect::<Vec<_>>())
            .expect("logits");
        for (rank, logits) in all.iter().enumerate() {
            assert_eq!(logits[step], all[0][step], "{name}: rank {rank} differs");
        }
        let lens = |rows: &[Vec<f32>]| rows.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lens(&all[0][step]), lens(&expected), "{name}");
        for (got, expected) in all[0][step].iter().flatten().zip(expected.iter().flatten()) {
            let is_close = (got - expected).abs() <= 1e-4 * expected.abs().max(1.0);
            assert!(
                is_close,
                "{name}, {ranks} ranks, step {step}: {got}, {expected}"
            );
        }
    }
}

#[test]
fn placed_weights_have_the_logits_of_whole_ones_in_all_families() {
    let _turn = alone();
    let cards: Vec<Value> = serde_json::from_str(CARDS).expect("JSON");
    let mut seen = Vec::new();
    for card in cards
        .iter()
        .filter(|card| card["layout"]["refused"].is_null())
    {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(
            folder.path().join("config.json"),
            card["config"].to_string(),
        )
        .expect("a file");
        let model = ModelConfig::from_hugging_face(folder.path()).expect("a known model");
        if seen.contains(&model) || model.depends_on_length(model.seq()) {
            continue;
        }
        seen.push(model);
        let (name, ranks) = (card["name"].as_str().expect("a name"), 2 + seen.len() % 2);
        match model {
            ModelConfig::Gpt(sizes) => assert_equal_logits(name, sizes, model, ranks),
            ModelConfig::Llama(sizes) => assert_equal_logits(name, sizes, model, ranks),
            ModelConfig::Gpt2(sizes) => assert_equal_logits(name, sizes, model, ranks),
        }
    }
    assert!(seen.len() > 30, "{}", seen.len());
}

#[test]
fn placed_weights_do_not_move() {
    let sizes = GptConfig {
        layers: 2,
        dim: 64,
        heads: 4,
        vocab: 100,
        seq: 40,
    };
    let _turn = alone();
    let (model, batch) = (ModelConfig::Gpt(sizes), 2);
    for ranks in 1..=4 {
        let all = launch(LaunchConfig::new(ranks), move |world| {
            let codec = TextCodec::Bytes;
            let sample = sample(&codec, model.seq());
            let read = |part: &ShardSpec<'_>| Ok(vec![0.1; part.shape.iter().product()]);
            let mut decoder = placed((sizes, &model), &sample, batch, &world, read)?;
            let tokens = [1, 2, 3, 4];
            for len in 3..5 {
                let given = [0, 1].map(|prompt| Sequence {
                    prompt,
                    tokens: &tokens[..len],
                });
                decoder.next_logits(&given)?;
            }
            // The keys and values of a new token are whole on all ranks.
            Ok::<_, RankError>((bytes_of_collectives(&decoder), decoder.num_bytes()))
        });
        let all = all.expect("it runs");
        // Keys and values of 64 columns, each rank those of its heads.
        let columns = 2 * 4 * 64 * sizes.layers * sizes.dim * batch;
        let [shared, whole] = [columns / ranks, columns];
        let expected = if sizes.heads.is_multiple_of(ranks) {
            shared
        } else {
            whole
        };
        assert!(all.iter().all(|(_, bytes)| *bytes == expected), "{all:?}");
        let given = all[0].0;
        // The keys and values of the new tokens are also gathered.
        let new = (2 * 4 * sizes.layers * sizes.dim * batch) as u128;
        let most = bytes_moved_by_placements(&sizes, batch, ranks) + new;
        assert_eq!(given == 0, ranks == 1, "{given}");
        assert!(given <= most, "{ranks}: {given}, {most}");
        assert!(10 * given < 4 * sizes.num_params() as u128, "{given}");
    }
}
