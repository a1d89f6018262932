//! Bytes that optimizers hold and take, compared with plain Burn.

use std::fs::{self, DirEntry};
use std::thread;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamWConfig, GradientsParams, LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, Tensor};
use burn_fsdp_shard::{ShardPolicy, backward, fully_shard, memory};

use super::{HEAP, alone, checkpointing, on_ranks};

const DIM: usize = 512;
const NUM_LAYERS: usize = 8;
/// Bytes of one layer.
const LAYER: usize = 4 * DIM * DIM;
const MODEL: usize = NUM_LAYERS * LAYER;

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

impl Stack {
    fn new(device: &Device) -> Self {
        let layer = |_| LinearConfig::new(DIM, DIM).with_bias(false).init(device);
        Self {
            layers: (0..NUM_LAYERS).map(layer).collect(),
        }
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        let x = Tensor::<2>::ones([2, DIM], device);
        let y = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        y.powf_scalar(2.0).mean()
    }
}

/// Bytes after the last step, and the maximum within its optimizer step.
#[derive(Debug, Clone, Copy)]
struct Bytes {
    at_rest: usize,
    at_most: usize,
}

/// Measurements of each side. Memory that other threads free meanwhile makes one too small, never too large, so the
/// largest counts.
const TIMES: usize = 3;

impl Bytes {
    /// The memory held over the heap `before`, or over the present heap: memory that others have freed meanwhile
    /// does not count.
    fn over(self, before: usize) -> Self {
        let rest = before.min(settled());
        Self {
            at_rest: self.at_rest.saturating_sub(rest),
            at_most: self.at_most.saturating_sub(rest),
        }
    }

    fn most(self, other: Self) -> Self {
        Self {
            at_rest: self.at_rest.max(other.at_rest),
            at_most: self.at_most.max(other.at_most),
        }
    }
}

/// Returns the bytes of the heap once the threads of earlier ranks have ended, which free their memory with a delay.
/// (Linux reports threads.)
pub(super) fn settled() -> usize {
    let is_rank = |thread: &DirEntry| {
        fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.starts_with("rank"))
    };
    let is_over = || {
        let threads = fs::read_dir("/proc/self/task").into_iter().flatten();
        !threads.flatten().any(|thread| is_rank(&thread))
    };
    let mut last = None;
    while last != Some(HEAP.current_usage()) || !is_over() {
        last = Some(HEAP.current_usage());
        thread::sleep(Duration::from_millis(50));
    }
    HEAP.current_usage()
}

fn plainly(optimizer: fn() -> ModuleOptimizer) -> Bytes {
    let device = checkpointing();
    let before = settled();
    let mut model = Stack::new(&device);
    let mut optim = optimizer();
    let mut at_most = 0;
    for _ in 0..5 {
        let gradients = GradientsParams::from_grads(model.loss(&device).backward(), &model);
        HEAP.reset_peak_usage();
        model = optim.step(1e-9, model, gradients);
        at_most = HEAP.peak_usage();
    }
    let at_rest = HEAP.current_usage();
    drop((model, optim));
    Bytes { at_rest, at_most }.over(before)
}

/// Returns the memory that the threads of two ranks keep for their kernels: buffers in which they pack the operands of
/// matrix products. It depends on the caches of the machine.
///
/// A rank has a worker in the background, which packs only if it finds a piece of a kernel. So all workers are made to
/// pack, also those of the main thread, whose memory is in no measurement then.
pub(super) fn kept_by_kernels() -> usize {
    fn pack() {
        rayon::broadcast(|_| {
            let square = Tensor::<2>::ones([128, 128], &checkpointing().inner());
            drop(square.clone().matmul(square));
        });
    }
    pack();
    let before = settled();
    let seen = on_ranks(2, move |world, _| {
        let device = checkpointing();
        let model = Stack::new(&device);
        drop(model.loss(&device).backward());
        drop(model);
        pack();
        world.barrier("all have dropped their models")?;
        let held = HEAP.current_usage();
        world.barrier("measured")?;
        Ok(held)
    });
    seen[0].saturating_sub(before.min(settled()))
}

/// The bytes of all ranks together, including their transport's memory.
fn sharded(optimizer: fn() -> ModuleOptimizer, policy: ShardPolicy) -> (Bytes, usize) {
    let before = settled();
    let seen = on_ranks(2, move |world, mesh| {
        let device = checkpointing();
        let policy = policy.clone().units(["layers.*"]);
        let mut model = fully_shard(Stack::new(&device), &mesh, policy)?;
        let mut optim = optimizer();
        let mut bytes = (0, 0);
        for _ in 0..5 {
            let gradients = backward(model.loss(&device), &model)?;
            world.barrier("backward is through")?;
            if world.rank() == 0 {
                HEAP.reset_peak_usage();
            }
            world.barrier("measuring")?;
            model = optim.step(1e-9, model, gradients);
            world.barrier("stepped")?;
            bytes = (HEAP.current_usage(), HEAP.peak_usage());
            world.barrier("measured")?;
        }
        Ok((bytes, memory(&model)?.pooled))
    });
    let (at_rest, at_most) = seen[0].0;
    let bytes = Bytes { at_rest, at_most }.over(before);
    (bytes, seen.iter().map(|seen| seen.1).sum())
}

#[test]
fn optimizers_hold_as_much_as_without_sharding() {
    let _turn = alone();
    type Case = (&'static str, fn() -> ModuleOptimizer, fn() -> ShardPolicy);
    let cut = ShardPolicy::new;
    let owned = || ShardPolicy::new().one_owner(["**"]);
    let cases: [Case; 7] = [
        ("SGD", || SgdConfig::new().init(), cut),
        (
            "momentum",
            || {
                let momentum = Some(MomentumConfig::new());
                SgdConfig::new().with_momentum(momentum).init()
            },
            cut,
        ),
        ("Lion", || LionConfig::new().init(), cut),
        ("RMSprop", || RmsPropConfig::new().init(), cut),
        ("AdamW", || AdamWConfig::new().init(), cut),
        ("AdamW by owner", || AdamWConfig::new().init(), owned),
        ("Muon by owner", || MuonConfig::new().init(), owned),
    ];
    let models = |bytes: usize| bytes as f64 / MODEL as f64;
    let kept = kept_by_kernels();
    eprintln!("kept by kernels {:.2} models", models(kept));
    for (name, optimizer, policy) in cases {
        let plain = (0..TIMES).map(|_| plainly(optimizer)).reduce(Bytes::most);
        let plain = plain.expect("it is measured");
        let all = (0..TIMES).map(|_| sharded(optimizer, policy()));
        let all = all.reduce(|(a, pool), (b, other)| (a.most(b), pool.max(other)));
        let (sharded, pooled) = all.expect("it is measured");
        eprintln!(
            "{name:9} plain at rest {:.2}, at most {:.2}; 2 ranks at rest {:.2}, at most {:.2}; \
             kept by the transport {:.2} models",
            models(plain.at_rest),
            models(plain.at_most),
            models(sharded.at_rest),
            models(sharded.at_most),
            models(pooled),
        );
        // For each rank: graphs, tables and threads.
        let books = 2 * LAYER + kept;
        let rest = plain.at_rest + pooled + books;
        assert!(
            sharded.at_rest <= rest,
            "{name}: {sharded:?}, {plain:?}, {pooled}"
        );
        // The temporaries of one parameter's step, on the other rank: a result, or the tensors that Newton
        // and Schulz iterate on.
        let temporaries = if name.starts_with("Muon") {
            4 * LAYER
        } else {
            LAYER
        };
        let most = plain.at_most + pooled + temporaries + books;
        assert!(
            sharded.at_most <= most,
            "{name}: {sharded:?}, {plain:?}, {pooled}"
        );
    }
}
