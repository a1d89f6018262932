use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_models::{Llama, LlamaConfig, LlamaVariant, ModelError};

const CONFIG: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 16,
    heads: 4,
    kv_heads: 2,
    hidden: 24,
    vocab: 13,
    seq: 8,
    rope_base: 10_000,
    variant: LlamaVariant::PLAIN,
};

fn tokens<const T: usize>(row: [i64; T], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(row.to_vec(), [1, T]), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32 values")
}

fn loss(model: &Llama, device: &Device) -> Tensor<1> {
    model.loss(
        tokens([1, 2, 3, 4, 5, 6, 7, 8], device),
        tokens([2, 3, 4, 5, 6, 7, 8, 9], device),
    )
}

#[test]
fn invalid_configurations_are_refused() {
    let device = Device::flex();
    let error = |config: LlamaConfig| config.init(&device, 1).unwrap_err();
    let three_heads = LlamaConfig { heads: 3, ..CONFIG };
    assert!(matches!(
        error(three_heads),
        ModelError::HeadsDoNotDivideDim { heads: 3, dim: 16 }
    ));
    let three_kv_heads = LlamaConfig {
        kv_heads: 3,
        ..CONFIG
    };
    assert!(matches!(
        error(three_kv_heads),
        ModelError::HeadsNotGrouped {
            heads: 4,
            kv_heads: 3
        }
    ));
    let tiny_heads = LlamaConfig {
        heads: 16,
        ..CONFIG
    };
    assert!(matches!(
        error(tiny_heads),
        ModelError::OddHeadDim { head_dim: 1 }
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
fn a_later_token_does_not_change_earlier_logits() {
    let device = Device::flex();
    let model = CONFIG.init(&device, 1).unwrap();
    let logits = |row| values(model.forward(tokens(row, &device)));
    let before = logits([1, 2, 3, 4, 5, 6, 7, 8]);
    let after = logits([1, 2, 3, 4, 5, 12, 7, 8]);
    let changed = 5 * CONFIG.vocab;
    assert_eq!(before[..changed], after[..changed]);
    assert_ne!(before[changed..], after[changed..]);
}

/// Attention depends only on differences of positions: leading tokens with the same values as the following ones
/// shift everything by one.
#[test]
fn positions_are_relative() {
    let device = Device::flex();
    let model = CONFIG.init(&device, 1).unwrap();
    let same = values(model.forward(tokens([3, 3, 3, 3], &device)));
    let rows: Vec<_> = same.chunks(CONFIG.vocab).collect();
    for row in &rows[1..] {
        for (a, b) in row.iter().zip(rows[0]) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }
    let order = |row| values(model.forward(tokens(row, &device)));
    let last = |logits: Vec<f32>| logits[3 * CONFIG.vocab..].to_vec();
    assert_ne!(last(order([1, 2, 3, 4])), last(order([2, 1, 3, 4])));
}

/// Copies each key and value head for all query heads that share it.
struct Repeat {
    path: Vec<String>,
    times: usize,
}

impl ModuleMapper for Repeat {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_shared = self.path.iter().any(|name| name == "wk" || name == "wv");
        if !is_shared {
            return param;
        }
        let times = self.times;
        param.map(|weight| {
            let [rows, columns] = [weight.dims()[0], weight.dims()[1]];
            let heads = CONFIG.kv_heads;
            let each: Tensor<4> = weight.reshape([rows, heads, 1, columns / heads]);
            let repeated = each.repeat_dim(2, times).reshape([rows, times * columns]);
            Tensor::from_data(repeated.into_data(), &Device::flex())
        })
    }
}

/// Query heads that share keys and values compute the same as with their own copies.
#[test]
fn grouped_queries_match_plain_attention() {
    let device = Device::flex();
    let grouped = CONFIG.init(&device, 1).unwrap();
    let config = LlamaConfig {
        kv_heads: CONFIG.heads,
        ..CONFIG
    };
    let mut repeat = Repeat {
        path: Vec::new(),
        times: CONFIG.heads / CONFIG.kv_heads,
    };
    // The number of key heads is not a parameter: the repeated weights are loaded into a model that has this number.
    let record = grouped.clone().map(&mut repeat).into_record();
    let plain = config.init(&device, 2).unwrap().load_record(record);
    let logits = |model: &Llama| values(model.forward(tokens([1, 2, 3, 4, 5, 6, 7, 8], &device)));
    for (got, want) in logits(&grouped).iter().zip(logits(&plain)) {
        assert!((got - want).abs() <= 1e-6, "{got}, expected {want}");
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
        assert_eq!(grads.len(), burn::module::list_param_ids(&model).len());
    }
}
