//! Two GPT-2s, and two Llamas, that share every parameter (clones of it, with one id). They are compared with one model in plain
//! Burn that runs twice, and saved steps move between engines.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use burn::module::{Module, ModuleDisplay, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::compile::{Mode, compile, restore_compiled, snapshot_compiled};
use burn_fsdp::internals::checkpoint::restore_model;
use burn_fsdp::internals::state::local_state;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward,
    fully_shard, launch,
};
use burn_fsdp_models::{Gpt2, Gpt2Config, Llama, LlamaConfig, LlamaVariant};

use crate::saving::save_taken;

const GPT2: Gpt2Config = Gpt2Config {
    layers: 2,
    dim: 12,
    heads: 2,
    hidden: 20,
    vocab: 23,
    seq: 8,
};

const LLAMA: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 12,
    heads: 2,
    kv_heads: 1,
    hidden: 20,
    vocab: 23,
    seq: 8,
    rope_base: 10_000,
    variant: LlamaVariant {
        has_tied_head: true,
        ..LlamaVariant::PLAIN
    },
};

/// 12 rows, divisible by every number of ranks up to 4.
const ROWS: usize = 12;
const STEPS: usize = 4;

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

/// A model and a clone of it.
#[derive(Module, Debug)]
struct Two<M> {
    first: M,
    second: M,
}

struct Case<M> {
    init: fn(&Device) -> M,
    loss: fn(&M, Tokens) -> Tensor<1>,
    /// The units of the first and of the second model.
    units: [&'static str; 2],
}

impl<M> Clone for Case<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Case<M> {}

impl<M: Module + ModuleDisplay> Case<M> {
    fn both(self, first: &M, second: &M, (tokens, targets): Tokens) -> Tensor<1> {
        let backwards = (targets.clone().flip([1]), tokens.clone().flip([1]));
        (self.loss)(first, (tokens, targets)) + (self.loss)(second, backwards).mul_scalar(0.5)
    }

    fn two(self, device: &Device) -> Two<M> {
        let first = (self.init)(device);
        Two {
            second: first.clone(),
            first,
        }
    }
}

fn batch(rows: Range<usize>, step: usize, device: &Device) -> Tokens {
    let number = |i: usize| ((i * 7 + i / 3 + step * 5) % 23) as i64;
    let tokens = |from: usize| {
        let values: Vec<i64> = (from..from + ROWS * 5).map(number).collect();
        Tensor::<2, Int>::from_data(TensorData::new(values, [ROWS, 5]), device)
    };
    let slice = |from| tokens(from).slice([rows.clone()]);
    (slice(0), slice(1))
}

fn own_rows(world: &ProcessGroup) -> Range<usize> {
    let rows = ROWS / world.size();
    world.rank() * rows..(world.rank() + 1) * rows
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-2)
}

fn plainly<M: Module + ModuleDisplay>(case: Case<M>) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model = (case.init)(&device);
    let mut optimizer = adamw().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = case.both(&model, &model, batch(0..ROWS, step, &device));
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    losses
}

fn mesh(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    let line = Mesh::line("shard", world.size())?;
    Ok(ProcessMesh::new(world, line)?)
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(120));
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

/// Losses of some steps with the eager engine.
fn eagerly<M: Module + ModuleDisplay + 'static>(
    case: Case<M>,
    ranks: usize,
    folder: &Path,
    steps: Range<usize>,
) -> Vec<f32> {
    let folder = folder.to_owned();
    let seen = on_ranks(ranks, move |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = mesh(&world)?;
        let policy = ShardPolicy::new().units(case.units);
        let mut model = fully_shard(case.two(&device), &mesh, policy)?;
        let mut optimizer = adamw().init();
        if steps.start > 0 {
            let step = Checkpoints::new(&folder).newest()?;
            (model, optimizer) = restore(model, optimizer, &step)?;
        }
        let mut losses = Vec::new();
        for step in steps.clone() {
            let loss = batch(own_rows(&world), step, &device);
            let loss = case.both(&model.first, &model.second, loss);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optimizer.step(1e-2, model, gradients);
        }
        let taken = snapshot(&model, &optimizer, mesh.mesh(), "shard")?;
        save_taken(&folder, world, taken, steps.end as u64)?;
        Ok(losses)
    });
    let mean = |step: usize| seen.iter().map(|losses| losses[step]).sum::<f32>() / ranks as f32;
    (0..seen[0].len()).map(mean).collect()
}

/// Losses of some steps with a compiled step.
fn compiled<M: Module + ModuleDisplay + 'static>(
    case: Case<M>,
    ranks: usize,
    folder: &Path,
    steps: Range<usize>,
) -> Vec<f32> {
    let folder = folder.to_owned();
    let seen = on_ranks(ranks, move |world| {
        let mesh = mesh(&world)?;
        let mut step = compile(
            move |device: &Device| case.two(device),
            move |model: &Two<M>, tokens: Tokens| case.both(&model.first, &model.second, tokens),
            adamw().build(),
            Mode::data_parallel(world.clone(), Strategy::FullShard).verified(),
        )?;
        if steps.start > 0 {
            restore_compiled(&mut step, &Checkpoints::new(&folder).newest()?)?;
        }
        let mut losses = Vec::new();
        for index in steps.clone() {
            let batch = batch(own_rows(&world), index, &Device::flex());
            losses.push(step.step(1e-2, &batch)? as f32);
        }
        let taken = snapshot_compiled(&mut step, mesh.mesh(), "shard")?;
        save_taken(&folder, world, taken, steps.end as u64)?;
        Ok(losses)
    });
    seen[0].clone()
}

type Run<M> = fn(Case<M>, usize, &Path, Range<usize>) -> Vec<f32>;

fn assert_tied<M: Module + ModuleDisplay + 'static>(case: Case<M>) {
    let want = plainly(case);
    assert!(want[STEPS - 1] < want[0]);
    let runs: [Run<M>; 2] = [eagerly, compiled];
    for (ranks, [from, to]) in [
        (1, [0, 0]),
        (2, [0, 1]),
        (3, [1, 0]),
        (4, [1, 1]),
        (4, [0, 0]),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut got = runs[from](case, ranks, folder.path(), 0..2);
        let step = Checkpoints::new(folder.path()).newest().expect("saved");
        for tensor in &step.index().tensors {
            let of_first = tensor.name.contains("first.");
            assert!(
                of_first && !tensor.name.contains("second."),
                "{}",
                tensor.name
            );
            if tensor.kind.is_model() {
                let second = tensor.name.replace("first.", "second.");
                assert_eq!(tensor.metadata["tied"], serde_json::json!([second]));
            }
        }
        got.extend(runs[to](case, ranks % 4 + 1, folder.path(), 2..STEPS));
        for (got, want) in got.iter().zip(&want) {
            let is_near = (got - want).abs() <= 2e-5 * want;
            assert!(is_near, "{ranks} ranks, {from} to {to}: {got}, {want}");
        }
    }
}

#[test]
fn two_gpt2s_with_shared_parameters_train_like_one_run_twice() {
    assert_tied(Case {
        init: |device| GPT2.init(device, 9).expect("valid sizes"),
        loss: |model: &Gpt2, (tokens, targets)| model.loss(tokens, targets),
        units: ["first.h.*", "second.h.*"],
    });
}

#[test]
fn two_llamas_with_shared_parameters_train_like_one_run_twice() {
    assert_tied(Case {
        init: |device| LLAMA.init(device, 9).expect("valid sizes"),
        loss: |model: &Llama, (tokens, targets)| model.loss(tokens, targets),
        units: ["first.layers.*", "second"],
    });
}

/// Adds a number to the parameters of one of the two models.
struct Shift {
    path: Vec<String>,
    of: &'static str,
    by: f32,
}

impl ModuleMapper for Shift {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let by = if self.path[0] == self.of {
            self.by
        } else {
            0.0
        };
        let value = (param.val().inner() + by).autodiff().require_grad();
        // A new id unties it.
        Param::initialized(burn::module::ParamId::new(), value)
    }
}

/// A tied model reads the steps of a model with two sets of parameters, and the reverse.
#[test]
fn steps_with_both_names_or_one_are_read_if_the_values_are_equal() {
    let init = |device: &Device| GPT2.init(device, 9).expect("valid sizes");
    for by in [0.0, 1.0] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_owned();
        on_ranks(2, move |world| {
            let device = Device::flex().autodiff().gradient_checkpointing();
            let mesh = mesh(&world)?;
            let two = |device: &Device| Two {
                first: init(device),
                second: init(device),
            };
            let shift = |of| Shift {
                path: Vec::new(),
                of,
                by,
            };
            let apart = two(&device).map(&mut shift("second"));
            let apart = fully_shard(apart, &mesh, ShardPolicy::new())?;
            let optimizer = adamw().init();
            let taken = snapshot(&apart, &optimizer, mesh.mesh(), "shard")?;
            save_taken(&path, world.clone(), taken, 1)?;
            let step = Checkpoints::new(&path).newest()?;
            let tied = || {
                let first = init(&device);
                Two {
                    second: first.clone(),
                    first,
                }
            };
            let tied = fully_shard(tied(), &mesh, ShardPolicy::new())?;
            let mut compiled = compile(
                move |device: &Device| {
                    let first = init(device);
                    Two {
                        second: first.clone(),
                        first,
                    }
                },
                |model: &Two<Gpt2>, (tokens, targets): Tokens| model.second.loss(tokens, targets),
                adamw().build(),
                Mode::data_parallel(world.clone(), Strategy::FullShard),
            )?;
            let got = restore_model(tied, &step);
            let by_compiled = restore_compiled(&mut compiled, &step);
            if by > 0.0 {
                let messages = [
                    got.err().map(|e| e.to_string()),
                    by_compiled.err().map(|e| e.to_string()),
                ];
                for message in messages {
                    let message = message.expect("they differ");
                    assert!(
                        message.contains("`first.") && message.contains("`second."),
                        "{message}"
                    );
                }
                return Ok(());
            }
            let (got, ()) = (got?, by_compiled?);
            // The reverse, from a step with one name.
            let taken = snapshot(&got, &adamw().init(), mesh.mesh(), "shard")?;
            save_taken(&path, world, taken, 2)?;
            let step = Checkpoints::new(&path).newest()?;
            let other = fully_shard(
                two(&device).map(&mut shift("first")),
                &mesh,
                ShardPolicy::new(),
            )?;
            let other = restore_model(other, &step)?;
            let (want, got) = (local_state(&apart)?, local_state(&other)?);
            assert_eq!(want.len(), got.len());
            for (want, got) in want.iter().zip(&got) {
                assert_eq!(want.path, got.path);
                assert_eq!(
                    want.elements.as_bytes(),
                    got.elements.as_bytes(),
                    "{}",
                    want.path
                );
            }
            Ok(())
        });
    }
}
