//! Evaluation of a sharded model with `valid()`: gather, run, free, without autodiff.
//!
//! ```text
//! cargo run --release --example evaluate
//! ```

use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp::inspect::{memory, wrap_plan};
use burn_fsdp::{Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, fully_shard, launch};
use burn_fsdp_models::{Batches, GptConfig, TokenStream};

const CONFIG: GptConfig = GptConfig {
    layers: 4,
    dim: 64,
    heads: 4,
    vocab: 256,
    seq: 32,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let results = launch(LaunchConfig::new(2), |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let model = CONFIG.init(&device, 1).expect("the configuration is valid");
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        if world.rank() == 0 {
            print!("{}", wrap_plan(&model)?);
        }
        // All ranks evaluate the same number of batches, but different rows.
        let batches = Batches {
            stream: TokenStream::Synthetic {
                vocab: CONFIG.vocab,
            },
            batch: 4,
            seq: CONFIG.seq,
        };
        let evaluated = model.valid();
        let plain = device.without_autodiff();
        let mut sum = 0.0;
        for step in 0..3 {
            let own = 2 * world.rank()..2 * world.rank() + 2;
            let (inputs, targets) = batches.rows(step, own).to_tensors(&plain);
            sum += evaluated.loss(inputs, targets).into_scalar::<f32>();
        }
        drop(evaluated);
        Ok::<_, Error>((sum / 3.0, memory(&model)?))
    })?;
    for (rank, (loss, memory)) in results.iter().enumerate() {
        println!(
            "rank {rank}: loss {loss:.4}, {} bytes held, at most {} unsharded, {} left",
            memory.parameters, memory.unsharded_peak, memory.unsharded_live
        );
        assert_eq!(memory.unsharded_live, 0);
    }
    Ok(())
}
