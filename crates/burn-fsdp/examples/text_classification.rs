//! Burn's own training loop, sharded: a transformer that distinguishes lines of Rust from lines of prose, with one
//! changed line.
//!
//! ```text
//! cargo run --release --example text_classification
//! ```

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::optim::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_fsdp::train::FullySharded;
use burn_fsdp::{LaunchConfig, ShardPolicy};

/// Bytes of a line that are read.
const LEN: usize = 48;
const DIM: usize = 32;
/// Shorter lines are skipped.
const LEAST: usize = 20;

#[derive(Module, Debug)]
struct Model {
    bytes: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(DIM, 2 * DIM, 2, 2).with_dropout(0.0);
        Self {
            bytes: EmbeddingConfig::new(256, DIM).init(device),
            places: EmbeddingConfig::new(LEN, DIM).init(device),
            encoder: encoder.with_norm_first(true).init(device),
            head: LinearConfig::new(DIM, 2).init(device),
        }
    }

    fn classify(&self, batch: Lines) -> ClassificationOutput {
        let [rows, len] = batch.bytes.dims();
        let places = Tensor::arange(0..len as i64, &batch.bytes.device());
        let places = self.places.forward(places.reshape([1, len]));
        let input = self.bytes.forward(batch.bytes) + places;
        let input = TransformerEncoderInput::new(input).mask_pad(batch.padding);
        let first = self.encoder.forward(input).slice([0..rows, 0..1]);
        let output = self.head.forward(first.reshape([rows, DIM]));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, output, batch.classes)
    }
}

impl TrainStep for Model {
    type Input = Lines;
    type Output = ClassificationOutput;

    fn step(&self, batch: Lines) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = Lines;
    type Output = ClassificationOutput;

    fn step(&self, batch: Lines) -> ClassificationOutput {
        self.classify(batch)
    }
}

#[derive(Debug, Clone)]
struct Lines {
    bytes: Tensor<2, Int>,
    padding: Tensor<2, Bool>,
    classes: Tensor<1, Int>,
}

/// A line, and 1 if it is from a program.
type Line = (Vec<u8>, i32);

#[derive(Clone)]
struct LineBatcher;

impl Batcher<Line, Lines> for LineBatcher {
    fn batch(&self, lines: Vec<Line>, device: &Device) -> Lines {
        let padded = |line: &Line| (0..LEN).map(|i| line.0.get(i).copied()).collect::<Vec<_>>();
        let padded: Vec<_> = lines.iter().flat_map(padded).collect();
        let bytes: Vec<i32> = padded.iter().map(|byte| byte.unwrap_or(0).into()).collect();
        let padding: Vec<bool> = padded.iter().map(Option::is_none).collect();
        let classes: Vec<i32> = lines.iter().map(|line| line.1).collect();
        let shape = [lines.len(), LEN];
        Lines {
            bytes: Tensor::<1, Int>::from_ints(bytes.as_slice(), device).reshape(shape),
            padding: Tensor::from_data(TensorData::new(padding, shape), device),
            classes: Tensor::from_ints(classes.as_slice(), device),
        }
    }
}

/// Returns lines of this project's pages and programs, alternating between the two.
fn lines() -> Vec<Line> {
    let prose = [
        include_str!("../../../README.md"),
        include_str!("../../../ARCHITECTURE.md"),
        include_str!("../../shard/src/README.md"),
        include_str!("../../collectives/src/README.md"),
        include_str!("../../spmd/src/README.md"),
    ];
    let programs = [
        include_str!("../../shard/src/wrap/mod.rs"),
        include_str!("../../shard/src/state/record.rs"),
        include_str!("../../collectives/src/group/collective.rs"),
        include_str!("../../glue/src/snapshot.rs"),
        include_str!("../../glue/src/restore.rs"),
    ];
    let usable = |text: &'static str| text.lines().filter(|line| line.len() >= LEAST);
    // Comments are prose. Tables and code blocks are neither.
    let is_prose = |line: &&str| line.starts_with(|first: char| first.is_ascii_alphabetic());
    let is_program = |line: &&str| !line.trim_start().starts_with("//");
    let prose = prose.into_iter().flat_map(usable).filter(is_prose);
    let programs = programs.into_iter().flat_map(usable).filter(is_program);
    let pairs = prose.zip(programs.map(str::trim_start));
    let of = |line: &str, class| (line.bytes().take(LEN).collect(), class);
    pairs
        .flat_map(|(prose, program)| [of(prose, 0), of(program, 1)])
        .collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let folder = tempfile::tempdir()?;
    let mut trained = lines();
    let held_out = trained.split_off(trained.len() - 80);
    println!(
        "{} lines to learn from, {} to be asked about",
        trained.len(),
        held_out.len()
    );
    let loader = |lines: Vec<Line>| {
        let builder = DataLoaderBuilder::new(LineBatcher).batch_size(8).shuffle(1);
        builder.build(InMemDataset::new(lines))
    };
    let (model, optimizer) = (Model::new(&device), AdamWConfig::new().init());
    let rates = LinearLrSchedulerConfig::new(3e-3, 1e-4, 120).init()?;
    let training =
        SupervisedTraining::new(folder.path(), loader(trained), loader(held_out.clone()))
            .metrics((AccuracyMetric::new(), LossMetric::new()))
            .num_epochs(6)
            .summary();

    // This line shards the training. Without it: let result = training.launch(Learner::new(model, optimizer, rates));
    let result = FullySharded::new(LaunchConfig::new(2))
        .policy(ShardPolicy::new().units(["encoder.layers.*"]))
        .launch(training, model, optimizer, rates)?;

    let asked = held_out.len();
    let test = LineBatcher.batch(held_out, &Device::flex());
    let answer = result.model.classify(test);
    let guessed = answer.output.argmax(1).flatten::<1>(0, 1);
    let right = guessed
        .equal(answer.targets)
        .int()
        .sum()
        .into_scalar::<i64>();
    println!("{right} of {asked} lines that it has never seen are right");
    assert!(right as usize * 10 >= asked * 8, "it has learned");
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

    impl Batch for Lines {
        fn map(self, mapper: &mut impl BatchMapper) -> Self {
            Self {
                bytes: mapper.int("bytes", self.bytes),
                padding: mapper.bool("padding", self.padding),
                classes: mapper.int("classes", self.classes),
            }
        }
    }

    #[test]
    fn metrics_match_plain_burn() {
        let mut items = lines();
        items.truncate(160);
        let held_out = items.split_off(128);
        let example = Example {
            batcher: LineBatcher,
            items: (items, held_out),
            batch: 16,
            accumulation: 1,
            optimizer: || AdamWConfig::new().init(),
            rates: || {
                let config = LinearLrSchedulerConfig::new(3e-3, 1e-4, 16);
                config.init().expect("a schedule")
            },
            policy: || ShardPolicy::new().units(["encoder.layers.*"]),
        };
        example.assert_as_by_burn(Model::new, &[1, 2, 4]);
        let optimizer = || AdamWConfig::new().build().into();
        let model: (_, fn(&_, _) -> _) = (Model::new as fn(&_) -> _, Model::classify);
        example.assert_compiled_as_by_burn(model, optimizer, &[1, 2, 4]);
    }
}
