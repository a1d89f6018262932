//! Burn's own training loop, sharded: a transformer that continues a text, with one changed line.
//!
//! The model, the schedule and the accumulation come from Burn's example with this name. The optimizer clips each
//! gradient by its own norm, which requires that one rank owns each whole parameter.
//!
//! ```text
//! cargo run --release --example text_generation
//! ```

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::optim::lr_scheduler::noam::NoamLrSchedulerConfig;
use burn::tensor::{Device, Int, Tensor};
use burn::train::metric::{AccuracyMetric, LearningRateMetric, LossMetric, PerplexityMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_fsdp::train::FullySharded;
use burn_fsdp::{LaunchConfig, ShardPolicy};

/// Bytes of a window.
const LEN: usize = 64;
const DIM: usize = 48;
const TEXT: &str = concat!(
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../shard/src/README.md"),
    include_str!("../../collectives/src/README.md"),
);

#[derive(Module, Debug)]
struct Model {
    transformer: TransformerEncoder,
    bytes: Embedding,
    places: Embedding,
    output: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let transformer = TransformerEncoderConfig::new(DIM, 4 * DIM, 4, 2).with_dropout(0.0);
        Self {
            transformer: transformer.with_norm_first(true).init(device),
            bytes: EmbeddingConfig::new(256, DIM).init(device),
            places: EmbeddingConfig::new(LEN, DIM).init(device),
            output: LinearConfig::new(DIM, 256).init(device),
        }
    }

    /// Returns the logits of the byte after each position, `[batch * time, 256]`.
    fn forward(&self, bytes: Tensor<2, Int>) -> Tensor<2> {
        let [rows, len] = bytes.dims();
        let device = bytes.device();
        let places = Tensor::arange(0..len as i64, &device).reshape([1, len]);
        let input = self.bytes.forward(bytes) + self.places.forward(places);
        let mask = generate_autoregressive_mask(rows, len, &device);
        let input = TransformerEncoderInput::new(input).mask_attn(mask);
        let encoded = self.transformer.forward(input);
        self.output.forward(encoded).flatten(0, 1)
    }

    fn predict(&self, batch: Windows) -> ClassificationOutput {
        let output = self.forward(batch.inputs);
        let targets = batch.targets.flatten(0, 1);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), targets.clone());
        ClassificationOutput::new(loss, output, targets)
    }

    /// Continues `text` with `count` bytes, each of them the likeliest.
    fn generate(&self, text: &str, count: usize) -> String {
        let mut bytes = text.as_bytes().to_vec();
        for _ in 0..count {
            let window = &bytes[bytes.len().saturating_sub(LEN)..];
            let input: Vec<i32> = window.iter().map(|&byte| byte.into()).collect();
            let input = Tensor::<1, Int>::from_ints(input.as_slice(), &Device::flex());
            let logits = self.forward(input.reshape([1, window.len()]));
            let last = logits.slice_dim(0, window.len() - 1..window.len());
            bytes.push(last.argmax(1).into_scalar::<i64>() as u8);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl TrainStep for Model {
    type Input = Windows;
    type Output = ClassificationOutput;

    fn step(&self, batch: Windows) -> TrainOutput<ClassificationOutput> {
        let output = self.predict(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = Windows;
    type Output = ClassificationOutput;

    fn step(&self, batch: Windows) -> ClassificationOutput {
        self.predict(batch)
    }
}

#[derive(Debug, Clone)]
struct Windows {
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
}

#[derive(Clone)]
struct WindowBatcher;

impl Batcher<Vec<u8>, Windows> for WindowBatcher {
    fn batch(&self, windows: Vec<Vec<u8>>, device: &Device) -> Windows {
        let cut = |from: usize| {
            let bytes = windows.iter().flat_map(|window| &window[from..from + LEN]);
            let bytes: Vec<i32> = bytes.map(|&byte| byte.into()).collect();
            Tensor::<1, Int>::from_ints(bytes.as_slice(), device).reshape([windows.len(), LEN])
        };
        Windows {
            inputs: cut(0),
            targets: cut(1),
        }
    }
}

fn windows() -> Vec<Vec<u8>> {
    let windows = TEXT.as_bytes().windows(LEN + 1).step_by(LEN);
    windows.map(<[u8]>::to_vec).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let folder = tempfile::tempdir()?;
    let mut trained = windows();
    let held_out = trained.split_off(trained.len() - 60);
    let loader = |windows: Vec<Vec<u8>>| {
        let builder = DataLoaderBuilder::new(WindowBatcher)
            .batch_size(8)
            .shuffle(1);
        builder.build(InMemDataset::new(windows))
    };
    let clipped = AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
    let (model, optimizer) = (Model::new(&device), clipped.init());
    let rates = NoamLrSchedulerConfig::new(0.5)
        .with_warmup_steps(40)
        .with_model_size(DIM)
        .init()?;
    let training =
        SupervisedTraining::new(folder.path(), loader(trained), loader(held_out.clone()))
            .metrics((
                AccuracyMetric::new(),
                PerplexityMetric::new(),
                LossMetric::new(),
            ))
            .metric_train_numeric(LearningRateMetric::new())
            .grads_accumulation(2)
            .num_epochs(4)
            .summary();

    // This line shards the training. Without it: let result = training.launch(Learner::new(model, optimizer, rates));
    let result = FullySharded::new(LaunchConfig::new(2))
        .policy(
            ShardPolicy::new()
                .units(["transformer.layers.*"])
                .one_owner(["**"]),
        )
        .launch(training, model, optimizer, rates)?;

    println!("{:?}", result.model.generate("Each rank ", 60));
    let loss = result
        .model
        .predict(WindowBatcher.batch(held_out, &Device::flex()))
        .loss;
    let loss = loss.into_scalar::<f32>();
    println!(
        "{loss:.2} nats a byte of what it has never seen; {:.2} without learning",
        256f32.ln()
    );
    assert!(loss < 3.0, "it has learned");
    Ok(())
}

#[cfg(test)]
#[path = "../tests/beside_burn/example.rs"]
mod beside_burn;

#[cfg(test)]
mod tests {
    use burn_fsdp::compile::{Batch, BatchMapper};

    use super::beside_burn::Example;
    use super::*;

    impl Batch for Windows {
        fn map(self, mapper: &mut impl BatchMapper) -> Self {
            Self {
                inputs: mapper.int("inputs", self.inputs),
                targets: mapper.int("targets", self.targets),
            }
        }
    }

    #[test]
    fn metrics_match_plain_burn() {
        let mut items = windows();
        items.truncate(160);
        let held_out = items.split_off(128);
        let example = Example {
            batcher: WindowBatcher,
            items: (items, held_out),
            batch: 16,
            accumulation: 2,
            optimizer: || {
                let clipping = GradientClippingConfig::Norm(1.0);
                AdamConfig::new().with_grad_clipping(Some(clipping)).init()
            },
            rates: || {
                let config = NoamLrSchedulerConfig::new(0.5).with_model_size(DIM);
                let schedule = config.with_warmup_steps(8).init();
                schedule.expect("a schedule")
            },
            policy: || {
                let policy = ShardPolicy::new().units(["transformer.layers.*"]);
                policy.one_owner(["**"])
            },
        };
        example.assert_as_by_burn(Model::new, &[1, 2, 4]);
        // Compiled steps have no clipping by the norm of each gradient.
        let example = Example {
            optimizer: || AdamConfig::new().init(),
            ..example
        };
        let optimizer = || AdamConfig::new().build().into();
        let model: (_, fn(&_, _) -> _) = (Model::new as fn(&_) -> _, Model::predict);
        example.assert_compiled_as_by_burn(model, optimizer, &[1, 2, 4]);
    }
}
