//! Values of parameters, drawn by the number of the parameter.

use burn::module::{ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};

/// Values by the number of the parameter. They share no generator with other tests.
pub(crate) struct Values {
    /// The seed of the next parameter.
    seed: u64,
    /// Number of the change in the last bits; 0 for none.
    nudge: u64,
    /// The relative distance of a number from the next one; changes are small multiples of it.
    rounding: f32,
    /// True if only the factors of adapters get values, false if everything else does.
    of_factors: bool,
    path: Vec<String>,
}

impl Values {
    pub(crate) fn new(seed: u64, nudge: u64, rounding: f32) -> Self {
        Self {
            seed,
            nudge,
            rounding,
            of_factors: false,
            path: Vec::new(),
        }
    }

    pub(crate) fn of_factors(mut self) -> Self {
        self.of_factors = true;
        self
    }
}

impl ModuleMapper for Values {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_factor = self.path.iter().any(|name| name == "lora");
        let is_running = self.path.iter().any(|name| name.starts_with("running"));
        if is_running || is_factor != self.of_factors {
            return param;
        }
        let (seed, nudge, rounding) = (self.seed, self.nudge, self.rounding);
        self.seed += 1;
        // Burn's map of a value leaves it without gradients. One parameter stays without them.
        let regains = (D == 1 || is_factor) && param.is_initialized() && param.is_require_grad();
        let mapped = param.init_mapper(move |old| {
            let shape = old.shape();
            let value = |i: usize| {
                let bits = mixed(seed.wrapping_mul(0x1_0000_0001) ^ i as u64) >> 40;
                let value = bits as f32 / (1_u64 << 24) as f32 - 0.5;
                let steps = match nudge {
                    0 => 0.0,
                    nudge => (mixed(bits ^ nudge << 32) % 9) as f32 - 4.0,
                };
                value * (1.0 + steps * rounding)
            };
            let values: Vec<_> = (0..shape.num_elements()).map(value).collect();
            Tensor::from_data(TensorData::new(values, shape), &old.device())
        });
        if regains {
            mapped.set_require_grad(true)
        } else {
            mapped
        }
    }
}

/// The finalizer of splitmix64: every bit of the result depends on all of `x`.
pub(crate) fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
