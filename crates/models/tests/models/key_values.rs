//! Tests of generation with cached keys and values against the whole sequence at once.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_models::{
    Architecture, Gpt2Config, GptConfig, KeyValueCache, LanguageModel, LlamaConfig, LlamaVariant,
    RopeScaling,
};

const GPT: GptConfig = GptConfig {
    layers: 2,
    dim: 16,
    heads: 2,
    vocab: 31,
    seq: 24,
};

const GPT2: Gpt2Config = Gpt2Config {
    layers: 3,
    dim: 12,
    heads: 3,
    hidden: 20,
    vocab: 29,
    seq: 24,
};

/// Three query heads for each key head, a tied head, and scaled positions.
const LLAMA: LlamaConfig = LlamaConfig {
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

fn tensor(tokens: &[Vec<i64>]) -> Tensor<2, Int> {
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

fn values(logits: Tensor<2>) -> Vec<f32> {
    logits.into_data().try_to_vec().expect("floats")
}

fn likeliest(logits: &[f32]) -> Vec<i64> {
    let rows = logits.chunks(logits.len() / BATCH);
    let best = rows.map(|row| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])));
    best.map(|best| best.expect("a token") as i64).collect()
}

/// Returns a model with larger weights, because initial weights are too small to distinguish tokens.
fn model<A: Architecture>(sizes: A) -> A::Model {
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
        assert_eq!(cache.num_bytes(), bytes_of_token * tokens[0].len());
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
