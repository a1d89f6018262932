//! Cross entropies.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_spmd::{Mode, compile};

use super::{DIM, TIME, assert_count, check_on, pairs};
use crate::compiled::seeded;

const CLASSES: usize = 7;

/// Cross entropies of Burn's and by hand, and readers of more than one class in each row of a softmax.
#[derive(Module, Debug)]
struct Classifier {
    heads: Vec<Linear>,
}

impl Classifier {
    fn new(device: &Device) -> Self {
        let head = |_| LinearConfig::new(DIM, CLASSES).init(device);
        Self {
            heads: (0..7).map(head).collect(),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let [rows, ..] = x.dims();
        let device = x.device();
        let len = rows * TIME;
        let logits = |index: usize| self.heads[index].forward(x.clone());
        let flat = |index: usize| logits(index).reshape([len, CLASSES]);
        let classes = y.narrow(2, 0, 1).add_scalar(1.0).mul_scalar(3.0).int();
        let targets = || classes.clone().reshape([len]);

        let mean = CrossEntropyLossConfig::new().init(&device);
        let padded = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![2, 5]));
        let weights = (0..CLASSES).map(|class| 0.5 + class as f32 / 4.0).collect();
        let weighted = CrossEntropyLossConfig::new().with_weights(Some(weights));
        let smoothed = CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
        let of_burn = mean.forward(flat(0), targets())
            + padded.init(&device).forward(flat(1), targets())
            + weighted.init(&device).forward(flat(2), targets());
        // Each row with its own rate, with three dims.
        let own = log_softmax(logits(3), 2).gather(2, classes.clone());
        let by_hand = (own.clone() * own.sin()).mean();
        // Every class counts; two of each row are read; others read the logarithms.
        let all = smoothed.init(&device).forward(flat(4), targets());
        let two = Tensor::<3, Int>::cat(vec![classes.clone(), classes.clone().zeros_like()], 2);
        let two = log_softmax(logits(5), 2).gather(2, two).mean();
        let logarithms = log_softmax(logits(6), 2);
        let read_twice = logarithms.clone().gather(2, classes).mean() + logarithms.square().mean();
        of_burn + by_hand + all + two + read_twice
    }
}

#[test]
fn cross_entropies_run_kernels() {
    let _guard = seeded();
    // Ranks have different numbers of padded rows, so the mean of their means is not the overall mean.
    let names = check_on(
        &[1],
        "cross entropies",
        Classifier::new,
        Classifier::loss,
        pairs,
    );
    assert_count(&names, "Custom.models.log_likelihood", 4);
    assert_count(&names, "Custom.models.log_likelihood_backward", 4);
    assert_count(&names, "Custom.models.log_softmax_backward", 3);
}

#[test]
fn invalid_targets_are_named_with_their_row() {
    let _guard = seeded();
    for (class, rows) in [(CLASSES as i64, 2), (-1, 3)] {
        let head = |device: &Device| LinearConfig::new(DIM, CLASSES).init(device);
        let loss = move |head: &Linear, x: Tensor<2>| {
            let device = x.device();
            let mut targets = vec![0; rows];
            targets[rows - 1] = class;
            let targets = Tensor::<1, Int>::from_data(targets.as_slice(), &device);
            CrossEntropyLossConfig::new()
                .init(&device)
                .forward(head.forward(x), targets)
        };
        let mut step = compile(head, loss, SgdConfig::new().build(), Mode::single()).unwrap();
        let batch = Tensor::<2>::ones([rows, DIM], &Device::flex());
        let error = step.step(0.1, &batch).unwrap_err().to_string();
        let expected = format!("the target of row {} is class {class}", rows - 1);
        assert!(error.contains(&expected), "{error}");
        assert!(error.contains("7 classes"), "{error}");
    }
}
