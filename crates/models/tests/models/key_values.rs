//! Tests of generation with cached keys and values against the whole sequence at once.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_models::{
    Architecture, AttentionScores, Continuation, Gpt2Config, GptConfig, KeyValueCache,
    LanguageModel, LlamaConfig, LlamaVariant, RopeScaling, SlidingWindow,
};

pub(crate) const GPT: GptConfig = GptConfig {
    layers: 2,
    dim: 16,
    heads: 2,
    vocab: 31,
    seq: 24,
};

pub(crate) const GPT2: Gpt2Config = Gpt2Config {
    layers: 3,
    dim: 12,
    heads: 3,
    hidden: 20,
    vocab: 29,
    seq: 24,
};

/// Three query heads for each key head, a tied head, and scaled positions.
pub(crate) const LLAMA: LlamaConfig = LlamaConfig {
    layers: 3,
    dim: 24,
    heads: 6,
    kv_heads: 2,
    hidden: 20,
    vocab: 37,
    seq: 24,
    rope_base: 100,
    variant: LlamaVariant {
        has_tied_head: true,
        norm_epsilon: 1e-5,
        rope_scaling: RopeScaling::Linear { factor: 2.0 },
        ..LlamaVariant::PLAIN
    },
};

const BATCH: usize = 2;

pub(crate) fn tensor(tokens: &[Vec<i64>]) -> Tensor<2, Int> {
    let shape = [tokens.len(), tokens[0].len()];
    Tensor::from_data(TensorData::new(tokens.concat(), shape), &Device::flex())
}

/// Returns the logits after the last tokens, computed from all tokens.
fn all_at_once<M: LanguageModel>(model: &M, tokens: &[Vec<i64>]) -> Vec<f32> {
    let time = tokens[0].len();
    let logits = model.logits_by(tensor(tokens), |block, x, shared| {
        M::run_block(block, x, shared, None)
    });
    let [_, vocab] = logits.dims();
    let logits = logits.reshape([BATCH, time, vocab]);
    values(logits.narrow(1, time - 1, 1).reshape([BATCH, vocab]))
}

pub(crate) fn values(logits: Tensor<2>) -> Vec<f32> {
    logits.into_data().try_to_vec().expect("floats")
}

fn likeliest(logits: &[f32]) -> Vec<i64> {
    let rows = logits.chunks(logits.len() / BATCH);
    let best = rows.map(|row| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])));
    best.map(|best| best.expect("a token") as i64).collect()
}

/// Returns a model with larger weights, because initial weights are too small to distinguish tokens.
pub(crate) fn model<A: Architecture>(sizes: A) -> A::Model {
    struct Larger;
    impl burn::module::ModuleMapper for Larger {
        fn map_float<const D: usize>(
            &mut self,
            param: burn::module::Param<Tensor<D>>,
        ) -> burn::module::Param<Tensor<D>> {
            param.map(|weight| match D {
                1 => weight,
                _ => weight * 12.0,
            })
        }
    }
    let model = sizes.init(&Device::flex(), 7).expect("valid sizes");
    burn::module::Module::map(model, &mut Larger)
}

fn assert_equal_generation<A: Architecture>(sizes: A, bytes_of_token: usize) {
    let model = model(sizes);
    let mut tokens = vec![vec![1, 2, 3, 4, 5], vec![28, 3, 3, 0, 9]];
    let mut cache = KeyValueCache::new();
    let mut chosen = Vec::new();
    while tokens[0].len() < 24 {
        let seen = cache.num_tokens();
        // At first five tokens at once, later three, and otherwise one.
        let new: Vec<Vec<i64>> = tokens.iter().map(|row| row[seen..].to_vec()).collect();
        let got = values(model.next_logits(tensor(&new), &mut cache));
        let want = all_at_once(&model, &tokens);
        for (got, want) in got.iter().zip(&want) {
            assert!(
                (got - want).abs() <= 1e-5 * want.abs().max(1.0),
                "{got}, {want}"
            );
        }
        assert_eq!(likeliest(&got), likeliest(&want));
        assert_eq!(cache.num_tokens(), tokens[0].len());
        // The cache has room for more tokens.
        let least = bytes_of_token * tokens[0].len();
        let most = bytes_of_token * (tokens[0].len() + 16);
        assert!((least..=most).contains(&cache.num_bytes()));
        chosen.push(likeliest(&got)[0]);
        let again = if tokens[0].len() == 9 { 3 } else { 1 };
        for (row, next) in tokens.iter_mut().zip(likeliest(&got)) {
            row.extend(std::iter::repeat_n(next, again));
        }
    }
    chosen.sort_unstable();
    chosen.dedup();
    assert!(chosen.len() > 1, "tokens differ: {chosen:?}");
}

#[test]
fn a_gpt_continues_from_its_cache() {
    assert_equal_generation(GPT, 4 * BATCH * 2 * GPT.layers * GPT.dim);
}

#[test]
fn a_gpt2_continues_from_its_cache() {
    assert_equal_generation(GPT2, 4 * BATCH * 2 * GPT2.layers * GPT2.dim);
}

#[test]
fn a_llama_continues_from_its_cache() {
    // The cache has one copy of the keys for all queries that share them.
    assert_equal_generation(LLAMA, 4 * BATCH * 2 * LLAMA.layers * LLAMA.kv_dim());
}

/// Runs sequences of unequal lengths together, which start and end at different times, and compares the logits of each
/// with those of the sequence alone.
fn assert_equal_together<A: Architecture>(sizes: A) {
    let model = model(sizes);
    let mut sequences = [vec![1, 2, 3, 4, 5, 6, 7], vec![28], vec![9, 0, 3]];
    let [mut together, mut alone] = [(); 2].map(|()| vec![KeyValueCache::new(); 3]);
    for step in 0..12 {
        let running = match step {
            0 | 1 => [true, true, false],
            2..=4 => [true, true, true],
            _ => [true, false, true],
        };
        let new: Vec<Vec<i64>> = sequences
            .iter()
            .zip(&together)
            .map(|(tokens, cache)| tokens[cache.num_tokens()..].to_vec())
            .collect();
        let caches = together.iter_mut().enumerate();
        let continuations = caches.filter(|(index, _)| running[*index]);
        let continuations = continuations.map(|(index, cache)| Continuation {
            tokens: tensor(&new[index..=index]),
            cache,
        });
        let got = model.next_logits_of_each(continuations.collect());
        let [rows, vocab] = got.dims();
        assert_eq!(rows, running.iter().filter(|runs| **runs).count());
        let got = values(got);
        let indices = (0..3).filter(|index| running[*index]);
        for (index, got) in indices.zip(got.chunks(vocab)) {
            let want = values(model.next_logits(tensor(&new[index..=index]), &mut alone[index]));
            for (got, want) in got.iter().zip(&want) {
                let is_close = (got - want).abs() <= 1e-5 * want.abs().max(1.0);
                assert!(is_close, "step {step}, sequence {index}: {got}, {want}");
            }
            let likeliest = (0..vocab).max_by(|a, b| want[*a].total_cmp(&want[*b]));
            sequences[index].push(likeliest.expect("a token") as i64);
            assert_eq!(together[index].num_tokens(), alone[index].num_tokens());
            assert_eq!(together[index].num_bytes(), alone[index].num_bytes());
        }
    }
    assert_eq!(sequences.map(|tokens| tokens.len()), [19, 6, 13]);
}

/// Returns [`LLAMA`] with other positions and scores.
pub(crate) fn llama_with(rope_scaling: RopeScaling, scores: AttentionScores) -> LlamaConfig {
    LlamaConfig {
        variant: LlamaVariant {
            rope_scaling,
            scores,
            ..LLAMA.variant
        },
        ..LLAMA
    }
}

#[test]
fn sequences_of_unequal_lengths_run_together() {
    assert_equal_together(GPT);
    assert_equal_together(GPT2);
    assert_equal_together(LLAMA);
    let with = |rope_scaling, scores| LlamaConfig {
        seq: 8,
        ..llama_with(rope_scaling, scores)
    };
    let plain = LLAMA.variant.scores;
    let window = SlidingWindow::All { size: 4 };
    // The rotations of a long sequence depend on its length.
    let dynamic = RopeScaling::Dynamic { factor: 2.0 };
    assert_equal_together(with(dynamic, plain));
    assert_equal_together(with(RopeScaling::None, AttentionScores { window, ..plain }));
}
