//! The inputs and outputs of a recomputed region, which are nests of tensors.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::{DType, Device, Gradients, Int, Tensor};
use burn_fsdp_tensors::{Batch, FloatMapper, Staging, map_floats};

use crate::activations::moved;
use crate::device::tracked;
use crate::error::Error;
use crate::op;
use crate::region::{HandedOn, InputNode, OutputGradient};

/// Returns the device of the first float tensor with autodiff in `nest`, otherwise of the first float tensor; `None` if
/// there is none.
pub(crate) fn device_of<B: Batch>(nest: &B) -> Option<Device> {
    struct Devices(Option<Device>);
    impl FloatMapper for Devices {
        fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
            let is_known = self.0.as_ref().is_some_and(Device::is_autodiff);
            if !is_known && (self.0.is_none() || tensor.is_autodiff()) {
                self.0 = Some(tensor.device());
            }
            tensor
        }
    }
    let mut devices = Devices(None);
    let _ = map_floats(nest.clone(), &mut devices);
    devices.0
}

/// Returns `nest` with its float tensors outside of the graph, on the same devices.
pub(crate) fn detached<B: Batch>(nest: B) -> B {
    struct Detach;
    impl FloatMapper for Detach {
        fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
            let device = tensor.device();
            plain(tensor, |tensor| tracked(tensor, &device))
        }
    }
    map_floats(nest, &mut Detach)
}

/// Applies `change` to `tensor` without autodiff, if it is on an autodiff device.
fn plain<const D: usize>(
    tensor: Tensor<D>,
    change: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    if tensor.is_autodiff() {
        change(tensor.inner())
    } else {
        tensor
    }
}

/// The inputs of a region, without graphs.
pub(crate) struct Inputs<I> {
    nest: I,
    /// For each float tensor: its device, and its node if it has a gradient.
    floats: Vec<(Device, Option<InputNode>)>,
    away: Option<Away>,
}

/// The way back of inputs that wait on the host.
struct Away {
    /// The device of each tensor.
    devices: Vec<Device>,
    staging: Arc<Staging>,
}

impl<I: Batch> Inputs<I> {
    /// Takes the inputs out of their graph. Also returns a token that is deeper than `token` and all inputs.
    pub(crate) fn attached(nest: I, token: Tensor<1>) -> (Tensor<1>, Self) {
        struct Attach {
            token: Tensor<1>,
            floats: Vec<(Device, Option<InputNode>)>,
        }
        impl FloatMapper for Attach {
            fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
                let device = tensor.device();
                let mut node = None;
                let tensor = if device.is_autodiff() {
                    (self.token, node) = op::attach(self.token.clone(), tensor.clone());
                    tensor.inner()
                } else {
                    tensor
                };
                self.floats.push((device, node));
                tensor
            }
        }
        let mut attach = Attach {
            token,
            floats: Vec::new(),
        };
        let nest = map_floats(nest, &mut attach);
        let Attach { token, floats } = attach;
        let inputs = Self {
            nest,
            floats,
            away: None,
        };
        (token, inputs)
    }

    /// Returns the inputs on the host, from which [`again`](Self::again) copies them back. Counts the copies in
    /// `staging`.
    pub(crate) fn offloaded(self, host: Device, staging: Arc<Staging>) -> Self {
        let (nest, devices) = moved(self.nest, std::iter::repeat(host), &staging);
        let away = Some(Away { devices, staging });
        Self { nest, away, ..self }
    }

    /// Returns the inputs for the second forward. Those that had gradients are leaves.
    pub(crate) fn again(&self) -> I {
        struct Again<'a>(std::slice::Iter<'a, (Device, Option<InputNode>)>);
        impl FloatMapper for Again<'_> {
            fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
                match self.0.next() {
                    Some((device, node)) if device.is_autodiff() => {
                        let tensor = tracked(tensor, device);
                        tensor.set_require_grad(node.is_some())
                    }
                    _ => tensor,
                }
            }
        }
        let nest = self.nest.clone();
        let nest = match &self.away {
            Some(away) => moved(nest, away.devices.iter().cloned(), &away.staging).0,
            None => nest,
        };
        map_floats(nest, &mut Again(self.floats.iter()))
    }

    /// Returns the gradients of the leaves that [`again`](Self::again) returned.
    pub(crate) fn handed_on(&self, leaves: I, gradients: &mut Gradients) -> Vec<HandedOn> {
        struct Take<'a> {
            floats: std::slice::Iter<'a, (Device, Option<InputNode>)>,
            gradients: &'a mut Gradients,
            taken: Vec<HandedOn>,
        }
        impl FloatMapper for Take<'_> {
            fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
                if let Some((_, Some(node))) = self.floats.next() {
                    let gradient = tensor.grad_remove(self.gradients);
                    // Burn visits the node in any case.
                    let gradient = match gradient {
                        None if !node.is_leaf => Some(tensor.clone().inner().zeros_like()),
                        gradient => gradient,
                    };
                    let handed_on = gradient.map(|gradient| HandedOn::new(node.id, gradient));
                    self.taken.extend(handed_on);
                }
                tensor
            }
        }
        let mut take = Take {
            floats: self.floats.iter(),
            gradients,
            taken: Vec::new(),
        };
        let _ = map_floats(leaves, &mut take);
        take.taken
    }
}

impl HandedOn {
    pub(crate) fn new<const D: usize>(node: NodeId, gradient: Tensor<D>) -> Self {
        let shape = gradient.shape();
        Self {
            node,
            gradient: gradient.reshape([shape.num_elements()]),
            shape,
        }
    }
}

/// The gradients of a region's float outputs, in order.
#[derive(Clone)]
pub(crate) struct Outputs(Vec<Arc<OutputGradient>>);

impl Outputs {
    pub(crate) fn of(number: usize) -> Self {
        Self((0..number).map(|_| Arc::default()).collect())
    }

    /// Returns the outputs as nodes of the graph, children of the node `region`.
    pub(crate) fn attached<O: Batch>(&self, outputs: O, region: &Tensor<1>) -> O {
        struct Attach<'a> {
            gradients: std::slice::Iter<'a, Arc<OutputGradient>>,
            region: &'a Tensor<1>,
        }
        impl FloatMapper for Attach<'_> {
            fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
                match self.gradients.next() {
                    Some(gradient) if tensor.is_autodiff() => {
                        op::returned(tensor, self.region.clone(), gradient.clone())
                    }
                    _ => tensor,
                }
            }
        }
        let mut attach = Attach {
            gradients: self.0.iter(),
            region,
        };
        map_floats(outputs, &mut attach)
    }

    /// Backpropagates the gradients of the outputs, from the second forward, through their graph.
    pub(crate) fn backward<O: Batch>(&self, outputs: O, device: &Device) -> Gradients {
        struct Weigh<'a> {
            gradients: std::slice::Iter<'a, Arc<OutputGradient>>,
            sum: Tensor<1>,
        }
        impl FloatMapper for Weigh<'_> {
            fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
                let gradient = self.gradients.next().and_then(|gradient| gradient.take());
                if let Some(gradient) = gradient {
                    let gradient = gradient.reshape(tensor.shape());
                    let gradient = tracked(gradient, &tensor.device());
                    // The gradient of each product is 1, in any type.
                    let product = (tensor.clone() * gradient).sum().cast(DType::F32);
                    self.sum = self.sum.clone() + product;
                }
                tensor
            }
        }
        let mut weigh = Weigh {
            gradients: self.0.iter(),
            // A leaf, because the outputs need not depend on any.
            sum: Tensor::zeros([1], (device, DType::F32)).require_grad(),
        };
        let _ = map_floats(outputs, &mut weigh);
        weigh.sum.backward()
    }
}

/// Returns a sample of each float tensor of a region's output.
pub(crate) fn samples<O: Batch>(outputs: O) -> Vec<Sample> {
    struct Take(Vec<Sample>);
    impl FloatMapper for Take {
        fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
            self.0.push(Sample::of(&tensor));
            tensor
        }
    }
    let mut take = Take(Vec::new());
    let _ = map_floats(outputs, &mut take);
    take.0
}

/// A sample of an output of a region, enough to notice that the second forward computed a different result.
pub(crate) struct Sample {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Sample {
    const SIZE: usize = 64;
    /// The tolerated difference, relative to the largest element. Equal kernels give equal bits; different random
    /// numbers are far outside the tolerance.
    const TOLERANCE: f32 = 1e-2;

    fn of<const D: usize>(output: &Tensor<D>) -> Self {
        let elements = output.shape().num_elements();
        let step = elements.div_ceil(Self::SIZE).max(1);
        let places: Vec<i64> = (0..elements)
            .step_by(step)
            .map(|place| place as i64)
            .collect();
        let plain = plain(output.clone(), |output| output).reshape([elements]);
        let places = Tensor::<1, Int>::from_data(&places[..], &plain.device());
        let values = plain.select(0, places).into_data().convert::<f32>();
        Self {
            shape: output.dims().to_vec(),
            values: values.try_to_vec().unwrap_or_default(),
        }
    }

    /// Checks that a second forward returned the same tensors.
    pub(crate) fn compare(first: &[Self], second: &[Self]) -> Result<(), Error> {
        let shapes = |samples: &[Self]| {
            let shapes: Vec<_> = samples.iter().map(|sample| sample.shape.clone()).collect();
            format!("tensors of the shapes {shapes:?}")
        };
        let (of_first, of_second) = (shapes(first), shapes(second));
        if of_first != of_second {
            return Err(Error::Recomputed {
                first: of_first,
                second: of_second,
            });
        }
        first.iter().zip(second).try_for_each(|(first, second)| {
            let scale = first
                .values
                .iter()
                .fold(0.0f32, |max, value| max.max(value.abs()));
            for (&first, &second) in first.values.iter().zip(&second.values) {
                let differs = (first - second).abs() > Self::TOLERANCE * scale;
                if differs || first.is_nan() != second.is_nan() {
                    return Err(Error::Recomputed {
                        first: first.to_string(),
                        second: second.to_string(),
                    });
                }
            }
            Ok(())
        })
    }
}
