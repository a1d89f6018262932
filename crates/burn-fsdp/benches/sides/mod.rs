//! The sides of comparisons: both engines with one GPT, each on its rank's rows.

#![allow(dead_code, reason = "a benchmark takes of it what it needs")]

use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::compile::{CompiledStep, Mode, Options, compile};
use burn_fsdp::internals::optim::SealedOptimizer;
use burn_fsdp::{Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward, fully_shard};
use burn_fsdp_models::{Batches, Gpt, GptConfig, TokenStream, fused};

/// The peer programs' default shape.
pub(crate) const CONFIG: GptConfig = GptConfig {
    layers: 6,
    dim: 384,
    heads: 6,
    vocab: 4096,
    seq: 256,
};
/// Rows of a step in that shape, on all ranks together.
pub(crate) const BATCH: usize = 8;

pub(crate) type Tokens = (Tensor<2, Int>, Tensor<2, Int>);
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// One side of a comparison.
pub(crate) trait Side {
    /// Runs one step. Returns the loss of this rank's rows, or of all ranks' rows.
    fn train(&mut self, batch: &Tokens) -> Result<f64, Failure>;
}

pub(crate) struct Eager {
    model: Option<Gpt>,
    optim: ModuleOptimizer,
}

impl Eager {
    pub(crate) fn new(world: &ProcessGroup) -> Result<Self, Failure> {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
        let policy = ShardPolicy::new().units(["blocks.*"]);
        Ok(Self {
            model: Some(fully_shard(CONFIG.init(&device, 1)?, &mesh, policy)?),
            optim: SealedOptimizer::new(AdamWConfig::new().build()).into(),
        })
    }
}

impl Side for Eager {
    fn train(&mut self, (tokens, targets): &Tokens) -> Result<f64, Failure> {
        let model = self.model.take().ok_or("a side keeps its model")?;
        let loss = model.loss(tokens.clone(), targets.clone());
        let value = loss.clone().into_scalar::<f32>();
        let gradients = backward(loss, &model)?;
        self.model = Some(self.optim.step(1e-3, model, gradients));
        Ok(value.into())
    }
}

/// The operations that a step is traced with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operations {
    Elementary,
    Fused,
}

pub(crate) struct Compiled(pub(crate) CompiledStep<Tokens>);

impl Compiled {
    pub(crate) fn new(
        world: &ProcessGroup,
        operations: Operations,
        options: Options,
    ) -> Result<Self, Failure> {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let step = compile(
            |device: &Device| CONFIG.init(device, 1).expect("the sizes are valid"),
            move |model: &Gpt, (tokens, targets): Tokens| match operations {
                Operations::Elementary => model.loss(tokens, targets),
                Operations::Fused => fused::recorded(|| model.loss(tokens, targets)),
            },
            AdamWConfig::new().build(),
            mode.options(options),
        )?;
        Ok(Self(step))
    }
}

impl Side for Compiled {
    fn train(&mut self, batch: &Tokens) -> Result<f64, Failure> {
        Ok(self.0.step(1e-3, batch)?)
    }
}

/// Returns a rank's rows in a step of `batch` rows, on a device.
pub(crate) fn rows(world: &ProcessGroup, batch: usize, step: usize, device: &Device) -> Tokens {
    let rows = batch / world.size();
    let first = world.rank() * rows;
    let batches = Batches {
        stream: TokenStream::Synthetic {
            vocab: CONFIG.vocab,
        },
        batch,
        seq: CONFIG.seq,
    };
    batches.rows(step, first..first + rows).to_tensors(device)
}

/// Returns the devices of the eager engine and of compiled steps.
pub(crate) fn devices() -> [Device; 2] {
    [
        Device::flex().autodiff().gradient_checkpointing(),
        Device::flex(),
    ]
}
