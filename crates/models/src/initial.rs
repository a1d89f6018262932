//! Initial weights.

use burn::module::{Param, ParamId};
use burn::tensor::{Device, Distribution, Shape, Tensor, TensorData};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// The random numbers for initial weights, or zeros if weights are read later.
///
/// Every parameter has its own generator, seeded by the model's seed and the parameter's number. Its values therefore
/// do not depend on the order in which parameters are first used, on the device, or on other threads that draw random
/// numbers at the same time.
#[derive(Debug)]
pub(crate) struct InitialValues<'a> {
    device: &'a Device,
    /// `None` for zeros.
    seed: Option<u64>,
    drawn: u64,
}

impl<'a> InitialValues<'a> {
    pub(crate) fn new(device: &'a Device, seed: u64) -> Self {
        Self {
            device,
            seed: Some(seed),
            drawn: 0,
        }
    }

    /// Creates a source of zeros, for weights that are read later.
    pub(crate) fn zeros(device: &'a Device) -> Self {
        Self {
            device,
            seed: None,
            drawn: 0,
        }
    }

    /// Returns the device of the parameters.
    pub(crate) fn device(&self) -> &'a Device {
        self.device
    }

    /// Returns a lazy matrix of normal values with mean zero, or of zeros.
    pub(crate) fn normal(&mut self, shape: [usize; 2], std: f64) -> Param<Tensor<2>> {
        let mut rng = self.next_generator();
        Param::uninitialized(
            ParamId::new(),
            move |device, is_require_grad| {
                let values = match &mut rng {
                    Some(rng) => {
                        let values = Distribution::Normal(0.0, std);
                        let data = TensorData::random::<f32, _, _>(shape, values, rng);
                        Tensor::from_data(data, device)
                    }
                    None => Tensor::zeros(shape, device),
                };
                values.set_require_grad(is_require_grad)
            },
            self.device.clone(),
            true,
            Shape::new(shape),
        )
    }

    fn next_generator(&mut self) -> Option<StdRng> {
        let own = self.seed?;
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&own.to_le_bytes());
        seed[8..16].copy_from_slice(&self.drawn.to_le_bytes());
        self.drawn += 1;
        Some(StdRng::from_seed(seed))
    }
}
