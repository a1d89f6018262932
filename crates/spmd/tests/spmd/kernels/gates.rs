//! SiLU by itself and as a gate.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig};
use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::{Device, Tensor};

use super::{DIM, assert_count, check, pairs};
use crate::compiled::seeded;

/// SiLU by itself, as a gate in either order, of values without a gradient, of values that others also read, and
/// lookalikes.
#[derive(Module, Debug)]
struct Gated {
    linears: Vec<Linear>,
    swiglu: SwiGlu,
    last: Linear,
}

impl Gated {
    fn new(device: &Device) -> Self {
        let linear = |_| LinearConfig::new(DIM, DIM).init(device);
        Self {
            linears: (0..5).map(linear).collect(),
            swiglu: SwiGluConfig::new(DIM, DIM).init(device),
            last: LinearConfig::new(DIM, 5).init(device),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let of = |index: usize, x: &Tensor<3>| self.linears[index].forward(x.clone());
        let x = self.swiglu.forward(x);
        // By itself, and read twice.
        let alone = silu(of(0, &x));
        let twice = silu(of(1, &x));
        let x = alone + twice.clone() * twice.sin();
        // Values first; values from the batch; a gate that is added to its product, and that also gates itself.
        let x = of(2, &x) * silu(of(3, &x)) + silu(of(4, &x)) * y;
        let x = x.clone() + silu(x.clone()) * x.cos();
        // A sigmoid of another value, one that is read twice, and values for all rows.
        let other = x.clone() * sigmoid(x.clone() * 1.5);
        let own = sigmoid(x.clone() * 0.7);
        let shared = (x.clone() * 0.7) * own.clone() + own;
        let row = x.clone().mean_dim(1) * silu(x);
        self.last.forward(other + shared + row).square().mean()
    }
}

/// Another addend of a gradient, or an operand, is created inside the pattern.
#[derive(Module, Debug)]
struct Entangled {
    linears: Vec<Linear>,
    norm: RmsNorm,
    last: Linear,
}

impl Entangled {
    fn new(device: &Device) -> Self {
        let linear = |_| LinearConfig::new(DIM, DIM).init(device);
        Self {
            linears: (0..8).map(linear).collect(),
            norm: RmsNormConfig::new(DIM).init(device),
            last: LinearConfig::new(DIM, 5).init(device),
        }
    }

    fn loss(&self, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<1> {
        let of = |index: usize| self.linears[index].forward(x.clone());
        let a = of(0);
        let mut all = silu(a.clone()) + a.clone() * a;
        let a = of(1);
        all = all + a.clone() * a.clone() + silu(a);
        let a = of(2);
        all = all + silu(a.clone()) + a.clone() * a.detach();
        let (a, v) = (of(3), of(4));
        all = all + silu(a.clone()) * v.clone() + a * v;
        let (a, v) = (of(5), of(6));
        all = all + a.clone() * v.clone() + v * silu(a);
        let a = of(7);
        let gain = self.norm.gamma.val().reshape([1, 1, DIM]);
        all = all + self.norm.forward(a.clone()) + a * gain;
        // Only from the batch.
        all = all + silu(y.clone()) * sigmoid(y.clone()) + sigmoid(y.clone()) * y;
        self.last.forward(all).square().mean()
    }
}

#[test]
fn gates_with_shared_intermediates_stay_correct() {
    let _guard = seeded();
    check("entangled", Entangled::new, Entangled::loss, pairs);
}

#[test]
fn silu_and_swiglu_run_kernels() {
    let _guard = seeded();
    let names = check("gates", Gated::new, Gated::loss, pairs);
    // One of Burn's own, two with values first (one of them without a gradient), and one whose gate is added to it.
    assert_count(&names, "Custom.models.swiglu", 4);
    assert_count(&names, "Custom.models.swiglu_backward", 4);
    // One by itself, one that is read twice, and one that is broadcast.
    assert_count(&names, "Custom.models.silu", 3);
    assert_count(&names, "Custom.models.silu_backward", 3);
}
