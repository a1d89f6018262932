//! Scaled losses, in Burn's own loop.

use burn::module::Module;
use burn::optim::SgdConfig;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use burn_fsdp::compile::LossScaling;
use burn_fsdp::train::FullySharded;
use burn_fsdp::{Error, LossScaler, ShardPolicy};

use super::network::{BATCH, Digits, Net, items};
use super::{assert_close, device, folder, on, optimizer, plain, rates, training, values};

/// A network whose steps scale a multiple of their loss.
#[derive(Module, Debug)]
struct Scaling {
    net: Net,
    #[module(skip)]
    factor: f32,
}

impl TrainStep for Scaling {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> TrainOutput<ClassificationOutput> {
        let output = self.net.classify(batch);
        let loss = FullySharded::scale_loss(output.loss.clone() * self.factor);
        TrainOutput::new(self, loss.backward(), output)
    }
}

impl InferenceStep for Scaling {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> ClassificationOutput {
        self.net.classify(batch)
    }
}

fn model(factor: f32) -> Scaling {
    let net = Net::new(&device());
    Scaling { net, factor }
}

fn units() -> ShardPolicy {
    ShardPolicy::new().units(["net.conv", "net.hidden"])
}

fn scaler(scale: f64) -> LossScaler {
    let scaling = LossScaling {
        initial_scale: scale,
        ..LossScaling::default()
    };
    LossScaler::new(scaling).expect("a scale")
}

/// A power of two changes no bit of the gradients.
#[test]
fn a_scaled_loss_trains_as_on_one_device() {
    let data = || (items(26, 1), items(6, 2));
    for (ranks, accumulation) in [(1, None), (2, None), (2, Some(3)), (3, None)] {
        let (ours, burns) = (folder(), folder());
        let set = training(ours.path(), data(), BATCH);
        let set = match accumulation {
            Some(batches) => set.grads_accumulation(batches),
            None => set,
        };
        let strategy = on(ranks).policy(units()).loss_scaler(scaler(4096.0));
        let got = strategy.launch(set, model(1.0), optimizer(), rates());
        let got = got.unwrap_or_else(|error| panic!("{error}"));
        let want = plain(burns.path(), data(), ranks, |set| match accumulation {
            Some(batches) => set.grads_accumulation(batches),
            None => set,
        });
        assert_close(&got.model, &want.model, 1e-5);
    }
}

/// The gradients overflow in the first five steps, until the scale is small enough.
#[test]
fn steps_that_overflow_are_skipped() {
    let trained = |count: usize| {
        let at = folder();
        let data = (items(count, 1), items(4, 2));
        let set = training(at.path(), data, BATCH).num_epochs(1);
        let strategy = on(2).policy(units()).loss_scaler(scaler(2f64.powi(127)));
        let rate = 1e-4;
        let result = strategy.launch(set, model(64.0), SgdConfig::new().init(), rate);
        result.unwrap_or_else(|error| panic!("{error}")).model
    };
    let first = values(&model(64.0));
    assert_eq!(values(&trained(2 * BATCH)), first);
    let later = values(&trained(40 * BATCH));
    assert_ne!(later, first);
    let mut all = later.iter().flat_map(|(_, values)| values);
    assert!(all.all(|value| value.is_finite()));
}

#[test]
fn a_step_that_does_not_scale_its_loss_is_refused() {
    let at = folder();
    let set = training(at.path(), (items(8, 1), items(4, 2)), BATCH);
    let strategy = on(2).loss_scaler(scaler(2.0));
    let refused = strategy.launch(set, Net::new(&device()), optimizer(), rates());
    let refused = refused.err().expect("refused");
    assert!(
        refused.to_string().contains("FullySharded::scale_loss"),
        "{refused}"
    );
    assert!(!matches!(refused, Error::Sharding(_)), "{refused}");
}
