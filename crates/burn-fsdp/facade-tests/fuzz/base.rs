//! Plain modules whose adapted matrices have the values of a base in 8 or 4 bits.

use burn::module::{Lora, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use burn_fsdp::internals::sharding::BaseBits;

use super::rounding::rounded;

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
        let bits = match self.bits {
            BaseBits::Eight => 8,
            BaseBits::Four => 4,
        };
        param.map(|old| {
            let values = old.clone().into_data().try_to_vec::<f32>().expect("floats");
            let data = TensorData::new(rounded(bits, &values), old.shape());
            Tensor::from_data(data, &old.device())
        })
    }
}
