//! Steps with placements, compared with one rank on the joined batch.

use std::collections::BTreeMap;

use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_mesh::Placement::{Replicate, Shard};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{Batch, DataParallel, Error, Expand, Mode, Strategy};

use crate::compiled::seeded;
use crate::eager::{self, adamw};
use crate::models::{Cnn, Encoder, Gpt, Recurrent, images, sequences, tokens};

pub(crate) const STEPS: usize = 10;
pub(crate) const ROWS: usize = 12;

/// A block after Megatron-LM: the products after the norms are cut by columns, then by rows.
pub(crate) fn tensor_parallel() -> Expand {
    let by_columns = ["attention.query", "attention.key", "attention.value", "fc"];
    let mut expand = Expand::new();
    for layer in by_columns {
        expand = expand
            .parameter(&format!("blocks.*.{layer}.weight"), "model", Shard(1))
            .parameter(&format!("blocks.*.{layer}.bias"), "model", Shard(0));
    }
    for layer in ["attention.output", "out"] {
        expand = expand.parameter(&format!("blocks.*.{layer}.weight"), "model", Shard(0));
    }
    expand
}

pub(crate) type Trained = (Vec<f64>, BTreeMap<String, Vec<f32>>);

/// Returns the result of `steps` steps of a mode on every rank, all of them the same.
pub(crate) fn trained<M, B>(
    num_ranks: usize,
    mode: impl Fn(&ProcessGroup) -> Result<Mode, Error> + Send + Sync + Clone + 'static,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: impl Fn(usize, usize, &Device) -> B + Send + Sync + Clone + 'static,
) -> Trained
where
    M: burn::module::Module + 'static,
    B: Batch,
{
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mode = mode(&world)?.verified();
        let mut step = compile(init, loss, adamw().build(), mode)?;
        let mut losses = Vec::new();
        for index in 0..STEPS {
            losses.push(step.step(1e-2, &batch(index, world.rank(), &device))?);
        }
        let specs = step.parameters().to_vec();
        let mut parameters = BTreeMap::new();
        for spec in specs {
            let data = step.parameter(&spec.path)?;
            if let Ok(values) = data.try_to_vec::<f32>() {
                parameters.insert(spec.path.to_string(), values);
            }
        }
        Ok((losses, parameters))
    };
    let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
    for other in &results[1..] {
        assert_eq!(other, &results[0], "the ranks differ");
    }
    results.swap_remove(0)
}

pub(crate) fn assert_close(what: &str, (losses, parameters): &Trained, expected: &eager::Trained) {
    for (step, (loss, expected)) in losses.iter().zip(&expected.losses).enumerate() {
        let difference = (loss - f64::from(*expected)).abs() / f64::from(*expected).abs();
        assert!(
            difference <= 1e-5,
            "{what}, step {step}: {loss} is not {expected}"
        );
    }
    for (path, expected) in &expected.parameters {
        let Ok(expected) = expected.try_to_vec::<f32>() else {
            continue;
        };
        let values = &parameters[path];
        let largest = expected
            .iter()
            .fold(1e-6f32, |most, value| most.max(value.abs()));
        for (value, expected) in values.iter().zip(&expected) {
            assert!(
                (value - expected).abs() <= 1e-4 * largest.max(0.1),
                "{what}, {path}: {value} is not {expected}"
            );
        }
    }
}

/// On one rank nothing is cut, and the bits equal Burn's.
fn assert_same((losses, parameters): &Trained, expected: &eager::Trained) {
    let losses: Vec<f32> = losses.iter().map(|loss| *loss as f32).collect();
    assert_eq!(losses, expected.losses);
    for (path, expected) in &expected.parameters {
        assert_eq!(&parameters[path], &expected.try_to_vec::<f32>().unwrap());
    }
}

pub(crate) fn mesh(world: &ProcessGroup, axes: &[(&str, usize)]) -> Result<ProcessMesh, Error> {
    let layout = Mesh::new(axes.iter().copied())?;
    ProcessMesh::new(world, layout).map_err(|source| Error::Collective {
        node: 0,
        source: std::sync::Arc::new(source),
    })
}

/// Returns a GPT trained with the given placements on a mesh whose data axis comes first.
pub(crate) fn gpt(axes: &'static [(&'static str, usize)], expand: Expand) -> Trained {
    gpt_with(axes, expand, Options::default())
}

fn gpt_with(axes: &'static [(&'static str, usize)], expand: Expand, options: Options) -> Trained {
    let num_ranks = axes.iter().map(|axis| axis.1).product();
    let num_data = axes.iter().find(|axis| axis.0 == "data").map_or(1, |a| a.1);
    trained(
        num_ranks,
        move |world| {
            let mode = Mode::expand(mesh(world, axes)?, expand.clone());
            Ok(mode.options(options.clone()))
        },
        Gpt::new,
        Gpt::loss,
        move |step, rank, device| {
            let rows = ROWS / num_data;
            let index = rank / (num_ranks / num_data);
            tokens(step, index * rows, rows, device)
        },
    )
}

#[test]
fn tensor_and_data_parallel_blocks_train_like_one_rank() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
    let data = |expand: Expand| expand.input("**", "data", Shard(0));
    let composed = Options::default().kernels(false);
    let one = gpt_with(&[("model", 1)], tensor_parallel(), composed.clone());
    assert_same(&one, &expected);
    for axes in [
        &[("model", 1)][..],
        &[("model", 2)],
        &[("model", 3)],
        &[("model", 4)],
    ] {
        for options in [composed.clone(), Options::default()] {
            let got = gpt_with(axes, tensor_parallel(), options);
            assert_close(&format!("{axes:?}"), &got, &expected);
        }
    }
    for axes in [
        &[("data", 2), ("model", 2)][..],
        &[("data", 1), ("model", 3)],
        &[("data", 4), ("model", 1)],
    ] {
        let expand = data(tensor_parallel());
        assert_close(&format!("{axes:?}"), &gpt(axes, expand), &expected);
    }
    // Neither the features nor the words divide.
    let words = tensor_parallel()
        .parameter("head.weight", "model", Shard(1))
        .parameter("wte.weight", "model", Shard(0));
    for axes in [&[("model", 2)][..], &[("model", 5)]] {
        assert_close(&format!("{axes:?}"), &gpt(axes, words.clone()), &expected);
    }
    // Weights cut on both axes.
    let both = data(tensor_parallel())
        .parameter("blocks.*.fc.weight", "data", Shard(0))
        .parameter("blocks.*.out.weight", "data", Shard(1))
        .parameter("*.weight", "data", Shard(1));
    let axes = &[("data", 2), ("model", 2)];
    let both = both.parameter("head.weight", "data", Replicate);
    assert_close("cut on both axes", &gpt(axes, both), &expected);
    // Data parallel only, and with weights cut along their first dim.
    for axes in [&[("data", 2)][..], &[("data", 3)], &[("data", 4)]] {
        let expand = data(Expand::new());
        assert_close(&format!("{axes:?}"), &gpt(axes, expand.clone()), &expected);
        let expand = expand.parameter("blocks.**", "data", Shard(0));
        assert_close(&format!("{axes:?}, sharded"), &gpt(axes, expand), &expected);
    }
}

/// Losses of the CNN and other models, with their batch cut among ranks and joined again.
#[test]
fn statistics_match_the_joined_batch() {
    let _guard = seeded();
    let cut = Expand::new().input("**", "data", Shard(0));
    // Without dropout, because random numbers differ from one rank's.
    let cnn = |device: &Device| Cnn::without_dropout(device);
    let expected = eager::train(cnn, Cnn::loss, images, STEPS, |_| 1e-2, adamw().init());
    for num_ranks in [1, 2, 4] {
        let cut = cut.clone();
        let trained = trained(
            num_ranks,
            move |world| {
                let size = world.size();
                Ok(Mode::expand(mesh(world, &[("data", size)])?, cut.clone()))
            },
            Cnn::without_dropout,
            Cnn::loss,
            move |step, rank, device| {
                let (x, labels) = images(step, device);
                let rows = x.dims()[0] / num_ranks;
                let rows = rank * rows..(rank + 1) * rows;
                (x.slice([rows.clone()]), labels.slice([rows]))
            },
        );
        // Running statistics included.
        assert_close(&format!("{num_ranks} ranks"), &trained, &expected);
    }
}

#[test]
fn recurrent_and_attention_models_train_like_one_rank() {
    let _guard = seeded();
    let cut = Expand::new().input("batch", "data", Shard(0));
    let batch = |width: usize| move |step, device: &Device| sequences(step, width, device);
    let lstm = eager::train(
        Recurrent::new,
        Recurrent::loss,
        batch(5),
        STEPS,
        |_| 1e-2,
        adamw().init(),
    );
    let encoder = eager::train(
        Encoder::without_dropout,
        Encoder::loss,
        batch(8),
        STEPS,
        |_| 1e-2,
        adamw().init(),
    );
    for num_ranks in [2, 4] {
        let part = move |width: usize| {
            move |step: usize, rank: usize, device: &Device| {
                let rows = 4 / num_ranks;
                sequences(step, width, device).narrow(0, rank * rows, rows)
            }
        };
        let expand = cut.clone();
        let mode = move |world: &ProcessGroup| {
            let mesh = mesh(world, &[("data", world.size())])?;
            Ok(Mode::expand(mesh, expand.clone()))
        };
        let got = trained(
            num_ranks,
            mode.clone(),
            Recurrent::new,
            Recurrent::loss,
            part(5),
        );
        assert_close(&format!("LSTM, {num_ranks} ranks"), &got, &lstm);
        let got = trained(
            num_ranks,
            mode,
            Encoder::without_dropout,
            Encoder::loss,
            part(8),
        );
        assert_close(&format!("encoder, {num_ranks} ranks"), &got, &encoder);
    }
}

#[test]
fn ranks_that_share_a_value_share_its_random_numbers() {
    let _guard = seeded();
    let expand = Expand::new().parameter(
        "encoder.layers.*.pwff.linear_inner.weight",
        "model",
        Shard(1),
    );
    let mode = move |world: &ProcessGroup| {
        let mesh = mesh(world, &[("model", world.size())])?;
        Ok(Mode::expand(mesh, expand.clone()))
    };
    // With dropout on values that are whole on all ranks; the test checks that the ranks agree.
    let (losses, _) = trained(2, mode, Encoder::new, Encoder::loss, |step, _, device| {
        sequences(step, 8, device)
    });
    assert!(losses.iter().all(|loss| loss.is_finite()));
    assert!(losses[STEPS - 1] < losses[0], "{losses:?}");
}

#[test]
fn automatic_placements_match_one_rank() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
    for num_ranks in [1, 2, 3, 4] {
        let got = trained(
            num_ranks,
            |world| {
                let mode = Mode::data_parallel(world.clone(), DataParallel::Automatic);
                // Kernels do not have the bits of the operations that they replace.
                let options = Options::default().kernels(world.size() > 1);
                Ok(mode.options(options))
            },
            Gpt::new,
            Gpt::loss,
            move |step, rank, device| {
                let rows = ROWS / num_ranks;
                tokens(step, rank * rows, rows, device)
            },
        );
        assert_close(&format!("{num_ranks} ranks"), &got, &expected);
        if num_ranks == 1 {
            assert_same(&got, &expected);
        }
    }
}

/// Counts the collectives of the third step, by kind.
fn counts(axes: &'static [(&'static str, usize)], expand: Expand) -> [u64; 3] {
    let num_ranks = axes.iter().map(|axis| axis.1).product();
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mesh = mesh(&world, axes)?;
        let mode = Mode::expand(mesh.clone(), expand.clone()).verified();
        let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
        let batch = tokens(0, 0, ROWS, &device);
        step.step(1e-2, &batch)?;
        step.step(1e-2, &batch)?;
        let kinds = [
            OperationKind::AllGather,
            OperationKind::ReduceScatter,
            OperationKind::AllReduce,
        ];
        let count = || {
            kinds.map(|kind| {
                let groups = axes.iter().filter_map(|axis| mesh.along(axis.0).ok());
                groups
                    .map(|group| group.counts().of(kind).operations)
                    .sum::<u64>()
            })
        };
        let before = count();
        step.step(1e-2, &batch)?;
        let after = count();
        Ok([0, 1, 2].map(|kind| after[kind] - before[kind]))
    };
    let mut counts = launch(LaunchConfig::new(num_ranks), body).unwrap();
    assert!(counts.windows(2).all(|pair| pair[0] == pair[1]));
    counts.swap_remove(0)
}

#[test]
fn a_tensor_parallel_block_takes_two_all_reduces_each_way() {
    let _guard = seeded();
    const BLOCKS: u64 = 3;
    // One bucket of the gradients that are sums over the cut dim: the shifts of the norms.
    let expected = [0, 0, 4 * BLOCKS + 1];
    assert_eq!(counts(&[("model", 3)], tensor_parallel()), expected);
    // With data parallelism, those gradients are sums on both axes, and are first summed one by one on the data axis.
    // Then one bucket has all other gradients, the loss, which is a mean, and the gradient of the position embedding
    // from all rows.
    let both = tensor_parallel().input("**", "data", Shard(0));
    let axes = &[("data", 2), ("model", 3)];
    let expected = [0, 0, expected[2] + 2 * BLOCKS + 3];
    assert_eq!(counts(axes, both), expected);
    // Nothing is cut on an axis of one rank.
    assert_eq!(counts(&[("model", 1)], tensor_parallel()), [0, 0, 0]);
}

#[test]
fn impossible_placements_are_rejected_with_the_shape() {
    let _guard = seeded();
    let refused = |expand: Expand| {
        let body = move |world: ProcessGroup| -> Result<String, Error> {
            let mode = Mode::expand(mesh(&world, &[("model", 2)])?, expand.clone());
            let batch = tokens(0, 0, 3, &Device::flex());
            let step = compile(Gpt::new, Gpt::loss, adamw().build(), mode);
            let result = step.and_then(|mut step| step.step(1e-2, &batch));
            Ok(result
                .err()
                .map_or_else(String::new, |error| error.to_string()))
        };
        launch(LaunchConfig::new(2), body).unwrap().swap_remove(1)
    };
    let head = |placement| Expand::new().parameter("head.weight", "model", placement);
    assert_eq!(
        refused(head(Shard(2))),
        "parameter \"head.weight\" of shape [12, 31] cannot be shard(2) on axis model: it has 2 dims; choose \
         another placement, or replicate it"
    );
    let partial = burn_fsdp_mesh::Placement::Partial(burn_fsdp_mesh::ReduceOp::Sum);
    assert!(refused(head(partial)).contains("nothing reduces it"));
    let unknown = refused(Expand::new().parameter("nose.*", "model", Shard(0)));
    assert!(
        unknown.contains("there is no parameter \"nose.*\""),
        "{unknown}"
    );
    let axis = refused(Expand::new().parameter("head.weight", "data", Replicate));
    assert!(axis.contains("data"), "{axis}");
    let input = refused(Expand::new().input("2", "model", Shard(0)));
    assert!(input.contains("there is no input \"2\""), "{input}");
}

/// Returns the error of a compiled step over cut inputs, on 2 ranks.
fn refused_loss<B: Batch>(
    loss: fn(&burn::nn::Linear, B) -> Tensor<1>,
    batch: fn(&Device) -> B,
    expand: Expand,
) -> String {
    let body = move |world: ProcessGroup| -> Result<String, Error> {
        let mode = Mode::expand(mesh(&world, &[("data", 2)])?, expand.clone());
        let init = |device: &Device| burn::nn::LinearConfig::new(3, 5).init(device);
        let mut step = compile(init, loss, adamw().build(), mode)?;
        let result = step.step(1e-2, &batch(&Device::flex()));
        Ok(result
            .err()
            .map_or_else(String::new, |error| error.to_string()))
    };
    launch(LaunchConfig::new(2), body).unwrap().swap_remove(0)
}

#[test]
fn unplaceable_operations_are_rejected_with_operands_and_placements() {
    let _guard = seeded();
    // Sorting needs the sums of all ranks, and integers are not summed over ranks.
    let text = refused_loss(
        |model, x: Tensor<2, burn::tensor::Int>| {
            let sums = x.sum_dim(0).sort(1).float();
            model.forward(sums).mean()
        },
        |device| Tensor::ones([2, 3], device),
        Expand::new().input("batch", "data", Shard(0)),
    );
    assert!(text.contains("NumericInt.Sort"), "{text}");
    assert!(
        text.contains("[1, 3] partial(sum)") && text.contains("axis data"),
        "{text}"
    );
}

#[test]
fn random_numbers_that_ranks_cannot_share_are_refused_with_their_shape() {
    let _guard = seeded();
    let text = refused_loss(
        |model, x: Tensor<2>| {
            let y = model.forward(x);
            let noise = y.random_like(burn::tensor::Distribution::Default);
            (y * noise).mean()
        },
        |device| Tensor::ones([7, 3], device),
        // Everything is whole on both ranks, and 7 x 5 numbers cannot be drawn by halves.
        Expand::new(),
    );
    assert!(text.contains("Float.Random of shape [7, 5]"), "{text}");
    assert!(text.contains("axis data"), "{text}");
}

#[test]
fn a_batch_may_be_cut_along_any_dim() {
    let _guard = seeded();
    let batch = |step, device: &Device| sequences(step, 8, device).swap_dims(0, 1);
    let loss = |model: &Encoder, x: Tensor<3>| Encoder::loss(model, x.swap_dims(0, 1));
    let init = Encoder::without_dropout;
    let expected = eager::train(init, loss, batch, STEPS, |_| 1e-2, adamw().init());
    let mode = |world: &ProcessGroup| {
        let expand = Expand::new().input("batch", "data", Shard(1));
        Ok(Mode::expand(
            mesh(world, &[("data", world.size())])?,
            expand,
        ))
    };
    let got = trained(2, mode, init, loss, move |step, rank, device| {
        batch(step, device).slice([0..6, 2 * rank..2 * rank + 2])
    });
    assert_close("cut along dim 1", &got, &expected);
}

/// Returns losses with SGD and momentum, whose first velocity is the gradient itself, on ranks with a mode each.
fn with_momentum(
    num_ranks: usize,
    mode: impl Fn(&ProcessGroup, Options) -> Result<Mode, Error> + Send + Sync + Copy + 'static,
    optimizer: OptimizerPlace,
) -> Vec<f32> {
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| -> Result<Vec<f32>, Error> {
        let device = Device::flex();
        let mut options = Options::default();
        options.optimizer = optimizer;
        let mode = mode(&world, options)?.verified();
        let mut step = compile(Gpt::new, Gpt::loss, momentum().build(), mode)?;
        let rows = ROWS / num_ranks;
        (0..STEPS)
            .map(|index| {
                let batch = tokens(index, world.rank() * rows, rows, &device);
                Ok(step.step(1e-1, &batch)? as f32)
            })
            .collect()
    };
    launch(LaunchConfig::new(num_ranks), body)
        .unwrap()
        .swap_remove(0)
}

fn momentum() -> SgdConfig {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new()))
}

#[test]
fn optimizers_that_store_gradients_store_the_global_gradient() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let rate = |_| 1e-1;
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, rate, momentum().init());
    let replicate = |world: &ProcessGroup, options| {
        let mode = Mode::data_parallel(world.clone(), Strategy::NoShard);
        Ok(mode.options(options))
    };
    let shard = |world: &ProcessGroup, options| {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        Ok(mode.options(options))
    };
    let placed = |world: &ProcessGroup, options| {
        let mesh = mesh(world, &[("data", world.size())])?;
        let expand = Expand::new().input("**", "data", Shard(0)).parameter(
            "blocks.*.fc.weight",
            "data",
            Shard(1),
        );
        Ok(Mode::expand(mesh, expand).options(options))
    };
    for place in [
        OptimizerPlace::AtEnd,
        OptimizerPlace::InBackward,
        OptimizerPlace::InNextForward,
    ] {
        for num_ranks in [1, 2, 3] {
            for (style, losses) in [
                ("replicate", with_momentum(num_ranks, replicate, place)),
                ("fully shard", with_momentum(num_ranks, shard, place)),
                ("placed", with_momentum(num_ranks, placed, place)),
            ] {
                for (step, (loss, expected)) in losses.iter().zip(&expected.losses).enumerate() {
                    assert!(
                        (loss - expected).abs() <= 2e-5 * expected,
                        "{style} on {num_ranks} ranks, {place:?}, step {step}: {loss} is not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_deferred_optimizer_and_placements_go_together() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
    // Biases stay whole and are sliced in forward. Their slices do not concern the optimizer.
    let got = trained(
        3,
        |world| {
            let expand = Expand::new().parameter("blocks.*.fc.weight", "model", Shard(1));
            let mut options = Options::default();
            options.optimizer = OptimizerPlace::InNextForward;
            let mode = Mode::expand(mesh(world, &[("model", 3)])?, expand);
            Ok(mode.options(options))
        },
        Gpt::new,
        Gpt::loss,
        |step, _, device| tokens(step, 0, ROWS, device),
    );
    assert_close("deferred", &got, &expected);
    // Running statistics belong to forward, and are not deferred.
    let init = Cnn::without_dropout;
    let expected = eager::train(init, Cnn::loss, images, STEPS, |_| 1e-2, adamw().init());
    let got = trained(
        1,
        |world| {
            let mut options = Options::default().kernels(false);
            options.optimizer = OptimizerPlace::InNextForward;
            let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
            Ok(mode.options(options))
        },
        init,
        Cnn::loss,
        |step, _, device| images(step, device),
    );
    assert_same(&got, &expected);
}

/// A layer that uses parameters in ways that share gradients.
#[derive(burn::module::Module, Debug)]
struct Sums {
    base: burn::module::Param<Tensor<2>>,
    other: burn::module::Param<Tensor<2>>,
    down: burn::module::Param<Tensor<2>>,
    up: burn::module::Param<Tensor<2>>,
}

impl Sums {
    fn new(device: &Device) -> Self {
        let weight = |rows, columns| {
            let init = burn::module::Initializer::Normal {
                mean: 0.0,
                std: 0.5,
            };
            init.init([rows, columns], device)
        };
        Self {
            base: weight(8, 8),
            other: weight(8, 8),
            down: weight(8, 2),
            up: weight(2, 8),
        }
    }

    /// Extrema, and counts of integers, are also combined over the ranks.
    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let delta = self.down.val().matmul(self.up.val());
        let weight = self.base.val() + self.other.val() + delta;
        let scale = x.clone().max().neg() + x.clone().min() * -2.0;
        let positive = x.clone().greater_elem(0.0).int().sum().float() / 100.0;
        let [rows, time, width] = x.dims();
        let y = x.reshape([rows * time, width]).matmul(weight);
        y.square().mean() + scale.square() + positive
    }
}

#[test]
fn shared_gradients_and_extrema_match_one_rank() {
    let _guard = seeded();
    let batch = |step, device: &Device| sequences(step, 8, device);
    let expected = eager::train(
        Sums::new,
        Sums::loss,
        batch,
        STEPS,
        |_| 1e-2,
        adamw().init(),
    );
    let part = |step: usize, rank: usize, device: &Device| {
        sequences(step, 8, device).narrow(0, 2 * rank, 2)
    };
    for place in [OptimizerPlace::InBackward, OptimizerPlace::InNextForward] {
        let mode = move |world: &ProcessGroup| {
            let mut options = Options::default();
            options.optimizer = place;
            let expand = Expand::new().input("batch", "data", Shard(0));
            let mode = Mode::expand(mesh(world, &[("data", 2)])?, expand);
            Ok(mode.options(options))
        };
        let got = trained(2, mode, Sums::new, Sums::loss, part);
        assert_close(&format!("{place:?}"), &got, &expected);
    }
}

/// A layer, and a count over the batch.
#[derive(burn::module::Module, Debug)]
struct Counting {
    weight: burn::module::Param<Tensor<2>>,
    table: burn::module::Param<Tensor<2>>,
}

type Counted = (
    Tensor<2>,
    Tensor<2, burn::tensor::Int>,
    Tensor<2, burn::tensor::Bool>,
);

impl Counting {
    fn new(device: &Device) -> Self {
        let uniform = burn::nn::Initializer::Uniform {
            min: -0.5,
            max: 0.5,
        };
        Self {
            weight: uniform.init([4, 4], device),
            table: uniform.init([6, 4], device),
        }
    }

    fn rows(step: usize, rows: std::ops::Range<usize>, device: &Device) -> Counted {
        let x = crate::agreement::data(step, [ROWS, 4], device);
        let ids: Vec<i64> = (0..ROWS * 3).map(|i| ((i * 7 + step) % 6) as i64).collect();
        let ids = burn::tensor::TensorData::new(ids, [ROWS, 3]);
        let ids = Tensor::<2, burn::tensor::Int>::from_data(ids, device);
        let keep = x.clone().greater_scalar(-0.3);
        (
            x.slice([rows.clone()]),
            ids.slice([rows.clone()]),
            keep.slice([rows]),
        )
    }

    fn h(&self, x: Tensor<2>) -> Tensor<2> {
        x.matmul(self.weight.val())
    }
}

#[test]
fn integers_and_booleans_are_redistributed() {
    let _guard = seeded();
    type Loss = fn(&Counting, Counted) -> Tensor<1>;
    let losses: [(&str, Loss); 6] = [
        (
            "the mean of whole numbers is rounded once",
            |model, (x, ids, _)| {
                let mean = ids.mean().float();
                model.h(x).square().mean() * mean
            },
        ),
        ("means of rows", |model, (x, ids, _)| {
            let mean = ids.mean_dim(0).float().sum();
            model.h(x).square().mean() * mean
        }),
        ("the largest number", |model, (x, ids, _)| {
            let most = ids.max().float();
            model.h(x).square().mean() * most
        }),
        ("a part of the indices", |model, (x, ids, _)| {
            let some = ids.narrow(0, 1, 5).float().mean();
            model.h(x).square().mean() * some
        }),
        ("an embedding by hand", |model, (x, ids, _)| {
            let ids = ids.narrow(1, 0, 1).squeeze_dim::<1>(1);
            let rows = model.table.val().select(0, ids);
            (model.h(x) * rows).tanh().square().mean()
        }),
        ("whether any is kept", |model, (x, _, keep)| {
            let any = keep.narrow(0, 0, 3).any().float();
            model.h(x).square().mean() * any
        }),
    ];
    for (what, loss) in losses {
        let whole = |step, device: &Device| Counting::rows(step, 0..ROWS, device);
        let expected = eager::train(Counting::new, loss, whole, STEPS, |_| 1e-2, adamw().init());
        for num_ranks in [1, 2, 3] {
            let got = trained(
                num_ranks,
                |world| Ok(Mode::data_parallel(world.clone(), DataParallel::Automatic)),
                Counting::new,
                loss,
                move |step, rank, device| {
                    let rows = ROWS / num_ranks;
                    Counting::rows(step, rank * rows..(rank + 1) * rows, device)
                },
            );
            assert_close(&format!("{what} on {num_ranks} ranks"), &got, &expected);
        }
    }
}

#[test]
fn inputs_without_a_batch_dim_are_declared() {
    let _guard = seeded();
    type Weighted = (Tensor<2>, Tensor<1>);
    let loss = |model: &Counting, (x, weights): Weighted| {
        (model.h(x) * weights.unsqueeze()).square().mean() + model.table.val().square().mean()
    };
    let part = |step, rows: std::ops::Range<usize>, device: &Device| -> Weighted {
        let x = crate::agreement::data::<2>(step, [ROWS, 4], device).slice([rows]);
        (x, crate::agreement::data(step + 9, [4], device))
    };
    let whole = |step, device: &Device| part(step, 0..ROWS, device);
    let expected = eager::train(Counting::new, loss, whole, STEPS, |_| 1e-2, adamw().init());
    for num_ranks in [2, 3] {
        let got = trained(
            num_ranks,
            |world| {
                let mode = Mode::data_parallel(world.clone(), DataParallel::Automatic);
                Ok(mode.shared_input("1"))
            },
            Counting::new,
            loss,
            move |step, rank, device| {
                let rows = ROWS / num_ranks;
                part(step, rank * rows..(rank + 1) * rows, device)
            },
        );
        assert_close(&format!("shared on {num_ranks} ranks"), &got, &expected);
    }
}

/// Each rank's factor would be a cut of a batch of factors.
#[test]
fn an_undeclared_input_without_a_batch_dim_is_an_error_with_a_remedy() {
    let _guard = seeded();
    type Weighted = (Tensor<2>, Tensor<1>);
    let loss = |model: &Counting, (x, factor): Weighted| {
        model.h(x).square().mean() * factor + model.table.val().square().mean()
    };
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mode = Mode::data_parallel(world.clone(), DataParallel::Automatic);
        let batch = (
            crate::agreement::data::<2>(world.rank(), [2, 4], &device),
            Tensor::from_floats([0.5], &device),
        );
        let mut step = compile(Counting::new, loss, adamw().build(), mode.clone())?;
        let undeclared = step.step(1e-2, &batch).map_err(|error| error.to_string());
        let mode = mode.shared_input("1");
        let mut step = compile(Counting::new, loss, adamw().build(), mode)?;
        step.step(1e-2, &batch)?;
        Ok(undeclared)
    };
    for undeclared in launch(LaunchConfig::new(2), body).unwrap() {
        let text = undeclared.unwrap_err();
        assert!(text.contains("the loss has shape [2]"), "{text}");
        assert!(text.contains("Mode::shared_input"), "{text}");
    }
}
