use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_models::{Gpt, GptConfig, ModelError};

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    dim: 16,
    heads: 4,
    vocab: 13,
    seq: 8,
};

fn tokens<const T: usize>(row: [i64; T], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(row.to_vec(), [1, T]), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32 values")
}

fn loss(model: &Gpt, device: &Device) -> Tensor<1> {
    model.loss(
        tokens([1, 2, 3, 4, 5, 6, 7, 8], device),
        tokens([2, 3, 4, 5, 6, 7, 8, 9], device),
    )
}

#[test]
fn an_invalid_configuration_is_refused() {
    let config = GptConfig { heads: 3, ..CONFIG };
    let error = config.init(&Device::flex(), 1).unwrap_err();
    assert!(matches!(
        error,
        ModelError::HeadsDoNotDivideDim { heads: 3, dim: 16 }
    ));
}

#[test]
fn the_module_has_the_configured_number_of_parameters() {
    let model = CONFIG.init(&Device::flex(), 1).unwrap();
    assert_eq!(model.num_params(), CONFIG.num_params());
}

#[test]
fn the_first_loss_is_near_a_uniform_guess() {
    let device = Device::flex();
    let model = CONFIG.init(&device, 1).unwrap();
    let loss = values(loss(&model, &device))[0];
    assert!((loss - (CONFIG.vocab as f32).ln()).abs() < 0.05, "{loss}");
}

#[test]
fn the_loss_matches_the_logits() {
    let device = Device::flex();
    let model = CONFIG.init(&device, 1).unwrap();
    let logits = values(model.forward(tokens([1, 2, 3, 4, 5, 6, 7, 8], &device)));
    let mut expected = 0.0;
    for (row, target) in logits.chunks(CONFIG.vocab).zip(2..) {
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        expected += (sum.ln() - f64::from(row[target])) / 8.0;
    }
    let loss = f64::from(values(loss(&model, &device))[0]);
    assert!((loss - expected).abs() < 1e-6, "{loss} {expected}");
}

#[test]
fn seeds_determine_weights_in_any_order_of_use() {
    let device = Device::flex();
    let first = CONFIG.init(&device, 1).unwrap();
    let second = CONFIG.init(&device, 1).unwrap();
    // A record visits the parameters in a different order from the forward pass.
    let _ = second.clone().into_record();
    assert_eq!(
        values(loss(&first, &device)),
        values(loss(&second, &device))
    );
    let third = CONFIG.init(&device, 2).unwrap();
    assert_ne!(values(loss(&first, &device)), values(loss(&third, &device)));
}

#[test]
fn a_later_token_does_not_change_earlier_logits() {
    let device = Device::flex();
    let model = CONFIG.init(&device, 1).unwrap();
    let logits = |row| values(model.forward(tokens(row, &device)));
    let before = logits([1, 2, 3, 4, 5, 6, 7, 8]);
    let after = logits([1, 2, 3, 4, 5, 12, 7, 8]);
    let changed = 5 * CONFIG.vocab;
    assert_eq!(before[..changed], after[..changed]);
    for position in 5..8 {
        let row = position * CONFIG.vocab..(position + 1) * CONFIG.vocab;
        assert_ne!(before[row.clone()], after[row], "position {position}");
    }
}

#[test]
fn a_later_target_gives_earlier_tokens_no_gradient_from_the_future() {
    // Only the first position has a loss that depends on the first token and no other: its gradient must not change
    // with the tokens after it.
    let device = Device::flex().autodiff();
    let model = CONFIG.init(&device, 1).unwrap();
    let gradient = |row: [i64; 4]| {
        let logits = model.forward(tokens(row, &device));
        let grads = logits.narrow(1, 0, 1).powi_scalar(2).sum().backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let id = burn::module::list_param_ids(&model)[0];
        values(grads.get::<2>(id).expect("the token table has a gradient"))
    };
    assert_eq!(gradient([1, 2, 3, 4]), gradient([1, 7, 8, 9]));
}

#[test]
fn shorter_sequences_are_accepted() {
    let device = Device::flex();
    let model = CONFIG.init(&device, 1).unwrap();
    let long = values(model.forward(tokens([1, 2, 3, 4, 5, 6, 7, 8], &device)));
    let short = values(model.forward(tokens([1, 2, 3], &device)));
    for (a, b) in short.iter().zip(&long) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

#[test]
fn every_parameter_has_a_gradient() {
    for device in [
        Device::flex().autodiff(),
        Device::flex().autodiff().gradient_checkpointing(),
    ] {
        let model = CONFIG.init(&device, 1).unwrap();
        let grads = GradientsParams::from_grads(loss(&model, &device).backward(), &model);
        assert_eq!(grads.len(), CONFIG.parameters().len());
    }
}

#[test]
fn gradients_predict_the_change_of_the_loss() {
    let device = Device::flex().autodiff();
    let model = CONFIG.init(&device, 1).unwrap();
    let before = loss(&model, &device);
    let value = f64::from(values(before.clone())[0]);
    let grads = GradientsParams::from_grads(before.backward(), &model);
    let mut norm = SquaredNorm {
        grads: &grads,
        sum: 0.0,
    };
    model.visit(&mut norm);
    let squared_norm = norm.sum;
    let lr = 1e-3;
    let moved = SgdConfig::new().init().step(lr, model, grads);
    let change = value - f64::from(values(loss(&moved, &device))[0]);
    let predicted = lr * squared_norm;
    assert!(
        (change / predicted - 1.0).abs() < 0.05,
        "{change} {predicted}"
    );
}

/// Sums the squares of all gradients.
struct SquaredNorm<'a> {
    grads: &'a GradientsParams,
    sum: f64,
}

impl ModuleVisitor for SquaredNorm<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = self
            .grads
            .get::<D>(param.id)
            .expect("every parameter has one");
        self.sum += values(grad)
            .iter()
            .map(|v| f64::from(*v).powi(2))
            .sum::<f64>();
    }
}
