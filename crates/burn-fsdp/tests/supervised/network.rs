//! The network that is trained, and its data, as in a user's program.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param, ParamId};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout, PaddingConfig2d};
use burn::tensor::{Bool, Device, FloatDType, Int, Tensor, activation};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use burn_fsdp::compile::{Batch, BatchMapper};

const SIDE: usize = 6;
const CLASSES: usize = 3;
/// Items of a batch of one rank.
pub(crate) const BATCH: usize = 4;

/// A convolutional network, as in a user's program.
#[derive(Module, Debug)]
pub(crate) struct Net {
    conv: Conv2d,
    hidden: Linear,
    head: Linear,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        Self::with_hidden(7, device)
    }

    pub(crate) fn with_hidden(width: usize, device: &Device) -> Self {
        device.seed(7);
        Self::unseeded(width, device)
    }

    /// Returns the network with 7 hidden neurons, without a change to the device.
    pub(crate) fn on(device: &Device) -> Self {
        Self::unseeded(7, device)
    }

    pub(crate) fn unseeded(width: usize, device: &Device) -> Self {
        let conv = Conv2dConfig::new([1, 3], [3, 3]).with_padding(PaddingConfig2d::Valid);
        let net = Self {
            conv: conv.init(device),
            hidden: LinearConfig::new(3 * 4 * 4, width).init(device),
            head: LinearConfig::new(width, CLASSES).init(device),
        };
        // Every training run has these values, whatever other threads draw.
        net.map(&mut Fixed(0))
    }

    /// Returns the network with hidden weights in columns.
    pub(crate) fn in_columns(device: &Device) -> Self {
        let layout = LinearLayout::Col;
        let hidden = LinearConfig::new(3 * 4 * 4, 7).with_layout(layout);
        Self {
            hidden: hidden.init(device),
            ..Self::new(device)
        }
    }

    /// Returns the network with different values.
    pub(crate) fn with_other_values(self) -> Self {
        self.map(&mut Fixed(500))
    }

    /// Returns the network with parameters of 16 bits.
    pub(crate) fn in_bf16(self) -> Self {
        self.map(&mut InBf16)
    }

    pub(crate) fn classify(&self, batch: Digits) -> ClassificationOutput {
        let dtype = self.conv.weight.val().dtype();
        let images = if dtype == batch.images.dtype() {
            batch.images
        } else {
            batch.images.cast(dtype)
        };
        let features = activation::relu(self.conv.forward(images)).flatten(1, 3);
        let output = self
            .head
            .forward(activation::gelu(self.hidden.forward(features)));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, output, batch.classes)
    }
}

/// Gives parameters fixed values that are not drawn.
struct Fixed(usize);

impl burn::module::ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let shape = old.shape();
            let values = (0..shape.num_elements()).map(|_| {
                self.0 += 1;
                ((self.0 * 7919) % 1009) as f32 / 1009.0 * 0.6 - 0.3
            });
            let values: Vec<f32> = values.collect();
            let data = burn::tensor::TensorData::new(values, shape);
            let device = old.device();
            Tensor::from_data(data, &device).set_require_grad(device.is_autodiff())
        })
    }
}

struct InBf16;

impl burn::module::ModuleMapper for InBf16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let is_trained = old.device().is_autodiff();
            let narrow = old.cast(FloatDType::BF16).detach();
            narrow.set_require_grad(is_trained)
        })
    }
}

impl TrainStep for Net {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// The network with fixed numbers, which no step trains: the order of its outputs, and the outputs that it uses.
#[derive(Module, Debug)]
pub(crate) struct Ordered {
    net: Net,
    order: Param<Tensor<1, Int>>,
    used: Param<Tensor<1, Bool>>,
}

impl Ordered {
    /// Returns the network whose outputs begin with the one of number `first`.
    pub(crate) fn on(first: i32, device: &Device) -> Self {
        let order = [0, 1, 2].map(|place| (first + place) % 3);
        Self {
            net: Net::on(device),
            order: Param::initialized(ParamId::new(), Tensor::from_ints(order, device)),
            used: Param::initialized(
                ParamId::new(),
                Tensor::from_bool([true, true, false], device),
            ),
        }
    }

    pub(crate) fn classify(&self, batch: Digits) -> ClassificationOutput {
        let classes = batch.classes.clone();
        let output = self.net.classify(batch).output;
        let ignored = self
            .used
            .val()
            .bool_not()
            .unsqueeze::<2>()
            .expand(output.dims());
        let output = output.select(1, self.order.val()).mask_fill(ignored, -9.0);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), classes.clone());
        ClassificationOutput::new(loss, output, classes)
    }
}

impl Ordered {
    pub(crate) fn order(&self) -> Vec<i32> {
        let order = self.order.val().into_data().convert::<i32>();
        order.try_to_vec().expect("integers")
    }
}

impl TrainStep for Ordered {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Ordered {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// The network after a normalization layer; each rank has its own running statistics.
#[derive(Module, Debug)]
pub(crate) struct Normalised {
    pub(crate) norm: BatchNorm,
    net: Net,
}

impl Normalised {
    pub(crate) fn new(device: &Device) -> Self {
        device.seed(7);
        Self::on(device)
    }

    /// Returns the network without a change to the device.
    pub(crate) fn on(device: &Device) -> Self {
        Self {
            norm: BatchNormConfig::new(1).init(device),
            net: Net::on(device),
        }
    }

    pub(crate) fn classify(&self, batch: Digits) -> ClassificationOutput {
        let images = self.norm.forward(batch.images);
        self.net.classify(Digits { images, ..batch })
    }
}

impl TrainStep for Normalised {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Normalised {
    type Input = Digits;
    type Output = ClassificationOutput;

    fn step(&self, batch: Digits) -> ClassificationOutput {
        self.classify(batch)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Digits {
    images: Tensor<4>,
    classes: Tensor<1, Int>,
}

impl Batch for Digits {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        Self {
            images: mapper.float("images", self.images),
            classes: mapper.int("classes", self.classes),
        }
    }
}

/// One image and its class.
pub(crate) type Item = ([f32; SIDE * SIDE], i32);

pub(crate) fn items(count: usize, seed: usize) -> Vec<Item> {
    let item = |i: usize| {
        let class = (i * 5 + seed) % CLASSES;
        let pixel = |p: usize| {
            let noise = ((i * 31 + p * 17 + seed) % 23) as f32 / 23.0;
            noise + f32::from(u8::from((p + class).is_multiple_of(CLASSES)))
        };
        (std::array::from_fn(pixel), class as i32)
    };
    (0..count).map(item).collect()
}

#[derive(Clone)]
pub(crate) struct Digitizer;

impl Batcher<Item, Digits> for Digitizer {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Digits {
        let images: Vec<f32> = items.iter().flat_map(|item| item.0).collect();
        let classes: Vec<i32> = items.iter().map(|item| item.1).collect();
        let shape = [items.len(), 1, SIDE, SIDE];
        Digits {
            images: Tensor::<1>::from_floats(images.as_slice(), device).reshape(shape),
            classes: Tensor::from_ints(classes.as_slice(), device),
        }
    }
}

pub(crate) fn loader(items: Vec<Item>, batch: usize) -> Arc<dyn DataLoader<Digits>> {
    let builder = DataLoaderBuilder::new(Digitizer).batch_size(batch);
    builder.build(InMemDataset::new(items))
}
