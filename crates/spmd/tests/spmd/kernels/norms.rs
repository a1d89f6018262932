//! Norms.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::silu;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_certificate::compile;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Mode, Precision};

use super::{DIM, ROWS, STEPS, assert_count, check, check_on, pairs};
use crate::clipping::sgd;
use crate::compiled::seeded;
use crate::eager;

/// Layer norms of two dims, and root-mean-square norms: of the batch, before and after an addition, one whose result is
/// read twice, one whose rows are read between its parts, and one before a sum over everything.
#[derive(Module, Debug)]
struct Normed {
    norms: Vec<RmsNorm>,
    layers: Vec<LayerNorm>,
    linears: Vec<Linear>,
    last: Linear,
}

impl Normed {
    fn new(device: &Device) -> Self {
        let norm = |_| RmsNormConfig::new(DIM).with_epsilon(1e-5).init(device);
        let linear = |_| LinearConfig::new(DIM, DIM).init(device);
        Self {
            norms: (0..5).map(norm).collect(),
            layers: (0..2)
                .map(|_| LayerNormConfig::new(DIM).init(device))
                .collect(),
            linears: (0..4).map(linear).collect(),
            last: LinearConfig::new(DIM, 5).init(device),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let x = self.linears[0].forward(self.norms[0].forward(x));
        // Before the addition, as in a Llama.
        let x = x.clone() + self.linears[1].forward(self.norms[1].forward(x));
        // After it.
        let x = self.norms[2].forward(x.clone() * y + x);
        // With two dims, as in the models here.
        let x = x.flatten::<2>(0, 1);
        let wide = self.norms[3].forward(self.linears[2].forward(x.clone()));
        let x = x + silu(wide.clone()) * self.linears[3].forward(wide);
        let x = x.clone() + self.layers[0].forward(x);
        let x = self.layers[1].forward(x).sin();
        self.last.forward(self.norms[4].forward(x)).square().mean()
    }
}

#[test]
fn root_mean_square_norms_run_kernels() {
    let _guard = seeded();
    let names = check("norms", Normed::new, Normed::loss, pairs);
    // The first norm is applied to the batch, which has no gradient.
    assert_count(&names, "Custom.models.rms_norm_backward", 4);
    assert_count(&names, "Custom.models.rms_norm", 4);
    assert_count(&names, "Custom.models.layer_norm_backward", 2);
    assert_count(&names, "Custom.models.swiglu_backward", 1);
}

/// Norms with a single row along some dims, or a single row in all: Burn sums their gradients along the other dims.
#[derive(Module, Debug)]
struct FewRows {
    linear: Linear,
    root: RmsNorm,
    layer: LayerNorm,
    whole: Linear,
    last: RmsNorm,
    end: LayerNorm,
}

impl FewRows {
    fn new(device: &Device) -> Self {
        Self {
            linear: LinearConfig::new(DIM, DIM).init(device),
            root: RmsNormConfig::new(DIM).init(device),
            layer: LayerNormConfig::new(DIM).init(device),
            whole: LinearConfig::new(DIM, DIM).init(device),
            last: RmsNormConfig::new(DIM).init(device),
            end: LayerNormConfig::new(DIM).init(device),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        // A batch of one, one position of it, and all of it as one row.
        let x = self.linear.forward(x).flatten::<2>(0, 1).unsqueeze::<4>();
        let x = self.root.forward(x.clone()) + self.layer.forward(x * 0.5);
        let [.., rows, _] = x.dims();
        let one = x.clone().reshape([rows, 1, DIM]);
        let one = self.layer.forward(self.root.forward(one).sin());
        let row = self.whole.forward(x.mean_dim(2)).reshape([1, DIM]);
        let row = self.end.forward(self.last.forward(row).sin());
        let y = y.flatten::<2>(0, 1).mean_dim(0);
        (row * y).square().mean() + one.square().mean()
    }
}

#[test]
fn norms_of_few_rows_run_kernels() {
    let _guard = seeded();
    // The mean over rows is not the mean of the ranks' means.
    let names = check_on(&[1], "few rows", FewRows::new, FewRows::loss, pairs);
    assert_count(&names, "Custom.models.rms_norm_backward", 3);
    assert_count(&names, "Custom.models.layer_norm_backward", 3);
}

fn loss_of_halves(model: &Normed, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
    let loss = model.loss((x.cast(DType::BF16), y.cast(DType::BF16)));
    loss.cast(DType::F32)
}

/// Parameters by path.
type Parameters = BTreeMap<String, Vec<f32>>;

/// Returns parameters after some steps in halves, and the number of times that each operation is in the step.
fn in_halves(options: Options) -> (Parameters, BTreeMap<String, usize>) {
    let device = Device::flex();
    device.seed(1);
    let options = options.precision(Precision::new(FloatDType::BF16));
    let mode = Mode::single().options(options).verified().certified();
    let mut step = compile(Normed::new, loss_of_halves, sgd().build(), mode).unwrap();
    for index in 0..STEPS {
        step.step(1e-2, &pairs(index, 0, ROWS, &device)).unwrap();
    }
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    for node in step.graph().unwrap().nodes() {
        let name = format!("{} {}", node.phase, node.name());
        *names.entry(name).or_default() += 1;
    }
    let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
    let mut parameters = BTreeMap::new();
    for path in paths {
        let values = step.parameter(&path).unwrap().try_to_vec().unwrap();
        parameters.insert(path.to_string(), values);
    }
    (parameters, names)
}

/// Returns the difference of parameters as a share of the change in training.
fn error(found: &Parameters, expected: &Parameters, initial: &Parameters) -> f64 {
    let distance = |a: &Parameters, b: &Parameters| {
        let pairs = a.iter().flat_map(|(path, a)| a.iter().zip(&b[path]));
        let squares = pairs.map(|(a, b)| f64::from(a - b).powi(2));
        squares.sum::<f64>().sqrt()
    };
    distance(found, expected) / distance(expected, initial)
}

#[test]
fn root_mean_square_norms_of_halves_run_kernels() {
    let _guard = seeded();
    let batch = |step: usize, device: &Device| pairs(step, 0, ROWS, device);
    let of_burn = |steps| {
        let trained = eager::train(
            Normed::new,
            Normed::loss,
            batch,
            steps,
            |_| 1e-2,
            sgd().init(),
        );
        let parameters = trained.parameters.into_iter();
        let parameters = parameters.map(|(path, data)| (path, data.try_to_vec().unwrap()));
        parameters.collect::<Parameters>()
    };
    let (initial, expected) = (of_burn(0), of_burn(STEPS));
    let (parameters, names) = in_halves(Options::default());
    assert_count(&names, "Custom.models.rms_norm_backward", 4);
    assert_count(&names, "Custom.models.rms_norm", 4);
    assert_count(&names, "Custom.models.layer_norm_backward", 2);
    let (composed, names) = in_halves(Options::default().kernels(false));
    assert_count(&names, "Custom.models.rms_norm", 0);
    let [kernels, composed] = [parameters, composed].map(|of| error(&of, &expected, &initial));
    println!("of 32 bits: kernels {kernels:.4}, composed {composed:.4}");
    assert!(kernels <= 0.05, "{kernels}");
    assert!(kernels <= 1.5 * composed, "{kernels}, composed {composed}");
}
