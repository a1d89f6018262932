//! Functions that only look like a kernel's.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{Device, Tensor};

use super::{DIM, assert_count, check, pairs};
use crate::compiled::seeded;

/// Functions that resemble the kernels' but differ, or whose intermediate values are used elsewhere.
#[derive(Module, Debug)]
struct Lookalikes {
    first: Linear,
    norm: LayerNorm,
    plain: LayerNorm,
    square: RmsNorm,
    last: Linear,
}

impl Lookalikes {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(DIM, DIM).init(device),
            norm: LayerNormConfig::new(DIM).init(device),
            plain: LayerNormConfig::new(DIM).with_bias(false).init(device),
            square: RmsNormConfig::new(DIM).init(device),
            last: LinearConfig::new(DIM, 4).with_bias(false).init(device),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let x = self.first.forward(x);
        // Along another dim, of a product with itself, and by hand with a part that is read twice.
        let across = softmax(x.clone(), 1);
        let scores = x.clone().matmul(y.transpose());
        let shifted = scores.clone() - scores.max_dim(2);
        let powers = shifted.exp();
        let total = powers.clone().sum_dim(2);
        let own = powers.clone() / total.clone();
        let twice = own.matmul(x.clone()) + (total.log() * 0.1) + powers.mean_dim(2) * 0.3;
        // A norm whose mean is also used, and one whose result is read three times. One without a shift is a
        // root-mean-square norm of centered rows, and so is the one with a shift for each position before that shift.
        let mean = x.clone().mean_dim(2);
        let centered = x - mean.clone();
        let variance = (centered.clone() * centered.clone()).mean_dim(2);
        let by_hand = centered / (variance + 1e-5).sqrt();
        // A norm with a shift for each position, with as many positions as the rows are wide.
        let square = twice.clone().transpose().matmul(twice.clone());
        let ends = square.clone() - square.mean_dim(2);
        let spread = (ends.clone() * ends.clone())
            .mean_dim(2)
            .add_scalar(1e-5)
            .sqrt();
        let gain = self.norm.gamma.val().reshape([1, 1, DIM]);
        let shift = self.norm.gamma.val().reshape([1, DIM, 1]);
        let by_position = (ends / spread * gain + shift).mean_dim(1).mean_dim(2);
        let normal = self.norm.forward(twice.clone() + across) + by_position;
        let all = normal.clone() * normal.clone() + self.plain.forward(normal) + by_hand + mean;
        let all = all + self.roots(&twice);
        let logits = self.last.forward(all);
        // Two have their own intermediate values, and two share them.
        let apart = log_softmax(logits.clone(), 2) * softmax(logits.clone() * 2.0, 2);
        let wide = logits * 0.5;
        let together = log_softmax(wide.clone(), 2) * softmax(wide, 2);
        (apart + together).square().mean()
    }
}

impl Lookalikes {
    /// Root-mean-square norms whose intermediate values are read elsewhere, whose gain has a different shape, or that
    /// use the mean of other squares.
    fn roots(&self, x: &Tensor<3>) -> Tensor<3> {
        let [_, time, _] = x.dims();
        let gain = self.square.gamma.val();
        let root = |x: &Tensor<3>, of: &Tensor<3>, epsilon: f64| {
            let root = (of.clone() * of.clone()).mean_dim(2);
            x.clone() / root.add_scalar(epsilon).sqrt()
        };
        let row = gain.clone().reshape([1, 1, DIM]);
        let read_twice = root(x, x, 1e-3);
        let read_twice = read_twice.clone() * row.clone() + read_twice.sin();
        let by_position = gain.narrow(0, 0, time).reshape([1, time, 1]);
        let by_position = root(&(x.clone() * 0.5), &(x.clone() * 0.5), 1e-4) * by_position;
        let of_other = root(x, &(x.clone() + 0.1), 1e-5) * row;
        read_twice + by_position + of_other
    }
}

#[test]
fn lookalikes_are_not_replaced_by_kernels() {
    let _guard = seeded();
    let names = check("lookalikes", Lookalikes::new, Lookalikes::loss, pairs);
    // One log-softmax and one softmax of the logits, and the norm that has a shift.
    assert_count(&names, "Custom.models.log_softmax_backward", 1);
    assert_count(&names, "Custom.models.softmax_backward", 1);
    assert_count(&names, "Custom.models.layer_norm_backward", 1);
    // Of centered rows, see above.
    assert_count(&names, "Custom.models.rms_norm_backward", 2);
    assert!(names.contains_key("backward Float.Recip"), "{names:#?}");
}
