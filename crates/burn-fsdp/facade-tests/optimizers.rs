//! Every optimizer moves between the eager engine and a compiled step, in the middle of a run, by checkpoints.

use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamWConfig, GradientsParams, ModuleOptimizer, Optimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::compile::{
    CompiledStep, Mode, OptimizerGroups, compile, restore_compiled, snapshot_compiled,
};
use burn_fsdp::internals::checkpoint::{GroupRendezvous, SaveRequest, TrainingState, save_step};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward,
    fully_shard, launch,
};

use crate::every::{ForEach, Needs, for_each};

const CUT: usize = 4;
const STEPS: usize = 10;

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    b: Linear,
}

impl Net {
    fn of(device: &Device, bias: bool) -> Self {
        let weight = |start: usize, shape: [usize; 2]| {
            let value = |i: usize| ((i * 37 + start) % 101) as f32 / 150.0 - 0.3;
            let values = (0..shape[0] * shape[1]).map(value).collect::<Vec<f32>>();
            Param::from_data(TensorData::new(values, shape), device)
        };
        let layer = |start: usize, from: usize, to: usize| {
            let mut layer = LinearConfig::new(from, to).with_bias(bias).init(device);
            layer.weight = weight(start, [from, to]);
            let zeros = || Param::from_data(TensorData::zeros::<f32, _>([to]), device);
            layer.bias = bias.then(zeros);
            layer
        };
        Self {
            a: layer(1, 4, 5),
            b: layer(5, 5, 3),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = self.b.forward(self.a.forward(x).tanh());
        y.sub_scalar(0.3).square().mean()
    }
}

/// The same on every rank, so the mean over the ranks does not depend on their number.
fn batch(step: usize, device: &Device) -> Tensor<2> {
    let value = |i: usize| ((i * 29 + step * 13) % 53) as f32 / 26.0 - 1.0;
    let values: Vec<f32> = (0..24).map(value).collect();
    Tensor::from_data(TensorData::new(values, [6, 4]), device)
}

fn mesh(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    let mesh = Mesh::line("shard", world.size())?;
    Ok(ProcessMesh::new(world, mesh)?)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Engine {
    Eager,
    Compiled(Strategy),
}

const SHARDED: Engine = Engine::Compiled(Strategy::FullShard);
const REPLICATED: Engine = Engine::Compiled(Strategy::NoShard);

/// The settings of one half of a run.
#[derive(Debug, Clone)]
struct Part {
    engine: Engine,
    ranks: usize,
    bias: bool,
    from: Option<Arc<Path>>,
    steps: std::ops::Range<usize>,
    to: Option<Arc<Path>>,
}

fn rate(base: f64, step: usize) -> f64 {
    base / (1.0 + 0.3 * step as f64)
}

/// Losses of a part, from a checkpoint and into one.
fn train(optimizer: OptimizerGroups, base: f64, part: Part) -> Result<Vec<f32>, String> {
    let ranks = part.ranks;
    let body = move |world: ProcessGroup| -> Result<Vec<f32>, Error> {
        let mesh = mesh(&world)?;
        let saved = part
            .from
            .as_deref()
            .map(|from| Checkpoints::new(from).newest());
        let saved = saved.transpose()?;
        let bias = part.bias;
        let mut losses = Vec::new();
        let mut taken = match part.engine {
            Engine::Compiled(style) => {
                let mut step: CompiledStep<Tensor<2>> = compile(
                    move |device: &Device| Net::of(device, bias),
                    |net: &Net, x: Tensor<2>| net.loss(x),
                    optimizer.clone(),
                    Mode::data_parallel(world.clone(), style),
                )?;
                if let Some(saved) = &saved {
                    restore_compiled(&mut step, saved)?;
                }
                for index in part.steps.clone() {
                    let batch = batch(index, &Device::flex());
                    losses.push(step.step(rate(base, index), &batch)? as f32);
                }
                snapshot_compiled(&mut step, mesh.mesh(), "shard")?
            }
            Engine::Eager => {
                let device = Device::flex().autodiff().gradient_checkpointing();
                let mut net = fully_shard(Net::of(&device, bias), &mesh, ShardPolicy::new())?;
                let mut optimizer = ModuleOptimizer::from(optimizer.clone());
                if let Some(saved) = &saved {
                    (net, optimizer) = restore(net, optimizer, saved)?;
                }
                for index in part.steps.clone() {
                    let loss = net.loss(batch(index, &device));
                    losses.push(loss.clone().into_scalar::<f32>());
                    let gradients = backward(loss, &net)?;
                    net = optimizer.step(rate(base, index), net, gradients);
                }
                snapshot(&net, &optimizer, mesh.mesh(), "shard")?
            }
        };
        if let Some(to) = &part.to {
            let training = TrainingState {
                step: part.steps.end as u64,
                optimizer: taken.optimizer.clone(),
                ..TrainingState::default()
            };
            let request = SaveRequest::new(taken.plan.clone(), training);
            let mut meet = GroupRendezvous::new(world);
            save_step(
                &Checkpoints::new(&**to),
                &request,
                &mut taken.snapshot,
                &mut meet,
            )?;
        }
        Ok(losses)
    };
    let losses = launch(LaunchConfig::new(ranks), body);
    losses
        .map(|mut losses| losses.swap_remove(0))
        .map_err(|error| error.to_string())
}

/// Burn's own loop on one rank.
fn burns(optimizer: OptimizerGroups, base: f64, bias: bool) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut net = Net::of(&device, bias);
    let mut optimizer = ModuleOptimizer::from(optimizer);
    let steps = (0..STEPS).map(|index| {
        let loss = net.loss(batch(index, &device));
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(rate(base, index), net.clone(), gradients);
        loss.into_scalar::<f32>()
    });
    steps.collect()
}

/// A run that moves from one engine to another, on a different number of ranks.
fn moved(
    optimizer: &OptimizerGroups,
    base: f64,
    bias: bool,
    [first, second]: [(Engine, usize); 2],
) -> Result<Vec<f32>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path: Arc<Path> = folder.path().into();
    let part = |(engine, ranks): (Engine, usize)| Part {
        engine,
        ranks,
        bias,
        from: None,
        steps: 0..CUT,
        to: None,
    };
    let mut losses = train(
        optimizer.clone(),
        base,
        Part {
            to: Some(path.clone()),
            ..part(first)
        },
    )?;
    losses.extend(train(
        optimizer.clone(),
        base,
        Part {
            from: Some(path),
            steps: CUT..STEPS,
            ..part(second)
        },
    )?);
    Ok(losses)
}

struct Moves(Vec<String>);

impl ForEach for Moves {
    fn case<O: Optimizer>(&mut self, name: &'static str, optimizer: O, base: f64, needs: Needs) {
        let bias = needs != Needs::Matrix;
        let optimizer = OptimizerGroups::from(optimizer);
        let expected = burns(optimizer.clone(), base, bias);
        let whole = [
            [(REPLICATED, 2), (REPLICATED, 1)],
            [(REPLICATED, 1), (REPLICATED, 2)],
        ];
        let sharded = [
            [(SHARDED, 2), (SHARDED, 3)],
            [(SHARDED, 2), (REPLICATED, 1)],
        ];
        let engines = [
            [(Engine::Eager, 2), (SHARDED, 2)],
            [(SHARDED, 2), (Engine::Eager, 2)],
            [(Engine::Eager, 1), (REPLICATED, 2)],
            [(REPLICATED, 2), (Engine::Eager, 3)],
        ];
        let mut moves = whole.to_vec();
        // Shards lack the parameter's shape: the eager engine is for optimizers that do not need it.
        match needs {
            Needs::Element => moves.extend(sharded.into_iter().chain(engines)),
            Needs::Shape => moves.extend(sharded),
            Needs::Whole | Needs::Matrix => {}
        }
        for engines in moves {
            let what = format!("{name}, {engines:?}");
            match moved(&optimizer, base, bias, engines) {
                Ok(losses) => {
                    let far = |(a, b): (&f32, &f32)| (a - b).abs() > 2e-5 * b.abs();
                    if let Some(at) = losses.iter().zip(&expected).position(far) {
                        self.0.push(format!("{what}: another loss at step {at}"));
                    }
                }
                Err(error) => self.0.push(format!("{what}: {error}")),
            }
        }
    }
}

#[test]
fn every_optimizer_moves_between_engines_and_numbers_of_ranks() {
    let mut moves = Moves(Vec::new());
    for_each(&mut moves);
    assert!(moves.0.is_empty(), "{:#?}", moves.0);
}

/// Groups whose states have the same form. Only the path tells which optimizer continues with each, and Burn asks
/// for it once.
fn groups() -> Vec<(&'static str, OptimizerGroups)> {
    let adamw = |decay: f32| {
        let config = AdamWConfig::new().with_weight_decay(decay);
        config.with_epsilon(1e-3).build()
    };
    let bias = || ParamGroup::from_predicate("bias");
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    vec![
        (
            "decays",
            OptimizerGroups::from(adamw(5.0))
                .with_group(bias(), adamw(0.0))
                .with_group(ParamGroup::from_path("b.weight"), adamw(1.0)),
        ),
        (
            "optimizers",
            OptimizerGroups::from(momentum.build()).with_group(bias(), adamw(3.0)),
        ),
        (
            "none of one",
            OptimizerGroups::from(adamw(3.0)).with_group(bias(), SgdConfig::new().build()),
        ),
    ]
}

#[test]
fn groups_move_between_engines_and_numbers_of_ranks() {
    let mut failed = Vec::new();
    for (name, groups) in groups() {
        let expected = burns(groups.clone(), 0.05, true);
        for engines in [
            [(Engine::Eager, 2), (SHARDED, 3)],
            [(SHARDED, 3), (Engine::Eager, 2)],
            [(SHARDED, 4), (Engine::Eager, 1)],
            [(REPLICATED, 2), (Engine::Eager, 3)],
            [(Engine::Eager, 1), (REPLICATED, 2)],
            [(SHARDED, 2), (SHARDED, 3)],
            [(Engine::Eager, 4), (Engine::Eager, 2)],
        ] {
            match moved(&groups, 0.05, true, engines) {
                Ok(losses) => {
                    let far = |(a, b): (&f32, &f32)| (a - b).abs() > 2e-5 * b.abs();
                    let at = losses.iter().zip(&expected).position(far);
                    failed.extend(
                        at.map(|at| format!("{name}, {engines:?}: another loss at step {at}")),
                    );
                }
                Err(error) => failed.push(format!("{name}, {engines:?}: {error}")),
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// The first part of a run, saved.
fn saved(optimizer: impl Optimizer, engine: Engine) -> (tempfile::TempDir, Arc<Path>) {
    let folder = tempfile::tempdir().unwrap();
    let path: Arc<Path> = folder.path().into();
    let part = Part {
        engine,
        ranks: 2,
        bias: true,
        from: None,
        steps: 0..CUT,
        to: Some(path.clone()),
    };
    train(optimizer.into(), 0.01, part).unwrap();
    (folder, path)
}

#[test]
fn the_states_of_another_optimizer_are_refused_by_both_engines() {
    let momentum = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let (_folder, path) = saved(momentum().build(), SHARDED);
    for engine in [Engine::Eager, SHARDED, REPLICATED] {
        let part = Part {
            engine,
            ranks: 2,
            bias: true,
            from: Some(path.clone()),
            steps: CUT..STEPS,
            to: None,
        };
        let error = train(RmsPropConfig::new().build().into(), 0.01, part).unwrap_err();
        assert!(error.contains("velocity"), "{engine:?}: {error}");
    }
}

#[test]
fn a_refused_restore_leaves_a_compiled_step_as_it_was() {
    let (_folder, path) = saved(RmsPropConfig::new().build(), SHARDED);
    let body = move |world: ProcessGroup| -> Result<(), Error> {
        let make = || {
            let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
            compile(
                |device: &Device| Net::of(device, true),
                |net: &Net, x: Tensor<2>| net.loss(x),
                momentum.build(),
                Mode::data_parallel(world.clone(), Strategy::FullShard),
            )
        };
        let (mut tried, mut other) = (make()?, make()?);
        for index in 0..3 {
            let batch = batch(index, &Device::flex());
            assert_eq!(tried.step(0.1, &batch)?, other.step(0.1, &batch)?);
        }
        let saved = Checkpoints::new(&*path).newest()?;
        assert!(restore_compiled(&mut tried, &saved).is_err());
        assert_eq!(tried.num_steps(), 3);
        for index in 3..6 {
            let batch = batch(index, &Device::flex());
            assert_eq!(tried.step(0.1, &batch)?, other.step(0.1, &batch)?);
        }
        Ok(())
    };
    launch(LaunchConfig::new(2), body).unwrap();
}

/// Running statistics that each rank has for itself.
#[derive(Module, Debug)]
struct Normed {
    norms: Vec<BatchNorm>,
    last: Linear,
}

#[test]
fn a_checkpoint_has_the_running_statistics_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path: Arc<Path> = folder.path().into();
    let body = move |world: ProcessGroup| -> Result<(), Error> {
        let mesh = mesh(&world)?;
        let mut step: CompiledStep<Tensor<2>> = compile(
            |device: &Device| Normed {
                norms: (0..4)
                    .map(|_| BatchNormConfig::new(4).init(device))
                    .collect(),
                last: LinearConfig::new(4, 2).init(device),
            },
            |net: &Normed, x: Tensor<2>| {
                let x = net.norms.iter().fold(x, |x, norm| norm.forward(x).tanh());
                net.last.forward(x).square().mean()
            },
            SgdConfig::new().build(),
            Mode::data_parallel(world.clone(), Strategy::FullShard),
        )?;
        for index in 0..3 {
            step.step(0.1, &batch(index + 5 * world.rank(), &Device::flex()))?;
        }
        let mut taken = snapshot_compiled(&mut step, mesh.mesh(), "shard")?;
        let training = TrainingState {
            step: 3,
            ..TrainingState::default()
        };
        let request = SaveRequest::new(taken.plan.clone(), training);
        let mut meet = GroupRendezvous::new(world.clone());
        save_step(
            &Checkpoints::new(&*path),
            &request,
            &mut taken.snapshot,
            &mut meet,
        )?;
        if world.rank() == 0 {
            let saved = Checkpoints::new(&*path).newest()?;
            for norm in 0..4 {
                for name in ["running_mean", "running_var"] {
                    let path = format!("norms.{norm}.{name}");
                    let bytes = saved.read(&path, &Region::Flat(0..4))?;
                    assert_eq!(bytes, step.shard(&path)?.as_bytes(), "{path}");
                }
            }
        }
        Ok(())
    };
    launch(LaunchConfig::new(2), body).unwrap();
}
