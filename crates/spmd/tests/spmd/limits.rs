//! Code that cannot be compiled gives an error with advice.

use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_mesh::Strategy;
use burn_fsdp_spmd::graph::{Graph, Phase};
use burn_fsdp_spmd::{Error, Mode, Override, compile, compile_with};

use crate::compiled::seeded;

fn linear(device: &Device) -> Linear {
    LinearConfig::new(3, 2).init(device)
}

fn error_of(loss: fn(&Linear, Tensor<2>) -> Tensor<1>) -> Error {
    let device = Device::flex();
    let mut step = compile(linear, loss, AdamWConfig::new().build(), Mode::single()).unwrap();
    let batch = Tensor::ones([4, 3], &device);
    let error = step.step(1e-3, &batch).unwrap_err();
    // Nothing has run, so the parameters are unchanged.
    assert!(step.parameter("weight").is_ok());
    error
}

#[test]
fn reading_a_tensor_in_the_loss_names_the_operation_and_a_remedy() {
    let _guard = seeded();
    let error = error_of(|model, x| {
        let y = model.forward(x).mean();
        if y.clone().into_scalar::<f32>() > 0.0 {
            y
        } else {
            y.neg()
        }
    });
    let text = error.to_string();
    assert!(
        matches!(
            error,
            Error::Uncapturable {
                stage: "the loss",
                ..
            }
        ),
        "{text}"
    );
    assert!(
        text.contains("NumericFloat.Mean") && text.contains("eager engine"),
        "{text}"
    );
}

#[test]
fn a_non_scalar_loss_is_rejected() {
    let _guard = seeded();
    let error = error_of(|model, x| model.forward(x).sum_dim(1).reshape([4]));
    assert!(
        matches!(error, Error::LossShape { ref shape } if *shape == [4]),
        "{error}"
    );
}

#[test]
fn a_loss_without_parameters_is_refused() {
    let _guard = seeded();
    let error = error_of(|_, x| x.mean());
    assert!(matches!(error, Error::NoGradient), "{error}");
}

#[test]
fn unknown_parameters_and_wrong_shapes_are_refused() {
    let _guard = seeded();
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).mean();
    let mut step = compile(linear, loss, AdamWConfig::new().build(), Mode::single()).unwrap();
    let error = step.parameter("wait").unwrap_err();
    assert!(error.to_string().contains("weight, bias"), "{error}");
    let data = burn::tensor::TensorData::from([1.0f32, 2.0]);
    let error = step.set_parameter("weight", data).unwrap_err();
    assert!(matches!(error, Error::TensorMismatch { .. }), "{error}");
}

/// Reads a value unless it is told not to.
#[derive(burn::module::Module, Debug)]
struct Curious {
    inner: Linear,
    #[module(skip)]
    looks: bool,
}

impl Curious {
    fn new(device: &Device) -> Self {
        Self {
            inner: linear(device),
            looks: true,
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = self.inner.forward(x).square().mean();
        if self.looks {
            assert!(y.clone().into_scalar::<f32>().is_finite());
            return y;
        }
        // Marks the place.
        y.mul_scalar(3.0)
    }
}

/// Does not read, and removes the mark.
struct DoNotLook;

impl Override<Curious> for DoNotLook {
    type Traced = Curious;

    fn replace(&self, module: Curious) -> Curious {
        Curious {
            looks: false,
            ..module
        }
    }

    fn rewrite(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut nodes = graph.take_nodes();
        for node in &mut nodes {
            let is_mark = node.name() == "NumericFloat.MulScalar" && node.phase != Phase::Optimizer;
            let is_three = node
                .scalar_values()
                .first()
                .map(|scalar| scalar.elem::<f64>())
                == Some(3.0);
            if is_mark && is_three {
                node.set_scalar_values(&[burn_ir::ScalarIr::Float(1.0)]);
            }
        }
        graph.set_nodes(nodes);
        Ok(graph)
    }
}

#[test]
fn an_override_makes_a_module_traceable_and_rewrites_its_graph() {
    let _guard = seeded();
    let device = Device::flex();
    let batch = Tensor::ones([4, 3], &device);
    let optimizer = || AdamWConfig::new().build();
    let mut plain = compile(Curious::new, Curious::loss, optimizer(), Mode::single()).unwrap();
    let error = plain.step(1e-3, &batch).unwrap_err();
    assert!(matches!(error, Error::Uncapturable { .. }), "{error}");
    let mode = Mode::single();
    let mut step = compile_with(Curious::new, Curious::loss, optimizer(), mode, DoNotLook).unwrap();
    // The same without the mark, from the same values.
    let init = |device: &Device| Curious {
        looks: false,
        ..Curious::new(device)
    };
    let loss = |model: &Curious, x: Tensor<2>| model.inner.forward(x).square().mean();
    let mut expected = compile(init, loss, optimizer(), Mode::single()).unwrap();
    for path in ["inner.weight", "inner.bias"] {
        let data = step.parameter(path).unwrap();
        expected.set_parameter(path, data).unwrap();
    }
    for _ in 0..3 {
        let loss = step.step(1e-3, &batch).unwrap();
        assert_eq!(loss, expected.step(1e-3, &batch).unwrap());
    }
}

#[test]
fn an_override_that_changes_parameters_is_refused() {
    let _guard = seeded();
    struct Wider;
    impl Override<Linear> for Wider {
        type Traced = Linear;

        fn replace(&self, _: Linear) -> Linear {
            LinearConfig::new(3, 4).init(&Device::flex())
        }
    }
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).mean();
    let error = compile_with(
        linear,
        loss,
        AdamWConfig::new().build(),
        Mode::single(),
        Wider,
    );
    let error = error.unwrap_err();
    assert!(error.to_string().contains("\"weight\""), "{error}");
}

#[test]
fn a_run_is_continued_from_parameters_and_states() {
    let _guard = seeded();
    let device = Device::flex();
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).square().mean();
    let optimizer = || AdamWConfig::new().build();
    let batch = |step: usize| Tensor::ones([4, 3], &device).mul_scalar(1.0 + step as f64);
    let mut first = compile(linear, loss, optimizer(), Mode::single()).unwrap();
    for step in 0..3 {
        first.step(1e-2, &batch(step)).unwrap();
    }
    let mut second = compile(linear, loss, optimizer(), Mode::single()).unwrap();
    second.resume(3, 1e-2).unwrap();
    for path in ["weight", "bias"] {
        second
            .set_parameter(path, first.parameter(path).unwrap())
            .unwrap();
        for (slot, data) in first.states(path).unwrap() {
            second.set_state(path, &slot, data).unwrap();
        }
    }
    for step in 3..6 {
        let expected = first.step(1e-2, &batch(step)).unwrap();
        assert_eq!(second.step(1e-2, &batch(step)).unwrap(), expected);
    }
    let mut third = compile(linear, loss, optimizer(), Mode::single()).unwrap();
    third.resume(1, 1e-2).unwrap();
    let error = third.step(1e-2, &batch(0)).unwrap_err();
    assert!(
        matches!(error, Error::Missing { ref what } if what.contains("momentum")),
        "{error}"
    );
    third
        .set_state("weight", "velocity", first.parameter("weight").unwrap())
        .unwrap();
    let error = third.step(1e-2, &batch(0)).unwrap_err().to_string();
    assert!(error.contains("velocity"), "{error}");
}

#[test]
fn a_timeline_holds_every_node_and_becomes_chrome_events() {
    let _guard = seeded();
    let device = Device::flex();
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).square().mean();
    // A single rank also gathers if its parameters are shards.
    let mode = Mode::data_parallel(ProcessGroup::solo(), Strategy::FullShard);
    let mut step = compile(linear, loss, AdamWConfig::new().build(), mode).unwrap();
    let batch = Tensor::ones([4, 3], &device);
    step.step(1e-2, &batch).unwrap();
    let (_, timeline) = step.step_with_timeline(1e-2, &batch).unwrap();
    let graph = step.graph().unwrap();
    let num_nodes = graph.nodes().iter().filter(|node| !node.is_drop()).count();
    assert_eq!(timeline.spans().len(), num_nodes);
    assert!(
        timeline
            .spans()
            .windows(2)
            .all(|pair| pair[0].start <= pair[1].start)
    );
    assert!(
        timeline
            .spans()
            .iter()
            .any(|span| span.kind == "communication")
    );
    let events = timeline.chrome_events(0);
    assert_eq!(events.len(), 3 + 2 * num_nodes);
    assert!(events.iter().all(|event| event["ph"].is_string()));
}
