//! A training run that moves between the eager engine and a compiled step, by checkpoints and in memory.

use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::compile::{
    CompiledStep, Expand, Mode, compile, load_compiled, restore_compiled, snapshot_compiled,
};
use burn_fsdp::internals::checkpoint::Step;
use burn_fsdp::internals::compile::{DataParallel, Override, compile_with};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::state::full_state;
use burn_fsdp::sharding::Cut;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, Placement, ProcessGroup, ProcessMesh, ShardPolicy, Strategy,
    backward, fully_shard, launch,
};
use burn_fsdp_models::{Gpt, GptConfig};
use serde_json::Value;

use crate::saving::save_taken;

const CONFIG: GptConfig = GptConfig {
    vocab: 19,
    seq: 8,
    layers: 2,
    heads: 2,
    dim: 6,
};

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-3)
}

/// The same on every rank, so the mean over the ranks does not depend on their number.
fn batch(step: usize, device: &Device) -> Tokens {
    let tokens = |start: usize| {
        let start = start as i64;
        let tokens = Tensor::<1, Int>::arange(start..start + 16, device);
        tokens.remainder_scalar(19).reshape([2, 8])
    };
    (tokens(step), tokens(step + 1))
}

fn mesh(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    let mesh = Mesh::line("shard", world.size())?;
    Ok(ProcessMesh::new(world, mesh)?)
}

/// An engine, and its division of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Engine {
    Eager(Strategy, Cut),
    Compiled(DataParallel),
    /// Compiled, with weights cut along their second dim.
    Columns,
}

const FULL: Engine = Engine::Eager(Strategy::FullShard, Cut::Elements);
const ROWS: Engine = Engine::Eager(Strategy::FullShard, Cut::Dims);
const WHOLE: Engine = Engine::Eager(Strategy::NoShard, Cut::Elements);
const SHARDED: Engine = Engine::Compiled(DataParallel::Strategy(Strategy::FullShard));
const REPLICATED: Engine = Engine::Compiled(DataParallel::Strategy(Strategy::NoShard));

fn eager_model(mesh: &ProcessMesh, strategy: Strategy, cut: Cut) -> Result<Gpt, Error> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let policy = ShardPolicy::new().units(["blocks.*"]);
    let policy = policy.strategy(strategy).cut(cut);
    let model = CONFIG.init(&device, 4).expect("valid");
    Ok(fully_shard(model, mesh, policy)?)
}

/// Every weight of the blocks cut along its second dim.
fn columns(mesh: &ProcessMesh) -> Mode {
    let expand = Expand::new().parameter("blocks.**.weight", "shard", Placement::Shard(1));
    Mode::expand(mesh.clone(), expand)
}

fn compiled_step(mode: Mode) -> Result<CompiledStep<Tokens>, Error> {
    let step = compile(
        |device: &Device| CONFIG.init(device, 4).expect("valid"),
        |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
        adamw().build(),
        mode,
    );
    Ok(step?)
}

/// The settings of a run, which resumes from a folder if there is one, trains, and saves.
#[derive(Debug, Clone)]
struct Run {
    engine: Engine,
    ranks: usize,
    from: Option<Arc<Path>>,
    steps: std::ops::Range<usize>,
    to: Option<Arc<Path>>,
}

/// Returns the losses of a run.
fn run(run: Run) -> Vec<f32> {
    let ranks = run.ranks;
    let body = move |world: ProcessGroup| -> Result<Vec<f32>, Error> {
        let mesh = mesh(&world)?;
        let saved = run
            .from
            .as_deref()
            .map(|from| Checkpoints::new(from).newest());
        let saved = saved.transpose()?;
        let mut losses = Vec::new();
        let taken = match run.engine {
            Engine::Eager(strategy, layout) => {
                let device = Device::flex().autodiff().gradient_checkpointing();
                let mut model = eager_model(&mesh, strategy, layout)?;
                let mut optimizer = adamw().init();
                if let Some(saved) = &saved {
                    (model, optimizer) = restore(model, optimizer, saved)?;
                }
                for step in run.steps.clone() {
                    let (tokens, targets) = batch(step, &device);
                    let loss = model.loss(tokens, targets);
                    losses.push(loss.clone().into_scalar::<f32>());
                    let gradients: GradientsParams = backward(loss, &model)?;
                    model = optimizer.step(1e-2, model, gradients);
                }
                snapshot(&model, &optimizer, mesh.mesh(), "shard")?
            }
            engine => {
                let mut step = compiled_step(match engine {
                    Engine::Compiled(style) => Mode::data_parallel(world.clone(), style),
                    _ => columns(&mesh),
                })?;
                if let Some(saved) = &saved {
                    restore_compiled(&mut step, saved)?;
                    assert_eq!(step.num_steps(), saved.index().training.step);
                }
                for index in run.steps.clone() {
                    let batch = batch(index, &Device::flex());
                    losses.push(step.step(1e-2, &batch)? as f32);
                }
                snapshot_compiled(&mut step, mesh.mesh(), "shard")?
            }
        };
        if let Some(to) = &run.to {
            save_taken(to, world, taken, run.steps.end as u64)?;
        }
        Ok(losses)
    };
    let losses = launch(LaunchConfig::new(ranks), body);
    losses
        .unwrap_or_else(|error| panic!("{error}"))
        .swap_remove(0)
}

/// Name and bytes of every whole tensor of a step, and the values other than tensors of the optimizer's
/// state.
fn contents(folder: &Path) -> (Vec<(String, Vec<u8>)>, Value) {
    let step = Checkpoints::new(folder).newest().expect("saved");
    let whole = |step: &Step, name: &str, shape: &[usize]| {
        let all = Region::Flat(0..shape.iter().product());
        step.read(name, &all).expect("whole")
    };
    let tensors = step.index().tensors.iter();
    let mut tensors: Vec<_> = tensors
        .map(|tensor| {
            (
                tensor.name.clone(),
                whole(&step, &tensor.name, &tensor.shape),
            )
        })
        .collect();
    tensors.sort();
    (tensors, without_groups(&step.index().training.optimizer))
}

/// The eager optimizer also records the paths of its groups; here it has only one group.
fn without_groups(optimizer: &Value) -> Value {
    let mut optimizer = optimizer.clone();
    let parameters = optimizer.as_object_mut().expect("an object");
    for kept in parameters.values_mut() {
        kept["group_path"] = Value::Null;
    }
    optimizer
}

#[test]
fn each_engine_resumes_the_others_runs() {
    let whole = Run {
        engine: FULL,
        ranks: 1,
        from: None,
        steps: 0..8,
        to: None,
    };
    let want = run(whole.clone());
    for (first, second) in [
        (FULL, SHARDED),
        (ROWS, SHARDED),
        (WHOLE, REPLICATED),
        (FULL, REPLICATED),
        (SHARDED, FULL),
        (SHARDED, ROWS),
        (REPLICATED, WHOLE),
        (REPLICATED, SHARDED),
        (Engine::Columns, FULL),
        (SHARDED, Engine::Columns),
    ] {
        for ranks in [[1, 1], [2, 2], [2, 3], [3, 1]] {
            let folder = tempfile::tempdir().expect("a folder");
            let path: Arc<Path> = folder.path().into();
            let before = run(Run {
                engine: first,
                ranks: ranks[0],
                steps: 0..4,
                to: Some(path.clone()),
                ..whole.clone()
            });
            let after = run(Run {
                engine: second,
                ranks: ranks[1],
                from: Some(path),
                steps: 4..8,
                ..whole.clone()
            });
            let got = before.iter().chain(&after);
            for (step, (got, want)) in got.zip(&want).enumerate() {
                assert!(
                    (got - want).abs() <= 1e-5 * want,
                    "{first:?} to {second:?} on {ranks:?} ranks, step {step}: {got} {want}"
                );
            }
        }
    }
}

#[test]
fn each_engine_restores_the_others_steps_bit_for_bit() {
    for (first, second) in [
        (FULL, SHARDED),
        (WHOLE, REPLICATED),
        (SHARDED, ROWS),
        (REPLICATED, FULL),
        (SHARDED, SHARDED),
        (ROWS, Engine::Columns),
        (Engine::Columns, REPLICATED),
        (ROWS, Engine::Compiled(DataParallel::Automatic)),
    ] {
        for ranks in [[1, 2], [2, 2], [3, 2]] {
            let [from, to] = [(), ()].map(|()| tempfile::tempdir().expect("a folder"));
            let steps = Run {
                engine: first,
                ranks: ranks[0],
                from: None,
                steps: 0..3,
                to: Some(from.path().into()),
            };
            run(steps.clone());
            // The run makes no step: the restored state is saved again.
            run(Run {
                engine: second,
                ranks: ranks[1],
                from: Some(from.path().into()),
                steps: 3..3,
                to: Some(to.path().into()),
            });
            let (saved, again) = (contents(from.path()), contents(to.path()));
            let states = |name: &str| name.starts_with("optimizer.");
            let num_states = saved.0.iter().filter(|(name, _)| states(name)).count();
            assert_eq!(3 * num_states, 2 * saved.0.len());
            assert!(saved == again, "{first:?} to {second:?} on {ranks:?} ranks");
        }
    }
}

#[test]
fn training_without_a_step_moves_between_engines() {
    for (first, second) in [(FULL, SHARDED), (SHARDED, FULL)] {
        let folder = tempfile::tempdir().expect("a folder");
        let path: Arc<Path> = folder.path().into();
        let base = Run {
            engine: first,
            ranks: 2,
            from: None,
            steps: 0..0,
            to: Some(path.clone()),
        };
        run(base.clone());
        let losses = |engine, from| {
            run(Run {
                engine,
                from,
                steps: 0..3,
                to: None,
                ..base.clone()
            })
        };
        let (want, got) = (losses(second, None), losses(second, Some(path)));
        assert_eq!(got, want, "{first:?} to {second:?}");
    }
}

#[test]
fn a_sharded_model_takes_the_weights_of_a_compiled_step() {
    let body = |world: ProcessGroup| -> Result<(), Error> {
        let mesh = mesh(&world)?;
        let mut step = compiled_step(Mode::data_parallel(world.clone(), Strategy::FullShard))?;
        let model = eager_model(&mesh, Strategy::FullShard, Cut::Dims)?;
        let mut model = load_compiled(model, &mut step)?;
        for index in 0..3 {
            let batch = batch(index, &Device::flex());
            let loss = step.step(1e-2, &batch)? as f32;
            let device = Device::flex().autodiff().gradient_checkpointing();
            let (tokens, targets) = self::batch(index, &device);
            let same = model.loss(tokens, targets).into_scalar::<f32>();
            assert!((loss - same).abs() <= 1e-6 * loss, "{loss} {same}");
            model = load_compiled(model, &mut step)?;
        }
        // Rank 0 sees every tensor whole.
        let mut seen = Vec::new();
        full_state(&model, |tensor| {
            seen.push((tensor.path.to_owned(), tensor.bytes.to_vec()));
        })?;
        assert_eq!(seen.is_empty(), world.rank() != 0);
        for parameter in step.parameters().to_vec() {
            let expected = step.parameter(&parameter.path)?;
            if let Some((_, bytes)) = seen.iter().find(|(path, _)| **path == *parameter.path) {
                assert_eq!(bytes, expected.as_bytes(), "{}", parameter.path);
            } else {
                assert!(world.rank() != 0, "{}", parameter.path);
            }
        }
        Ok(())
    };
    launch(LaunchConfig::new(2), body).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn another_model_is_rejected_and_each_parameter_keeps_its_step_count() {
    let folder = tempfile::tempdir().expect("a folder");
    let path: Arc<Path> = folder.path().into();
    run(Run {
        engine: FULL,
        ranks: 1,
        from: None,
        steps: 0..2,
        to: Some(path.clone()),
    });
    let body = move |world: ProcessGroup| -> Result<(), Error> {
        let saved = Checkpoints::new(&*path).newest()?;
        let other = GptConfig {
            layers: 1,
            ..CONFIG
        };
        let mut step = compile(
            move |device: &Device| other.init(device, 4).expect("valid"),
            |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
            adamw().build(),
            Mode::single(),
        )?;
        let before = step.parameter("head.weight")?;
        let message = restore_compiled(&mut step, &saved).unwrap_err().to_string();
        assert!(message.contains("blocks.1"), "{message}");
        assert_eq!(step.parameter("head.weight")?, before);

        // A parameter that is no longer trained; its state is kept in case it is trained again.
        let mut step = compile(
            |device: &Device| {
                let model = CONFIG.init(device, 4).expect("valid");
                model.freeze_group(ParamGroup::from_predicate("head"))
            },
            |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
            adamw().build(),
            Mode::single(),
        )?;
        restore_compiled(&mut step, &saved)?;
        step.step(1e-2, &batch(2, &Device::flex()))?;
        let taken = snapshot_compiled(&mut step, mesh(&world)?.mesh(), "shard")?;
        let time = |path: &str| {
            // The integer type may be either one.
            let time = taken.optimizer[path]["scalars"]["momentum.time"].as_object();
            time.and_then(|time| time.values().next()?.as_u64())
        };
        assert_eq!(
            (time("head.weight"), time("wte.weight")),
            (Some(2), Some(3))
        );

        // A parameter that is trained only later.
        let mut step = compiled_step(Mode::data_parallel(world.clone(), Strategy::FullShard))?;
        restore_compiled(&mut step, &saved)?;
        let mesh = mesh(&world)?;
        let mut taken = snapshot_compiled(&mut step, mesh.mesh(), "shard")?;
        let scalars = &mut taken.optimizer["head.weight"]["scalars"];
        let time = scalars.as_object_mut().expect("an object");
        assert_eq!(time.len(), 1, "{time:?}");
        time["momentum.time"] = serde_json::json!({"Int": 1});
        let younger = tempfile::tempdir().expect("a folder");
        save_taken(younger.path(), world.clone(), taken, 2)?;
        let saved = Checkpoints::new(younger.path()).newest()?;
        let mut step = compiled_step(Mode::data_parallel(world, Strategy::FullShard))?;
        restore_compiled(&mut step, &saved)?;
        let ages = |step: &CompiledStep<Tokens>| {
            let time = |path: &str| step.counters(path).expect("has a state")[0].1;
            ["head.weight", "wte.weight"].map(|path| u64::try_from(time(path)).expect("a count"))
        };
        assert_eq!(ages(&step), [1, 2]);
        step.step(1e-2, &batch(2, &Device::flex()))?;
        assert_eq!(ages(&step), [2, 3]);
        Ok(())
    };
    launch(LaunchConfig::new(1), body).unwrap_or_else(|error| panic!("{error}"));
}

/// The model without the part that its stand-in adds.
#[derive(Module, Debug)]
struct Plain {
    fc: Linear,
    out: Linear,
}

/// Adds a part with a parameter.
#[derive(Module, Debug)]
struct Gated {
    gate: Param<Tensor<1>>,
    fc: Linear,
    out: Linear,
}

struct Gate;

impl Override<Plain> for Gate {
    type Traced = Gated;

    fn replace(&self, module: Plain) -> Gated {
        let device = module.fc.weight.lazy_device();
        Gated {
            gate: Initializer::Constant { value: 0.5 }.init([7], &device),
            fc: module.fc,
            out: module.out,
        }
    }
}

impl Gated {
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let hidden = self.fc.forward(x).tanh() * self.gate.val().unsqueeze();
        (self.out.forward(hidden) - 1.0).square().mean()
    }
}

/// Trains with the stand-in, from the newest step of a folder. Returns the losses, and the added parameter before and after.
fn with_stand_in(
    ranks: usize,
    steps: std::ops::Range<usize>,
    [from, to]: [Option<&Path>; 2],
) -> (Vec<f64>, [Vec<f32>; 2]) {
    let [from, to] = [from, to].map(|folder| folder.map(Path::to_owned));
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let plain = |device: &Device| {
            let linear = |from, to, value| {
                let config = LinearConfig::new(from, to);
                config
                    .with_initializer(Initializer::Constant { value })
                    .init(device)
            };
            Plain {
                fc: linear(5, 7, 0.3),
                out: linear(7, 3, 0.2),
            }
        };
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compile_with(plain, Gated::loss, adamw().build(), mode, Gate)?;
        if let Some(from) = &from {
            restore_compiled(&mut step, &Checkpoints::new(from).newest()?)?;
        }
        let gate = |step: &mut CompiledStep<Tensor<2>>| -> Result<Vec<f32>, Error> {
            Ok(step.parameter("gate")?.try_to_vec().expect("floats"))
        };
        let before = gate(&mut step)?;
        let mut losses = Vec::new();
        for index in steps.clone() {
            let x = Tensor::<1, Int>::arange(0..20, &Device::flex()).float();
            let x = (x * (0.7 + index as f64)).sin().reshape([4, 5]);
            losses.push(step.step(1e-1, &x)?);
        }
        let after = gate(&mut step)?;
        if let Some(to) = &to {
            let mesh = mesh(&world)?;
            let taken = snapshot_compiled(&mut step, mesh.mesh(), "shard")?;
            save_taken(to, world, taken, steps.end as u64)?;
        }
        Ok((losses, [before, after]))
    };
    let done = launch(LaunchConfig::new(ranks), body);
    done.unwrap_or_else(|error| panic!("{error}"))
        .swap_remove(0)
}

/// Both the values and the optimizer's state.
#[test]
fn what_a_stand_in_adds_is_saved_and_resumed() {
    let (losses, [_, last]) = with_stand_in(1, 0..6, [None, None]);
    for [first, second] in [[1, 3], [2, 1], [3, 2], [2, 2]] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (_, [_, saved]) = with_stand_in(first, 0..3, [None, Some(folder.path())]);
        assert!(saved.iter().all(|value| (value - 0.5).abs() > 1e-3));
        let (rest, [resumed, after]) = with_stand_in(second, 3..6, [Some(folder.path()), None]);
        assert_eq!(resumed, saved, "{first} ranks, then {second}");
        for (loss, want) in rest.iter().zip(&losses[3..]) {
            assert!((loss - want).abs() <= 1e-5 * want, "{rest:?}, {losses:?}");
        }
        for (value, want) in after.iter().zip(&last) {
            assert!((value - want).abs() <= 1e-5, "{after:?}, not {last:?}");
        }
    }
}
