//! Saving and resuming: a training run stops, and continues with a different number of ranks.
//!
//! ```text
//! cargo run --release -p burn-fsdp --example checkpoint
//! ```

use std::path::{Path, PathBuf};

use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, backward, fully_shard,
    launch, resume, save,
};
use burn_fsdp_models::{Batches, GptConfig, TokenStream};

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    dim: 32,
    heads: 2,
    vocab: 64,
    seq: 16,
};

/// Rows in a step, over all ranks.
const BATCH: usize = 6;

/// Runs one rank: resumes from the folder, trains up to `until` steps, and saves them. Returns the losses.
fn rank(world: &ProcessGroup, folder: &Path, until: u64) -> Result<Vec<f32>, Error> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let model = CONFIG.init(&device, 1).expect("the configuration is valid");
    let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
    // For an empty folder, the model and the optimizer are returned unchanged, and the step is 0.
    let resumed = resume(folder, model, AdamWConfig::new().init(), &mesh)?;
    let (mut model, mut optim) = (resumed.model, resumed.optimizer);
    let batches = Batches {
        stream: TokenStream::Synthetic {
            vocab: CONFIG.vocab,
        },
        batch: BATCH,
        seq: CONFIG.seq,
    };
    let rows = BATCH / world.size();
    let mut losses = Vec::new();
    for step in resumed.step..until {
        let own = world.rank() * rows..(world.rank() + 1) * rows;
        let (inputs, targets) = batches.rows(step as usize, own).to_tensors(&device);
        let loss = model.loss(inputs, targets);
        losses.push(loss.clone().into_scalar());
        let gradients = backward(loss, &model)?;
        model = optim.step(1e-3, model, gradients);
    }
    save(folder, until, &model, &optim, &mesh)?;
    Ok(losses)
}

/// Returns the mean loss of each new step.
fn train(
    ranks: usize,
    folder: PathBuf,
    until: u64,
) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    let by_rank = launch(LaunchConfig::new(ranks), move |world| {
        rank(&world, &folder, until)
    })?;
    let mean = |step: usize| by_rank.iter().map(|losses| losses[step]).sum::<f32>() / ranks as f32;
    Ok((0..by_rank[0].len()).map(mean).collect())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (whole, parts) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let want = train(2, whole.path().to_owned(), 8)?;
    let mut got = train(2, parts.path().to_owned(), 4)?;
    println!("stopped after {} steps on 2 ranks", got.len());
    got.extend(train(3, parts.path().to_owned(), 8)?);
    println!("went on to {} steps on 3 ranks", got.len());
    for (step, (got, want)) in got.iter().zip(&want).enumerate() {
        println!("step {step}: loss {got:.6}, without the stop {want:.6}");
        assert!((got / want - 1.0).abs() < 1e-5, "the same training");
    }
    assert_eq!(got.len(), want.len());
    Ok(())
}
