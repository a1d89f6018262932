//! Bytes: bounds that fail if a full weight stays alive.

mod forecast;
mod growth;
mod held;
mod optimizers;
mod stepping;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::module::{Lora, Module};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig2d, RmsNorm, RmsNormConfig,
};
use burn::optim::AdamWConfig;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, InitialPart, Memory, ShardPolicy, Strategy, backward, fully_shard, fully_shard_from,
    memory, order, reset_peak, wrap_plan,
};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The allocator counts for the whole process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

const NUM_BLOCKS: usize = 12;
const DIM: usize = 192;
/// Bytes of a block's weights.
const UNIT: usize = 4 * 2 * DIM * 4 * DIM;
/// Bytes of embedding and head.
const ROOT: usize = 4 * (2 * VOCAB * DIM);
const VOCAB: usize = 64;

#[derive(Module, Debug)]
struct Net {
    embed: Embedding,
    blocks: Vec<Block>,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    norm: RmsNorm,
    up: Linear,
    down: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let block = || Block {
            norm: RmsNormConfig::new(DIM).init(device),
            up: LinearConfig::new(DIM, 4 * DIM).init(device),
            down: LinearConfig::new(4 * DIM, DIM).init(device),
        };
        Self {
            embed: EmbeddingConfig::new(VOCAB, DIM).init(device),
            blocks: (0..NUM_BLOCKS).map(|_| block()).collect(),
            head: LinearConfig::new(DIM, VOCAB).with_bias(false).init(device),
        }
    }

    fn loss(&self, shape: [usize; 2], device: &Device) -> Tensor<1> {
        let tokens = Tensor::<1, Int>::arange(0..(shape[0] * shape[1]) as i64, device);
        let tokens = tokens.remainder_scalar(VOCAB as i64).reshape(shape);
        let mut x = self.embed.forward(tokens);
        for block in &self.blocks {
            let y = gelu(block.up.forward(block.norm.forward(x.clone())));
            x = x + block.down.forward(y);
        }
        self.head.forward(x).powf_scalar(2.0).mean()
    }
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup, ProcessMesh) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    let body = move |world: ProcessGroup| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        body(world, mesh)
    };
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

fn checkpointing() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// Memory over the third step, seen from the buffers.
fn of_one_step(shape: [usize; 2], prefetch: usize, device: fn() -> Device) -> Vec<Memory> {
    on_ranks(2, move |_, mesh| {
        let device = device();
        let mut model = fully_shard(Net::new(&device), &mesh, blocks().prefetch(prefetch))?;
        let mut optim = AdamWConfig::new().init();
        for step in 0..3 {
            if step == 2 {
                reset_peak(&model)?;
            }
            let gradients = backward(model.loss(shape, &device), &model)?;
            model = optim.step(1e-3, model, gradients);
        }
        memory(&model)
    })
}

/// Shapes with which Burn takes different ways through `linear`.
const SHAPES: [[usize; 2]; 4] = [[1, 32], [2, 32], [2, 7], [1, 5]];

#[test]
fn unsharded_tensors_stay_within_twice_the_root_and_two_units() {
    let _turn = alone();
    for shape in SHAPES {
        for memory in of_one_step(shape, 0, checkpointing) {
            let peak = memory.unsharded_peak;
            assert!(peak <= 2 * ROOT + 2 * UNIT, "{peak} bytes with {shape:?}");
            assert!(peak >= UNIT, "counted at all: {peak}");
            assert_eq!(memory.unsharded_live, 0);
            assert_eq!(memory.pinned, []);
        }
    }
}

#[test]
fn prefetching_one_costs_two_units_more() {
    let _turn = alone();
    for shape in SHAPES {
        for memory in of_one_step(shape, 1, checkpointing) {
            let peak = memory.unsharded_peak;
            assert!(peak <= 2 * ROOT + 4 * UNIT, "{peak} bytes with {shape:?}");
            // Memory gathered ahead exists: a limit without effect would take no memory.
            let without = of_one_step(shape, 0, checkpointing);
            let without = without[0].unsharded_peak;
            assert!(
                peak >= without + UNIT / 2,
                "{peak} bytes with {shape:?}, {without} without prefetching"
            );
            assert_eq!(memory.pinned, []);
        }
    }
}

#[test]
fn every_step_takes_the_same_memory() {
    let _turn = alone();
    let peaks = on_ranks(2, |_, mesh| {
        let device = checkpointing();
        let mut model = fully_shard(Net::new(&device), &mesh, blocks())?;
        let mut optim = AdamWConfig::new().init();
        let mut peaks = Vec::new();
        for _ in 0..5 {
            reset_peak(&model)?;
            let gradients = backward(model.loss([1, 32], &device), &model)?;
            model = optim.step(1e-3, model, gradients);
            peaks.push(memory(&model)?.unsharded_peak);
        }
        Ok(peaks)
    });
    for peaks in peaks {
        // The first two steps record the order and find the necessary depth of tokens.
        assert!(peaks[2..].iter().all(|peak| *peak == peaks[2]), "{peaks:?}");
    }
}

#[test]
fn the_plan_predicts_the_peak() {
    let _turn = alone();
    for prefetch in 0..2 {
        let plans = on_ranks(2, move |_, mesh| {
            let model = fully_shard(
                Net::new(&checkpointing()),
                &mesh,
                blocks().prefetch(prefetch),
            )?;
            wrap_plan(&model)
        });
        let planned = plans[0].unsharded_peak();
        for memory in of_one_step([1, 32], prefetch, checkpointing) {
            let peak = memory.unsharded_peak;
            assert!(peak <= planned, "{peak} bytes, {planned} planned");
            assert!(2 * peak > planned, "{peak} bytes, {planned} planned");
        }
    }
}

/// The maximum growth of the heap over its size before the third step.
fn heap_of_one_step(policy: ShardPolicy, device: fn() -> Device) -> usize {
    let grown = on_ranks(2, move |world, mesh| {
        let device = device();
        let mut model = fully_shard(Net::new(&device), &mesh, policy.clone())?;
        let mut optim = AdamWConfig::new().init();
        let mut seen = 0;
        for _ in 0..3 {
            world.barrier("before the step")?;
            let before = HEAP.current_usage();
            HEAP.reset_peak_usage();
            world.barrier("measured")?;
            let gradients = backward(model.loss([1, 32], &device), &model)?;
            world.barrier("after backward")?;
            seen = HEAP.peak_usage().saturating_sub(before);
            world.barrier("measured")?;
            model = optim.step(1e-3, model, gradients);
        }
        Ok(seen)
    });
    grown[0]
}

#[test]
fn the_heap_grows_by_activations_and_shards_only() {
    let _turn = alone();
    // The pools' memory exists before the step and does not count as growth, so the pools' own bounds are
    // tested above. This test measures Burn's memory.
    let peak = heap_of_one_step(blocks().prefetch(0), checkpointing);
    // Both ranks: saved activations (two of the wide ones per block), weights and gradients of a unit. A set
    // of full weights on both ranks would already be more.
    let activations = 2 * NUM_BLOCKS * 2 * 32 * 4 * DIM * 4;
    // The shards' gradients, which are not part of a pool: one model for both ranks together.
    let gradients = NUM_BLOCKS * UNIT + ROOT;
    let bound = activations + 2 * (2 * ROOT + 2 * UNIT) + gradients;
    assert!(
        bound < 2 * NUM_BLOCKS * UNIT + gradients,
        "the bound can fail"
    );
    assert!(peak <= bound, "{peak} bytes, bound {bound}");
}

#[test]
fn weights_pinned_without_checkpointing_are_reported() {
    let _turn = alone();
    let plain = || Device::flex().autodiff();
    let seen = of_one_step([1, 32], 0, plain);
    let pinned = &seen[0].pinned;
    // Backward has used up the last block's weights before the engine is called.
    assert!(pinned.len() >= NUM_BLOCKS - 1, "every block: {pinned:?}");
    let text = pinned[0].to_string();
    assert!(text.contains("unit `blocks.0`"), "{text}");
    assert!(text.contains("gradient_checkpointing()"), "{text}");
}

/// Weights that are reshaped before they are used.
#[derive(Module, Debug)]
struct Reshaped {
    layers: Vec<Linear>,
}

fn reshaped(device: fn() -> Device) -> Memory {
    let seen = on_ranks(2, move |_, mesh| {
        let device = device();
        let linear = |_| LinearConfig::new(DIM, DIM).with_bias(false).init(&device);
        let net = Reshaped {
            layers: (0..6).map(linear).collect(),
        };
        let policy = ShardPolicy::new().units(["layers.*"]).prefetch(0);
        let model = fully_shard(net, &mesh, policy)?;
        for _ in 0..2 {
            reset_peak(&model)?;
            let x = Tensor::<3>::ones([1, 32, DIM], &device);
            let layers = model.layers.iter();
            let y = layers.fold(x, |x, layer| x.matmul(layer.weight.val().unsqueeze()));
            backward(y.powf_scalar(2.0).mean(), &model)?;
        }
        memory(&model)
    });
    seen[0].clone()
}

#[test]
fn weights_reshaped_before_use_are_dropped_or_reported() {
    let _turn = alone();
    let unit = 4 * DIM * DIM;
    let dropped = reshaped(checkpointing);
    assert_eq!(dropped.pinned, []);
    assert!(dropped.unsharded_peak <= 2 * unit, "{dropped:?}");
    let kept = reshaped(|| Device::flex().autodiff());
    // The first layer's input has no gradient, and backward has used up the last layer's weight before the
    // engine is called.
    assert!(kept.pinned.len() >= 4, "{kept:?}");
    let text = kept.pinned[0].to_string();
    assert!(text.contains("an operation saved a view"), "{text}");
}

#[test]
fn an_embedding_outside_the_root_is_reported_with_a_remedy() {
    let _turn = alone();
    let seen = on_ranks(2, |_, mesh| {
        let device = checkpointing();
        let policy = ShardPolicy::new().units(["embed", "blocks.*"]);
        let model = fully_shard(Net::new(&device), &mesh, policy)?;
        backward(model.loss([1, 32], &device), &model)?;
        memory(&model)
    });
    let pinned = &seen[0].pinned;
    assert_eq!(pinned.len(), 1, "{pinned:?}");
    assert_eq!(pinned[0].unit, "embed");
    assert_eq!(pinned[0].bytes, 4 * VOCAB * DIM);
    assert!(
        pinned[0]
            .to_string()
            .contains("leave embeddings to the root")
    );
}

#[test]
fn frozen_units_are_dropped() {
    let _turn = alone();
    let seen = on_ranks(2, |_, mesh| {
        let device = checkpointing();
        let mut net = Net::new(&device);
        net.blocks = net.blocks.into_iter().map(Module::freeze).collect();
        let model = fully_shard(net, &mesh, blocks().prefetch(0))?;
        backward(model.loss([1, 32], &device), &model)?;
        memory(&model)
    });
    assert!(seen[0].unsharded_peak <= 2 * ROOT + 2 * UNIT);
    assert_eq!(seen[0].pinned, []);
}

/// Adapted weights live no longer than the weights that they adapt: they are recomputed in backward.
#[test]
fn adapted_weights_are_dropped() {
    let _turn = alone();
    let policy = || blocks().prefetch(0).lora(Lora::new(4, 8.0));
    for strategy in [Strategy::FullShard, Strategy::ShardGradOp] {
        let peak = heap_of_one_step(policy().strategy(strategy), checkpointing);
        let activations = 2 * NUM_BLOCKS * 2 * 32 * 4 * DIM * 4;
        // On both ranks, for a unit and the root: weights including their adapters, and gradients of those.
        let bound = activations + 2 * (2 * ROOT + 2 * UNIT);
        assert!(bound < 2 * NUM_BLOCKS * UNIT, "the bound can fail");
        assert!(peak <= bound, "{strategy:?}: {peak} bytes, bound {bound}");
    }
}

#[derive(Module, Debug)]
struct ConvNet {
    convs: Vec<Conv2d>,
}

const CHANNELS: usize = 48;

#[test]
fn convolutions_reduce_as_backward_goes() {
    let _turn = alone();
    let seen = on_ranks(2, |_, mesh| {
        let device = checkpointing();
        let conv = |_| {
            Conv2dConfig::new([CHANNELS; 2], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(&device)
        };
        let net = ConvNet {
            convs: (0..6).map(conv).collect(),
        };
        let policy = ShardPolicy::new().units(["convs.*"]).prefetch(0);
        let model = fully_shard(net, &mesh, policy)?;
        for _ in 0..3 {
            reset_peak(&model)?;
            let x = Tensor::<4>::ones([1, CHANNELS, 4, 4], &device);
            let y = model.convs.iter().fold(x, |x, conv| gelu(conv.forward(x)));
            backward(y.powf_scalar(2.0).mean(), &model)?;
        }
        Ok((memory(&model)?, order(&model)?))
    });
    let (memory, order) = &seen[0];
    let unit = 4 * CHANNELS * CHANNELS * 9;
    assert!(
        memory.unsharded_peak <= 2 * unit,
        "{}",
        memory.unsharded_peak
    );
    assert_eq!(memory.pinned, []);
    // The first convolution does not need its weight: its input has no gradient.
    let backward: Vec<_> = order.operations.iter().skip(6).collect();
    for (unit, pair) in (1..6).rev().zip(backward.chunks(2)) {
        assert_eq!(
            pair[0],
            &format!("backward unshard convs.{unit}"),
            "{order}"
        );
        assert_eq!(pair[1], &format!("reduce convs.{unit}"), "{order}");
    }
}

/// Also if a unit has several layers.
#[test]
fn lazy_layers_are_materialized_one_at_a_time() {
    let _turn = alone();
    for a_unit in [1, 2] {
        assert_lazily_sharded(a_unit);
    }
}

#[derive(Module, Debug)]
struct Groups {
    groups: Vec<Reshaped>,
}

fn assert_lazily_sharded(a_unit: usize) {
    let grown = on_ranks(2, move |world, mesh| {
        let device = checkpointing();
        let linear = |_| LinearConfig::new(512, 1024).with_bias(false).init(&device);
        let group = |_| Reshaped {
            layers: (0..a_unit).map(linear).collect(),
        };
        let net = Groups {
            groups: (0..12 / a_unit).map(group).collect(),
        };
        world.barrier("before")?;
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        world.barrier("measured")?;
        let policy = ShardPolicy::new().units(["groups.*"]);
        let model = fully_shard(net, &mesh, policy)?;
        world.barrier("sharded")?;
        let peak = HEAP.peak_usage() - before;
        let held = memory(&model)?.parameters;
        world.barrier("measured again")?;
        Ok((peak, held))
    });
    let held: usize = grown.iter().map(|grown| grown.1).sum();
    let layer = 4 * 512 * 1024;
    assert_eq!(held, 12 * layer);
    let (peak, _) = grown[0];
    // One layer on rank 0, and the temporary memory of drawing its random numbers, and bookkeeping.
    let books = 512 << 10;
    assert!(
        peak <= held + 2 * layer + books,
        "{peak} bytes, {held} of shards, {layer} a layer, {a_unit} a unit"
    );
}

#[test]
fn each_rank_holds_only_its_part_of_the_values_read() {
    let _turn = alone();
    let grown = on_ranks(2, |world, mesh| {
        let device = checkpointing();
        let linear = |_| LinearConfig::new(512, 1024).with_bias(false).init(&device);
        let net = Reshaped {
            layers: (0..12).map(linear).collect(),
        };
        world.barrier("before")?;
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        world.barrier("measured")?;
        let policy = ShardPolicy::new().units(["layers.*"]);
        let read = |part: &InitialPart<'_>| {
            let values = part.range.clone().map(|i| i as f32);
            Ok::<_, Error>(Some(values.flat_map(f32::to_ne_bytes).collect()))
        };
        let model = fully_shard_from(net, &mesh, policy, read)?;
        world.barrier("sharded")?;
        let peak = HEAP.peak_usage() - before;
        world.barrier("measured again")?;
        Ok((peak, memory(&model)?.parameters))
    });
    let held: usize = grown.iter().map(|grown| grown.1).sum();
    let unit = 4 * 512 * 1024;
    assert_eq!(held, 12 * unit);
    let peak = grown[0].0;
    let books = 512 << 10;
    // The data that a rank reads, as its buffer grows and as it is kept.
    assert!(
        peak <= held + 2 * unit + books,
        "{peak} bytes, {held} of shards"
    );
}

#[test]
fn forwards_without_a_backward_leave_nothing() {
    let _turn = alone();
    let seen = on_ranks(2, |world, mesh| {
        let device = checkpointing();
        let model = fully_shard(Net::new(&device), &mesh, blocks())?;
        let settle = |world: &ProcessGroup| -> Result<usize, Error> {
            // Burn frees abandoned graphs at the next backward.
            backward(model.loss([1, 5], &device), &model)?;
            world.barrier("settled")?;
            let live = HEAP.current_usage();
            world.barrier("measured")?;
            Ok(live)
        };
        let abandon = || {
            for _ in 0..100 {
                drop(model.loss([1, 5], &device));
            }
        };
        // Burn's tables grow to the size of the largest graph, once.
        abandon();
        settle(&world)?;
        let before = settle(&world)?;
        abandon();
        settle(&world)?;
        let after = settle(&world)?;
        Ok((before, after, memory(&model)?.unsharded_live))
    });
    let (before, after, unsharded) = seen[0];
    assert_eq!(unsharded, 0);
    // A weight left behind by each forward would be a hundred units; tables may still grow.
    assert!(after <= before + 2 * UNIT, "{before} bytes grew to {after}");
}
