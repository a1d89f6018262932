//! Activation checkpointing: a part of the model whose activations are recomputed in backward.
//!
//! Forward runs the region without a graph and keeps only its input. Backward runs it again with a separate graph,
//! backpropagates through that graph, and passes the gradients on. Sharded units take part in both: they are gathered
//! once for the forward, and once for the recomputation *and* its backward together. The order of operations is as in
//! the README, with a unit's second gather at the start of its recomputation.
//!
//! The inner graph shares no leaf with the outer one: Burn locks a graph during its backward, and a shared leaf would
//! join the two graphs.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Int, Tensor};

use crate::ambient::{self, Purpose};
use crate::device::tracked;
use crate::error::Error;
use crate::inspect;
use crate::numbers::Numbers;
use crate::op::{self, HandedOn, Region};
use crate::parameter::Attached;
use crate::path::{self, Location};
use crate::region::{self, RegionState, within};
use crate::thrown::throw;
use crate::wrap::own_states;

/// Returns a copy of `module` whose unsharded parameters `mapper` has replaced.
fn prepared<M: Module>(module: &M, mapper: &mut impl ModuleMapper) -> M {
    // A lazy parameter would draw different numbers in the copy.
    module.visit(&mut Initialize);
    ambient::within(Purpose::Prepare, || copy(module).map(mapper))
}

/// Returns a copy of `module` for use in a graph only.
fn copy<M: Module>(module: &M) -> M {
    ambient::within(Purpose::CopyForGraph, || module.clone())
}

/// Runs `forward(module, input)`; backward keeps only `input` and recomputes the rest. This saves the memory of the
/// region's activations at the cost of a second forward.
///
/// Checkpoint one unit at a time: the full weights of all units in a region exist together in its backward.
/// With [`ShardPolicy::units`](crate::ShardPolicy::units) `["blocks.*"]`, call it once around each block.
///
/// `module` may be sharded, contain sharded modules, or be plain. `forward` must compute the same result both times,
/// and must not capture a tracked tensor, whose gradient would be lost; violations are errors. Only the first forward
/// updates running statistics, such as BatchNorm's. If `input` is not on an autodiff device, or inside another region,
/// `forward` is simply called.
///
/// Dropout draws the same numbers twice if each rank is a process. A region seeds Burn's generator with a seed drawn
/// from it, and uses that seed again in backward. Then the generator continues with a new seed. Draws by other threads
/// meanwhile would interfere. If ranks are threads, which share that one generator, dropout in a region is an error.
///
/// All ranks must call it in the same way.
///
/// # Errors
///
/// The errors of a forward and a backward, which unwind: see [`catch`](crate::catch).
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_shard::recompute;
///
/// let device = Device::flex().autodiff();
/// let layer: Linear = LinearConfig::new(4, 4).init(&device);
/// let input = Tensor::<2>::ones([2, 4], &device);
/// let output = recompute(&layer, input, |layer, input| layer.forward(input).exp());
/// let gradients = output.sum().backward();
/// assert!(layer.weight.val().grad(&gradients).is_some());
/// ```
pub fn recompute<M, F, const D: usize, const E: usize>(
    module: &M,
    input: Tensor<D>,
    forward: F,
) -> Tensor<E>
where
    M: Module + Sync + 'static,
    F: Fn(&M, Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
{
    if !input.is_autodiff() || region::state() != RegionState::Off || !is_selected(module) {
        return forward(module, input);
    }
    let device = input.device();
    let numbers = Numbers::begin(&device);
    let (output, touched) = within(Purpose::Region, || {
        let plain = prepared(module, &mut Detach);
        forward(&plain, tracked(input.clone().inner(), &device))
    });
    let tokens = touched.into_iter().map(|touched| touched.token);
    let token = tokens.reduce(|sum, token| sum + token).unwrap_or_else(|| {
        // The region is attached to this tensor if the input has no gradient.
        Tensor::zeros([1], &device).require_grad()
    });
    let region = Checkpointed::<M, F, D, E> {
        module: copy(module),
        input: input.clone().inner(),
        device,
        numbers,
        sample: Sample::of(&output),
        forward,
    };
    let region: Arc<dyn Region> = Arc::new(region);
    op::recomputed(output, input, token, region)
}

/// Returns true if the policies of all units in `module` select its regions. This is the same on all ranks.
fn is_selected<M: Module>(module: &M) -> bool {
    let members = inspect::members(module);
    members
        .iter()
        .all(|member| member.generation.unit.is_recomputed(member.index))
}

/// Returns the module with separate running states, so updates by the second forward have no effect.
fn with_own_states<M: Module>(module: M) -> M {
    let mut untrained = Untrained(false);
    inspect::visit(&module, &mut untrained);
    if untrained.0 {
        ambient::within(Purpose::CopyForGraph, || own_states(module))
            .unwrap_or_else(|error| throw(error))
    } else {
        module
    }
}

/// A visitor that finds out whether a module has an unsharded float tensor without gradients, such as a running state.
struct Untrained(bool);

impl path::Visitor for Untrained {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let is_plain = !place.is_nested() && param.reparameterization::<Attached>().is_none();
        self.0 |= is_plain && !param.base().is_require_grad();
    }
}

/// A visitor that initializes lazy parameters.
struct Initialize;

impl ModuleVisitor for Initialize {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        drop(param.base());
    }
}

/// A mapper that takes unsharded parameters out of the graph. Sharded parameters handle this themselves.
struct Detach;

impl ModuleMapper for Detach {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let device = tensor.device();
            tracked(tensor.inner(), &device)
        })
    }
}

/// A mapper that gives unsharded parameters separate leaves for the region.
struct OwnLeaves;

impl ModuleMapper for OwnLeaves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let device = tensor.device();
            let is_trainable = tensor.is_require_grad();
            tracked(tensor.inner(), &device).set_require_grad(is_trainable)
        })
    }
}

struct Checkpointed<M, F, const D: usize, const E: usize> {
    module: M,
    input: Tensor<D>,
    device: Device,
    numbers: Option<Numbers>,
    sample: Sample,
    forward: F,
}

impl<M, F, const D: usize, const E: usize> fmt::Debug for Checkpointed<M, F, D, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpointed").finish_non_exhaustive()
    }
}

impl<M, F, const D: usize, const E: usize> Region for Checkpointed<M, F, D, E>
where
    M: Module + Sync,
    F: Fn(&M, Tensor<D>) -> Tensor<E> + Send + Sync,
{
    fn backward(&self, gradient: Tensor<1>) -> Vec<HandedOn> {
        let input = tracked(self.input.clone(), &self.device).require_grad();
        let module = with_own_states(copy(&self.module));
        let module = prepared(&module, &mut OwnLeaves);
        let (mut gradients, _) = within(Purpose::RegionAgain, || {
            let forward = || {
                within(Purpose::RegionAgain, || {
                    (self.forward)(&module, input.clone())
                })
            };
            let (output, touched) = match &self.numbers {
                Some(numbers) => numbers.again(forward),
                None => forward(),
            };
            for touched in touched {
                touched.by.end_recomputation();
            }
            if let Err(error) = self.sample.compare(&output) {
                throw(error);
            }
            let gradient = tracked(gradient.reshape(output.shape()), &self.device);
            (output * gradient).sum().backward()
        });
        let mut handed_on = Vec::new();
        if let Some(gradient) = input.grad_remove(&mut gradients) {
            handed_on.push(flattened(None, gradient));
        }
        let mut leaves = Leaves {
            nodes: Vec::new(),
            gradients,
            handed_on,
        };
        self.module.visit(&mut leaves);
        leaves.nodes.reverse();
        module.visit(&mut Collect(&mut leaves));
        leaves.handed_on
    }
}

fn flattened<const D: usize>(node: Option<NodeId>, gradient: Tensor<D>) -> HandedOn {
    let shape = gradient.shape();
    HandedOn {
        node,
        gradient: gradient.reshape([shape.num_elements()]),
        shape,
    }
}

/// The graph nodes of the module's own leaves, and the gradients of the region's leaves.
struct Leaves {
    nodes: Vec<Option<NodeId>>,
    gradients: Gradients,
    handed_on: Vec<HandedOn>,
}

impl ModuleVisitor for Leaves {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let is_leaf = value.is_autodiff() && value.is_require_grad();
        self.nodes.push(is_leaf.then(|| op::node_of(value)));
    }
}

/// A visitor that collects the gradients of the region's leaves for the module's own leaves.
struct Collect<'a>(&'a mut Leaves);

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(Some(node)) = self.0.nodes.pop() else {
            return;
        };
        if let Some(gradient) = param.base().grad_remove(&mut self.0.gradients) {
            self.0.handed_on.push(flattened(Some(node), gradient));
        }
    }
}

/// A sample of a region's output, enough to notice that the second forward computed a different result.
struct Sample(Vec<f32>);

impl Sample {
    const SIZE: usize = 64;
    /// The tolerated difference, relative to the largest element. Equal kernels give equal bits; different random
    /// numbers are far outside the tolerance.
    const TOLERANCE: f32 = 1e-2;

    fn of<const E: usize>(output: &Tensor<E>) -> Self {
        let elements = output.shape().num_elements();
        let step = elements.div_ceil(Self::SIZE).max(1);
        let places: Vec<i64> = (0..elements)
            .step_by(step)
            .map(|place| place as i64)
            .collect();
        let plain = output.clone().inner().reshape([elements]);
        let places = Tensor::<1, Int>::from_data(&places[..], &plain.device());
        let values = plain.select(0, places).into_data().convert::<f32>();
        Self(values.try_to_vec().unwrap_or_default())
    }

    fn compare<const E: usize>(&self, output: &Tensor<E>) -> Result<(), Error> {
        let again = Self::of(output);
        let scale = self
            .0
            .iter()
            .fold(0.0f32, |max, value| max.max(value.abs()));
        for (&first, &second) in self.0.iter().zip(&again.0) {
            let differs = (first - second).abs() > Self::TOLERANCE * scale;
            if differs || first.is_nan() != second.is_nan() {
                return Err(Error::Recomputed { first, second });
            }
        }
        Ok(())
    }
}
