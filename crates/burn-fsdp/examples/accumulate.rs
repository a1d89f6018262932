//! Gradient accumulation: four micro-batches, one optimizer step.
//!
//! Each micro-batch is reduced into the shards, so peak memory is the same as for one micro-batch.
//!
//! ```text
//! cargo run --release --example accumulate
//! ```

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsAccumulator};
use burn::tensor::{Device, Distribution, Tensor};
use burn_fsdp::optim::check_elementwise;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, backward, fully_shard, launch,
};

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn loss(&self, batch: Tensor<2>) -> Tensor<1> {
        let output = self.layers.iter().fold(batch, |x, layer| layer.forward(x));
        output.powf_scalar(2.0).mean()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let losses = launch(LaunchConfig::new(2), |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let layers = (0..4).map(|_| LinearConfig::new(64, 64).init(&device));
        let net = Net {
            layers: layers.collect(),
        };
        let mut net = fully_shard(net, &mesh, ShardPolicy::new().units(["layers.*"]))?;
        let mut optim = AdamWConfig::new().init();
        // With gradients from an accumulator, the first step cannot check that the optimizer is elementwise, so check
        // it here.
        check_elementwise(&net, &optim)?;
        let mut means = Vec::new();
        for _ in 0..5 {
            let mut gradients = GradientsAccumulator::new();
            let mut mean = 0.0;
            for _ in 0..4 {
                let batch = Tensor::random([8, 64], Distribution::Default, &device);
                // A quarter each, so the sum is the mean over the joined batch.
                let loss = net.loss(batch).div_scalar(4.0);
                mean += loss.clone().into_scalar::<f32>();
                gradients.accumulate(&net, backward(loss, &net)?);
            }
            net = optim.step(1e-3, net, gradients.grads());
            means.push(mean);
        }
        Ok::<_, Error>(means)
    })?;
    for (step, loss) in losses[0].iter().enumerate() {
        println!("step {step}: loss {loss:.5} on rank 0");
    }
    assert!(losses[0].last() < losses[0].first(), "training goes down");
    Ok(())
}
