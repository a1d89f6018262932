//! Tensors that a loss closure returns in addition to the loss.

use burn::optim::GradientsParams;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_mesh::Placement::Shard;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{Error, Expand, Mode, Strategy, compile};

use crate::clipping::{ROWS, STEPS, sgd};
use crate::compiled::seeded;
use crate::eager::floats;
use crate::models::{Gpt, TokenBatch, tokens};

/// Logits, predictions, their correctness, and the loss again.
type Seen = (Tensor<3>, (Tensor<2, Int>, Tensor<2, Bool>), Tensor<1>);

fn with_outputs(model: &Gpt, (tokens, targets): TokenBatch) -> (Tensor<1>, Seen) {
    let loss = model.loss((tokens.clone(), targets.clone()));
    let logits = model.logits(tokens);
    let [batch, time, _] = logits.dims();
    let predicted = logits.clone().argmax(2).reshape([batch, time]);
    let right = predicted.clone().equal(targets);
    (loss.clone(), (logits, (predicted, right), loss))
}

/// Returns the outputs of each step in Burn's loop, over that many micro-batches.
fn expected(num_batches: usize) -> Vec<Vec<Seen>> {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Gpt::new(&device);
    let _ = floats(&model);
    let mut optimizer = sgd().init();
    let mut seen = Vec::new();
    for step in 0..STEPS {
        let mut of_step = Vec::new();
        let mut total = Tensor::zeros([1], &device);
        for micro in 0..num_batches {
            let batch = tokens(step, micro * ROWS, ROWS, &device);
            let (loss, outputs) = with_outputs(&model, batch);
            total = total + loss.div_scalar(num_batches as f32);
            of_step.push(outputs);
        }
        let gradients = GradientsParams::from_grads(total.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
        seen.push(of_step);
    }
    seen
}

/// Checks rows of the outputs of a step. The loss covers all rows if `is_joined`.
fn assert_seen(
    what: &str,
    got: &Seen,
    expected: &Seen,
    rows: std::ops::Range<usize>,
    is_joined: bool,
) {
    let all = expected.0.clone().into_data().try_to_vec::<f32>().unwrap();
    let each = all.len() / ROWS;
    let logits = got.0.clone().into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(logits.len(), each * rows.len(), "{what}");
    for (got, expected) in logits.iter().zip(&all[rows.start * each..]) {
        assert!(
            (got - expected).abs() <= 1e-4,
            "{what}: {got} is not {expected}"
        );
    }
    let part = |tensor: &Tensor<2, Bool>| {
        let values = tensor
            .clone()
            .into_data()
            .iter::<bool>()
            .collect::<Vec<_>>();
        let each = values.len() / tensor.dims()[0];
        (values, each)
    };
    let (right, _) = part(&got.1.1);
    let (all_right, each) = part(&expected.1.1);
    assert_eq!(
        right,
        all_right[rows.start * each..rows.end * each],
        "{what}"
    );
    let predicted = got
        .1
        .0
        .clone()
        .into_data()
        .iter::<i64>()
        .collect::<Vec<_>>();
    let all = expected
        .1
        .0
        .clone()
        .into_data()
        .iter::<i64>()
        .collect::<Vec<_>>();
    assert_eq!(predicted, all[rows.start * each..rows.end * each], "{what}");
    if is_joined {
        let (got, expected) = (
            got.2.clone().into_scalar::<f32>(),
            expected.2.clone().into_scalar::<f32>(),
        );
        assert!(
            (got - expected).abs() <= 1e-5 * expected,
            "{what}: {got} is not {expected}"
        );
    }
}

#[test]
fn each_rank_gets_the_outputs_of_its_part_of_the_batch() {
    let _guard = seeded();
    for num_batches in [1, 2] {
        let one = expected(num_batches);
        for options in [
            Options::default(),
            Options::none(),
            Options::default()
                .optimizer(OptimizerPlace::InNextForward)
                .prefetch(true),
        ] {
            for (num_ranks, strategy) in [
                (1, Strategy::FullShard),
                (2, Strategy::FullShard),
                (3, Strategy::NoShard),
            ] {
                let with = options.clone();
                Device::flex().seed(1);
                let body = move |world: ProcessGroup| -> Result<_, Error> {
                    let device = Device::flex();
                    let rows = ROWS / world.size();
                    let first = world.rank() * rows;
                    let mode = Mode::data_parallel(world, strategy).options(with.clone());
                    let mut step = compile(Gpt::new, with_outputs, sgd().build(), mode.verified())?;
                    assert!(step.outputs()?.is_empty());
                    let mut seen = Vec::new();
                    for index in 0..STEPS {
                        let batches: Vec<_> = (0..num_batches)
                            .map(|micro| tokens(index, micro * ROWS + first, rows, &device))
                            .collect();
                        step.step_accumulated(1e-2, &batches)?;
                        seen.push(step.outputs()?);
                    }
                    Ok((first..first + rows, seen))
                };
                let what = format!("{num_batches} of {strategy} on {num_ranks}");
                for (rows, seen) in launch(LaunchConfig::new(num_ranks), body).unwrap() {
                    assert_eq!(seen.len(), STEPS);
                    for (seen, expected) in seen.iter().zip(&one) {
                        assert_eq!(seen.len(), num_batches);
                        for (seen, expected) in seen.iter().zip(expected) {
                            assert_seen(&what, seen, expected, rows.clone(), num_ranks == 1);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn with_placements_every_rank_gets_the_outputs_of_the_joined_batch() {
    let _guard = seeded();
    let one = expected(1);
    Device::flex().seed(1);
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mesh = Mesh::new([("data", 2), ("model", 2)])?;
        let mesh = ProcessMesh::new(&world, mesh).map_err(|source| Error::Collective {
            node: 0,
            source: std::sync::Arc::new(source),
        })?;
        let expand = Expand::new()
            .parameter("blocks.*.fc.weight", "model", Shard(1))
            .parameter("blocks.*.out.weight", "model", Shard(0))
            .input("**", "data", Shard(0));
        let mode = Mode::expand(mesh, expand).verified();
        let mut step = compile(Gpt::new, with_outputs, sgd().build(), mode)?;
        let mut seen = Vec::new();
        for index in 0..STEPS {
            let first = world.rank() / 2 * (ROWS / 2);
            step.step(1e-2, &tokens(index, first, ROWS / 2, &device))?;
            seen.extend(step.outputs()?);
        }
        Ok(seen)
    };
    for seen in launch(LaunchConfig::new(4), body).unwrap() {
        for (seen, expected) in seen.iter().zip(&one) {
            assert_seen("2 x 2", seen, &expected[0], 0..ROWS, true);
        }
    }
}

#[test]
fn inputs_and_constants_can_be_outputs_but_parameters_cannot() {
    let _guard = seeded();
    let device = Device::flex();
    let batch = tokens(0, 0, 2, &device);
    let given = |_: &Gpt, batch: &TokenBatch| {
        let constant = Tensor::<1>::from_floats([1.0, 2.0], &batch.0.device());
        (batch.0.clone(), constant)
    };
    let loss = move |model: &Gpt, batch: TokenBatch| {
        let outputs = given(model, &batch);
        (model.loss(batch), outputs)
    };
    let mut step = compile(Gpt::new, loss, sgd().build(), Mode::single()).unwrap();
    for _ in 0..3 {
        step.step(1e-2, &batch).unwrap();
        let (tokens, constant) = step.outputs().unwrap().remove(0);
        assert_eq!(
            tokens.into_data().iter::<i64>().collect::<Vec<_>>(),
            batch.0.to_data().iter::<i64>().collect::<Vec<_>>()
        );
        assert_eq!(
            constant.into_data().try_to_vec::<f32>().unwrap(),
            [1.0, 2.0]
        );
    }
    let weight = |model: &Gpt, batch: TokenBatch| (model.loss(batch), model.head_weight());
    let mut step = compile(Gpt::new, weight, sgd().build(), Mode::single()).unwrap();
    let told = step.step(1e-2, &batch).expect_err("refused").to_string();
    assert!(told.contains("CompiledStep::parameter"), "{told}");
    let view =
        |model: &Gpt, batch: TokenBatch| (model.loss(batch), model.head_weight().transpose());
    let mut step = compile(Gpt::new, view, sgd().build(), Mode::single()).unwrap();
    let told = step.step(1e-2, &batch).expect_err("refused").to_string();
    assert!(told.contains("CompiledStep::parameter"), "{told}");
    let elsewhere = |model: &Gpt, batch: TokenBatch| {
        (
            model.loss(batch),
            Tensor::<1>::from_floats([1.0], &Device::flex()),
        )
    };
    let mut step = compile(Gpt::new, elsewhere, sgd().build(), Mode::single()).unwrap();
    let told = step.step(1e-2, &batch).expect_err("refused").to_string();
    assert!(told.contains("another device"), "{told}");
}
