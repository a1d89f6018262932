//! A program that makes another type the default of its device gets the states of its optimizers back in that type. The
//! default belongs to the process, so each type has its own process.

use std::env;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, RmsPropConfig, SgdConfig};
use burn::tensor::{DType, Device, DeviceConfig, FloatDType, Tensor, TensorData};
use burn_fsdp::optim::FileBackedOptimizer;
use burn_fsdp::{
    Error, LaunchConfig, ProcessGroup, ShardPolicy, backward, fully_shard, launch, resume, save,
};

const TYPE: &str = "BURN_FSDP_TEST_TYPE";
const STEPS: u64 = 6;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |seed: usize, [from, to]: [usize; 2]| {
            let value = |i: usize| ((i * 37 + seed) % 101) as f32 / 90.0 - 0.5;
            let values: Vec<f32> = (0..from * to).map(value).collect();
            let mut layer = LinearConfig::new(from, to).with_bias(false).init(device);
            layer.weight = Param::from_data(TensorData::new(values, [from, to]), device);
            layer
        };
        Self {
            first: layer(1, [5, 7]),
            second: layer(5, [7, 3]),
        }
    }

    fn loss(&self, step: u64, device: &Device) -> Tensor<1> {
        let value = |i: usize| ((i * 29 + step as usize * 13) % 53) as f32 / 26.0 - 1.0;
        let values: Vec<f32> = (0..20).map(value).collect();
        let x = Tensor::<2>::from_data(TensorData::new(values, [4, 5]), device);
        self.second
            .forward(self.first.forward(x).tanh())
            .square()
            .mean()
    }
}

fn number(loss: Tensor<1>) -> f64 {
    loss.cast(DType::F64).into_scalar::<f64>()
}

fn optimizer(name: &str) -> ModuleOptimizer {
    match name {
        "adamw" => AdamWConfig::new().with_epsilon(1e-3).init(),
        "rmsprop" => RmsPropConfig::new().with_epsilon(1e-3).init(),
        _ => SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .init(),
    }
}

/// Trains in parts; each continues from the state that the previous part has saved.
fn trained(name: &'static str, ranks: usize, ends: &[u64]) -> Vec<f64> {
    let folder = tempfile::tempdir().expect("a folder");
    let path: Arc<Path> = folder.path().into();
    let mut all = Vec::new();
    for &end in ends {
        let path = path.clone();
        let body = move |world: ProcessGroup| -> Result<Vec<f64>, Error> {
            let device = Device::flex().autodiff().gradient_checkpointing();
            let policy = ShardPolicy::new().units(["first"]);
            let net = fully_shard(Net::new(&device), &world, policy)?;
            let resumed = resume(&*path, net, optimizer(name), &world)?;
            let (mut net, mut optimizer) = (resumed.model, resumed.optimizer);
            let mut losses = Vec::new();
            for step in resumed.step..end {
                let loss = net.loss(step, &device);
                losses.push(number(loss.clone()));
                let gradients = backward(loss, &net)?;
                net = optimizer.step(1e-2, net, gradients);
            }
            save(&*path, end, &net, &optimizer, &world)?;
            Ok(losses)
        };
        let losses = launch(LaunchConfig::new(ranks), body);
        all.extend(
            losses
                .unwrap_or_else(|error| panic!("{error}"))
                .swap_remove(0),
        );
    }
    all
}

/// The same with the optimizer's state in files.
fn in_files(name: &'static str, ranks: usize) -> Vec<f64> {
    let folder = tempfile::tempdir().expect("a folder");
    let path: Arc<Path> = folder.path().into();
    let body = move |world: ProcessGroup| -> Result<Vec<f64>, Error> {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let policy = ShardPolicy::new().units(["first"]);
        let mut net = fully_shard(Net::new(&device), &world, policy)?;
        let mut optimizer = FileBackedOptimizer::new(optimizer(name), &*path, world.rank())?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let loss = net.loss(step, &device);
            losses.push(number(loss.clone()));
            let gradients = backward(loss, &net)?;
            net = optimizer.step(1e-2, net, gradients)?;
        }
        Ok(losses)
    };
    let losses = launch(LaunchConfig::new(ranks), body);
    losses
        .unwrap_or_else(|error| panic!("{error}"))
        .swap_remove(0)
}

fn plainly(name: &str) -> Vec<f64> {
    let device = Device::flex().autodiff();
    let (mut net, mut optimizer) = (Net::new(&device), optimizer(name));
    let steps = (0..STEPS).map(|step| {
        let loss = net.loss(step, &device);
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(1e-2, net.clone(), gradients);
        number(loss)
    });
    steps.collect()
}

/// The work of a process for one type; nothing without a type.
#[test]
fn in_the_requested_type() {
    let dtype = match env::var(TYPE).as_deref() {
        Ok("f64") => FloatDType::F64,
        Ok("bf16") => FloatDType::BF16,
        Ok("f16") => FloatDType::F16,
        _ => return,
    };
    let config = DeviceConfig::default().float_dtype(dtype);
    Device::flex()
        .configure(config)
        .expect("before the first tensor");
    for name in ["adamw", "rmsprop", "momentum"] {
        assert_eq!(
            trained(name, 1, &[3, STEPS]),
            plainly(name),
            "{name} in {dtype:?}"
        );
        for ranks in [1, 2, 3] {
            let want = trained(name, ranks, &[STEPS]);
            assert_eq!(
                trained(name, ranks, &[3, STEPS]),
                want,
                "{name} in {dtype:?} on {ranks}"
            );
            assert_eq!(
                in_files(name, ranks),
                want,
                "{name} in {dtype:?} on {ranks}, in files"
            );
        }
    }
}

#[test]
fn states_are_restored_in_the_default_type_of_the_device() {
    for dtype in ["f64", "bf16", "f16"] {
        let mut command = Command::new(env::current_exe().expect("this test"));
        let command = command
            .args(["--exact", "in_the_requested_type"])
            .env(TYPE, dtype);
        let done = command.output().expect("starts");
        let text = String::from_utf8_lossy(&done.stdout);
        assert!(
            done.status.success() && text.contains("1 passed"),
            "{dtype}: {text}"
        );
    }
}
