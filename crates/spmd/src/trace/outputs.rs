//! The results of a loss closure: the loss, and other outputs.

use std::hash::Hash;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_fsdp_tensors::{Batch, BatchMapper};

use super::batch::Path;
use super::capture::{Captured, bool_id, float_id, int_id};
use crate::error::Error;

/// Prefix of the names of outputs in a graph.
pub(super) const PREFIX: &str = "output ";

/// The result of a loss closure: the loss, or the loss and other outputs, such as logits for a metric. A step returns
/// the outputs in [`CompiledStep::outputs`](crate::CompiledStep::outputs).
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_spmd::{Mode, compile};
///
/// let mut step = compile(
///     |device: &Device| LinearConfig::new(3, 1).init(device),
///     |model: &Linear, (x, y): (Tensor<2>, Tensor<2>)| {
///         let prediction = model.forward(x);
///         ((prediction.clone() - y).square().mean(), prediction)
///     },
///     SgdConfig::new().build(),
///     Mode::single(),
/// )?;
/// let device = Device::flex();
/// step.step(1e-2, &(Tensor::ones([8, 3], &device), Tensor::ones([8, 1], &device)))?;
/// let prediction: Tensor<2> = step.outputs()?.remove(0);
/// assert_eq!(prediction.dims(), [8, 1]);
/// # Ok::<(), burn_fsdp_spmd::Error>(())
/// ```
pub trait Loss {
    /// The outputs other than the loss.
    type Outputs: Batch + Send;

    /// Splits the result into the loss, which is one number, and the other outputs.
    fn into_parts(self) -> (Tensor<1>, Self::Outputs);
}

impl Loss for Tensor<1> {
    type Outputs = ();

    fn into_parts(self) -> (Tensor<1>, ()) {
        (self, ())
    }
}

impl<O: Batch + Send> Loss for (Tensor<1>, O) {
    type Outputs = O;

    fn into_parts(self) -> (Tensor<1>, O) {
        self
    }
}

/// The outputs on the capture device, except the loss, by name.
pub(super) type Taken = Vec<(Arc<str>, Option<Captured>)>;

/// Takes the tensors out of the outputs of a trace, and returns the outputs with small placeholders.
pub(super) fn take<O: Batch>(outputs: O) -> (O, Taken) {
    let mut mapper = Take {
        path: Path::default(),
        taken: Vec::new(),
        device: Device::flex(),
    };
    let template = outputs.map(&mut mapper);
    (template, mapper.taken)
}

/// The value of an output.
#[derive(Clone)]
pub(crate) enum OutputValue {
    /// Elements that were read back. The tensor will be on Burn's CPU device.
    Read(TensorData),
    /// A tensor in the step's memory. Nothing is copied.
    Lent(DispatchTensor),
}

/// Returns the outputs with the values of a step, by name, instead of the placeholders in `template`.
pub(crate) fn fill<O: Batch>(
    template: &O,
    values: impl Fn(&str) -> Option<OutputValue>,
) -> Result<O, Error> {
    let mut mapper = Fill {
        path: Path::default(),
        values,
        device: Device::flex(),
        missing: None,
    };
    let outputs = template.clone().map(&mut mapper);
    match mapper.missing {
        None => Ok(outputs),
        Some(name) => Err(Error::Internal(format!("the step has no {name}"))),
    }
}

struct Take {
    path: Path,
    taken: Taken,
    device: Device,
}

impl Take {
    fn add(&mut self, name: &str, captured: Option<Captured>) {
        let name = format!("{PREFIX}{}", self.path.of(name));
        self.taken.push((name.into(), captured));
    }
}

impl BatchMapper for Take {
    fn float<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) -> Tensor<D> {
        self.add(name, float_id(&tensor));
        Tensor::empty([1; D], &self.device)
    }

    fn int<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.add(name, int_id(&tensor));
        Tensor::empty([1; D], &self.device)
    }

    fn bool<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.add(name, bool_id(&tensor));
        Tensor::empty([1; D], &self.device)
    }

    fn fixed(&mut self, _: &str, _: &impl Hash) {}

    fn enter(&mut self, name: &str) {
        self.path.0.push(name.to_owned());
    }

    fn exit(&mut self) {
        self.path.0.pop();
    }
}

struct Fill<V> {
    path: Path,
    values: V,
    device: Device,
    missing: Option<String>,
}

impl<V: Fn(&str) -> Option<OutputValue>> Fill<V> {
    fn filled<const D: usize, K: Basic>(
        &mut self,
        name: &str,
        tensor: Tensor<D, K>,
    ) -> Tensor<D, K> {
        let name = format!("{PREFIX}{}", self.path.of(name));
        match (self.values)(&name) {
            Some(OutputValue::Lent(tensor)) => Tensor::from_dispatch(tensor),
            Some(OutputValue::Read(data)) => {
                let dtype = data.dtype();
                Tensor::from_data(data, (&self.device, dtype))
            }
            None => {
                self.missing.get_or_insert(name);
                tensor
            }
        }
    }
}

impl<V: Fn(&str) -> Option<OutputValue>> BatchMapper for Fill<V> {
    fn float<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) -> Tensor<D> {
        self.filled(name, tensor)
    }

    fn int<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.filled(name, tensor)
    }

    fn bool<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.filled(name, tensor)
    }

    fn fixed(&mut self, _: &str, _: &impl Hash) {}

    fn enter(&mut self, name: &str) {
        self.path.0.push(name.to_owned());
    }

    fn exit(&mut self) {
        self.path.0.pop();
    }
}
