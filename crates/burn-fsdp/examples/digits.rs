//! Burn's own training loop, sharded: a convolutional network on drawn digits, as in Burn's guide, with one changed
//! line.
//!
//! ```text
//! cargo run --release --example digits
//! ```
//!
//! Built with the feature `mpi` and started by `mpirun`, it runs its ranks as processes:
//!
//! ```text
//! cargo build --release --example digits --features burn-fsdp-cli/mpi
//! mpirun -n 2 target/release/examples/digits
//! ```

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Gelu, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::optim::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::tensor::{Device, Int, Tensor};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_fsdp::train::FullySharded;
use burn_fsdp::{LaunchConfig, ShardPolicy, launcher_ranks};

const SIDE: usize = 14;

#[derive(Module, Debug)]
struct ConvBlock {
    conv: Conv2d,
    norm: BatchNorm,
    activation: Gelu,
}

impl ConvBlock {
    fn new(channels: [usize; 2], device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new(channels, [3, 3]).init(device),
            norm: BatchNormConfig::new(channels[1]).init(device),
            activation: Gelu::new(),
        }
    }

    fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let features = self.norm.forward(self.conv.forward(input));
        self.activation.forward(features)
    }
}

#[derive(Module, Debug)]
struct Model {
    conv1: ConvBlock,
    conv2: ConvBlock,
    dropout: Dropout,
    hidden: Linear,
    head: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            conv1: ConvBlock::new([1, 8], device),
            conv2: ConvBlock::new([8, 16], device),
            dropout: DropoutConfig::new(0.2).init(),
            hidden: LinearConfig::new(16 * (SIDE - 4) * (SIDE - 4), 32).init(device),
            head: LinearConfig::new(32, 10).init(device),
        }
    }

    fn classify(&self, images: Tensor<4>) -> Tensor<2> {
        let features = self.conv2.forward(self.conv1.forward(images));
        let features = self.dropout.forward(features.flatten::<2>(1, 3));
        self.head.forward(self.hidden.forward(features).tanh())
    }

    fn output(&self, batch: Digits) -> ClassificationOutput {
        let output = self.classify(batch.images);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, output, batch.classes)
    }
}

impl TrainStep for Model {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> TrainOutput<ClassificationOutput> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> ClassificationOutput {
        self.output(batch)
    }
}

#[derive(Debug, Clone)]
struct Digits {
    images: Tensor<4>,
    classes: Tensor<1, Int>,
}

#[derive(Debug, Clone)]
struct Digit {
    pixels: Vec<f32>,
    class: i32,
}

/// Draws a digit like a pocket calculator's, at a position that varies with the number, with noise.
fn drawn(number: usize) -> Digit {
    // Bars from top to bottom, and from left to right.
    const BARS: [&[usize]; 10] = [
        &[0, 1, 2, 4, 5, 6],
        &[2, 5],
        &[0, 2, 3, 4, 6],
        &[0, 2, 3, 5, 6],
        &[1, 2, 3, 5],
        &[0, 1, 3, 5, 6],
        &[0, 1, 3, 4, 5, 6],
        &[0, 2, 5],
        &[0, 1, 2, 3, 4, 5, 6],
        &[0, 1, 2, 3, 5, 6],
    ];
    let class = number % 10;
    let (left, top) = (1 + number * 7 % 5, 1 + number * 3 % 4);
    let mut pixels: Vec<f32> = (0..SIDE * SIDE)
        .map(|p| ((number * 131 + p * 71) % 97) as f32 / 97.0 * 0.5)
        .collect();
    for bar in BARS[class] {
        for step in 0..4 {
            let (x, y) = match bar {
                0 | 3 | 6 => (step, bar / 3 * 4),
                1 | 4 => (0, bar / 3 * 4 + step + 1),
                _ => (4, bar / 3 * 4 + step + 1),
            };
            pixels[(top + y) * SIDE + left + x] += 1.0;
        }
    }
    Digit {
        pixels,
        class: class as i32,
    }
}

#[derive(Clone)]
struct DigitBatcher;

impl Batcher<Digit, Digits> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> Digits {
        let pixels: Vec<f32> = items.iter().flat_map(|item| item.pixels.clone()).collect();
        let classes: Vec<i32> = items.iter().map(|item| item.class).collect();
        let shape = [items.len(), 1, SIDE, SIDE];
        Digits {
            images: Tensor::<1>::from_floats(pixels.as_slice(), device).reshape(shape),
            classes: Tensor::from_ints(classes.as_slice(), device),
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let folder = tempfile::tempdir()?;
    let loader = |range: std::ops::Range<usize>| {
        let items = range.map(drawn).collect();
        let builder = DataLoaderBuilder::new(DigitBatcher)
            .batch_size(16)
            .shuffle(42);
        builder.build(InMemDataset::new(items))
    };
    let (model, optimizer) = (Model::new(&device), AdamWConfig::new().init());
    let rates = CosineAnnealingLrSchedulerConfig::new(4e-3, 100).init()?;
    let training = SupervisedTraining::new(folder.path(), loader(0..800), loader(800..1000))
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_default_checkpointers()
        .num_epochs(4)
        .summary();

    // This line shards the training. Without it: let result = training.launch(Learner::new(model, optimizer, rates));
    let result = FullySharded::new(LaunchConfig::new(launcher_ranks().unwrap_or(2)))
        .policy(ShardPolicy::new().units(["conv*", "hidden"]))
        .launch_among_processes(training, model, optimizer, rates)?;

    let test = DigitBatcher.batch((800..1000).map(drawn).collect(), &Device::flex());
    let guessed = result
        .model
        .classify(test.images)
        .argmax(1)
        .flatten::<1>(0, 1);
    let right = guessed.equal(test.classes).int().sum().into_scalar::<i64>();
    println!("{right} of 200 digits that it has never seen are right");
    assert!(right >= 180, "it has learned");
    Ok(())
}

#[cfg(test)]
#[path = "../tests/beside_burn/example.rs"]
mod beside_burn;

#[cfg(test)]
mod tests {
    use burn::optim::GradientsParams;
    use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

    use burn_fsdp::compile::{Batch, BatchMapper};

    use super::beside_burn::{Example, assert_equal, joined, seeded};
    use super::*;

    const BATCH: usize = 16;

    impl Batch for Digits {
        fn map(self, mapper: &mut impl BatchMapper) -> Self {
            Self {
                images: mapper.float("images", self.images),
                classes: mapper.int("classes", self.classes),
            }
        }
    }

    fn rates() -> ModuleLrScheduler {
        let config = CosineAnnealingLrSchedulerConfig::new(4e-3, 20);
        config.init().expect("a schedule")
    }

    /// Returns the model without its random parts.
    fn model(device: &Device) -> Model {
        Model {
            dropout: DropoutConfig::new(0.0).init(),
            ..Model::new(device)
        }
    }

    /// Returns loss and accuracy of two epochs in plain Burn, where `BatchNorm` sees each rank's images separately.
    fn by_hand(items: &[Digit], ranks: usize) -> Vec<[f64; 2]> {
        let device = Device::flex().autodiff();
        let (mut model, mut optimizer) = (seeded(model), AdamWConfig::new().init());
        let mut rates = rates();
        let epoch = |_| {
            let mut sums = [0.0; 2];
            let steps: Vec<_> = joined(items, ranks, BATCH / ranks)
                .chunks(BATCH)
                .map(<[_]>::to_vec)
                .collect();
            for step in &steps {
                let each = step.chunks(BATCH / ranks).map(|own| {
                    let batch = DigitBatcher.batch(own.to_vec(), &device);
                    let output = model.output(batch);
                    let right = output.output.clone().argmax(1).flatten::<1>(0, 1);
                    let right = right.equal(output.targets).int().sum().into_scalar::<i64>();
                    sums[1] += 100.0 * right as f64 / items.len() as f64;
                    output.loss
                });
                let loss = each.reduce(|a, b| a + b).expect("a rank") / ranks as f64;
                sums[0] += loss.clone().into_scalar::<f64>() / steps.len() as f64;
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(rates.step(), model.clone(), gradients);
            }
            sums
        };
        (0..2).map(epoch).collect()
    }

    #[test]
    fn metrics_match_plain_burn() {
        let example = Example {
            batcher: DigitBatcher,
            items: (
                (0..160).map(drawn).collect(),
                (800..832).map(drawn).collect(),
            ),
            batch: BATCH,
            accumulation: 1,
            optimizer: || AdamWConfig::new().init(),
            rates,
            policy: || ShardPolicy::new().units(["conv*", "hidden"]),
        };
        example.assert_as_by_burn(model, &[1]);
        let optimizer = || AdamWConfig::new().build().into();
        let closures: (_, fn(&_, _) -> _) = (model as fn(&_) -> _, Model::output);
        example.assert_compiled_as_by_burn(closures, optimizer, &[1]);
        for ranks in [2, 4] {
            let expected = by_hand(&example.items.0, ranks).into_iter().enumerate();
            let expected = expected
                .map(|(epoch, of)| ("train", epoch + 1, of))
                .collect();
            for got in [
                example.on_ranks(seeded(model), ranks),
                example.compiled(closures, optimizer, ranks),
            ] {
                let trained = got.into_iter().filter(|(split, ..)| *split == "train");
                assert_equal(&trained.collect(), &expected);
            }
        }
    }
}
