//! Generation from a sharded model: any method that reads parameters works, not only `forward`.
//!
//! All ranks run it together on the same tokens, because each gather needs every rank's shards.
//!
//! ```text
//! cargo run --release --example generate
//! ```

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp::{Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, fully_shard, launch};
use burn_fsdp_models::{Gpt, GptConfig};

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    dim: 32,
    heads: 2,
    vocab: 256,
    seq: 16,
};

/// Returns the likeliest token after `tokens`.
fn next(model: &Gpt, tokens: &[i64], device: &Device) -> i64 {
    let window = &tokens[tokens.len().saturating_sub(CONFIG.seq)..];
    let input = TensorData::new(window.to_vec(), [1, window.len()]);
    let logits = model.forward(Tensor::<2, Int>::from_data(input, device));
    let last = logits.slice([0..1, window.len() - 1..window.len()]);
    last.argmax(2).into_scalar::<i64>()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let texts = launch(LaunchConfig::new(2), |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let model = CONFIG.init(&device, 1).expect("the configuration is valid");
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?.valid();
        let plain = device.without_autodiff();
        let mut tokens: Vec<i64> = b"fn main".iter().map(|&byte| i64::from(byte)).collect();
        for _ in 0..24 {
            tokens.push(next(&model, &tokens, &plain));
        }
        Ok::<_, Error>(tokens)
    })?;
    assert_eq!(texts[0], texts[1], "ranks agree on every token");
    println!("{:?}", texts[0]);
    Ok(())
}
