//! Burn's own training loop, as the oracle.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor, TensorData};

/// Returns all floats of a module by path, as they are stored: without the results of a reparameterization.
pub(crate) fn floats<M: Module>(module: &M) -> BTreeMap<String, TensorData> {
    struct Floats(Vec<String>, BTreeMap<String, TensorData>);
    impl ModuleVisitor for Floats {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.insert(self.0.join("."), param.base().into_data());
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
    }
    let mut visitor = Floats(Vec::new(), BTreeMap::new());
    module.visit(&mut visitor);
    visitor.1
}

/// The results of a run of the oracle.
pub(crate) struct Trained {
    pub(crate) losses: Vec<f32>,
    pub(crate) parameters: BTreeMap<String, TensorData>,
}

/// Uses a large epsilon. A small one hides a wrong scale of the gradients. It also divides gradients near zero by their
/// own size, and rounding then decides the step.
pub(crate) fn adamw() -> AdamWConfig {
    AdamWConfig::new()
        .with_weight_decay(0.05)
        .with_epsilon(1e-2)
}

/// Trains with Burn's loop; `rate` returns the learning rate of each step.
pub(crate) fn train<M: Module, B>(
    init: impl Fn(&Device) -> M,
    loss: impl Fn(&M, B) -> Tensor<1>,
    batch: impl Fn(usize, &Device) -> B,
    steps: usize,
    rate: impl Fn(usize) -> f64,
    mut optimizer: ModuleOptimizer,
) -> Trained {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = init(&device);
    // Lazy parameters take their values now, from the seed above.
    let _ = floats(&model);
    device.seed(2);
    let mut losses = Vec::new();
    for step in 0..steps {
        let value = loss(&model, batch(step, &device));
        let gradients = GradientsParams::from_grads(value.backward(), &model);
        losses.push(value.into_scalar::<f32>());
        model = optimizer.step(rate(step), model, gradients);
    }
    // Running statistics take their pending update here.
    let model = model.train();
    Trained {
        losses,
        parameters: floats(&model),
    }
}

/// Trains with Burn's loop over the micro-batches of each step. Gradients are scaled to limit the norm `of` all of them
/// to `max_norm`. Also returns the norms before scaling.
pub(crate) fn train_clipped<M: Module, B>(
    init: impl Fn(&Device) -> M,
    loss: impl Fn(&M, B) -> Tensor<1>,
    batches: impl Fn(usize, &Device) -> Vec<B>,
    steps: usize,
    mut optimizer: ModuleOptimizer,
    (max_norm, of): (f64, impl Fn(&[f64]) -> f64),
) -> (Trained, Vec<f64>) {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = init(&device);
    let _ = floats(&model);
    device.seed(2);
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let batches = batches(step, &device);
        let num_batches = batches.len() as f32;
        let mut accumulator = GradientsAccumulator::new();
        let mut mean = 0.0;
        for batch in batches {
            let value = loss(&model, batch).div_scalar(num_batches);
            let gradients = GradientsParams::from_grads(value.backward(), &model);
            mean += value.into_scalar::<f32>();
            accumulator.accumulate(&model, gradients);
        }
        let mut gradients = accumulator.grads();
        let norm = of(&elements(&model, &gradients));
        let coefficient = (max_norm / (norm + 1e-6)).min(1.0);
        scale(&model, &mut gradients, coefficient);
        losses.push(mean);
        norms.push(norm);
        model = optimizer.step(1e-2, model, gradients);
    }
    let model = model.train();
    let trained = Trained {
        losses,
        parameters: floats(&model),
    };
    (trained, norms)
}

/// All elements of all gradients.
pub(crate) fn elements<M: Module>(model: &M, gradients: &GradientsParams) -> Vec<f64> {
    struct Elements<'a>(&'a GradientsParams, Vec<f64>);
    impl ModuleVisitor for Elements<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.get::<D>(param.id) {
                self.1.extend(gradient.into_data().iter::<f64>());
            }
        }
    }
    let mut visitor = Elements(gradients, Vec::new());
    model.visit(&mut visitor);
    visitor.1
}

pub(crate) fn scale<M: Module>(model: &M, gradients: &mut GradientsParams, by: f64) {
    struct Scale<'a>(&'a mut GradientsParams, f64);
    impl ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.remove::<D>(param.id) {
                self.0.register(param.id, gradient.mul_scalar(self.1));
            }
        }
    }
    model.visit(&mut Scale(gradients, by));
}
