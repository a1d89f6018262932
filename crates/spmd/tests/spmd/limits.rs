//! What cannot be compiled is an error that helps.

use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_spmd::{Error, Mode, compile};

fn linear(device: &Device) -> Linear {
    LinearConfig::new(3, 2).init(device)
}

fn error_of(loss: fn(&Linear, Tensor<2>) -> Tensor<1>) -> Error {
    let device = Device::flex();
    let mut step = compile(linear, loss, AdamWConfig::new().build(), Mode::single()).unwrap();
    let batch = Tensor::ones([4, 3], &device);
    let error = step.step(1e-3, &batch).unwrap_err();
    // Nothing has run, so that the parameters are still those of before.
    assert!(step.parameter("weight").is_ok());
    error
}

#[test]
fn reading_a_tensor_in_the_loss_names_the_operation_and_the_way_out() {
    let error = error_of(|model, x| {
        let y = model.forward(x).mean();
        match y.clone().into_scalar::<f32>() > 0.0 {
            true => y,
            false => y.neg(),
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
fn a_loss_of_several_numbers_is_refused() {
    let error = error_of(|model, x| model.forward(x).sum_dim(1).reshape([4]));
    assert!(
        matches!(error, Error::LossShape { ref shape } if *shape == [4]),
        "{error}"
    );
}

#[test]
fn a_loss_without_parameters_is_refused() {
    let error = error_of(|_, x| x.mean());
    assert!(matches!(error, Error::NoGradient), "{error}");
}

#[test]
fn unknown_parameters_and_wrong_shapes_are_refused() {
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).mean();
    let mut step = compile(linear, loss, AdamWConfig::new().build(), Mode::single()).unwrap();
    let error = step.parameter("wait").unwrap_err();
    assert!(error.to_string().contains("weight, bias"), "{error}");
    let data = burn::tensor::TensorData::from([1.0f32, 2.0]);
    let error = step.set_parameter("weight", data).unwrap_err();
    assert!(matches!(error, Error::TensorMismatch { .. }), "{error}");
}
