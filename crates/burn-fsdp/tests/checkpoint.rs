//! Activation checkpointing of a GPT, with the same losses and a third of the activations.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, backward, fully_shard, launch, recompute,
};
use burn_fsdp_models::{Block, Gpt, GptConfig};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const CONFIG: GptConfig = GptConfig {
    vocab: 64,
    seq: 64,
    layers: 12,
    heads: 2,
    dim: 32,
};

fn batch(rank: usize, step: usize, device: &Device) -> [Tensor<2, Int>; 2] {
    [0, 1].map(|shift| {
        let start = (shift + 7 * rank + 3 * step) as i64;
        let tokens = Tensor::<1, Int>::arange(start..start + 4 * 64, device);
        tokens.remainder_scalar(61).reshape([4, 64])
    })
}

fn loss(model: &Gpt, rank: usize, step: usize, device: &Device, checkpoints: bool) -> Tensor<1> {
    let [inputs, targets] = batch(rank, step, device);
    model.loss_with(inputs, targets, |block, x, batch| {
        if checkpoints {
            recompute(block, x, move |block: &Block, x| block.forward(x, batch))
        } else {
            block.forward(x, batch)
        }
    })
}

#[test]
fn activations_fall_to_a_third() {
    // Both ranks are in one process, so this is their total.
    let seen = launch(LaunchConfig::new(2), |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let model = CONFIG.init(&device, 3).expect("valid");
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        let mut seen = Vec::new();
        for checkpoints in [false, true] {
            for step in 0..3 {
                world.barrier("before forward")?;
                let before = HEAP.current_usage();
                world.barrier("measured before")?;
                let loss = loss(&model, world.rank(), step, &device, checkpoints);
                world.barrier("after forward")?;
                let after = HEAP.current_usage();
                world.barrier("measured after")?;
                seen.push((after - before, loss.clone().into_scalar::<f32>()));
                backward(loss, &model)?;
            }
        }
        Ok::<_, Error>(seen)
    })
    .unwrap_or_else(|error| panic!("{error}"));
    for seen in seen {
        let (whole, again) = seen.split_at(3);
        // The last value of each: pools are warm.
        let ratio = whole[2].0 as f64 / again[2].0 as f64;
        println!(
            "{} bytes of activations, {} with checkpoints: {ratio:.1}-fold",
            whole[2].0, again[2].0
        );
        assert!(ratio >= 3.0, "{ratio}");
        for ((_, whole), (_, again)) in whole.iter().zip(again) {
            assert_eq!(whole, again);
        }
    }
}

#[test]
fn regions_run_twice_and_no_more() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let device = Device::flex().autodiff();
    let model = CONFIG.init(&device, 3).expect("valid");
    let [inputs, targets] = batch(0, 0, &device);
    let loss = model.loss_with(inputs, targets, |block, x, batch| {
        recompute(block, x, move |block: &Block, x| {
            RUNS.fetch_add(1, Ordering::Relaxed);
            block.forward(x, batch)
        })
    });
    assert_eq!(RUNS.load(Ordering::Relaxed), CONFIG.layers);
    loss.backward();
    assert_eq!(RUNS.load(Ordering::Relaxed), 2 * CONFIG.layers);
}
