//! The weights that ranks compute with if shards travel in 8 bits, written from the documentation.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use burn_fsdp::Strategy;
use burn_fsdp::sharding::Cut;

use super::legs::{Eager, Engine, Leg, Ranks};
use super::model::Net;

/// Number of elements of a shard that share a scale.
const BLOCK: usize = 256;

impl Leg {
    /// Returns a module with the values that ranks compute with. Gradients go to the exact parameters.
    pub(crate) fn arrived(&self, net: Net) -> Net {
        let num_shards = match self.ranks {
            Ranks::Line(ranks) | Ranks::Copies(ranks) => ranks,
            Ranks::Grid(..) => return net,
        };
        match &self.engine {
            Engine::Eager(eager) if eager.gathers_in_8_bits => net.map(&mut Arrive {
                eager,
                num_shards,
                is_running: false,
            }),
            _ => net,
        }
    }
}

struct Arrive<'a> {
    eager: &'a Eager,
    num_shards: usize,
    is_running: bool,
}

impl Arrive<'_> {
    /// Returns the number of elements of the largest shard; `None` for a parameter that ranks do not gather.
    fn of_shard(&self, shape: &[usize]) -> Option<usize> {
        let len: usize = shape.iter().product();
        let is_kept = shape.len() < 2 && !self.eager.shards_vectors || len < self.eager.whole_below;
        if is_kept || self.eager.strategy == Strategy::NoShard {
            return None;
        }
        let row = match self.eager.cut {
            _ if self.eager.has_owners => len,
            Cut::Elements => 1,
            Cut::Dims => shape[1..].iter().product(),
            Cut::Multiples(multiple) => multiple,
        };
        Some(len.div_ceil(row).div_ceil(self.num_shards) * row)
    }
}

impl ModuleMapper for Arrive<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.is_running = name.starts_with("running");
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // Clones share running states.
        if self.is_running {
            return param;
        }
        let exact = param.val();
        let Some(shard) = self.of_shard(&exact.dims()) else {
            return param;
        };
        let values: Vec<f32> = exact.to_data().try_to_vec().expect("32-bit floats");
        let blocks = values.chunks(shard).flat_map(|shard| shard.chunks(BLOCK));
        let near = blocks.flat_map(rounded).collect::<Vec<_>>();
        let near = Tensor::from_data(TensorData::new(near, exact.shape()), &exact.device());
        let nothing = exact.clone() - exact.detach();
        Param::initialized(param.id, near + nothing)
    }
}

/// Rounds a block to multiples of a 127th of its largest magnitude.
fn rounded(block: &[f32]) -> Vec<f32> {
    let sizes = block.iter().map(|value| value.abs());
    let step = sizes.fold(0.0, f32::max) / 127.0;
    let near = |value: &f32| {
        if step == 0.0 {
            0.0
        } else {
            (value / step).round_ties_even() * step
        }
    };
    block.iter().map(near).collect()
}
