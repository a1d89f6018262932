//! Compiled steps over batches whose number of tensors changes from step to step, compared with plain Burn.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Distribution, Tensor};
use burn_fsdp::compile::{CompiledStep, Mode, Options, compile};
use burn_fsdp::internals::compile::Error;
use burn_fsdp::internals::compile::passes::schedule::OptimizerPlace;
use burn_fsdp::{LaunchConfig, Strategy, launch};

const RATE: f64 = 1e-2;

/// A vector and an option, each of which changes the number of tensors.
type Rows = (Vec<Tensor<2>>, Option<Tensor<2>>);

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    /// Used only if the option is there.
    extra: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |[from, to]: [usize; 2]| {
            let mut linear = LinearConfig::new(from, to).init(device);
            let values = |shape: &[usize]| -> Tensor<1> {
                let len = shape.iter().product::<usize>() as i64;
                let steps = Tensor::<1, burn::tensor::Int>::arange(0..len, device).float();
                (steps * 0.7).sin() * 0.4
            };
            linear.weight = Param::from_tensor(values(&[from, to]).reshape([from, to]));
            linear.bias = Some(Param::from_tensor(values(&[to])));
            linear
        };
        Self {
            first: linear([4, 5]),
            second: linear([5, 3]),
            extra: linear([4, 3]),
        }
    }

    fn loss(&self, (rows, extra): Rows) -> Tensor<1> {
        let num = rows.len() as f64;
        let of_rows = |rows: Tensor<2>| {
            let hidden = self.first.forward(rows).tanh();
            self.second.forward(hidden).square().mean()
        };
        let sum = rows.into_iter().map(of_rows).reduce(|sum, loss| sum + loss);
        let mean = sum.expect("a batch has rows") / num;
        match extra {
            Some(extra) => mean + self.extra.forward(extra).square().mean(),
            None => mean,
        }
    }
}

/// Number of tensors in the vector, and true if the option is there, for each step.
const FORMS: [(usize, bool); 9] = [
    (2, false),
    (2, false),
    (3, false),
    (2, true),
    (1, true),
    (2, false),
    (3, true),
    (3, false),
    (2, false),
];

/// The batch of a step, the same on all ranks.
fn batch(step: usize, (num, extra): (usize, bool), device: &Device) -> Rows {
    let rows = |seed: usize| {
        device.seed((100 * step + seed) as u64);
        Tensor::<2>::random([2, 4], Distribution::Uniform(-1.0, 1.0), device)
    };
    let all = (0..num).map(rows).collect();
    (all, extra.then(|| rows(50)))
}

fn plain(steps: &[Vec<Rows>]) -> Vec<f64> {
    let device = Device::flex().autodiff();
    let mut model = Net::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let tracked = |(rows, extra): &Rows| {
        let on = |rows: &Tensor<2>| Tensor::from_data(rows.to_data(), &device);
        (rows.iter().map(on).collect(), extra.as_ref().map(on))
    };
    let mut losses = Vec::new();
    for batches in steps {
        let of_batch = |rows| model.loss(tracked(rows)) / batches.len() as f64;
        let loss = batches.iter().map(of_batch).reduce(|sum, loss| sum + loss);
        let loss = loss.expect("a step has batches");
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(RATE, model, gradients);
    }
    losses
}

#[track_caller]
fn assert_like_plain(ranks: usize, options: &Options, steps: &[Vec<Rows>]) {
    let expected = plain(steps);
    let (options, steps) = (options.clone(), steps.to_vec());
    let losses = launch(LaunchConfig::new(ranks), move |world| {
        let mode = Mode::data_parallel(world, Strategy::FullShard).options(options.clone());
        let optimizer = AdamWConfig::new().build();
        let mut step: CompiledStep<Rows> = compile(Net::new, Net::loss, optimizer, mode)?;
        let run = |batches: &Vec<Rows>| match &batches[..] {
            [one] => step.step(RATE, one),
            all => step.step_accumulated(RATE, all),
        };
        steps.iter().map(run).collect::<Result<Vec<f64>, Error>>()
    });
    for losses in losses.unwrap_or_else(|error| panic!("{error}")) {
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            assert!(
                (loss - expected).abs() < 1e-5 * expected.abs(),
                "{ranks} ranks, step {step}: {losses:?}, plain Burn {expected:?}"
            );
        }
    }
}

fn in_forms() -> Vec<Vec<Rows>> {
    let forms = FORMS.iter().enumerate();
    let batches = forms.map(|(step, form)| vec![batch(step, *form, &Device::flex())]);
    batches.collect()
}

#[test]
fn states_outlive_batches_of_other_forms() {
    for ranks in [1, 2, 3] {
        assert_like_plain(ranks, &Options::default(), &in_forms());
        assert_like_plain(ranks, &Options::none(), &in_forms());
    }
}

#[test]
fn an_optimizer_in_the_next_forward_outlives_batches_of_other_forms() {
    let options = Options::default().optimizer(OptimizerPlace::InNextForward);
    for ranks in [1, 2] {
        assert_like_plain(ranks, &options, &in_forms());
    }
}

#[test]
fn micro_batches_of_a_step_may_have_other_forms() {
    let device = Device::flex();
    let steps = [
        [(2, false), (1, false)],
        [(3, false), (2, false)],
        [(1, true), (2, true)],
        [(2, false), (3, false)],
    ];
    let steps = steps.iter().enumerate().map(|(step, forms)| {
        let forms = forms.iter().enumerate();
        forms
            .map(|(index, form)| batch(10 * step + index, *form, &device))
            .collect()
    });
    let steps: Vec<Vec<Rows>> = steps.collect();
    for ranks in [1, 2] {
        assert_like_plain(ranks, &Options::default(), &steps);
    }
}
