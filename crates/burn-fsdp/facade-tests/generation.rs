//! Generation from a sharded model with a cache of keys and values, where one unit is whole at a time.

use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp::inspect::memory;
use burn_fsdp::internals::collectives::OperationKind;
use burn_fsdp::internals::inspect::reset_peak;
use burn_fsdp::{Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, fully_shard, launch};
use burn_fsdp_models::{
    Architecture, Gpt2Config, GptConfig, KeyValueCache, LanguageModel, LlamaConfig, LlamaVariant,
};

const GPT: GptConfig = GptConfig {
    layers: 3,
    dim: 20,
    heads: 2,
    vocab: 37,
    seq: 20,
};

const GPT2: Gpt2Config = Gpt2Config {
    layers: 3,
    dim: 20,
    heads: 2,
    hidden: 28,
    vocab: 37,
    seq: 20,
};

const LLAMA: LlamaConfig = LlamaConfig {
    layers: 3,
    dim: 20,
    heads: 2,
    kv_heads: 1,
    hidden: 36,
    vocab: 37,
    seq: 20,
    rope_base: 10_000,
    variant: LlamaVariant::PLAIN,
};

const PROMPT: [i64; 3] = [1, 5, 30];
const NEW: usize = 12;

/// A mapper that multiplies matrices, because with initial weights all tokens are about equally likely.
struct Larger;

impl ModuleMapper for Larger {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let factor = if D == 1 { 1.0 } else { 10.0 };
        param.map(|weight| weight * factor)
    }
}

fn input(tokens: &[i64]) -> Tensor<2, Int> {
    let data = TensorData::new(tokens.to_vec(), [1, tokens.len()]);
    Tensor::from_data(data, &Device::flex())
}

fn likeliest(logits: Tensor<2>) -> i64 {
    logits.argmax(1).into_scalar::<i64>()
}

/// The most likely tokens of a whole model, each computed from all tokens before it.
fn plainly<A: Architecture>(sizes: A) -> Vec<i64> {
    let model = sizes.init(&Device::flex(), 11).expect("valid sizes");
    let model = model.map(&mut Larger);
    let mut tokens = PROMPT.to_vec();
    for _ in 0..NEW {
        let run = |block: &_, x, shared: &_| A::Model::run_block(block, x, shared, None);
        let logits = model.logits_by(input(&tokens), run);
        let last = logits.narrow(0, tokens.len() - 1, 1);
        tokens.push(likeliest(last));
    }
    tokens
}

/// The same with shards, with the peak bytes of full parameters, and the gathers of each token.
fn sharded<A: Architecture>(sizes: A, ranks: usize) -> Vec<(Vec<i64>, usize, Vec<u64>)> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    let seen = launch(config, move |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let model = sizes.init(&device, 11).expect("valid sizes");
        let policy = ShardPolicy::new().units([A::BLOCKS]).reshard_root(true);
        let model = fully_shard(model.map(&mut Larger), &mesh, policy.prefetch(0))?;
        let plain = model.valid();
        reset_peak(&model)?;
        let (mut tokens, mut cache) = (PROMPT.to_vec(), KeyValueCache::new());
        let mut gathers = Vec::new();
        for _ in 0..NEW {
            let before = world.counts();
            let new = input(&tokens[cache.num_tokens()..]);
            tokens.push(likeliest(plain.next_logits(new, &mut cache)));
            let counts = world.counts().since(&before);
            gathers.push(counts.of(OperationKind::AllGather).operations);
        }
        Ok::<_, Error>((tokens, memory(&model)?.unsharded_peak, gathers))
    });
    seen.unwrap_or_else(|error| panic!("{error}"))
}

/// `root` and `block` are the elements of the matrices of each.
fn assert_generation<A: Architecture>(sizes: A, [root, block]: [usize; 2], layers: u64) {
    let want = plainly(sizes);
    let mut distinct = want.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 4, "tokens differ: {want:?}");
    for ranks in 1..=4 {
        for (tokens, peak, gathers) in sharded(sizes, ranks) {
            assert_eq!(tokens, want, "{ranks} ranks");
            // A single rank gathers nothing: its shards are the weights.
            let largest = if ranks == 1 { 0 } else { 4 * root.max(block) };
            assert_eq!(peak, largest, "{ranks} ranks");
            // Each block is gathered once, and the root at both ends; from the end of one token to the beginning of the
            // next it is the same use.
            assert_eq!(gathers[0], layers + 2, "{ranks} ranks");
            let later = &gathers[1..];
            assert!(later.iter().all(|count| *count == layers + 1), "{later:?}");
        }
    }
}

#[test]
fn a_gpt_generates_one_unit_at_a_time() {
    let root = GPT.dim * (2 * GPT.vocab + GPT.seq);
    assert_generation(GPT, [root, 12 * GPT.dim * GPT.dim], 3);
}

#[test]
fn a_gpt2_generates_one_unit_at_a_time() {
    let root = GPT2.dim * (GPT2.vocab + GPT2.seq);
    let block = GPT2.dim * (4 * GPT2.dim + 2 * GPT2.hidden);
    assert_generation(GPT2, [root, block], 3);
}

#[test]
fn a_llama_generates_one_unit_at_a_time() {
    let root = 2 * LLAMA.dim * LLAMA.vocab;
    let block = LLAMA.dim * (2 * LLAMA.dim + 2 * LLAMA.kv_dim() + 3 * LLAMA.hidden);
    assert_generation(LLAMA, [root, block], 3);
}
