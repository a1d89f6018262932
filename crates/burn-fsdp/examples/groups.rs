//! Parameter groups: weight decay only for matrices, in Burn's usual loop.
//!
//! ```text
//! cargo run --release -p burn-fsdp --example groups
//! ```

mod gpt;

use burn::module::ParamGroup;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::Device;
use burn_fsdp::optim::check_elementwise;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, backward, fully_shard, launch,
};

use crate::gpt::{RANKS, ROWS, STEPS, batches, init};

/// Returns the optimizer. The decay is strong, so a group that is not found affects the losses.
fn optimizer() -> ModuleOptimizer {
    let without = AdamWConfig::new().with_weight_decay(0.0);
    let norms_and_biases = ParamGroup::from_any_predicates(vec!["gamma", "beta", "bias"]);
    AdamWConfig::new().with_weight_decay(3.0).init().with_group(
        norms_and_biases,
        without.build(),
        None,
    )
}

/// Trains in the same way with plain Burn, on one rank.
fn plain(mut optim: ModuleOptimizer) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model = init(&device);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (inputs, targets) = batches().rows(step, 0..RANKS * ROWS).to_tensors(&device);
        let loss = model.loss(inputs, targets);
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, gradients);
    }
    losses
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let by_rank = launch(LaunchConfig::new(RANKS), |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let mut model = fully_shard(init(&device), &mesh, policy)?;
        // Groups use the same paths as without shards.
        let mut optim = optimizer();
        check_elementwise(&model, &optim)?;
        let own = world.rank() * ROWS..(world.rank() + 1) * ROWS;
        let mut losses: Vec<f32> = Vec::new();
        for step in 0..STEPS {
            let (inputs, targets) = batches().rows(step, own.clone()).to_tensors(&device);
            let loss = model.loss(inputs, targets);
            losses.push(loss.clone().into_scalar());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok::<_, Error>(losses)
    })?;
    let want = plain(optimizer());
    for (step, want) in want.iter().enumerate() {
        let got = by_rank.iter().map(|losses| losses[step]).sum::<f32>() / RANKS as f32;
        println!("step {step}: loss {got:.6}, plain Burn {want:.6}");
        assert!((got / want - 1.0).abs() < 1e-5, "the same training");
    }
    let one_group = plain(AdamWConfig::new().with_weight_decay(3.0).init());
    assert_ne!(want, one_group, "groups make a difference");
    Ok(())
}
