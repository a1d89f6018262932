//! Evaluation on the parameters of a compiled step, compared with Burn's inference with the same values.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PositionalEncoding,
    PositionalEncodingConfig,
};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_mesh::Placement::Shard;
use burn_fsdp_spmd::Precision;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{
    CompiledStep, DataParallel, Error, Evaluation, Expand, Mode, Strategy, compile,
};

use crate::clipping::sgd;
use crate::compiled::seeded;
use crate::eager::adamw;
use crate::models::{Cnn, Gpt, ImageBatch, TokenBatch, images, tokens};

const ROWS: usize = 12;

/// Gives a module the current values of a step.
struct Values<'a, B, O>(&'a mut CompiledStep<B, burn::backend::Flex, O>, Vec<String>);

impl<B: burn_fsdp_spmd::Batch, O> ModuleMapper for Values<'_, B, O> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let data = self.0.parameter(&self.1.join(".")).unwrap();
        let device = param.lazy_device();
        param.map(|_| Tensor::from_data(data.clone(), &device))
    }
    fn enter_module(&mut self, name: &str, _: &str) {
        self.1.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.1.pop();
    }
}

/// Returns a model in Burn's inference mode, with the values of a step.
pub(crate) fn inferring<M: Module, B: burn_fsdp_spmd::Batch, O>(
    init: fn(&Device) -> M,
    step: &mut CompiledStep<B, burn::backend::Flex, O>,
) -> M {
    let model = init(&Device::flex().autodiff());
    model.map(&mut Values(step, Vec::new())).valid()
}

fn floats(data: TensorData) -> Vec<f32> {
    data.convert::<f32>().try_to_vec().unwrap()
}

fn assert_close(what: &str, got: TensorData, want: TensorData) {
    assert_eq!(got.shape(), want.shape(), "{what}");
    for (got, want) in floats(got).into_iter().zip(floats(want)) {
        assert!(
            (got - want).abs() <= 2e-5 * want.abs().max(1.0),
            "{what}: {got}, not {want}"
        );
    }
}

type Logits = Tensor<3>;

fn logits() -> Evaluation<Tensor<2, Int>, Logits> {
    Evaluation::new(Gpt::new, |model: &Gpt, tokens| model.logits(tokens))
}

/// Checks logits of this rank's rows before the first step, between steps, and with fewer rows.
fn of_a_gpt(world: &ProcessGroup, mode: Mode) -> Result<(), Error> {
    let device = Device::flex();
    let (rank, size) = (world.rank(), world.size());
    let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode.verified())?;
    let mut evaluation = logits();
    let rows = ROWS / size;
    for index in 0..4 {
        for rows in [rows, 1] {
            let (batch, _) = tokens(40 + index, rank * rows, rows, &device);
            let got = step.evaluate(&mut evaluation, &batch)?;
            let want = inferring(Gpt::new, &mut step).logits(batch);
            assert_close(&format!("step {index}"), got.into_data(), want.into_data());
        }
        step.step(1e-1, &tokens(index, rank * rows, rows, &device))?;
    }
    Ok(())
}

#[test]
fn logits_match_burn_before_and_between_steps() {
    let _guard = seeded();
    for ranks in 1..=4 {
        for strategy in [
            Strategy::FullShard,
            Strategy::ShardGradOp,
            Strategy::NoShard,
        ] {
            for place in [OptimizerPlace::InBackward, OptimizerPlace::InNextForward] {
                let body = move |world: ProcessGroup| {
                    let options = Options::default().optimizer(place).prefetch(ranks % 2 == 0);
                    let mode = Mode::data_parallel(world.clone(), strategy).options(options);
                    of_a_gpt(&world, mode)
                };
                launch(LaunchConfig::new(ranks), body).unwrap();
            }
        }
    }
    let body = |world: ProcessGroup| {
        let mesh = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, mesh).expect("four ranks");
        let mode = Mode::hybrid(mesh, "replicate", Strategy::FullShard)?;
        of_a_gpt(&world, mode)
    };
    launch(LaunchConfig::new(4), body).unwrap();
}

#[test]
fn an_evaluation_changes_nothing() {
    let _guard = seeded();
    let trained = |evaluates: bool| {
        // The values come from rank 0, which alone draws.
        Device::flex().seed(7);
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let device = Device::flex();
            let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
            let init = Cnn::without_dropout;
            let mut step = compile(init, Cnn::loss, adamw().build(), mode.verified())?;
            let mut evaluation =
                Evaluation::new(init, |model: &Cnn, batch: ImageBatch| model.loss(batch));
            let mut losses = Vec::new();
            for index in 0..4 {
                let batch = images(index * world.size() + world.rank(), &device);
                losses.push(step.step(1e-2, &batch)?);
                if evaluates {
                    let measured = step.evaluate(&mut evaluation, &batch)?;
                    assert!(measured.into_scalar::<f32>().is_finite());
                }
            }
            let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
            let mut values = Vec::new();
            for path in paths {
                values.push(step.parameter(&path)?);
            }
            Ok((losses, values))
        };
        launch(LaunchConfig::new(2), body).unwrap().swap_remove(0)
    };
    let (without, with) = (trained(false), trained(true));
    assert_eq!(without, with);
}

/// A model that draws in training, and keeps statistics of earlier batches.
#[derive(Module, Debug)]
struct Noisy {
    inner: Linear,
    /// It holds a tensor that is not a parameter.
    positions: PositionalEncoding,
    norm: BatchNorm,
    dropout: Dropout,
}

impl Noisy {
    fn new(device: &Device) -> Self {
        Self {
            inner: LinearConfig::new(5, 8).init(device),
            positions: PositionalEncodingConfig::new(8).init(device),
            norm: BatchNormConfig::new(8).init(device),
            dropout: DropoutConfig::new(0.5).init(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.positions.forward(self.inner.forward(x).unsqueeze());
        let x = self.norm.forward(x.swap_dims(1, 2)).swap_dims(1, 2);
        self.dropout.forward(x).squeeze_dim(0)
    }
}

#[test]
fn evaluation_uses_running_statistics_and_no_dropout() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let loss = |model: &Noisy, x: Tensor<2>| model.forward(x).powf_scalar(2.0).mean();
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compile(Noisy::new, loss, sgd().build(), mode.verified())?;
        let mut evaluation = Evaluation::new(Noisy::new, |model: &Noisy, x| model.forward(x));
        let x = |seed: usize| {
            let values = (0..20).map(|i| ((i * 37 + seed * 11) % 17) as f32 / 5.0 - 1.0);
            Tensor::<2>::from_data(TensorData::new(values.collect::<Vec<_>>(), [4, 5]), &device)
        };
        for index in 0..3 {
            step.step(1e-2, &x(index * 2 + world.rank()))?;
            let got = step.evaluate(&mut evaluation, &x(9))?;
            let want = inferring(Noisy::new, &mut step).forward(x(9));
            assert_close("inference", got.into_data(), want.into_data());
        }
        Ok(())
    };
    launch(LaunchConfig::new(2), body).unwrap();
}

#[test]
fn evaluation_uses_the_precision_of_the_step() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let init = |device: &Device| LinearConfig::new(5, 7).init(device);
        let loss = |model: &Linear, x: Tensor<2>| {
            let x = x.cast(model.weight.val().dtype());
            model.forward(x).powf_scalar(2.0).mean()
        };
        let options = Options::default().precision(Precision::new(FloatDType::BF16));
        let mode = Mode::data_parallel(world, Strategy::FullShard).options(options);
        let mut step = compile(init, loss, sgd().build(), mode.verified())?;
        let mut evaluation = Evaluation::new(init, |model: &Linear, x: Tensor<2>| {
            model.forward(x.cast(model.weight.val().dtype()))
        });
        let x = Tensor::<2>::ones([3, 5], &device);
        step.step(1e-2, &x)?;
        let got = step.evaluate(&mut evaluation, &x)?.into_data();
        assert_eq!(got.dtype(), burn::tensor::DType::BF16);
        let model = inferring(|device| LinearConfig::new(5, 7).init(device), &mut step);
        let weight = model.weight.val().cast(FloatDType::BF16);
        let bias = model
            .bias
            .map(|bias| bias.val().cast(FloatDType::BF16).unsqueeze());
        let want = x.cast(FloatDType::BF16).matmul(weight) + bias.expect("it has one");
        assert_eq!(got, want.into_data());
        Ok(())
    };
    launch(LaunchConfig::new(2), body).unwrap();
}

#[test]
fn evaluation_uses_the_placements_of_the_step() {
    let _guard = seeded();
    let device = Device::flex();
    let joined = |step: usize| tokens(step, 0, ROWS, &device).0;
    let wanted: [Tensor<2, Int>; 3] = std::array::from_fn(joined);
    let check = |mode: fn(ProcessGroup) -> Mode, begins: bool| {
        let wanted = wanted.clone();
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let device = Device::flex();
            let rows = ROWS / 2;
            let own =
                |step: usize| -> TokenBatch { tokens(step, world.rank() * rows, rows, &device) };
            let mut step = compile(
                Gpt::new,
                Gpt::loss,
                adamw().build(),
                mode(world.clone()).verified(),
            )?;
            let mut evaluation = logits();
            if begins {
                step.step(1e-2, &own(0))?;
            }
            for (index, wanted) in wanted.iter().enumerate() {
                let got = step.evaluate(&mut evaluation, &own(index).0)?;
                let want = inferring(Gpt::new, &mut step).logits(wanted.clone());
                assert_close("by placements", got.into_data(), want.into_data());
                step.step(1e-2, &own(index))?;
            }
            Ok(())
        };
        launch(LaunchConfig::new(2), body).unwrap();
    };
    check(
        |world| {
            let mesh = ProcessMesh::new(&world, Mesh::new([("data", 2)]).unwrap()).unwrap();
            let expand = Expand::new().input("**", "data", Shard(0)).parameter(
                "blocks.*.fc.weight",
                "data",
                Shard(1),
            );
            Mode::expand(mesh, expand)
        },
        false,
    );
    check(
        |world| Mode::data_parallel(world, DataParallel::Automatic),
        true,
    );
}

#[test]
fn units_are_gathered_once() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode.verified())?;
        let mut evaluation = logits();
        let (batch, _) = tokens(0, 0, 2, &device);
        step.evaluate(&mut evaluation, &batch)?;
        let before = world.counts();
        step.evaluate(&mut evaluation, &batch)?;
        let after = world.counts();
        let of = |kind| after.of(kind).operations - before.of(kind).operations;
        assert_eq!(
            of(OperationKind::AllGather),
            7,
            "embeddings, blocks, norm, head"
        );
        assert_eq!(of(OperationKind::ReduceScatter), 0);
        assert_eq!(of(OperationKind::AllReduce), 0);
        Ok(())
    };
    launch(LaunchConfig::new(2), body).unwrap();
}

#[test]
fn invalid_evaluations_are_rejected() {
    let _guard = seeded();
    let init = |device: &Device| LinearConfig::new(5, 7).init(device);
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).mean();
    let x = Tensor::<2>::ones([3, 5], &Device::flex());
    let mut step = compile(init, loss, sgd().build(), Mode::single()).unwrap();
    let other = |device: &Device| LinearConfig::new(5, 7).with_bias(false).init(device);
    let mut evaluation = Evaluation::new(other, |model: &Linear, x: Tensor<2>| model.forward(x));
    let said = step.evaluate(&mut evaluation, &x).unwrap_err().to_string();
    assert!(said.contains("bias") && said.contains("init"), "{said}");
    let mut reading = Evaluation::new(init, |model: &Linear, x: Tensor<2>| {
        let _ = model.forward(x.clone()).into_scalar::<f32>();
        x
    });
    let said = step.evaluate(&mut reading, &x).unwrap_err().to_string();
    assert!(said.contains("cannot capture the evaluation"), "{said}");
    let mut weights = Evaluation::new(init, |model: &Linear, _: Tensor<2>| model.weight.val());
    let said = step.evaluate(&mut weights, &x).unwrap_err().to_string();
    assert!(
        said.contains("weight") || said.contains("parameter"),
        "{said}"
    );
    // None of this has changed the step.
    step.step(1e-2, &x).unwrap();

    let solo = ProcessGroup::solo();
    let automatic = Mode::data_parallel(solo, DataParallel::Automatic);
    let mut step = compile(init, loss, sgd().build(), automatic).unwrap();
    let mut evaluation = Evaluation::new(init, |model: &Linear, x: Tensor<2>| model.forward(x));
    let said = step.evaluate(&mut evaluation, &x).unwrap_err().to_string();
    assert!(said.contains("first train step"), "{said}");
    step.step(1e-2, &x).unwrap();
    step.evaluate(&mut evaluation, &x).unwrap();
}

#[test]
fn one_evaluation_works_with_several_steps() {
    let _guard = seeded();
    let init = |device: &Device| LinearConfig::new(5, 7).init(device);
    let loss = |model: &Linear, x: Tensor<2>| {
        let x = x.cast(model.weight.val().dtype());
        model.forward(x).mean()
    };
    let step = |precision: Precision| {
        let options = Options::default().precision(precision);
        compile(init, loss, sgd().build(), Mode::single().options(options)).unwrap()
    };
    let mut full = step(Precision::default());
    let mut half = step(Precision::new(FloatDType::BF16));
    let mut evaluation = Evaluation::new(init, |model: &Linear, x: Tensor<2>| {
        model.forward(x.cast(model.weight.val().dtype()))
    });
    let x = Tensor::<2>::ones([3, 5], &Device::flex());
    for _ in 0..3 {
        let of_full = full.evaluate(&mut evaluation, &x).unwrap();
        let of_half = half.evaluate(&mut evaluation, &x).unwrap();
        assert_eq!(of_full.dtype(), burn::tensor::DType::F32);
        assert_eq!(of_half.dtype(), burn::tensor::DType::BF16);
    }
}

#[test]
fn changing_host_values_are_rejected_every_time() {
    let _guard = seeded();
    let init = |device: &Device| LinearConfig::new(5, 7).init(device);
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).mean();
    let mut step = compile(init, loss, sgd().build(), Mode::single()).unwrap();
    let calls = std::sync::atomic::AtomicUsize::new(0);
    let mut evaluation = Evaluation::new(init, move |model: &Linear, x: Tensor<2>| {
        let call = calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model.forward(x) * (call as f32 + 1.5)
    });
    let x = Tensor::<2>::ones([3, 5], &Device::flex());
    step.evaluate(&mut evaluation, &x).unwrap();
    for _ in 0..3 {
        let refused = step.evaluate(&mut evaluation, &x);
        assert!(
            matches!(refused, Err(Error::NotRepeatable { .. })),
            "{refused:?}"
        );
    }
}

#[test]
fn undeclared_input_cuts_are_rejected() {
    let _guard = seeded();
    let init = |device: &Device| LinearConfig::new(5, 7).init(device);
    let loss = |model: &Linear, (x, y): (Tensor<2>, Tensor<2>)| (model.forward(x) - y).mean();
    let mesh = Mesh::new([("data", 1)]).unwrap();
    let mesh = ProcessMesh::new(&ProcessGroup::solo(), mesh).unwrap();
    let expand = Expand::new().input("*", "data", Shard(0));
    let mut step = compile(
        init,
        loss,
        sgd().build(),
        Mode::expand(mesh.clone(), expand),
    )
    .unwrap();
    let x = Tensor::<2>::ones([3, 5], &Device::flex());
    let mut evaluation = Evaluation::new(init, |model: &Linear, x: Tensor<2>| model.forward(x));
    step.evaluate(&mut evaluation, &x).unwrap();
    let expand = Expand::new()
        .input("0", "data", Shard(0))
        .input("1", "data", Shard(0));
    let mut step = compile(init, loss, sgd().build(), Mode::expand(mesh, expand)).unwrap();
    let said = step.evaluate(&mut evaluation, &x).unwrap_err().to_string();
    assert!(
        said.contains("\"batch\"") && said.contains("tuple"),
        "{said}"
    );
    let mut evaluation =
        Evaluation::new(init, |model: &Linear, (x,): (Tensor<2>,)| model.forward(x));
    step.evaluate(&mut evaluation, &(x,)).unwrap();
}
