//! The frozen base of adapters in 8 or 4 bits, as plain Rust rounds it by the formulas of the documentation.

use burn::module::{Lora, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use burn_fsdp::internals::sharding::BaseBits;

/// The levels of the QLoRA paper, appendix E.
#[allow(clippy::excessive_precision, reason = "the digits of the paper")]
const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// Returns the elements of a matrix: in blocks of 64, each is the nearest level times the block's largest magnitude.
fn rounded(bits: BaseBits, values: &[f32]) -> Vec<f32> {
    let levels: Vec<f32> = match bits {
        BaseBits::Four => NF4.to_vec(),
        BaseBits::Eight => (-127..=127).map(|number| number as f32 / 127.0).collect(),
    };
    let mut all = Vec::new();
    for block in values.chunks(64) {
        let sizes = block.iter().map(|value| value.abs());
        let largest = sizes.fold(0.0, f32::max);
        for value in block {
            let part = f64::from(value / largest);
            let distance = |level: &&f32| (f64::from(**level) - part).abs();
            let mut by_distance: Vec<_> = levels.iter().collect();
            by_distance.sort_by(|one, other| distance(one).total_cmp(&distance(other)));
            all.push(by_distance[0] * largest);
        }
    }
    all
}

/// A mapper that rounds the matrices that adapters adapt.
pub(crate) struct Round {
    pub(crate) bits: BaseBits,
    pub(crate) lora: Lora,
    pub(crate) path: Vec<String>,
}

impl ModuleMapper for Round {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        if D != 2 || !self.lora.param_group.matches(&param.id, Some(&path)) {
            return param;
        }
        let bits = self.bits;
        param.map(|old| {
            let values = old.clone().into_data().try_to_vec::<f32>().expect("floats");
            let data = TensorData::new(rounded(bits, &values), old.shape());
            Tensor::from_data(data, &old.device())
        })
    }
}
