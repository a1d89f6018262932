//! Gradients over several micro-batches, scaled by their norm, compared with Burn's loop on one rank.

use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Placement::Shard;
use burn_fsdp_mesh::{Clip, Mesh, NonFinite, Norm};
use burn_fsdp_spmd::graph::Role;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::passes::{IterationGraph, IterationMove, PassId};
use burn_fsdp_spmd::{DataParallel, Error, Expand, Mode, Strategy};

use crate::compiled::seeded;
use crate::eager;
use crate::models::{Cnn, Gpt, ImageBatch, TokenBatch, images, tokens};

pub(crate) const STEPS: usize = 6;
pub(crate) const ROWS: usize = 12;

/// A step of stochastic gradient descent is as long as its gradient, and its first velocity is a gradient.
pub(crate) fn sgd() -> SgdConfig {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new()))
}

/// Losses, norms and parameters by path.
pub(crate) type Trained = (Vec<f64>, Vec<Option<f64>>, Vec<(String, Vec<f32>)>);

/// Trains a GPT over that many micro-batches a step, each divided among the ranks.
pub(crate) fn trained(
    num_ranks: usize,
    num_batches: usize,
    mode: impl Fn(ProcessGroup) -> Result<(Mode, usize, usize), Error> + Send + Sync + 'static,
) -> Trained {
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| -> Result<Trained, Error> {
        let device = Device::flex();
        // The number of parts of the batch, and this rank's part.
        let (mode, parts, own) = mode(world)?;
        let mut step = compile(Gpt::new, Gpt::loss, sgd().build(), mode.verified())?;
        let rows = ROWS / parts;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for index in 0..STEPS {
            let batches: Vec<TokenBatch> = (0..num_batches)
                .map(|micro| tokens(index, micro * ROWS + own * rows, rows, &device))
                .collect();
            losses.push(step.step_accumulated(1e-2, &batches)?);
            norms.push(step.grad_norm());
        }
        let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
        let mut parameters = Vec::new();
        for path in paths {
            let values = step.parameter(&path)?.try_to_vec::<f32>();
            parameters.push((path.to_string(), values.expect("all are floats")));
        }
        Ok((losses, norms, parameters))
    };
    let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
    for other in &results[1..] {
        assert_eq!(other, &results[0], "the ranks differ");
    }
    results.swap_remove(0)
}

/// Moves the optimizer's step, which reads the norm, for the parameter with the largest gradients into the next step.
#[derive(Debug)]
struct MoveHead;

impl IterationMove for MoveHead {
    fn id(&self) -> PassId {
        PassId::User("move the head")
    }

    fn moves(&self, step: &mut IterationGraph) -> Result<(), Error> {
        let nodes = step.graph().nodes().iter().enumerate();
        let head = nodes.filter(|(_, node)| node.path.as_deref() == Some("head.weight"));
        let head: Vec<usize> = head.map(|(index, _)| index).collect();
        let before = step.first_read(&head);
        step.move_to_next_iteration(head, before)
    }
}

#[test]
fn a_moved_part_of_the_optimizer_gets_clipped_gradients() {
    let _guard = seeded();
    let one = expected(1, 0.5, Norm::default());
    for style in [Strategy::FullShard, Strategy::NoShard] {
        for num_ranks in 1..=4 {
            let options = Options::default().clip_grad_norm(Clip::to(0.5));
            let mode = data_parallel(style.into(), options);
            let mode = move |world| {
                let (mode, parts, own) = mode(world)?;
                Ok((
                    mode.move_to_next_iteration(MoveHead).certified(),
                    parts,
                    own,
                ))
            };
            let got = trained(num_ranks, 1, mode);
            assert!(got.1.iter().all(Option::is_some));
            assert_close(&format!("{style:?} on {num_ranks}"), &got, &one);
        }
    }
}

fn data_parallel(
    style: DataParallel,
    options: Options,
) -> impl Fn(ProcessGroup) -> Result<(Mode, usize, usize), Error> {
    move |world| {
        let (size, rank) = (world.size(), world.rank());
        let mode = Mode::data_parallel(world, style).options(options.clone());
        Ok((mode, size, rank))
    }
}

pub(crate) fn expected(
    num_batches: usize,
    max_norm: f64,
    norm: Norm,
) -> (eager::Trained, Vec<f64>) {
    let batches = |step: usize, device: &Device| {
        let micro = |micro| tokens(step, micro * ROWS, ROWS, device);
        (0..num_batches).map(micro).collect()
    };
    let of = move |elements: &[f64]| {
        let sizes = elements.iter().map(|x| x.abs());
        match norm {
            Norm::P(p) => sizes.map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p),
            Norm::Infinity => sizes.fold(0.0, f64::max),
        }
    };
    eager::train_clipped(
        Gpt::new,
        Gpt::loss,
        batches,
        STEPS,
        sgd().init(),
        (max_norm, of),
    )
}

pub(crate) fn assert_close(what: &str, got: &Trained, expected: &(eager::Trained, Vec<f64>)) {
    let (losses, norms, parameters) = got;
    let near = |a: f64, b: f64, of: f64| (a - b).abs() <= 1e-5 * of;
    for (step, (loss, expected)) in losses.iter().zip(&expected.0.losses).enumerate() {
        let expected = f64::from(*expected);
        assert!(
            near(*loss, expected, expected),
            "{what}, step {step}: loss {loss}, not {expected}"
        );
    }
    for (step, (norm, expected)) in norms.iter().zip(&expected.1).enumerate() {
        if let Some(norm) = norm {
            assert!(
                near(*norm, *expected, *expected),
                "{what}, step {step}: norm {norm}, not {expected}"
            );
        }
    }
    for (path, values) in parameters {
        let expected = expected.0.parameters[path].try_to_vec::<f32>().unwrap();
        let largest = expected.iter().fold(1e-2f32, |most, x| most.max(x.abs()));
        for (value, expected) in values.iter().zip(&expected) {
            let (value, expected) = (f64::from(*value), f64::from(*expected));
            assert!(
                near(value, expected, f64::from(largest)),
                "{what}, {path}: {value}, not {expected}"
            );
        }
    }
}

#[test]
fn ranks_clip_by_the_norm_of_all_gradients() {
    let _guard = seeded();
    let styles = [
        Strategy::FullShard.into(),
        Strategy::NoShard.into(),
        Strategy::ShardGradOp.into(),
        DataParallel::Automatic,
    ];
    for norm in [Norm::P(2.0), Norm::P(1.0), Norm::P(3.0), Norm::Infinity] {
        let (_, norms) = expected(1, f64::INFINITY, norm);
        // Some steps are clipped and some are not.
        let mut sorted = norms.clone();
        sorted.sort_by(f64::total_cmp);
        let max_norm = sorted[STEPS / 2] * 0.999;
        let one = expected(1, max_norm, norm);
        assert!(one.1.iter().any(|norm| *norm < max_norm), "{:?}", one.1);
        assert!(one.1.iter().any(|norm| *norm > max_norm), "{:?}", one.1);
        let options = Options::default().clip_grad_norm(Clip::to(max_norm).norm(norm));
        // The norm that is measured is nearly independent of the division.
        let (of_norm, ranks) = match norm {
            Norm::P(2.0) => (&styles[..], &[1, 2, 3, 4][..]),
            _ => (&styles[..1], &[3][..]),
        };
        for style in of_norm.iter().copied() {
            for num_ranks in ranks.iter().copied() {
                let got = trained(num_ranks, 1, data_parallel(style, options.clone()));
                assert!(got.1.iter().all(Option::is_some));
                assert_close(&format!("{norm:?}, {style:?} on {num_ranks}"), &got, &one);
            }
        }
    }
}

#[test]
fn micro_batches_are_one_step() {
    let _guard = seeded();
    for (num_batches, clip) in [(3, None), (2, Some(0.5)), (1, Some(0.5))] {
        let one = expected(num_batches, clip.unwrap_or(f64::INFINITY), Norm::default());
        let clipped = Options::default().clip_grad_norm(clip.map(Clip::to));
        let options = [
            clipped.clone(),
            clipped.clone().prefetch(true),
            clipped
                .clone()
                .bucket(None)
                .optimizer(OptimizerPlace::AtEnd),
            clipped.optimizer(OptimizerPlace::InNextForward),
        ];
        for (index, options) in options.iter().enumerate() {
            for style in [Strategy::FullShard, Strategy::NoShard] {
                for num_ranks in [1, 2, 3] {
                    let mode = data_parallel(style.into(), options.clone());
                    let got = trained(num_ranks, num_batches, mode);
                    assert_eq!(got.1.iter().all(Option::is_some), clip.is_some());
                    let what = format!("{num_batches} of {style:?} {index} on {num_ranks}");
                    assert_close(&what, &got, &one);
                }
            }
        }
    }
}

#[test]
fn parameters_cut_along_an_axis_count_once() {
    let _guard = seeded();
    for (num_batches, max_norm) in [(1, 0.5), (2, 0.5)] {
        let one = expected(num_batches, max_norm, Norm::default());
        for (data, model) in [(1, 2), (2, 2), (1, 3), (1, 5)] {
            let mode = move |world: ProcessGroup| {
                let mesh = Mesh::new([("data", data), ("model", model)])?;
                let mesh = ProcessMesh::new(&world, mesh).map_err(|source| Error::Collective {
                    node: 0,
                    source: std::sync::Arc::new(source),
                })?;
                let expand = Expand::new()
                    .parameter("blocks.*.fc.weight", "model", Shard(1))
                    .parameter("blocks.*.fc.bias", "model", Shard(0))
                    .parameter("blocks.*.out.weight", "model", Shard(0))
                    .input("**", "data", Shard(0));
                let clip = Clip::to(max_norm);
                let options = Options::default().clip_grad_norm(clip);
                let own = world.rank() / model;
                Ok((Mode::expand(mesh, expand).options(options), data, own))
            };
            let got = trained(data * model, num_batches, mode);
            assert_close(&format!("{num_batches} on {data} x {model}"), &got, &one);
        }
    }
}

#[test]
fn running_statistics_move_with_each_micro_batch() {
    let _guard = seeded();
    let batches = |step: usize, device: &Device| -> Vec<ImageBatch> {
        (0..2)
            .map(|micro| images(2 * step + micro, device))
            .collect()
    };
    let (expected, _) = eager::train_clipped(
        Cnn::without_dropout,
        Cnn::loss,
        batches,
        3,
        sgd().init(),
        (f64::INFINITY, |_: &[f64]| 0.0),
    );
    let device = Device::flex();
    device.seed(1);
    let mode = Mode::single().verified();
    let mut step = compile(Cnn::without_dropout, Cnn::loss, sgd().build(), mode).unwrap();
    for index in 0..3 {
        step.step_accumulated(1e-2, &batches(index, &device))
            .unwrap();
    }
    for (path, expected) in &expected.parameters {
        let got = step.parameter(path).unwrap();
        got.assert_approx_eq::<f32>(expected, burn::tensor::Tolerance::rel_abs(1e-5, 1e-6));
    }
}

/// All-gathers, reduce-scatters and all-reduces of the second step.
fn counts(num_batches: usize, style: Strategy, clip: Option<Clip>) -> [u64; 3] {
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let options = Options::default().clip_grad_norm(clip);
        let mode = Mode::data_parallel(world.clone(), style).options(options);
        let mut step = compile(Gpt::new, Gpt::loss, sgd().build(), mode)?;
        let batches = vec![tokens(0, world.rank(), 1, &device); num_batches];
        step.step_accumulated(1e-2, &batches)?;
        let before = world.counts();
        step.step_accumulated(1e-2, &batches)?;
        let after = world.counts();
        if num_batches > 1 {
            let graph = step.graph().expect("it has run");
            let pending = graph
                .values()
                .filter(|value| matches!(value.role, Role::Pending(_)));
            let elements: usize = pending.map(|value| value.num_elements()).sum();
            let parameters = graph.parameters().iter();
            let all: usize = parameters.map(|parameter| parameter.num_elements()).sum();
            let whole = style == Strategy::NoShard;
            assert!(
                elements
                    <= if whole {
                        all
                    } else {
                        all / 2 + graph.parameters().len()
                    }
            );
        }
        assert_eq!(step.memory().live_bytes() % 4, 0);
        let kinds = [
            OperationKind::AllGather,
            OperationKind::ReduceScatter,
            OperationKind::AllReduce,
        ];
        Ok(kinds.map(|kind| after.of(kind).operations - before.of(kind).operations))
    };
    launch(LaunchConfig::new(2), body).unwrap().swap_remove(0)
}

#[test]
fn clipping_adds_one_gather_and_micro_batches_repeat_the_step() {
    let _guard = seeded();
    let clip = Some(Clip::to(1.0));
    let [gathers, reductions, losses] = counts(1, Strategy::FullShard, None);
    assert_eq!(
        counts(1, Strategy::FullShard, clip),
        [gathers + 1, reductions, losses]
    );
    assert_eq!(
        counts(3, Strategy::FullShard, clip),
        [3 * gathers + 1, 3 * reductions, 3 * losses]
    );
    let whole = counts(1, Strategy::NoShard, None);
    assert_eq!(counts(1, Strategy::NoShard, clip), whole);
    assert_eq!(counts(3, Strategy::NoShard, clip), whole.map(|n| 3 * n));
}

#[test]
fn non_finite_norms_are_rejected_on_all_ranks() {
    let _guard = seeded();
    let broken = |nonfinite| {
        launch(
            LaunchConfig::new(2),
            move |world: ProcessGroup| -> Result<_, Error> {
                let device = Device::flex();
                let clip = Clip::to(1.0).nonfinite(nonfinite);
                let options = Options::default().clip_grad_norm(clip);
                let mode = Mode::data_parallel(world.clone(), Strategy::FullShard).options(options);
                let loss =
                    |model: &Gpt, batch: (TokenBatch, Tensor<1>)| model.loss(batch.0) * batch.1;
                let mut step = compile(Gpt::new, loss, sgd().build(), mode)?;
                let factor = Tensor::<1>::from_floats([f32::INFINITY], &device);
                let batch = (tokens(0, world.rank(), 1, &device), factor);
                let failed = step.step(1e-2, &batch).err().map(|error| error.to_string());
                Ok((failed, step.grad_norm()))
            },
        )
        .unwrap()
    };
    for (failed, norm) in broken(NonFinite::Refuse) {
        let failed = failed.expect("the norm is not finite");
        assert!(failed.contains("the norm of the gradients is"), "{failed}");
        assert!(failed.contains("NonFinite::Scale"), "{failed}");
        assert_eq!(norm, None);
    }
    for (failed, norm) in broken(NonFinite::Scale) {
        assert_eq!(failed, None);
        assert!(!norm.expect("it was measured").is_finite());
    }
    let device = Device::flex();
    let refused = |clip: Clip, batches: &[TokenBatch]| {
        let mode = Mode::single().options(Options::default().clip_grad_norm(clip));
        let mut step = compile(Gpt::new, Gpt::loss, sgd().build(), mode).unwrap();
        step.step_accumulated(1e-2, batches)
            .expect_err("refused")
            .to_string()
    };
    let batch = [tokens(0, 0, 1, &device)];
    for clip in [
        Clip::to(-1.0),
        Clip::to(f64::NAN),
        Clip::to(1.0).norm(Norm::P(0.5)),
    ] {
        let told = refused(clip, &batch);
        assert!(told.contains("cannot be clipped"), "{told}");
    }
    let told = refused(Clip::to(1.0), &[]);
    assert!(told.contains("at least one micro-batch"), "{told}");
}
