//! States that a user's pass adds to a compiled step: computed in the graph, equal on all ranks, saved and resumed.

use std::path::Path;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::compile::{
    CompiledStep, Evaluation, Mode, Options, compile, restore_compiled, snapshot_compiled,
};
use burn_fsdp::internals::compile::graph::{Graph, Node, Phase, Role, Update};
use burn_fsdp::internals::compile::passes::schedule::OptimizerPlace;
use burn_fsdp::internals::compile::passes::{GraphTransform, PassId, PassState};
use burn_fsdp::internals::compile::{Error as GraphError, restore_compiled_matching};
use burn_fsdp::{Error, LaunchConfig, Mesh, ProcessGroup, Strategy, fully_shard, launch};
use burn_fsdp::{ShardPolicy, checkpoint::restore};
use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorId};

use crate::fixed::Fixed;
use crate::saving::save_taken;

const RATE: f64 = 1e-2;
const KEPT: f32 = 0.75;
const MEAN: &str = "loss.mean";
const STEPS: &str = "loss.steps";

/// Keeps a moving average of the loss, and counts steps.
#[derive(Debug)]
struct Watch;

impl GraphTransform for Watch {
    fn id(&self) -> PassId {
        PassId::User("watch")
    }

    fn states(&self, states: &mut Vec<PassState>) {
        let state = |path: &str, initial| PassState {
            path: path.to_owned(),
            initial,
        };
        states.push(state(MEAN, TensorData::from([8f32])));
        states.push(state(STEPS, TensorData::from([0i64])));
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, GraphError> {
        let state = |path| graph.parameter(path).map(|of| of.value);
        let (Some(mean), steps, Some(loss)) = (state(MEAN), state(STEPS), graph.loss()) else {
            return Ok(graph);
        };
        let kept = scaled(&mut graph, mean, KEPT)?;
        let own = scaled(&mut graph, loss, 1.0 - KEPT)?;
        let sum = result_like(&mut graph, mean)?;
        let sum_of = NumericOperationIr::Add(BinaryOpIr {
            lhs: graph.read(kept)?,
            rhs: graph.read(own)?,
            out: graph.write(sum)?,
        });
        let sum_of = OperationIr::NumericFloat(DType::F32, sum_of);
        graph.push(Node::new(sum_of, Phase::Optimizer));
        replace(&mut graph, mean, sum);
        // A later pass may have removed it.
        if let Some(steps) = steps {
            let next = result_like(&mut graph, steps)?;
            let one_more = NumericOperationIr::AddScalar(ScalarOpIr {
                lhs: graph.read(steps)?,
                rhs: ScalarIr::Int(1),
                out: graph.write(next)?,
            });
            let one_more = OperationIr::NumericInt(DType::I64, one_more);
            graph.push(Node::new(one_more, Phase::Optimizer));
            replace(&mut graph, steps, next);
        }
        Ok(graph)
    }
}

fn result_like(graph: &mut Graph, of: TensorId) -> Result<TensorId, GraphError> {
    let like = graph.read(of)?;
    Ok(graph.add_value(like.shape.to_vec(), like.dtype, Role::Temporary))
}

fn scaled(graph: &mut Graph, of: TensorId, factor: f32) -> Result<TensorId, GraphError> {
    let scaled = result_like(graph, of)?;
    let operation = NumericOperationIr::MulScalar(ScalarOpIr {
        lhs: graph.read(of)?,
        rhs: ScalarIr::Float(factor.into()),
        out: graph.write(scaled)?,
    });
    let operation = OperationIr::NumericFloat(DType::F32, operation);
    graph.push(Node::new(operation, Phase::Optimizer));
    Ok(scaled)
}

fn replace(graph: &mut Graph, into: TensorId, from: TensorId) {
    graph.updates_mut().push(Update { into, from });
}

/// Removes the number of steps from the states.
#[derive(Debug)]
struct Forget;

impl GraphTransform for Forget {
    fn id(&self) -> PassId {
        PassId::User("forget")
    }

    fn states(&self, states: &mut Vec<PassState>) {
        states.retain(|state| state.path != STEPS);
    }

    fn transform(&self, graph: Graph) -> Result<Graph, GraphError> {
        Ok(graph)
    }
}

/// Keeps a value of each rank's own rows, which differs between ranks: the loss before it is averaged.
#[derive(Debug)]
struct KeepOwn;

impl GraphTransform for KeepOwn {
    fn id(&self) -> PassId {
        PassId::User("keep own")
    }

    fn states(&self, states: &mut Vec<PassState>) {
        states.push(PassState {
            path: "own.loss".to_owned(),
            initial: TensorData::from([0f32]),
        });
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, GraphError> {
        let mean = graph.loss();
        let mut nodes = graph.nodes().iter();
        let own = nodes.find_map(|node| {
            let is_mean = node.outputs().any(|output| Some(output) == mean);
            node.inputs().next().filter(|_| is_mean)
        });
        let state = graph.parameter("own.loss").map(|of| of.value);
        if let (Some(into), Some(from)) = (state, own) {
            replace(&mut graph, into, from);
        }
        Ok(graph)
    }
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    head: Linear,
}

impl Net {
    fn drawn(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(5, 7).init(device),
            head: LinearConfig::new(7, 3).init(device),
        }
    }

    fn new(device: &Device) -> Self {
        Self::drawn(device).map(&mut Fixed(0))
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.first.forward(x).tanh();
        (self.head.forward(x) - 0.3).square().mean()
    }
}

type Step = CompiledStep<Tensor<2>>;

/// A rank's batch in a step.
fn batch(step: u64, rank: usize) -> Tensor<2> {
    let value = |i: u64| ((i * 7 + step * 5 + rank as u64 * 3) % 13) as f32 / 13.0 - 0.4;
    let values: Vec<f32> = (0..4 * 5).map(value).collect();
    Tensor::from_data(TensorData::new(values, [4, 5]), &Device::flex())
}

fn compiled(mode: Mode) -> Result<Step, Error> {
    let loss = |net: &Net, x: Tensor<2>| net.loss(x);
    Ok(compile(
        Net::new,
        loss,
        AdamWConfig::new().build(),
        mode.verified(),
    )?)
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

/// The states as numbers.
fn states(step: &mut Step) -> Result<(f32, i64), Error> {
    let mean = step.parameter(MEAN)?.iter::<f32>().next();
    let steps = step.parameter(STEPS)?.iter::<i64>().next();
    Ok((mean.expect("one number"), steps.expect("one number")))
}

/// Computes the moving average from the losses that steps return.
fn mean_of(losses: &[f64], from: f32) -> f32 {
    let next = |mean: f32, loss: &f64| mean * KEPT + *loss as f32 * (1.0 - KEPT);
    losses.iter().fold(from, next)
}

#[test]
fn states_follow_the_steps_on_all_ranks() {
    for ranks in [1, 2, 4] {
        for strategy in [Strategy::FullShard, Strategy::NoShard] {
            for place in [OptimizerPlace::InBackward, OptimizerPlace::InNextForward] {
                let got = on_ranks(ranks, move |world| {
                    let options = Options::default().optimizer(place);
                    let mode = Mode::data_parallel(world.clone(), strategy).options(options);
                    let mut step = compiled(mode.transform(Watch))?;
                    let mut all = vec![(states(&mut step)?, 8.0)];
                    let mut losses = Vec::new();
                    for number in 0..5 {
                        losses.push(step.step(RATE, &batch(number, world.rank()))?);
                        all.push((states(&mut step)?, mean_of(&losses, 8.0)));
                    }
                    Ok(all)
                });
                for (rank, all) in got.iter().enumerate() {
                    assert_eq!(all, &got[0], "rank {rank} of {ranks}, {strategy:?}");
                    for (number, ((mean, steps), expected)) in all.iter().enumerate() {
                        let what = format!("step {number}, {ranks} ranks, {strategy:?}, {place:?}");
                        assert_eq!((*mean, *steps), (*expected, number as i64), "{what}");
                    }
                }
            }
        }
    }
}

/// Each micro-batch updates the states. An evaluation leaves them alone.
#[test]
fn micro_batches_update_states_and_evaluations_do_not() {
    let got = on_ranks(2, |world| {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compiled(mode.transform(Watch))?;
        let mut forward = Evaluation::new(Net::drawn, |net: &Net, x: Tensor<2>| net.loss(x));
        step.evaluate(&mut forward, &batch(0, world.rank()))?;
        for number in 0..2 {
            let batches = [0, 1, 2].map(|micro| batch(3 * number + micro, world.rank()));
            step.step_accumulated(RATE, &batches)?;
            step.evaluate(&mut forward, &batches[0])?;
        }
        Ok(states(&mut step)?.1)
    });
    assert_eq!(got, [6, 6]);
}

fn save(step: &mut Step, number: u64, folder: &Path, world: ProcessGroup) -> Result<(), Error> {
    let mesh = Mesh::line("shard", world.size())?;
    let taken = snapshot_compiled(step, &mesh, "shard")?;
    save_taken(folder, world, taken, number)
}

/// Trains up to step `until` from the newest step of a folder, and saves. Returns the states and the new losses.
fn leg(ranks: usize, until: u64, folder: &Path) -> ((f32, i64), Vec<f64>) {
    let folder = folder.to_owned();
    let got = on_ranks(ranks, move |world| {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compiled(mode.transform(Watch))?;
        if let Ok(saved) = Checkpoints::new(&folder).newest() {
            restore_compiled(&mut step, &saved)?;
        }
        let mut losses = Vec::new();
        for number in step.num_steps()..until {
            losses.push(step.step(RATE, &batch(number, world.rank()))?);
        }
        save(&mut step, until, &folder, world)?;
        Ok((states(&mut step)?, losses))
    });
    assert!(got.iter().all(|of| *of == got[0]));
    got.into_iter().next().expect("a rank")
}

#[test]
fn states_are_saved_and_resumed_on_other_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut mean, mut until) = (8.0, 0);
    for ranks in [2, 1, 4] {
        until += 2;
        let (got, losses) = leg(ranks, until, folder.path());
        mean = mean_of(&losses, mean);
        assert_eq!(
            (got, losses.len()),
            ((mean, until as i64), 2),
            "{ranks} ranks"
        );
    }
}

/// A saved step and a mode must have the same states, unless the caller selects what to restore.
#[test]
fn other_states_than_saved_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_, losses) = leg(2, 2, folder.path());
    let path = folder.path().to_owned();
    let got = on_ranks(2, move |world| {
        let mode = || Mode::data_parallel(world.clone(), Strategy::FullShard);
        let saved = Checkpoints::new(&path).newest()?;
        let refused = |mode: Mode| {
            let restored = restore_compiled(&mut compiled(mode)?, &saved);
            Ok::<_, Error>(restored.expect_err("other states").to_string())
        };
        let removed = refused(mode())?;
        let added = refused(mode().transform(Watch).transform(KeepOwn))?;
        let mesh = burn_fsdp::ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let device = Device::flex().autodiff();
        let net = fully_shard(Net::new(&device), &mesh, ShardPolicy::new())?;
        let eager = restore(net, AdamWConfig::new().init(), &saved);
        let eager = eager.err().expect("an eager model has none").to_string();
        // The number of steps is dropped. The average goes on.
        let mut step = compiled(mode().transform(Watch).transform(Forget))?;
        restore_compiled_matching(&mut step, &saved, |path| path != STEPS)?;
        let loss = step.step(RATE, &batch(2, world.rank()))?;
        let mean = step.parameter(MEAN)?.iter::<f32>().next();
        let forgotten = step.parameter(STEPS).expect_err("removed").to_string();
        Ok((removed, added, eager, (mean, loss), forgotten))
    });
    for (removed, added, eager, (mean, loss), forgotten) in got {
        assert!(removed.contains(MEAN), "{removed}");
        assert!(added.contains("own.loss"), "{added}");
        assert!(eager.contains(MEAN), "{eager}");
        assert!(forgotten.contains(STEPS), "{forgotten}");
        let expected = mean_of(&[loss], mean_of(&losses, 8.0));
        assert_eq!(mean, Some(expected));
    }
}

/// Ranks cannot keep different values, and a state cannot hide a tensor of the model.
#[test]
fn states_that_differ_among_ranks_are_refused() {
    let refused = on_ranks(2, |world| {
        let mode = || Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compiled(mode().transform(KeepOwn))?;
        let varying = step.step(RATE, &batch(0, world.rank()));
        let twice = compiled(mode().transform(Named("head.bias", 0.0)));
        let varying = varying.expect_err("it differs").to_string();
        // Each rank has its own initial value, and all begin with the value of rank 0.
        let mut step = compiled(mode().transform(Named("level", world.rank() as f32 + 5.0)))?;
        step.step(RATE, &batch(0, world.rank()))?;
        let level = step.parameter("level")?.iter::<f32>().next();
        Ok((
            varying,
            twice.expect_err("a name of the model").to_string(),
            level,
        ))
    });
    for (varying, twice, level) in refused {
        assert!(
            varying.contains("state own.loss of a pass is replicate"),
            "{varying}"
        );
        assert!(twice.contains("head.bias"), "{twice}");
        assert_eq!(level, Some(5.0));
    }
}

/// Adds a state that never changes.
#[derive(Debug)]
struct Named(&'static str, f32);

impl GraphTransform for Named {
    fn id(&self) -> PassId {
        PassId::User("named")
    }

    fn states(&self, states: &mut Vec<PassState>) {
        states.push(PassState {
            path: self.0.to_owned(),
            initial: TensorData::from([self.1]),
        });
    }

    fn transform(&self, graph: Graph) -> Result<Graph, GraphError> {
        Ok(graph)
    }
}

/// The proof covers the passes after the user's, and lists the user's as assumed.
#[test]
fn steps_with_states_are_certified() {
    let got = on_ranks(2, |world| {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compiled(mode.transform(Watch).certified())?;
        step.step(RATE, &batch(0, world.rank()))?;
        let certificate = step.certificate().map(ToString::to_string);
        Ok(certificate.expect("proved"))
    });
    assert!(got.iter().all(|of| of.contains("watch")), "{got:?}");
}
