//! Training runs of a small GPT by either engine, on any of the backends.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::compile::{CompiledStep, Mode, Options, restore_compiled, snapshot_compiled};
use burn_fsdp::internals::checkpoint::TrainingSnapshot;
use burn_fsdp::internals::compile::{ShardSpec, compile_on};
use burn_fsdp::{
    Error, LaunchConfig, Mesh, Precision, ProcessGroup, ProcessMesh, ShardPolicy, Strategy,
    backward, fully_shard, launch,
};
use burn_fsdp_models::{Gpt, GptConfig};

use crate::backends::Tested;
use crate::saving::save_taken;

/// Few tensors divide evenly among 4 ranks.
pub(crate) const CONFIG: GptConfig = GptConfig {
    vocab: 19,
    seq: 8,
    layers: 2,
    heads: 2,
    dim: 6,
};

pub(crate) type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

/// A large epsilon: with a small one Adam hides a wrong gradient scale.
pub(crate) fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-2)
}

/// The rows of one of `parts` parts, which differ. All parts together are the same 12 rows.
pub(crate) fn batch(step: usize, (part, parts): (usize, usize), device: &Device) -> Tokens {
    let rows = 12 / parts;
    let tokens = |shift: usize| {
        let token = |i: usize| ((i * i + i / 3 + step * 3 + shift) % 19) as i64;
        let own = part * rows * 8..(part + 1) * rows * 8;
        let values: Vec<i64> = own.map(token).collect();
        Tensor::from_data(TensorData::new(values, [rows, 8]), device)
    };
    (tokens(0), tokens(1))
}

/// Burn's own loop on a device, on the joined batch.
pub(crate) fn plainly(steps: usize, device: &Device) -> Vec<f32> {
    let device = device.clone().autodiff();
    let mut model: Gpt = CONFIG.init(&device, 4).expect("valid");
    let mut optimizer = adamw().init();
    let mut losses = Vec::new();
    for step in 0..steps {
        let (tokens, targets) = batch(step, (0, 1), &device);
        let loss = model.loss(tokens, targets);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    losses
}

/// Returns the types in which steps can compute on a backend, apart from f32.
fn other_types<B: Tested>() -> Vec<FloatDType> {
    let has_halves = B::supports_dtype(&B::own(), DType::BF16);
    has_halves.then_some(FloatDType::BF16).into_iter().collect()
}

pub(crate) fn assert_close(got: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - expected).abs() <= tolerance * expected.abs(),
            "{what}, step {step}: {got} is not {expected}"
        );
    }
}

pub(crate) fn mesh(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    let mesh = Mesh::line("shard", world.size())?;
    Ok(ProcessMesh::new(world, mesh)?)
}

/// Returns a step on a backend, with the initial values of `init`.
pub(crate) fn compiled_step<B: Tested>(mode: Mode) -> Result<CompiledStep<Tokens, B>, Error> {
    let init = |device: &Device| CONFIG.init(device, 4).expect("valid");
    let values = (init, |_: &ShardSpec<'_>| Ok(None));
    let on = (&B::device(), B::own());
    let loss = |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets);
    compile_on::<B, _, _, _, _, _, Error>(values, loss, adamw().build(), mode, (), on)
}

/// Returns a sharded model on a backend.
pub(crate) fn eager_model<B: Tested>(mesh: &ProcessMesh, of: Division) -> Result<Gpt, Error> {
    let device = B::device().autodiff().gradient_checkpointing();
    let policy = ShardPolicy::new().units(["blocks.*"]).strategy(of.strategy);
    let policy = match of.compute {
        Some(compute) => policy.precision(Precision::new(compute)),
        None => policy,
    };
    let model = CONFIG.init(&device, 4).expect("valid");
    Ok(fully_shard(model, mesh, policy)?)
}

/// A division of the model, and the type in which its steps compute.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    pub(crate) strategy: Strategy,
    pub(crate) compute: Option<FloatDType>,
}

impl Division {
    /// Returns the divisions that are tested on a backend.
    pub(crate) fn all<B: Tested>() -> Vec<Self> {
        let types = other_types::<B>().into_iter().map(Some);
        let full = [None].into_iter().chain(types).map(|compute| Self {
            strategy: Strategy::FullShard,
            compute,
        });
        let whole = Self {
            strategy: Strategy::NoShard,
            compute: None,
        };
        full.chain([whole]).collect()
    }

    pub(crate) fn mode(self, world: &ProcessGroup) -> Mode {
        let options = Options::default();
        let options = match self.compute {
            Some(compute) => options.precision(Precision::new(compute)),
            None => options,
        };
        Mode::data_parallel(world.clone(), self.strategy)
            .options(options)
            .verified()
    }

    /// Returns the largest relative difference of a loss from the loss of the same division on another backend.
    pub(crate) fn tolerance<B: Tested>(self) -> f32 {
        match self.compute {
            Some(_) => 1e-2,
            None => B::TOLERANCE,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Engine {
    Eager,
    Compiled,
}

/// The settings of a run, which resumes from a folder if there is one, trains, and saves.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) engine: Engine,
    pub(crate) division: Division,
    pub(crate) ranks: usize,
    pub(crate) from: Option<Arc<Path>>,
    pub(crate) steps: Range<usize>,
    pub(crate) to: Option<Arc<Path>>,
}

impl Run {
    /// Runs on a backend. Returns the losses of the joined batches.
    pub(crate) fn on<B: Tested>(&self) -> Vec<f32> {
        let run = self.clone();
        let losses = launch(LaunchConfig::new(self.ranks), move |world| {
            let mut losses = Vec::new();
            let taken = match run.engine {
                Engine::Eager => run.eagerly::<B>(&world, &mut losses)?,
                Engine::Compiled => run.compiled::<B>(&world, &mut losses)?,
            };
            if let Some(to) = &run.to {
                save_taken(to, world, taken, run.steps.end as u64)?;
            }
            Ok::<_, Error>(losses)
        });
        let losses = losses.unwrap_or_else(|error| panic!("{self:?}: {error}"));
        // The eager engine's losses are of the ranks' own rows.
        let means = (0..self.steps.len()).map(|step| {
            let sum: f32 = losses.iter().map(|of_rank| of_rank[step]).sum();
            sum / self.ranks as f32
        });
        means.collect()
    }

    fn compiled<B: Tested>(
        &self,
        world: &ProcessGroup,
        losses: &mut Vec<f32>,
    ) -> Result<TrainingSnapshot, Error> {
        let mut step = compiled_step::<B>(self.division.mode(world))?;
        if let Some(from) = &self.from {
            restore_compiled(&mut step, &Checkpoints::new(&**from).newest()?)?;
            assert_eq!(step.num_steps(), self.steps.start as u64);
        }
        for index in self.steps.clone() {
            let batch = batch(index, (world.rank(), world.size()), &B::device());
            losses.push(step.step(1e-2, &batch)? as f32);
        }
        Ok(snapshot_compiled(&mut step, mesh(world)?.mesh(), "shard")?)
    }

    fn eagerly<B: Tested>(
        &self,
        world: &ProcessGroup,
        losses: &mut Vec<f32>,
    ) -> Result<TrainingSnapshot, Error> {
        let mesh = mesh(world)?;
        let mut model = eager_model::<B>(&mesh, self.division)?;
        let mut optimizer = adamw().init();
        if let Some(from) = &self.from {
            let saved = Checkpoints::new(&**from).newest()?;
            (model, optimizer) = restore(model, optimizer, &saved)?;
        }
        let device = B::device().autodiff().gradient_checkpointing();
        for index in self.steps.clone() {
            let (tokens, targets) = batch(index, (world.rank(), world.size()), &device);
            let loss = model.loss(tokens, targets);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optimizer.step(1e-2, model, gradients);
        }
        Ok(snapshot(&model, &optimizer, mesh.mesh(), "shard")?)
    }
}
