//! Compiled training on two ranks, and evaluation of the trained model.
//!
//! ```text
//! cargo run --release -p burn-fsdp --example compile
//! ```

mod gpt;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::compile::{Mode, compile, load_compiled};
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, fully_shard,
    launch,
};
use burn_fsdp_models::Gpt;

use crate::gpt::{RANKS, ROWS, STEPS, batches, init};

/// A batch as the loss takes it: a tuple of integer tensors.
type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

/// Runs one rank. Returns the losses of the steps, and the loss of a batch after them.
fn rank(world: &ProcessGroup) -> Result<(Vec<f64>, f32), Error> {
    // Use `build()`, which returns the optimizer for a single tensor, and not `init()`.
    let mut step = compile(
        init,
        |model: &Gpt, (inputs, targets): Tokens| model.loss(inputs, targets),
        AdamWConfig::new().build(),
        Mode::data_parallel(world.clone(), Strategy::FullShard),
    )?;
    // Batches are on a device without autodiff, because the compiler has created the gradients. Each rank has its own
    // rows, and the loss is the mean over all ranks.
    let device = Device::flex();
    let own = world.rank() * ROWS..(world.rank() + 1) * ROWS;
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let batch = batches().rows(index, own.clone()).to_tensors(&device);
        losses.push(step.step(1e-2, &batch)?);
    }
    // To evaluate, move the values into a sharded module, which is a normal Burn module.
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let model = init(&Device::flex().autodiff().gradient_checkpointing());
    let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
    let model = load_compiled(model, &mut step)?.valid();
    let (inputs, targets) = batches().rows(STEPS, own).to_tensors(&device);
    Ok((losses, model.loss(inputs, targets).into_scalar()))
}

/// Trains in the same way with plain Burn, on one rank.
fn plain() -> (Vec<f64>, f32) {
    let device = Device::flex().autodiff();
    let mut model = init(&device);
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let (inputs, targets) = batches().rows(index, 0..RANKS * ROWS).to_tensors(&device);
        let loss = model.loss(inputs, targets);
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, gradients);
    }
    let batch = batches().rows(STEPS, 0..RANKS * ROWS);
    let (inputs, targets) = batch.to_tensors(&device.without_autodiff());
    (losses, model.valid().loss(inputs, targets).into_scalar())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let results = launch(LaunchConfig::new(RANKS), |world| rank(&world))?;
    let (want, want_after) = plain();
    let (losses, _) = &results[0];
    for (step, (got, want)) in losses.iter().zip(&want).enumerate() {
        println!("step {step}: loss {got:.6}, plain Burn {want:.6}");
        assert!((got / want - 1.0).abs() < 1e-5, "the same training");
    }
    let after = results.iter().map(|(_, after)| after).sum::<f32>() / RANKS as f32;
    println!("evaluated: loss {after:.6}, plain Burn {want_after:.6}");
    assert!(
        (after / want_after - 1.0).abs() < 1e-4,
        "the same evaluation"
    );
    assert!(losses.last() < losses.first(), "training goes down");
    Ok(())
}
