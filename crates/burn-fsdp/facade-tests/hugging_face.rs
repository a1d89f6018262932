//! Checkpoints in Hugging Face's format; each rank reads its shards.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Device, Int, Tensor, TensorData};
use burn_fsdp::compile::{Mode, compile};
use burn_fsdp::inspect::{memory, num_params};
use burn_fsdp::internals::inspect::reset_peak;
use burn_fsdp::internals::optim::params_with_gradient;
use burn_fsdp::sharding::Cut;
use burn_fsdp::state::into_record;
use burn_fsdp::state::load_local_state;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward,
    fully_shard, launch, resume, save,
};
use burn_fsdp_models::{
    Architecture, Gpt2, Gpt2Config, Llama, LlamaConfig, LlamaVariant, WeightsFile,
};

const CONFIG: LlamaConfig = LlamaConfig {
    layers: 3,
    dim: 20,
    heads: 2,
    kv_heads: 1,
    hidden: 36,
    vocab: 29,
    seq: 8,
    rope_base: 10_000,
    variant: LlamaVariant::PLAIN,
};

fn logits(model: &Llama) -> Vec<f32> {
    let tokens = Tensor::<2, Int>::from_data([[1, 5, 10, 3], [0, 2, 28, 9]], &Device::flex());
    let logits = model.forward(tokens).into_data();
    logits.try_to_vec().expect("floats")
}

/// The model with its shards read from files, and with unchanged factors of its adapters.
fn with_shards_of(model: Llama, weights: &WeightsFile<LlamaConfig>) -> Result<Llama, Error> {
    load_local_state(model, |tensor| {
        if tensor.path.contains(".lora.") {
            return Ok(None);
        }
        let values = weights.read(&tensor.path, tensor.range());
        let values = values.expect("readable").into_iter();
        Ok(Some(values.flat_map(f32::to_ne_bytes).collect()))
    })
}

/// The model of these ranks, whole again after each rank has read its shards, and the bytes that each has
/// read.
fn loaded(
    folder: &std::path::Path,
    ranks: usize,
    policy: ShardPolicy,
) -> Vec<(Vec<f32>, u64, usize)> {
    let folder = Arc::new(folder.to_owned());
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(30));
    let seen = launch(config, move |world| {
        let weights = WeightsFile::open(folder.as_path(), CONFIG).expect("it fits the model");
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let model = CONFIG.blank(&device).expect("valid sizes");
        let model = fully_shard(model, &mesh, policy.clone())?;
        reset_peak(&model)?;
        let model = with_shards_of(model, &weights)?;
        let unsharded = memory(&model)?.unsharded_peak;
        let record = into_record(model)?;
        let whole = CONFIG.blank(&Device::flex()).expect("valid sizes");
        let whole = whole.load_record(record);
        Ok::<_, Error>((logits(&whole), weights.num_bytes_read(), unsharded))
    });
    seen.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn each_rank_reads_only_its_shards() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = CONFIG.init(&Device::flex(), 5).expect("valid sizes");
    model
        .save(folder.path().join("model.safetensors"))
        .expect("a writable folder");
    let expected = logits(&model);
    let all_bytes = 4 * CONFIG.num_params() as u64;
    // Vectors are whole on every rank, and rows at the ends of a range may be read twice.
    let twice = 4 * 2 * (CONFIG.layers as u64 * (4 * 20 + 3 * 36) + 29 + 20 * 7);
    let layers = || ShardPolicy::new().units(["layers.*"]);
    for ranks in 1..=4 {
        for policy in [
            layers(),
            layers().cut(Cut::Dims),
            layers().one_owner(["**"]),
            layers().strategy(Strategy::ShardGradOp),
        ] {
            let seen = loaded(folder.path(), ranks, policy);
            for (logits, read, unsharded) in &seen {
                assert_eq!(logits, &expected, "{ranks} ranks");
                assert_eq!(*unsharded, 0);
                assert!(
                    *read < all_bytes * 2 / ranks as u64 + twice,
                    "{read} of {all_bytes}"
                );
            }
            let read: u64 = seen.iter().map(|(_, read, _)| read).sum();
            assert!(
                read >= all_bytes && read <= all_bytes + ranks as u64 * twice,
                "{read} of {all_bytes}"
            );
        }
    }
}

fn adapters() -> Lora {
    Lora::new(4, 8.0).set_param_group(ParamGroup::from_predicate("layers"))
}

fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().with_epsilon(1e-2).init()
}

const ROWS: usize = 12;
const STEPS: usize = 6;

/// The loss of some rows of a step's batch.
fn loss(model: &Llama, rows: Range<usize>, step: usize, device: &Device) -> Tensor<1> {
    let (tokens, targets) = batch(rows, step, device);
    model.loss(tokens, targets)
}

/// Some rows of a step's batch.
fn batch(rows: Range<usize>, step: usize, device: &Device) -> Tokens {
    let tokens = |shift: usize| {
        let tokens = 4 * rows.start..4 * rows.end;
        let tokens = tokens.map(|i| ((i * 5 + shift + 7 * step) % 29) as i64);
        let tokens = TensorData::new(tokens.collect::<Vec<_>>(), [rows.len(), 4]);
        Tensor::from_data(tokens, device)
    };
    (tokens(0), tokens(5))
}

/// Losses of plain Burn, and the adapters with which it began.
fn plainly(weights: &WeightsFile<LlamaConfig>) -> (Vec<f32>, Vec<u8>) {
    let device = Device::flex().autodiff();
    let mut model = weights
        .load(&device)
        .expect("a model")
        .apply_lora(adapters());
    let begun = model
        .clone()
        .into_record_group(ParamGroup::from_predicate("lora"));
    let begun = begun.into_bytes().expect("bytes").to_vec();
    let mut optimizer = optimizer();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = loss(&model, 0..ROWS, step, &device);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    (losses, begun)
}

/// Losses of `steps` on sharded weights that are read from files or, in later steps, from a checkpoint.
fn sharded(
    folder: &Path,
    saved: &Path,
    begun: &[u8],
    ranks: usize,
    steps: Range<usize>,
) -> Vec<f32> {
    let (folder, saved, begun) = (folder.to_owned(), saved.to_owned(), begun.to_vec());
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(30));
    let body = move |world: ProcessGroup| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let policy = ShardPolicy::new().units(["layers.*"]).lora(adapters());
        let blank = CONFIG.blank(&device).expect("valid sizes");
        let model = fully_shard(blank, &mesh, policy)?;
        let (mut model, mut optimizer) = match steps.start {
            0 => {
                let weights = WeightsFile::open(&folder, CONFIG).expect("it fits the model");
                let begun = Bytes::from_bytes_vec(begun.clone());
                let begun = ModuleRecord::from_bytes(begun).expect("a record");
                let model = with_shards_of(model, &weights)?;
                (model.load_record(begun.allow_partial(true)), optimizer())
            }
            step => {
                let resumed = resume(&saved, model, optimizer(), &mesh)?;
                assert_eq!(resumed.step, step as u64);
                (resumed.model, resumed.optimizer)
            }
        };
        let mut losses = Vec::new();
        for step in steps.clone() {
            let loss = loss(&model, own_rows(&world), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            let trained = params_with_gradient(&model, &gradients);
            assert_eq!(trained.len(), 2 * 7 * CONFIG.layers);
            model = optimizer.step(1e-2, model, gradients);
        }
        save(&saved, steps.end as u64, &model, &optimizer, &mesh)?;
        Ok::<_, Error>((losses, memory(&model)?.parameters))
    };
    let seen = launch(config, body).unwrap_or_else(|error| panic!("{error}"));
    let vectors = 4 * (2 * CONFIG.layers + 1) * CONFIG.dim;
    let factors: usize = [
        (20, 20),
        (20, 10),
        (20, 10),
        (20, 20),
        (20, 36),
        (20, 36),
        (36, 20),
    ]
    .map(|(rows, columns)| 4 * 4 * CONFIG.layers * (rows + columns))
    .iter()
    .sum();
    let matrices = 4 * CONFIG.num_params() - vectors;
    for (_, held) in &seen {
        // A shard of each of 23 matrices and 42 factors may be one element longer.
        let share = (matrices + factors).div_ceil(ranks) + vectors;
        assert!(held.abs_diff(share) <= 4 * (23 + 42), "{held}, {share}");
    }
    let mean = |step| seen.iter().map(|(losses, _)| losses[step]).sum::<f32>() / ranks as f32;
    (0..seen[0].0.len()).map(mean).collect()
}

/// A frozen Llama whose shards are read from files, with adapters, saved in the middle of a training and resumed on a
/// different number of ranks.
#[test]
fn adapters_of_a_frozen_llama_match_unsharded_training() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = CONFIG.init(&Device::flex(), 5).expect("valid sizes");
    let file = folder.path().join("model.safetensors");
    model.save(file).expect("a writable folder");
    let weights = WeightsFile::open(folder.path(), CONFIG).expect("it fits the model");
    let (want, begun) = plainly(&weights);
    assert!(want[STEPS - 1] < want[0]);
    for ranks in 1..=4 {
        let saved = tempfile::tempdir().expect("a folder");
        let run = |ranks, steps| sharded(folder.path(), saved.path(), &begun, ranks, steps);
        let mut got = run(ranks, 0..3);
        got.extend(run(ranks % 4 + 1, 3..STEPS));
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            let difference = (got - want).abs();
            assert!(difference <= 1e-5 * want, "{ranks} ranks: {got}, {want}");
        }
    }
}

const TIED: LlamaConfig = LlamaConfig {
    variant: LlamaVariant {
        has_tied_head: true,
        ..LlamaVariant::PLAIN
    },
    ..CONFIG
};

const GPT2: Gpt2Config = Gpt2Config {
    layers: 3,
    dim: 20,
    heads: 2,
    hidden: 36,
    vocab: 29,
    seq: 8,
};

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

/// A model whose head is the table of its embedding.
struct Tied<M> {
    init: fn(&Device) -> M,
    loss: fn(&M, Tokens) -> Tensor<1>,
    num_params: usize,
}

impl<M> Clone for Tied<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Tied<M> {}

/// The rows of a rank.
fn own_rows(world: &ProcessGroup) -> Range<usize> {
    let rows = ROWS / world.size();
    world.rank() * rows..(world.rank() + 1) * rows
}

/// Losses and parameters of plain Burn.
fn tied_plainly<M: Module>(case: Tied<M>) -> (Vec<f32>, Vec<Vec<f32>>) {
    let device = Device::flex().autodiff();
    let mut model = (case.init)(&device);
    let mut whole = optimizer();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = (case.loss)(&model, batch(0..ROWS, step, &device));
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = whole.step(1e-2, model, gradients);
    }
    (losses, values(&model))
}

/// The parameters of a plain module, in its order.
fn values<M: Module>(model: &M) -> Vec<Vec<f32>> {
    #[derive(Default)]
    struct Values(Vec<Vec<f32>>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().into_data().try_to_vec();
            self.0.push(values.expect("floats"));
        }
    }
    let mut found = Values::default();
    model.visit(&mut found);
    found.0
}

/// Losses of some steps by the eager engine, which begins with the saved state and saves its final state.
fn tied_eagerly<M: Module + 'static>(
    case: Tied<M>,
    (ranks, policy): (usize, ShardPolicy),
    saved: &Path,
    steps: Range<usize>,
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let saved = saved.to_owned();
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    let seen = launch(config, move |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let model = fully_shard((case.init)(&device), &mesh, policy.clone())?;
        assert_eq!(num_params(&model), case.num_params);
        let resumed = resume(&saved, model, optimizer(), &mesh)?;
        assert_eq!(resumed.step, steps.start as u64);
        let (mut model, mut optimizer) = (resumed.model, resumed.optimizer);
        let mut losses = Vec::new();
        for step in steps.clone() {
            let loss = (case.loss)(&model, batch(own_rows(&world), step, &device));
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optimizer.step(1e-2, model, gradients);
        }
        save(&saved, steps.end as u64, &model, &optimizer, &mesh)?;
        let whole = (case.init)(&Device::flex()).load_record(into_record(model)?);
        Ok::<_, Error>((losses, values(&whole)))
    });
    let seen = seen.unwrap_or_else(|error| panic!("{error}"));
    let mean = |step: usize| seen.iter().map(|(losses, _)| losses[step]).sum::<f32>();
    let losses = (0..seen[0].0.len()).map(|step| mean(step) / ranks as f32);
    (losses.collect(), seen[0].1.clone())
}

/// Losses by a compiled step.
fn tied_compiled<M: Module + 'static>(case: Tied<M>, ranks: usize) -> Vec<f32> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    let seen = launch(config, move |world| {
        let mut step = compile(
            case.init,
            move |model: &M, tokens: Tokens| (case.loss)(model, tokens),
            AdamWConfig::new().with_epsilon(1e-2).build(),
            Mode::data_parallel(world.clone(), Strategy::FullShard),
        )?;
        let losses = (0..STEPS).map(|index| {
            let batch = batch(own_rows(&world), index, &Device::flex());
            Ok::<_, Error>(step.step(1e-2, &batch)? as f32)
        });
        losses.collect::<Result<Vec<_>, _>>()
    });
    seen.unwrap_or_else(|error| panic!("{error}"))
        .swap_remove(0)
}

/// The table of a tied embedding is used at both ends of a forward. It is one parameter, with one gradient, saved once.
fn assert_tied<M: Module + 'static>(case: Tied<M>, units: &str) {
    let (want, end) = tied_plainly(case);
    assert!(want[STEPS - 1] < want[0]);
    let close = |got: &[f32], ranks: usize| {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!(
                (got - want).abs() <= 1e-5 * want,
                "{ranks} ranks: {got}, {want}"
            );
        }
    };
    let policy = || ShardPolicy::new().units([units]);
    for ranks in 1..=4 {
        for policy in [
            policy(),
            policy().reshard_root(true).prefetch(2),
            policy().strategy(Strategy::ShardGradOp),
            policy().strategy(Strategy::NoShard),
        ] {
            let saved = tempfile::tempdir().expect("a folder");
            let run =
                |ranks, steps| tied_eagerly(case, (ranks, policy.clone()), saved.path(), steps);
            let (mut losses, _) = run(ranks, 0..3);
            let (later, got) = run(ranks % 4 + 1, 3..STEPS);
            losses.extend(later);
            close(&losses, ranks);
            for (got, want) in got.iter().flatten().zip(end.iter().flatten()) {
                assert!((got - want).abs() <= 1e-5, "{ranks} ranks: {got}, {want}");
            }
        }
        close(&tied_compiled(case, ranks), ranks);
    }
}

#[test]
fn a_tied_llama_matches_unsharded_training() {
    let case = Tied {
        init: |device| TIED.init(device, 9).expect("valid sizes"),
        loss: |model: &Llama, (tokens, targets)| model.loss(tokens, targets),
        num_params: TIED.num_params(),
    };
    assert_tied(case, "layers.*");
}

#[test]
fn a_gpt2_matches_unsharded_training() {
    let case = Tied {
        init: |device| GPT2.init(device, 9).expect("valid sizes"),
        loss: |model: &Gpt2, (tokens, targets)| model.loss(tokens, targets),
        num_params: GPT2.num_params(),
    };
    assert_tied(case, "h.*");
}
