//! Other contents of a module than trained float parameters, and the ones that are refused by name.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::SgdConfig;
use burn::tensor::{Bool, Device, Distribution, Int, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_spmd::{Error, Mode, Strategy, compile};

use crate::agreement::{ROWS, agrees, agrees_closely, vectors};
use crate::compiled::seeded;

#[derive(Module, Debug)]
struct Ordered {
    layer: Linear,
    order: Param<Tensor<1, Int>>,
}

#[derive(Module, Debug)]
struct Masked {
    layer: Linear,
    keep: Param<Tensor<1, Bool>>,
}

#[test]
fn integer_and_boolean_parameters_do_not_change() {
    let _guard = seeded();
    let init = |device: &Device| Ordered {
        layer: LinearConfig::new(5, 3).init(device),
        order: Param::initialized(ParamId::new(), Tensor::from_ints([2, 0, 1], device)),
    };
    let loss = |model: &Ordered, x: Tensor<2>| {
        let y = model.layer.forward(x).select(1, model.order.val());
        y.cumsum(1).square().mean()
    };
    agrees("integers", init, loss, vectors);
    let init = |device: &Device| {
        let keep = TensorData::new(vec![true, false, true], [3]);
        Masked {
            layer: LinearConfig::new(5, 3).init(device),
            keep: Param::initialized(ParamId::new(), Tensor::from_data(keep, device)),
        }
    };
    let loss = |model: &Masked, x: Tensor<2>| {
        let y = model.layer.forward(x) * model.keep.val().float().unsqueeze();
        y.square().mean()
    };
    agrees("booleans", init, loss, vectors);
}

#[test]
fn column_layouts_work_like_row_layouts() {
    let _guard = seeded();
    let init = |device: &Device| {
        let config = LinearConfig::new(5, 3).with_layout(LinearLayout::Col);
        config.init(device)
    };
    let loss = |model: &Linear, x: Tensor<2>| {
        let y = model.forward(x);
        y.sub_scalar(0.5).square().mean()
    };
    // Burn computes with a view of the transposed weight, and a compiled step with a separate tensor.
    agrees_closely("column layout", init, loss, vectors);
}

#[test]
fn one_parameter_may_be_read_twice() {
    let _guard = seeded();
    let init = |device: &Device| LinearConfig::new(5, 5).with_bias(false).init(device);
    let loss = |model: &Linear, x: Tensor<2>| {
        let y = model.forward(model.forward(x).tanh());
        y.sub_scalar(0.5).square().mean()
    };
    agrees("a layer that runs twice", init, loss, vectors);
}

#[derive(Module, Debug)]
struct Features {
    frequencies: Tensor<2>,
    head: Linear,
}

impl Features {
    fn with(frequencies: Tensor<2>, device: &Device) -> Self {
        Self {
            frequencies,
            head: LinearConfig::new(4, 1).init(device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let features = x.matmul(self.frequencies.clone()).sin();
        self.head.forward(features).sub_scalar(1.0).square().mean()
    }
}

#[derive(Module, Debug)]
struct Drawn {
    frequencies: Param<Tensor<2>>,
    head: Linear,
}

#[test]
fn tensors_that_init_draws_are_parameters_or_refused() {
    let _guard = seeded();
    let computed = |device: &Device| {
        let frequencies = Tensor::<1, Int>::arange(0..20, device).float();
        Features::with(frequencies.reshape([5, 4]).mul_scalar(0.1), device)
    };
    agrees("computed features", computed, Features::loss, vectors);
    let drawn = |device: &Device| {
        let normal = Distribution::Normal(0.0, 1.0);
        Features::with(Tensor::random([5, 4], normal, device), device)
    };
    let optimizer = || SgdConfig::new().build();
    let mut step = compile(drawn, Features::loss, optimizer(), Mode::single()).unwrap();
    let batch = vectors(0, 0..ROWS, &Device::flex());
    let error = step.step(1e-1, &batch).unwrap_err();
    assert!(
        matches!(&error, Error::RandomInModule { shape, .. } if *shape == [5, 4]),
        "{error}"
    );
    assert!(error.to_string().contains("frozen parameter"), "{error}");
    // The solution.
    let frozen = |device: &Device| {
        let normal = Distribution::Normal(0.0, 1.0);
        let drawn = Tensor::random([5, 4], normal, device);
        Drawn {
            frequencies: Param::from_tensor(drawn).set_require_grad(false),
            head: LinearConfig::new(4, 1).init(device),
        }
    };
    let loss = |model: &Drawn, x: Tensor<2>| {
        let features = x.matmul(model.frequencies.val()).sin();
        model.head.forward(features).sub_scalar(1.0).square().mean()
    };
    agrees("drawn features", frozen, loss, vectors);
}

/// Numbers that differ in every call, like a generator on the host.
static CALLS: AtomicUsize = AtomicUsize::new(0);

fn of_the_host(device: &Device) -> Features {
    let call = CALLS.fetch_add(1, Ordering::SeqCst);
    let values: Vec<f32> = (0..20).map(|i| (i * 7 + call) as f32 / 20.0).collect();
    let frequencies = Tensor::from_data(TensorData::new(values, [5, 4]), device);
    Features::with(frequencies, device)
}

#[test]
fn tensors_of_other_host_data_are_noticed() {
    let _guard = seeded();
    let optimizer = || SgdConfig::new().build();
    let mut step = compile(of_the_host, Features::loss, optimizer(), Mode::single()).unwrap();
    let batch = vectors(0, 0..ROWS, &Device::flex());
    let results: Vec<_> = (0..3).map(|_| step.step(0.0, &batch)).collect();
    let error = results.into_iter().find_map(Result::err).unwrap();
    assert!(
        matches!(&error, Error::NotRepeatable { difference } if difference.contains("[5, 4]")),
        "{error}"
    );
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let mode = Mode::data_parallel(world, Strategy::FullShard);
        let mut step = compile(of_the_host, Features::loss, SgdConfig::new().build(), mode)?;
        let batch = vectors(0, 0..3, &Device::flex());
        Ok(step.step(1e-1, &batch).map_err(|error| error.to_string()))
    };
    for result in launch(LaunchConfig::new(2), body).unwrap() {
        let text = result.unwrap_err();
        assert!(
            text.contains("rank 1 would run a different graph"),
            "{text}"
        );
    }
}

#[test]
fn init_may_ask_for_gradients_and_its_failures_are_errors() {
    let _guard = seeded();
    let asks = |device: &Device| {
        let layer = LinearConfig::new(5, 3).init(device);
        let weight = layer.weight.val().detach().require_grad();
        Linear {
            weight: Param::initialized(layer.weight.id, weight),
            ..layer
        }
    };
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).square().mean();
    agrees("require_grad in init", asks, loss, vectors);
    let error_of = |init: fn(&Device) -> Linear| {
        let optimizer = SgdConfig::new().build();
        let error = compile(init, loss, optimizer, Mode::single()).unwrap_err();
        error.to_string()
    };
    let text = error_of(|_| panic!("no such file"));
    assert!(
        text.contains("no such file") && text.contains("modules.rs"),
        "{text}"
    );
    let text = error_of(|device| {
        device.seed(3);
        LinearConfig::new(5, 3).init(device)
    });
    assert!(text.contains("seed before `compile`"), "{text}");
}

#[test]
fn tensors_that_burn_reads_back_are_rejected_with_a_remedy() {
    let _guard = seeded();
    let error_of = |loss: fn(&Linear, Tensor<2>) -> Tensor<1>| {
        let init = |device: &Device| LinearConfig::new(5, 3).init(device);
        let mut step = compile(init, loss, SgdConfig::new().build(), Mode::single()).unwrap();
        let batch = vectors(0, 0..ROWS, &Device::flex());
        step.step(1e-1, &batch).unwrap_err().to_string()
    };
    let text = error_of(|model, x| {
        let classes = x.clone().narrow(1, 0, 1).squeeze_dim::<1>(1);
        let wanted: Tensor<2, Int> = classes.greater_scalar(0.0).int().one_hot(3);
        (model.forward(x) - wanted.float()).square().mean()
    });
    assert!(
        text.contains("one_hot") && text.contains("arange"),
        "{text}"
    );
    let text = error_of(|model, x| {
        let wanted = Tensor::from_inner(model.forward(x.clone()).without_autodiff());
        (model.forward(x) - wanted).square().mean()
    });
    assert!(text.contains("detach()"), "{text}");
}
