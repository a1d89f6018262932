//! Cuts of uneven dims, compared with one rank on the joined batch.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, launch};
use burn_fsdp_mesh::Clip;
use burn_fsdp_mesh::Placement::Shard;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Error, Expand, Mode, named_activation};

use crate::compiled::seeded;
use crate::eager::{self, adamw};
use crate::placement::{STEPS, Trained, assert_close, mesh, trained};

const ROWS: usize = 6;
const FROM: usize = 7;
const WIDTH: usize = 13;
const TO: usize = 5;

/// A block whose sizes are primes. It divides by one of its parameters, whose padding is zero at first.
#[derive(Module, Debug)]
struct Odd {
    first: Linear,
    divisor: Param<Tensor<1>>,
    last: Linear,
}

impl Odd {
    fn new(device: &Device) -> Self {
        let divisor = Tensor::random([WIDTH], Distribution::Uniform(1.0, 2.0), device);
        Self {
            first: LinearConfig::new(FROM, WIDTH).init(device),
            divisor: Param::from_tensor(divisor),
            last: LinearConfig::new(WIDTH, TO).init(device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let wide = named_activation("wide", gelu(self.first.forward(x)));
        let divided = wide / self.divisor.val().unsqueeze::<2>();
        let divided = named_activation("divided", divided);
        let out = self.last.forward(divided.clone());
        out.clone().exp().sum() / 60.0 + (out - 1.0).square().sum() / 30.0 + divided.mean() / 10.0
    }
}

/// Returns the loss without the operations that need a whole row.
fn of_products(model: &Odd, x: Tensor<2>) -> Tensor<1> {
    let wide = gelu(model.first.forward(x)) / model.divisor.val().unsqueeze::<2>();
    (model.last.forward(wide) - 1.0).square().sum()
}

fn rows(step: usize, device: &Device) -> Tensor<2> {
    let at = |index: usize| ((step * 37 + index * 7919) % 101) as f32 / 50.0 - 1.0;
    let values: Vec<f32> = (0..ROWS * FROM).map(at).collect();
    Tensor::from_data(TensorData::new(values, [ROWS, FROM]), device)
}

fn one_rank() -> eager::Trained {
    eager::train(Odd::new, Odd::loss, rows, STEPS, |_| 1e-2, adamw().init())
}

/// Returns cuts by columns, then by rows, after Megatron-LM.
fn columns_and_rows() -> Expand {
    Expand::new()
        .parameter("first.weight", "model", Shard(1))
        .parameter("first.bias", "model", Shard(0))
        .parameter("divisor", "model", Shard(0))
        .parameter("last.weight", "model", Shard(0))
}

/// Returns the result on the ranks of a mesh; the rows are cut along the axis `data`.
fn placed(axes: &'static [(&'static str, usize)], expand: Expand) -> Trained {
    placed_with(axes, expand, Options::default())
}

fn placed_with(
    axes: &'static [(&'static str, usize)],
    expand: Expand,
    options: Options,
) -> Trained {
    let along = |name| {
        let found = axes.iter().find(|axis| axis.0 == name);
        found.map_or(1, |axis| axis.1)
    };
    let num_ranks = axes.iter().map(|axis| axis.1).product::<usize>();
    let (num_data, behind) = (along("data"), num_ranks / along("data"));
    trained(
        num_ranks,
        move |world| {
            let mode = Mode::expand(mesh(world, axes)?, expand.clone());
            Ok(mode.options(options.clone()).certified())
        },
        Odd::new,
        Odd::loss,
        move |step, rank, device| {
            let own = ROWS / num_data;
            rows(step, device).narrow(0, rank / behind * own, own)
        },
    )
}

#[test]
fn parameters_that_do_not_divide_train_like_one_rank() {
    let _guard = seeded();
    let expected = one_rank();
    // The last of 5 ranks has one row of 13, and the last of 12 has none.
    for axes in [
        &[("model", 2)][..],
        &[("model", 3)],
        &[("model", 4)],
        &[("model", 5)],
        &[("model", 12)],
    ] {
        let got = placed(axes, columns_and_rows());
        assert_close(&format!("{axes:?}"), &got, &expected);
    }
    let both = columns_and_rows().input("**", "data", Shard(0));
    let axes = &[("data", 3), ("model", 2)];
    assert_close("rows and columns", &placed(axes, both.clone()), &expected);
    let both = both
        .parameter("first.weight", "data", Shard(0))
        .parameter("last.weight", "data", Shard(1))
        .parameter("last.bias", "data", Shard(0));
    assert_close("cut on both axes", &placed(axes, both), &expected);
}

#[test]
fn activations_that_do_not_divide_train_like_one_rank() {
    let _guard = seeded();
    let expected = one_rank();
    for (wide, divided) in [(0, 1), (1, 0), (0, 0), (1, 1)] {
        let expand = Expand::new()
            .activation("wide", "model", Shard(wide))
            .activation("divided", "model", Shard(divided));
        for axes in [&[("model", 4)][..], &[("model", 5)]] {
            let got = placed(axes, expand.clone());
            assert_close(&format!("{axes:?}, {wide} then {divided}"), &got, &expected);
        }
    }
}

/// The gradient of the divisor is not a number in padding.
#[test]
fn norms_of_gradients_leave_padding_out() {
    let _guard = seeded();
    let norm = |all: &[f64]| all.iter().map(|one| one * one).sum::<f64>().sqrt();
    let batches = |step, device: &Device| vec![rows(step, device)];
    let clipped = |limit| {
        let optimizer = adamw().init();
        eager::train_clipped(
            Odd::new,
            Odd::loss,
            batches,
            STEPS,
            optimizer,
            (limit, norm),
        )
    };
    let limit = clipped(f64::INFINITY).1[0] / 2.0;
    let (expected, norms) = clipped(limit);
    assert!(norms.iter().any(|norm| *norm > limit), "{norms:?}");
    let options = Options::default().clip_grad_norm(Clip::to(limit));
    for axes in [
        &[("model", 2)][..],
        &[("model", 5)],
        &[("data", 2), ("model", 3)],
    ] {
        let expand = columns_and_rows().input("**", "data", Shard(0));
        let expand = match axes.len() {
            1 => columns_and_rows(),
            _ => expand,
        };
        let got = placed_with(axes, expand, options.clone());
        assert_close(&format!("{axes:?}"), &got, &expected);
    }
}

/// Counts the operations of a step of three ranks, by kind.
fn counts(expand: Expand, loss: fn(&Odd, Tensor<2>) -> Tensor<1>) -> Vec<u64> {
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mesh = mesh(&world, &[("model", 3)])?;
        let mode = Mode::expand(mesh.clone(), expand.clone());
        let mut step = compile(Odd::new, loss, adamw().build(), mode)?;
        step.step(1e-2, &rows(0, &device))?;
        let kinds = [
            OperationKind::AllGather,
            OperationKind::ReduceScatter,
            OperationKind::AllReduce,
            OperationKind::AllToAll,
        ];
        let group = mesh.along("model").unwrap();
        let before = kinds.map(|kind| group.counts().of(kind).operations);
        step.step(1e-2, &rows(1, &device))?;
        let after = kinds.map(|kind| group.counts().of(kind).operations);
        let counts = before
            .iter()
            .zip(after)
            .map(|(before, after)| after - before);
        Ok(counts.collect::<Vec<u64>>())
    };
    let mut counts = launch(LaunchConfig::new(3), body).unwrap();
    assert!(counts.windows(2).all(|pair| pair[0] == pair[1]));
    counts.swap_remove(0)
}

#[test]
fn work_is_divided_along_dims_that_do_not_divide() {
    let _guard = seeded();
    // As with sizes that divide: the addends of the second product are reduced, and nothing else moves.
    assert_eq!(counts(columns_and_rows(), of_products), [0, 0, 1, 0]);
    let exchanged = Expand::new()
        .activation("wide", "model", Shard(0))
        .activation("divided", "model", Shard(1));
    assert!(counts(exchanged, Odd::loss)[3] > 0);
}

#[test]
fn ranks_hold_and_return_only_their_part_without_padding() {
    let _guard = seeded();
    const LENS: [usize; 4] = [4, 4, 4, 1];
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let own = LENS[world.rank()];
        let mode = || -> Result<_, Error> {
            let mesh = mesh(&world, &[("model", world.size())])?;
            Ok(Mode::expand(mesh, columns_and_rows()))
        };
        let start = || compile(Odd::new, Odd::loss, adamw().build(), mode()?);
        let mut step = start()?;
        for index in 0..3 {
            step.step(1e-2, &rows(index, &device))?;
        }
        let graph = step.graph().unwrap();
        let held = graph.value(graph.parameter("first.weight").unwrap().value);
        assert_eq!(held.unwrap().shape, [FROM, LENS[0]]);
        assert_eq!(step.shard("first.weight")?.shape().to_vec(), [FROM, own]);
        assert_eq!(step.shard("divisor")?.shape().to_vec(), [own]);
        for (slot, state) in step.state_shards("last.weight")? {
            assert_eq!(state.shape().to_vec(), [own, TO], "{slot}");
        }
        // Another step continues with its parts, both as they are and as wholes.
        let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
        let (mut by_parts, mut by_wholes) = (start()?, start()?);
        for again in [&mut by_parts, &mut by_wholes] {
            again.step(1e-2, &rows(7, &device))?;
        }
        let mut states = Vec::new();
        for path in &paths {
            by_parts.set_shard(path, step.shard(path)?)?;
            by_wholes.set_parameter(path, step.parameter(path)?)?;
            for (slot, state) in step.states(path)? {
                by_wholes.set_state(path, &slot, state)?;
            }
            states.push(burn_fsdp_spmd::OptimizerState {
                path: path.to_string(),
                counters: step.counters(path).unwrap().to_vec(),
                tensors: step.state_shards(path)?,
            });
        }
        by_parts.resume_with(3, states)?;
        by_wholes.resume(3, 1e-2)?;
        let expected = step.step(1e-2, &rows(3, &device))?;
        for mut again in [by_parts, by_wholes] {
            assert_eq!(again.step(1e-2, &rows(3, &device))?, expected);
            for path in &paths {
                assert_eq!(again.parameter(path)?, step.parameter(path)?, "{path}");
            }
        }
        Ok(())
    };
    launch(LaunchConfig::new(LENS.len()), body).unwrap();
}

#[test]
fn fewer_rows_than_ranks_are_refused() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let mesh = mesh(&world, &[("model", world.size())])?;
        let expand = Expand::new().parameter("last.bias", "model", Shard(0));
        let step = compile(
            Odd::new,
            Odd::loss,
            adamw().build(),
            Mode::expand(mesh, expand),
        );
        Ok(step.err().map(|error| error.to_string()))
    };
    let refused = launch(LaunchConfig::new(TO + 1), body).unwrap();
    let refused = refused[0].clone().unwrap();
    assert!(
        refused.contains("parameter \"last.bias\" of shape [5]")
            && refused.contains("5 cannot be cut among 6 ranks"),
        "{refused}"
    );
}
