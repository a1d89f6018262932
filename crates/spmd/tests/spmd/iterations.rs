//! Nodes that run in the next step, compared with Burn's loop on one rank.

use std::num::NonZeroU64;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_mesh::Clip;
use burn_fsdp_spmd::graph::{CollectiveKind, Graph, Node, Phase, Stage};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::passes::{
    self, IterationGraph, IterationMove, MoveReductions, PassId, Pipeline, schedule,
};
use burn_fsdp_spmd::{
    Batch, BatchMapper, CompiledStep, Error, Evaluation, Mode, MoveError, Strategy,
};

use crate::clipping::sgd;
use crate::compiled::seeded;
use crate::eager::{self, adamw};
use crate::models::{Gpt, tokens};

const STEPS: usize = 7;

/// Losses, and parameters by path.
type Trained = (Vec<f64>, Vec<(String, Vec<f32>)>);

/// Moves the optimizer's work for parameters of some paths, optionally with the product that makes their gradient.
#[derive(Debug, Clone)]
struct MovePart {
    of: &'static str,
    steps: Option<u64>,
}

impl IterationMove for MovePart {
    fn id(&self) -> PassId {
        PassId::User("move a part")
    }

    fn moves(&self, step: &mut IterationGraph) -> Result<(), Error> {
        let nodes = step.graph().nodes().iter().enumerate();
        let is_part = |node: &Node| {
            node.path
                .as_deref()
                .is_some_and(|of| of.starts_with(self.of))
        };
        let part: Vec<usize> = nodes
            .filter(|(_, n)| is_part(n))
            .map(|(at, _)| at)
            .collect();
        let before = step.first_read(&part);
        step.move_to_next_iteration(part, before)?;
        if let Some(steps) = self.steps.and_then(NonZeroU64::new) {
            step.max_iterations(steps);
        }
        Ok(())
    }
}

/// The nodes of a step that move.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moves {
    Part,
    Reductions,
    ReductionsForTwoSteps,
    ReductionsAndOptimizer,
}

fn reductions() -> MoveReductions {
    MoveReductions::of(["head.*", "blocks.1.**"])
}

impl Moves {
    fn of(self, mode: Mode, options: Options) -> Mode {
        let two = NonZeroU64::new(2).expect("two");
        match self {
            Self::Part => {
                let (of, steps) = ("blocks.0.fc", None);
                mode.options(options)
                    .move_to_next_iteration(MovePart { of, steps })
            }
            Self::Reductions => mode.options(options).move_to_next_iteration(reductions()),
            Self::ReductionsForTwoSteps => {
                let two = reductions().max_iterations(two);
                mode.options(options).move_to_next_iteration(two)
            }
            Self::ReductionsAndOptimizer => {
                let options = options.optimizer(OptimizerPlace::InNextForward);
                mode.options(options).move_to_next_iteration(reductions())
            }
        }
    }
}

/// The fourth step has fewer rows.
fn rows_of(step: usize, ranks: usize) -> usize {
    match step {
        3 => 1,
        _ => 12 / ranks,
    }
}

fn expected(ranks: usize, is_adam: bool) -> eager::Trained {
    let batch = |step, device: &Device| tokens(step, 0, ranks * rows_of(step, ranks), device);
    let optimizer = if is_adam {
        adamw().init()
    } else {
        sgd().init()
    };
    let rate = |step| 1e-2 / (step + 1) as f64;
    eager::train(Gpt::new, Gpt::loss, batch, STEPS, rate, optimizer)
}

/// Trains, and reads the parameters between steps: with an evaluation after the second step, and directly after the
/// fifth.
fn train(world: &ProcessGroup, mode: Mode, is_adam: bool) -> Result<Trained, Error> {
    let device = Device::flex();
    let mode = mode.verified();
    let mut step = if is_adam {
        compile(Gpt::new, Gpt::loss, adamw().build(), mode)?
    } else {
        compile(Gpt::new, Gpt::loss, sgd().build(), mode)?
    };
    let mut evaluation = Evaluation::new(Gpt::new, |model: &Gpt, tokens: Tensor<2, Int>| {
        model.logits(tokens)
    });
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let rows = rows_of(index, world.size());
        let batch = tokens(index, world.rank() * rows, rows, &device);
        losses.push(step.step(1e-2 / (index + 1) as f64, &batch)?);
        match index {
            1 => {
                let logits = step.evaluate(&mut evaluation, &batch.0)?;
                let model = crate::evaluation::inferring(Gpt::new, &mut step);
                let want = model.logits(batch.0).into_data();
                let largest = want.iter::<f32>().fold(0f32, |most, x| most.max(x.abs()));
                for (got, want) in logits.into_data().iter::<f32>().zip(want.iter::<f32>()) {
                    assert!((got - want).abs() <= 1e-5 * largest, "{got}, not {want}");
                }
            }
            4 => {
                step.parameter("head.weight")?;
                step.state_shards("blocks.1.fc.weight")?;
            }
            _ => {}
        }
    }
    Ok((losses, parameters_of(&mut step)?))
}

fn parameters_of<B: Batch>(step: &mut CompiledStep<B>) -> Result<Vec<(String, Vec<f32>)>, Error> {
    let specs = step.parameters().iter();
    let paths: Vec<_> = specs.map(|spec| spec.path.clone()).collect();
    let mut parameters = Vec::new();
    for path in paths {
        let values = step.parameter(&path)?.try_to_vec::<f32>().expect("floats");
        parameters.push((path.to_string(), values));
    }
    Ok(parameters)
}

fn assert_close(what: &str, (losses, parameters): &Trained, one: &eager::Trained) {
    for (step, (loss, want)) in losses.iter().zip(&one.losses).enumerate() {
        let want = f64::from(*want);
        assert!(
            (loss - want).abs() <= 1e-5 * want,
            "{what}, step {step}: {loss}, not {want}"
        );
    }
    for (path, values) in parameters {
        let want = one.parameters[path].try_to_vec::<f32>().expect("floats");
        let largest = want.iter().fold(1e-2f32, |most, x| most.max(x.abs()));
        for (value, want) in values.iter().zip(&want) {
            let differs = (value - want).abs() > 1e-5 * largest;
            assert!(!differs, "{what}, {path}: {value}, not {want}");
        }
    }
}

#[test]
fn moved_nodes_match_one_rank() {
    let _guard = seeded();
    for ranks in 1..=4 {
        let one = [false, true].map(|is_adam| expected(ranks, is_adam));
        let of_options = [
            (Strategy::FullShard, Options::default()),
            (
                Strategy::FullShard,
                Options::default()
                    .prefetch(true)
                    .optimizer(OptimizerPlace::AtEnd),
            ),
            (Strategy::ShardGradOp, Options::default().bucket(None)),
            // A bucket would join the loss with gradients.
            (Strategy::NoShard, Options::default().bucket(None)),
        ];
        let of_moves = [
            Moves::Part,
            Moves::Reductions,
            Moves::ReductionsForTwoSteps,
            Moves::ReductionsAndOptimizer,
        ];
        for (number, (strategy, options)) in of_options.into_iter().enumerate() {
            for (index, moves) in of_moves.into_iter().enumerate() {
                // Each move meets each schedule on two numbers of ranks, one of them with Adam.
                if (number + index + ranks) % 2 == 1 {
                    continue;
                }
                let is_adam = (number + index + ranks) % 4 == 0;
                let what = format!("{moves:?} of {strategy:?} {number} on {ranks} ranks");
                let options = options.clone();
                let body = move |world: ProcessGroup| {
                    let mode = Mode::data_parallel(world.clone(), strategy);
                    let mode = moves.of(mode, options.clone());
                    let mode = if ranks == 2 { mode.certified() } else { mode };
                    train(&world, mode, is_adam)
                };
                Device::flex().seed(1);
                let got = launch(LaunchConfig::new(ranks), body);
                let got = got.unwrap_or_else(|error| panic!("{what}: {error}"));
                for other in &got[1..] {
                    assert_eq!(other, &got[0], "{what}: the ranks differ");
                }
                assert_close(&what, &got[0], &one[usize::from(is_adam)]);
            }
        }
    }
}

#[test]
fn moves_end_after_the_given_number_of_steps() {
    let _guard = seeded();
    for limit in [None, Some(1), Some(3)] {
        let mode = Mode::single().move_to_next_iteration(MovePart {
            of: "head",
            steps: limit,
        });
        let mut step = compile(Gpt::new, Gpt::loss, sgd().build(), mode).unwrap();
        let device = Device::flex();
        for index in 0..7_u64 {
            step.step(1e-2, &tokens(index as usize, 0, 2, &device))
                .unwrap();
            // The second step has other operations than the first, and nothing of the first is pending any more.
            let held = step.memory().live_bytes();
            step.flush().unwrap();
            let was_left = step.memory().live_bytes() < held;
            assert_eq!(was_left, limit != Some(1), "{limit:?}, step {index}");
        }
    }
    // Three steps in a row; the last one leaves nothing.
    let of = "head";
    let mode = Mode::single().move_to_next_iteration(MovePart { of, steps: Some(3) });
    let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode).unwrap();
    let device = Device::flex();
    step.step(1e-2, &tokens(0, 0, 2, &device)).unwrap();
    step.flush().unwrap();
    let mut held = Vec::new();
    for index in 1..7 {
        step.step(1e-2, &tokens(index, 0, 2, &device)).unwrap();
        held.push(step.memory().live_bytes());
    }
    let (left, none) = (held[0], held[2]);
    assert!(none < left);
    assert_eq!(held, [left, left, none, left, left, none]);
}

/// Returns a step on two ranks with its collectives inserted.
fn divided(clip: Option<Clip>) -> Graph {
    let graph = crate::passes::gpt();
    let options = Options::default()
        .clip_grad_norm(clip)
        .optimizer(OptimizerPlace::InNextForward);
    let passes = schedule::pipeline(2, Strategy::FullShard, &options, &[]);
    passes.run(graph).unwrap()
}

#[test]
fn invalid_moves_are_named_in_the_error() {
    let _guard = seeded();
    let graph = divided(None);
    let at = |of: &dyn Fn(&Node) -> bool| graph.nodes().iter().position(of).unwrap();
    let refused = |nodes: &[usize], before: Option<usize>| {
        let mut step = IterationGraph::new(graph.clone());
        let error = step.move_to_next_iteration(nodes.iter().copied(), before);
        error.unwrap_err().to_string()
    };
    // The gather is not a leaf: forward reads it.
    let gather = at(&|node| node.name() == "all_gather");
    let error = refused(&[gather], None);
    assert!(
        error.contains(&format!("node {gather} (all_gather)")) && error.contains("not moved reads"),
        "{error}"
    );
    // Part of an optimizer's step.
    let head: Vec<usize> = (0..graph.nodes().len())
        .filter(|at| graph.nodes()[*at].path.as_deref() == Some("head.weight"))
        .collect();
    let error = refused(&head[..head.len() - 1], None);
    assert!(error.contains("not moved reads"), "{error}");
    // After the first read of the values that it replaces.
    let error = refused(&head, None);
    assert!(
        error.contains("cannot run before node") && error.contains("first_read"),
        "{error}"
    );
    let step = IterationGraph::new(graph.clone());
    let before = step.first_read(&head);
    assert!(before.is_some());
    // Moving twice, and moving nothing.
    let mut step = step;
    step.move_to_next_iteration(head.clone(), before).unwrap();
    let error = step
        .move_to_next_iteration(head, before)
        .unwrap_err()
        .to_string();
    assert!(error.contains("already been moved"), "{error}");
    let error = refused(&[], None);
    assert!(error.contains("no node was chosen"), "{error}");
    // The loss is a result of the step.
    let loss = graph.loss().unwrap();
    let made = at(&|node| node.outputs().any(|id| id == loss));
    let error = refused(&[made], None);
    assert!(error.contains("a result of the step"), "{error}");
    // A wait without its start.
    let split = Pipeline::new()
        .then(passes::Split)
        .run(graph.clone())
        .unwrap();
    let mut step = IterationGraph::new(split);
    let reduces = |node: &Node| {
        node.collective
            .as_ref()
            .is_some_and(|of| of.kind == CollectiveKind::ReduceScatter)
    };
    let mut waits = step.graph().nodes().iter();
    let wait = waits
        .position(|node| reduces(node) && node.name().starts_with("wait"))
        .unwrap();
    let nodes = step.with_readers([wait]);
    let before = step.first_read(&nodes.iter().copied().collect::<Vec<_>>());
    let error = step
        .move_to_next_iteration(nodes, before)
        .unwrap_err()
        .to_string();
    assert!(error.contains("whose start is not moved"), "{error}");
    // The norm of clipped gradients is a result of the step.
    let step = IterationGraph::new(divided(Some(Clip::to(1.0))));
    let error = step.then(&reductions()).unwrap_err().to_string();
    assert!(error.contains("a result of the step"), "{error}");
    let step = IterationGraph::new(divided(None));
    let error = step.then(&MoveReductions::of(["heads.*"])).unwrap_err();
    assert!(error.to_string().contains("heads.*"), "{error}");
}

#[test]
fn steps_with_loss_scaling_move_nothing() {
    let _guard = seeded();
    let options = Options::default().scale_loss(burn_fsdp_spmd::LossScaling::default());
    let mode = Mode::single().options(options);
    let mode = mode.move_to_next_iteration(MovePart {
        of: "head",
        steps: None,
    });
    let error = compile(Gpt::new, Gpt::loss, adamw().build(), mode.clone()).unwrap_err();
    assert!(matches!(error, Error::Move(MoveError::Scaled)), "{error}");
    // No other function treats it as a step without moved nodes.
    let error = burn_fsdp_certificate::certify(crate::passes::gpt(), 1, &mode).unwrap_err();
    assert!(matches!(error, Error::Move(MoveError::Scaled)), "{error}");
    let error = burn_fsdp_spmd::lower(crate::passes::gpt(), &mode).unwrap_err();
    assert!(matches!(error, Error::Move(MoveError::Scaled)), "{error}");
}

/// Two models; every step but some trains one of them.
#[derive(Module, Debug)]
struct Pair {
    a: [Linear; 2],
    b: [Linear; 2],
}

/// Rows, and the model that they train.
#[derive(Debug, Clone)]
struct Turn(Tensor<2>, usize);

impl Batch for Turn {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.fixed("turn", &self.1);
        Self(mapper.float("x", self.0), self.1)
    }
}

impl Pair {
    fn new(device: &Device) -> Self {
        let layers = || [(5, 7), (7, 3)].map(|(x, y)| LinearConfig::new(x, y).init(device));
        Self {
            a: layers(),
            b: layers(),
        }
    }

    fn loss(&self, Turn(x, turn): Turn) -> Tensor<1> {
        let y = |[first, second]: &[Linear; 2]| second.forward(first.forward(x.clone()).tanh());
        let y = match turn {
            0 => y(&self.a),
            1 => y(&self.b),
            _ => y(&self.a) * y(&self.b),
        };
        (y - 1.0).square().mean()
    }
}

fn turn(step: usize, rank: usize, rows: usize, device: &Device) -> Turn {
    let numbers = (0..rows * 5).map(|at| ((step * 97 + rank * rows * 5 + at) as f32 * 0.7).sin());
    let data = TensorData::new(numbers.collect::<Vec<_>>(), [rows, 5]);
    let turns = [0, 1, 0, 0, 1, 1, 2, 0, 2];
    Turn(Tensor::from_data(data, device), turns[step])
}

/// A step may give no gradient to the named parameters; nothing of it moves then.
#[test]
fn steps_that_train_other_parameters_move_nothing() {
    const TURNS: usize = 9;
    let _guard = seeded();
    for ranks in 1..=4 {
        let batch = |step, device: &Device| turn(step, 0, 12, device);
        let one = eager::train(
            Pair::new,
            Pair::loss,
            batch,
            TURNS,
            |_| 1e-2,
            adamw().init(),
        );
        for strategy in [Strategy::FullShard, Strategy::NoShard] {
            for (patterns, optimizer) in [
                (&["a.**", "b.**"][..], OptimizerPlace::AtEnd),
                (&["a.**"], OptimizerPlace::InBackward),
                (&["b.1.*"], OptimizerPlace::InNextForward),
            ] {
                let what = format!("{patterns:?} of {strategy:?} on {ranks}");
                let body = move |world: ProcessGroup| {
                    let options = Options::default().bucket(None).optimizer(optimizer);
                    let mode = Mode::data_parallel(world.clone(), strategy).options(options);
                    let moves = MoveReductions::of(patterns.iter().copied());
                    let mode = mode.move_to_next_iteration(moves).verified().certified();
                    let mut step = compile(Pair::new, Pair::loss, adamw().build(), mode)?;
                    let rows = 12 / world.size();
                    let mut losses = Vec::new();
                    for index in 0..TURNS {
                        let batch = turn(index, world.rank(), rows, &Device::flex());
                        losses.push(step.step(1e-2, &batch)?);
                    }
                    Ok::<_, Error>((losses, parameters_of(&mut step)?))
                };
                Device::flex().seed(1);
                let got = launch(LaunchConfig::new(ranks), body);
                let got = got.unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_close(&what, &got[0], &one);
            }
        }
    }
}

/// Ranks that do not call the same are told so before the pending part of the last step runs. Then all continue.
#[test]
fn a_step_without_batches_keeps_pending_moves() {
    let _guard = seeded();
    let body = |world: ProcessGroup| {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mode = mode.move_to_next_iteration(reductions());
        let mut step = compile(Gpt::new, Gpt::loss, sgd().build(), mode)?;
        let batch = |index| tokens(index, world.rank() * 2, 2, &Device::flex());
        step.step(1e-2, &batch(0))?;
        let wrong = match world.rank() {
            0 => step.step_accumulated(1e-2, &[]),
            _ => step.step(1e-2, &batch(1)),
        };
        let wrong = wrong.expect_err("no batch");
        let differs = match world.rank() {
            0 => step.step_accumulated(1e-2, &[batch(1), batch(2)]),
            _ => step.step(1e-2, &batch(1)),
        };
        let differs = differs.expect_err("other steps");
        step.step(1e-2, &batch(1))?;
        let head = step.parameter("head.weight")?;
        Ok::<_, Error>((wrong.to_string(), differs.to_string(), head))
    };
    Device::flex().seed(1);
    let got = launch(LaunchConfig::new(2), body).unwrap();
    let (first, second) = (&got[0], &got[1]);
    assert_eq!(first.0, Error::NoBatch.to_string());
    assert_eq!(second.0, Error::PeerNotReady { rank: 0 }.to_string());
    for of in [first, second] {
        assert!(of.1.contains("a different graph"), "{}", of.1);
    }
    let batch = |step, device: &Device| tokens(step, 0, 4, device);
    let one = eager::train(Gpt::new, Gpt::loss, batch, 2, |_| 1e-2, sgd().init());
    let want = one.parameters["head.weight"].iter::<f32>();
    for (got, want) in first.2.iter::<f32>().zip(want) {
        assert!((got - want).abs() < 1e-5, "{got}, not {want}");
    }
}

/// Work of forward runs between the start of each reduction and its end.
#[test]
fn forward_runs_while_gradients_are_reduced() {
    let _guard = seeded();
    let options = Options::default()
        .prefetch(true)
        .optimizer(OptimizerPlace::InNextForward);
    let passes = schedule::pipeline(2, Strategy::FullShard, &options, &[]);
    let graph = passes.run(crate::passes::gpt()).unwrap();
    let step = IterationGraph::new(graph).then(&reductions()).unwrap();
    let parts = step.split(&Pipeline::new().then(passes::Liveness)).unwrap();
    let nodes = parts.main.nodes();
    let is_of = |node: &Node, stage| {
        let of = node.collective.as_ref();
        of.is_some_and(|of| of.kind == CollectiveKind::ReduceScatter && of.stage == stage)
    };
    let starts = |graph: &Graph| {
        let starts = graph
            .nodes()
            .iter()
            .filter(|node| is_of(node, Stage::Start));
        starts.count()
    };
    let mut moved = 0;
    let all = nodes.iter().enumerate();
    for (at, start) in all.filter(|(_, node)| is_of(node, Stage::Start)) {
        let reads = |node: &&Node| node.inputs().any(|id| start.outputs().any(|out| out == id));
        let waits = |node: &&Node| is_of(node, Stage::Wait) && reads(node);
        let behind = || nodes[at..].iter();
        let between = behind().take_while(|node| !waits(node));
        let before = nodes[..at].iter();
        if before.rev().any(|node| node.phase == Phase::Backward) {
            continue;
        }
        moved += 1;
        assert!(behind().any(|node| waits(&node)));
        let work = between.filter(|node| node.phase == Phase::Forward && node.collective.is_none());
        assert!(work.count() > 5, "{} at {at} is not hidden", start.name());
    }
    assert!(moved > 0);
    assert_eq!(moved, starts(&parts.cleanup));
}

#[test]
fn the_reduction_of_a_gradient_is_in_the_forward_of_the_next_step() {
    let _guard = seeded();
    let step = IterationGraph::new(divided(None))
        .then(&reductions())
        .unwrap();
    let parts = step.split(&Pipeline::new().then(passes::Liveness)).unwrap();
    let reduced = |graph: &Graph| {
        let nodes = graph.nodes().iter().enumerate();
        let reduced = nodes.filter(|(_, node)| node.name() == "reduce_scatter");
        reduced.map(|(at, _)| at).collect::<Vec<_>>()
    };
    let backward = parts.main.nodes().iter();
    let backward = backward
        .map(|node| node.phase)
        .position(|of| of == burn_fsdp_spmd::graph::Phase::Backward);
    let (setup, main, cleanup) = (
        reduced(&parts.setup),
        reduced(&parts.main),
        reduced(&parts.cleanup),
    );
    assert!(!setup.is_empty() && !cleanup.is_empty());
    assert_eq!(main.len(), setup.len() + cleanup.len());
    let early = main.iter().filter(|at| Some(**at) < backward);
    assert_eq!(early.count(), cleanup.len());
    for graph in [&parts.setup, &parts.main, &parts.cleanup] {
        passes::verify(graph).unwrap();
    }
}

/// Micro-batches move nothing, and first finish the nodes that the previous step has moved.
#[test]
fn a_step_of_micro_batches_finishes_what_was_moved() {
    let _guard = seeded();
    // Number of micro-batches in each step.
    const MICRO: [usize; 7] = [1, 2, 1, 1, 3, 2, 1];
    let place = |step: usize, micro: usize| 10 * step + micro;
    let batches = |step: usize, device: &Device| -> Vec<_> {
        let micros = 0..MICRO[step];
        micros
            .map(|micro| tokens(place(step, micro), 0, 12, device))
            .collect()
    };
    let clip = (f64::INFINITY, |_: &[f64]| 0.0);
    let (one, _) = eager::train_clipped(
        Gpt::new,
        Gpt::loss,
        batches,
        MICRO.len(),
        adamw().init(),
        clip,
    );
    for ranks in 1..=3 {
        for moves in [
            Moves::Part,
            Moves::Reductions,
            Moves::ReductionsForTwoSteps,
            Moves::ReductionsAndOptimizer,
        ] {
            let what = format!("{moves:?} on {ranks} ranks");
            let body = move |world: ProcessGroup| {
                let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
                let mode = moves.of(mode, Options::default()).verified();
                let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
                let rows = 12 / world.size();
                let mut losses = Vec::new();
                for (index, number) in MICRO.into_iter().enumerate() {
                    let batch = |micro| {
                        let first = world.rank() * rows;
                        tokens(place(index, micro), first, rows, &Device::flex())
                    };
                    let batches: Vec<_> = (0..number).map(batch).collect();
                    losses.push(step.step_accumulated(1e-2, &batches)?);
                    if number > 1 {
                        let held = step.memory().live_bytes();
                        step.flush()?;
                        assert_eq!(step.memory().live_bytes(), held, "step {index}");
                    }
                }
                Ok::<_, Error>((losses, parameters_of(&mut step)?))
            };
            Device::flex().seed(1);
            let got = launch(LaunchConfig::new(ranks), body);
            let got = got.unwrap_or_else(|error| panic!("{what}: {error}"));
            for other in &got[1..] {
                assert_eq!(other, &got[0], "{what}: the ranks differ");
            }
            assert_close(&what, &got[0], &one);
        }
    }
}
