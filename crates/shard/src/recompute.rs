//! Activation checkpointing: a part of the model whose activations are recomputed in backward.
//!
//! Forward runs the region without a graph and keeps only its inputs. Backward runs it again with a separate graph,
//! backpropagates through that graph, and passes the gradients on. Sharded units take part in both: they are gathered
//! once for the forward, and once for the recomputation *and* its backward together. A region inside a unit shares both
//! gathers with the rest of the unit. The order of operations is as in the README, with a unit's second gather at the
//! start of its recomputation, unless backward has gathered the unit already.
//!
//! The inner graph shares no leaf with the outer one: Burn locks a graph during its backward, and a shared leaf would
//! join the two graphs.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Tensor};
use burn_fsdp_tensors::Batch;

use crate::activations;
use crate::ambient::{self, Purpose};
use crate::device::tracked;
use crate::inspect;
use crate::nest::{self, Inputs, Outputs, Sample};
use crate::numbers::Numbers;
use crate::op;
use crate::path::{self, Location};
use crate::region::{self, HandedOn, Region, RegionState, SharedUse, within};
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
/// region's activations at the cost of a second forward. [`offload_activations`](crate::offload_activations) also moves
/// `input` to the host until then.
///
/// Checkpoint one unit at a time: the full weights of all units in a region exist together in its backward.
/// With [`ShardPolicy::units`](crate::ShardPolicy::units) `["blocks.*"]`, call it once around each block. A region that
/// is only a part of a unit adds no gathers: it shares the unit's full weights with the rest of the unit.
///
/// `input` and the output are tensors or any nesting of tensors: tuples, arrays, vectors, options, maps, and structs
/// that implement [`Batch`]. Float tensors get their gradients; ints and bools pass through. If the loss depends on
/// the region but not on one of its inputs, gradients of zero pass through that input, unless it is a leaf.
///
/// `module` may be sharded, contain sharded modules, or be plain. `forward` must compute the same result both times,
/// and must not capture a tracked tensor, whose gradient would be lost; violations are errors. Pass such a tensor in
/// `input`. Only the first forward updates running statistics, such as BatchNorm's. If `input` has float tensors, but
/// none on an autodiff device, or inside another region, `forward` is simply called.
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
/// let mask = Tensor::<2>::ones([2, 4], &device).require_grad();
/// let (output, gate) = recompute(&layer, (input, mask.clone()), |layer, (input, mask)| {
///     let gate = layer.forward(input);
///     (gate.clone().exp() * mask, gate)
/// });
/// let gradients = (output.sum() + gate.sum()).backward();
/// assert!(layer.weight.val().grad(&gradients).is_some());
/// assert!(mask.grad(&gradients).is_some());
/// ```
pub fn recompute<M, F, I, O>(module: &M, input: I, forward: F) -> O
where
    M: Module + Sync + 'static,
    I: Batch + Send + Sync,
    O: Batch,
    F: Fn(&M, I) -> O + Send + Sync + 'static,
{
    let device = region_device(module, &input).filter(Device::is_autodiff);
    let device = device.filter(|_| region::state() == RegionState::Off && is_selected(module));
    let Some(device) = device else {
        return forward(module, input);
    };
    let numbers = Numbers::begin(&device);
    let (output, touched) = within(Purpose::Region, || {
        let plain = prepared(module, &mut Detach);
        forward(&plain, nest::detached(input.clone()))
    });
    let tokens = touched.iter().map(|touched| touched.token.clone());
    // Tokens have no gradients, so they cannot be added.
    let token = tokens.reduce(|joined, token| op::attach(joined, token).0);
    // If no unit is used, the region is attached to a new leaf, because its inputs need not have gradients.
    let token = token.unwrap_or_else(|| Tensor::zeros([1], &device).require_grad());
    let (token, mut inputs) = Inputs::attached(input, token);
    if let Some(host) = activations::host() {
        let counter = touched.first().map(|touched| touched.by.staging());
        inputs = inputs.offloaded(host, counter.unwrap_or_default());
    }
    let samples = nest::samples(output.clone());
    let outputs = Outputs::of(samples.len());
    let region = Checkpointed {
        module: copy(module),
        inputs,
        device,
        numbers,
        samples,
        outputs: outputs.clone(),
        uses: touched
            .into_iter()
            .flat_map(|touched| touched.uses)
            .collect(),
        forward,
    };
    let region = op::recomputed(token, Arc::new(region));
    outputs.attached(output, &region)
}

/// Returns the device of a region: of its first float input with autodiff, otherwise of its first float input, otherwise
/// of its module. `None` if neither has tensors.
pub fn region_device<M: Module, I: Batch>(module: &M, input: &I) -> Option<Device> {
    nest::device_of(input).or_else(|| {
        let mut first = FirstDevice(None);
        inspect::visit(module, &mut first);
        first.0
    })
}

/// A visitor that finds the device of a module's first float tensor.
struct FirstDevice(Option<Device>);

impl path::Visitor for FirstDevice {
    fn float<const D: usize>(&mut self, _: &Location, param: &Param<Tensor<D>>) {
        if self.0.is_none() {
            self.0 = Some(param.base().device());
        }
    }
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
    if has_untrained(&module) {
        ambient::within(Purpose::CopyForGraph, || own_states(module))
            .unwrap_or_else(|error| throw(error))
    } else {
        module
    }
}

/// Returns true if a module has an unsharded float tensor without gradients, such as a running state.
fn has_untrained<M: Module>(module: &M) -> bool {
    let mut untrained = Untrained::default();
    inspect::visit(module, &mut untrained);
    let sharded = inspect::fields(module).into_iter();
    let sharded: HashSet<_> = sharded.map(|(path, _)| path).collect();
    untrained.0.iter().any(|path| !sharded.contains(path))
}

/// A visitor that collects the paths of float tensors without gradients. A sharded parameter's stand-in is one.
#[derive(Default)]
struct Untrained(Vec<String>);

impl path::Visitor for Untrained {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        if !place.is_nested() && !param.base().is_require_grad() {
            self.0.push(place.path());
        }
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

struct Checkpointed<M, F, I> {
    module: M,
    inputs: Inputs<I>,
    device: Device,
    numbers: Option<Numbers>,
    samples: Vec<Sample>,
    outputs: Outputs,
    /// The uses of units to which the region belongs.
    uses: Vec<Arc<SharedUse>>,
    forward: F,
}

impl<M, F, I> fmt::Debug for Checkpointed<M, F, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpointed").finish_non_exhaustive()
    }
}

impl<M, F, I, O> Region for Checkpointed<M, F, I>
where
    M: Module + Sync,
    I: Batch + Send + Sync,
    O: Batch,
    F: Fn(&M, I) -> O + Send + Sync,
{
    fn backward(&self) -> Vec<HandedOn> {
        let input = self.inputs.again();
        let module = with_own_states(copy(&self.module));
        let module = prepared(&module, &mut OwnLeaves);
        let (mut gradients, _) = within(Purpose::RegionAgain, || {
            let forward = || region::again(&self.uses, || (self.forward)(&module, input.clone()));
            let (output, touched) = match &self.numbers {
                Some(numbers) => numbers.again(forward),
                None => forward(),
            };
            for touched in touched {
                touched.by.end_recomputation();
            }
            if let Err(error) = Sample::compare(&self.samples, &nest::samples(output.clone())) {
                throw(error);
            }
            self.outputs.backward(output, &self.device)
        });
        let handed_on = self.inputs.handed_on(input, &mut gradients);
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
            self.0.handed_on.push(HandedOn::new(node, gradient));
        }
    }
}
