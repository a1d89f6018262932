//! Values of parameters that are not drawn: Burn's generator is one for all tests of a process.

use burn::module::{ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};

/// Gives parameters fixed values, starting with the number of values that were given before.
pub(crate) struct Fixed(pub(crate) usize);

impl ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let shape = old.shape();
            let values = (0..shape.num_elements()).map(|_| {
                self.0 += 1;
                ((self.0 * 7919) % 1009) as f32 / 1009.0 * 0.6 - 0.3
            });
            let data = TensorData::new(values.collect::<Vec<f32>>(), shape);
            Tensor::from_data(data, &old.device()).require_grad()
        })
    }
}
