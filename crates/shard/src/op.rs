//! The engine's operations as Burn backend operations, differentiated by hand.
//!
//! The engine adds a few kinds of nodes to the autodiff graph, and nothing to the model's code:
//!
//! - `unshard`: its output is the full parameter. Backward passes the full gradient to the unit. If full weights are
//!   dropped after forward, the node is memory-bound regardless of the device's strategy: consumers keep the node
//!   instead of the weight, and its retro-forward gathers the unit again.
//! - `link`: a link of the *token*, a no-op that sets the depth of the nodes attached to it. Burn's backward runs by
//!   depth, and the token makes it run unit by unit. Each link carries an [`Announce`], which runs when a unit's
//!   gradients are complete or backward is about to end.
//! - `attach`, `recomputed` and `returned`: a region's inputs, the region, whose backward runs it again, and its outputs,
//!   which have stored their gradients by then.
//!
//! The engine chooses the depth of a link with a *ruler*, an untracked parent that backward does not visit: a node is
//! one deeper than its deepest parent, tracked or not.
//!
//! An offloaded value is on the host and cannot be a parent of another backend's result. A leaf on that backend
//! represents it and gets no gradient: the reduced gradient is registered for the value's own node, since Burn's
//! `Gradients` hold tensors of any backend.

#![cfg_attr(
    feature = "ndarray",
    allow(deprecated, reason = "tests need `NdArray` as a second backend")
)]

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cube")]
use burn::backend::Cube;
#[cfg(feature = "tch")]
use burn::backend::LibTorch;
#[cfg(feature = "ndarray")]
use burn::backend::NdArray;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{Shape, Tensor};

use crate::error::Error;
use crate::region::{InputNode, OutputGradient, Region};
use crate::thrown::throw;

/// The full parameter of one use of a unit, as backward accesses it.
pub(crate) trait Weight: fmt::Debug + Send + Sync {
    fn shape(&self) -> Shape;

    /// Returns true if the full parameter is kept until the backward of the use.
    fn stays(&self) -> bool;

    /// Gathers the unit again and returns the full parameter, flat and without autodiff.
    fn regather(&self) -> Result<Tensor<1>, Error>;

    /// Receives the full gradient, flat and without autodiff.
    fn receive(&self, gradient: Tensor<1>);
}

/// A milestone, which a link of the token announces when backward reaches it.
pub(crate) trait Announce: fmt::Debug + Send + Sync {
    /// Called when backward reaches the link. Returns the gradients of completed reductions.
    fn reached(&self) -> Result<Vec<Reduced>, Error>;

    /// Called with the leaf of each gradient that `reached` returned, once they are in Burn's `Gradients`.
    fn handed_over(&self, leaves: &[NodeId]) -> Result<(), Error>;
}

/// A shard gradient that is ready for the optimizer.
pub(crate) struct Reduced {
    /// The leaf to which the gradient belongs.
    pub(crate) node: NodeId,
    /// The averaged gradient of this rank's elements.
    pub(crate) gradient: Tensor<1>,
    /// Shape of the leaf.
    pub(crate) shape: Shape,
}

/// The engine's operations. A `full` parameter has no autodiff; `value` is the tensor that the optimizer sees.
#[backend_extension(
    Flex,
    Cube: cfg(feature = "cube"),
    LibTorch: cfg(feature = "tch"),
    NdArray: cfg(feature = "ndarray"),
    Autodiff
)]
pub(crate) trait ShardOps: Backend {
    /// Returns `full` in its final shape, as a graph node with the parents `value` and `token`.
    fn unshard(
        full: FloatTensor<Self>,
        value: FloatTensor<Self>,
        token: FloatTensor<Self>,
        weight: Arc<dyn Weight>,
    ) -> FloatTensor<Self>;

    /// Returns a link that is deeper than `token` and `ruler`, and announces `milestone`.
    fn link(
        token: FloatTensor<Self>,
        ruler: FloatTensor<Self>,
        milestone: Arc<dyn Announce>,
    ) -> FloatTensor<Self>;

    /// Makes `ruler`, which is untracked, `links` levels deeper.
    fn extend(ruler: FloatTensor<Self>, links: usize) -> FloatTensor<Self>;

    /// Returns a token that is deeper than `token` and `input`, an input of a region, and sets `node` to the input's
    /// node. Returns `token` if `input` has no gradient.
    fn attach(
        token: FloatTensor<Self>,
        input: FloatTensor<Self>,
        node: Arc<OnceLock<InputNode>>,
    ) -> FloatTensor<Self>;

    /// Returns a node whose backward runs `region` again. `token` makes it deeper than the region's inputs and units.
    fn recomputed(token: FloatTensor<Self>, region: Arc<dyn Region>) -> FloatTensor<Self>;

    /// Returns the `output` that a region computed without a graph, as a node whose backward stores its gradient for
    /// the region, the node `region`.
    fn returned(
        output: FloatTensor<Self>,
        region: FloatTensor<Self>,
        gradient: Arc<OutputGradient>,
    ) -> FloatTensor<Self>;

    /// Writes the id of `value`'s graph node to `sink`.
    fn identify(value: FloatTensor<Self>, sink: Arc<AtomicU64>) -> FloatTensor<Self>;
}

/// A backend whose primitives the engine can extract from tensors and wrap again.
pub(crate) trait Primitive: Backend {
    /// Returns the primitive of a flat tensor without autodiff, if it is on this backend.
    fn try_lower(tensor: Tensor<1>) -> Option<FloatTensor<Self>>;
    /// Returns the primitive of a flat tensor without autodiff, which must be on this backend.
    fn lower(tensor: Tensor<1>) -> FloatTensor<Self> {
        Self::try_lower(tensor).expect("a unit's full parameters are on one backend")
    }
    /// Returns a flat tensor without autodiff from a primitive of any shape.
    fn raise(primitive: FloatTensor<Self>) -> Tensor<1>;
}

/// Implements the operations for a backend without autodiff, where they are only reshapes.
macro_rules! plain_backend {
    ($backend:ty) => {
        impl Primitive for $backend {
            fn try_lower(tensor: Tensor<1>) -> Option<FloatTensor<Self>> {
                tensor.try_into_primitive::<$backend>().ok()
            }

            fn raise(primitive: FloatTensor<Self>) -> Tensor<1> {
                let flat = Shape::from([primitive.shape().num_elements()]);
                Tensor::from_primitive::<$backend>(<$backend>::float_reshape(primitive, flat))
            }
        }

        impl ShardOps for $backend {
            fn unshard(
                full: FloatTensor<Self>,
                _value: FloatTensor<Self>,
                _token: FloatTensor<Self>,
                weight: Arc<dyn Weight>,
            ) -> FloatTensor<Self> {
                <$backend>::float_reshape(full, weight.shape())
            }

            fn link(
                token: FloatTensor<Self>,
                _ruler: FloatTensor<Self>,
                _milestone: Arc<dyn Announce>,
            ) -> FloatTensor<Self> {
                token
            }

            fn extend(ruler: FloatTensor<Self>, _links: usize) -> FloatTensor<Self> {
                ruler
            }

            fn attach(
                token: FloatTensor<Self>,
                _input: FloatTensor<Self>,
                _node: Arc<OnceLock<InputNode>>,
            ) -> FloatTensor<Self> {
                token
            }

            fn recomputed(token: FloatTensor<Self>, _region: Arc<dyn Region>) -> FloatTensor<Self> {
                token
            }

            fn returned(
                output: FloatTensor<Self>,
                _region: FloatTensor<Self>,
                _gradient: Arc<OutputGradient>,
            ) -> FloatTensor<Self> {
                output
            }

            fn identify(value: FloatTensor<Self>, _sink: Arc<AtomicU64>) -> FloatTensor<Self> {
                value
            }
        }
    };
}

plain_backend!(Flex);
#[cfg(feature = "cube")]
plain_backend!(Cube);
#[cfg(feature = "tch")]
plain_backend!(LibTorch);
#[cfg(feature = "ndarray")]
plain_backend!(NdArray);

/// A retro-forward that gathers the unit again when backward first needs one of its parameters.
#[derive(Debug)]
struct Regather<B> {
    weight: Arc<dyn Weight>,
    backend: PhantomData<fn() -> B>,
}

impl<B: Primitive> RetroForward for Regather<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let full = self.weight.regather();
        let full = full.unwrap_or_else(|error| throw(error));
        let full = B::float_reshape(B::lower(full), self.weight.shape());
        states.save(out_node, full);
    }
}

/// The backward of `unshard`, which passes the full gradient to the unit.
#[derive(Debug)]
struct ReceiveGradient;

impl<B: Primitive> Backward<B, 2> for ReceiveGradient {
    type State = Arc<dyn Weight>;

    fn backward(self, ops: Ops<Arc<dyn Weight>, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [value, _token] = ops.parents;
        let gradient = grads.consume::<B>(&ops.node);
        // A frozen value has no node. Burn computed its gradient anyway; it is dropped here.
        if value.is_some() {
            ops.state.receive(B::raise(gradient));
        }
    }
}

/// A node that is only deeper than its parents, such as a ruler's. A region registers its inputs' gradients itself.
#[derive(Debug)]
struct Notch;

impl<B: Backend, const N: usize> Backward<B, N> for Notch {
    type State = ();

    fn backward(self, _: Ops<(), N>, _: &mut Gradients, _: &mut Checkpointer) {}
}

/// The backward of a link, which announces its milestone.
#[derive(Debug)]
struct Report;

impl<B: Primitive> Backward<B, 2> for Report {
    type State = Arc<dyn Announce>;

    fn backward(self, ops: Ops<Arc<dyn Announce>, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let reduced = ops.state.reached();
        let mut handed_over = Vec::new();
        for reduced in reduced.unwrap_or_else(|error| throw(error)) {
            let (node, shape) = (reduced.node, reduced.shape);
            match B::try_lower(reduced.gradient.clone()) {
                Some(flat) => grads.register::<B>(node, B::float_reshape(flat, shape)),
                // The gradient of an offloaded shard: its leaf is on the host, even if backward runs on another
                // backend.
                None => {
                    let flat = Flex::lower(reduced.gradient);
                    grads.register::<Flex>(node, Flex::float_reshape(flat, shape));
                }
            }
            handed_over.push(node);
        }
        let taken_down = ops.state.handed_over(&handed_over);
        taken_down.unwrap_or_else(|error| throw(error));
    }
}

/// The backward of `returned`, which stores an output's gradient for its region.
#[derive(Debug)]
struct StoreGradient;

impl<B: Primitive> Backward<B, 1> for StoreGradient {
    type State = Arc<OutputGradient>;

    fn backward(
        self,
        ops: Ops<Arc<OutputGradient>, 1>,
        grads: &mut Gradients,
        _: &mut Checkpointer,
    ) {
        let gradient = grads.consume::<B>(&ops.node);
        ops.state.set(B::raise(gradient));
    }
}

/// The backward of `recomputed`, which runs a region again and passes its gradients on.
#[derive(Debug)]
struct RunAgain;

impl<B: Primitive> Backward<B, 1> for RunAgain {
    type State = Arc<dyn Region>;

    fn backward(self, ops: Ops<Arc<dyn Region>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        for handed_on in ops.state.backward() {
            let gradient = B::float_reshape(B::lower(handed_on.gradient), handed_on.shape);
            grads.register::<B>(handed_on.node, gradient);
        }
    }
}

/// Finishes a node, with `state` if it has a gradient.
fn finished<B: Backend, C: CheckpointStrategy, O: Backward<B, N>, const N: usize>(
    prepared: OpsKind<O, B, O::State, C, N>,
    state: O::State,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(state, output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}

impl<B: ShardOps + Primitive, C: CheckpointStrategy> ShardOps for Autodiff<B, C> {
    fn unshard(
        full: FloatTensor<Self>,
        value: FloatTensor<Self>,
        token: FloatTensor<Self>,
        weight: Arc<dyn Weight>,
    ) -> FloatTensor<Self> {
        let output = B::float_reshape(full.into_primitive(), weight.shape());
        let parents = [value.node(), token.node()];
        if weight.stays() {
            let prepared = Backward::<B, 2>::prepare::<NoCheckpointing>(ReceiveGradient, parents);
            return finished(prepared.compute_bound().stateful(), weight, output);
        }
        let regather = Regather::<B> {
            weight: weight.clone(),
            backend: PhantomData,
        };
        let prepared = Backward::<B, 2>::prepare::<BalancedCheckpointing>(ReceiveGradient, parents)
            .memory_bound()
            .retro_forward(regather);
        // Burn does not recompute a node with an untracked parent, so a frozen value is left out. The generation holds
        // it for the retro-forward anyway.
        let prepared = if value.is_tracked() {
            prepared.parents([&value, &token])
        } else {
            prepared.parents([&token])
        };
        finished(prepared.stateful(), weight, output)
    }

    fn link(
        token: FloatTensor<Self>,
        ruler: FloatTensor<Self>,
        milestone: Arc<dyn Announce>,
    ) -> FloatTensor<Self> {
        let (primitive, node) = token.into_parts();
        let link = Backward::<B, 2>::prepare::<NoCheckpointing>(Report, [node, ruler.node()]);
        finished(link.compute_bound().stateful(), milestone, primitive)
    }

    fn extend(ruler: FloatTensor<Self>, links: usize) -> FloatTensor<Self> {
        (0..links).fold(ruler, |ruler, _| {
            let (primitive, node) = ruler.into_parts();
            let notch = Backward::<B, 1>::prepare::<NoCheckpointing>(Notch, [node]);
            notch.compute_bound().stateless(primitive)
        })
    }

    fn attach(
        token: FloatTensor<Self>,
        input: FloatTensor<Self>,
        node: Arc<OnceLock<InputNode>>,
    ) -> FloatTensor<Self> {
        if !input.is_tracked() {
            return token;
        }
        node.get_or_init(|| InputNode {
            id: input.id(),
            is_leaf: Self::float_is_require_grad(&input),
        });
        let (primitive, parent) = token.into_parts();
        let notch = Backward::<B, 2>::prepare::<NoCheckpointing>(Notch, [parent, input.node()]);
        notch.compute_bound().stateless(primitive)
    }

    fn recomputed(token: FloatTensor<Self>, region: Arc<dyn Region>) -> FloatTensor<Self> {
        let (primitive, node) = token.into_parts();
        let prepared = Backward::<B, 1>::prepare::<NoCheckpointing>(RunAgain, [node]);
        finished(prepared.compute_bound().stateful(), region, primitive)
    }

    fn returned(
        output: FloatTensor<Self>,
        region: FloatTensor<Self>,
        gradient: Arc<OutputGradient>,
    ) -> FloatTensor<Self> {
        if output.is_tracked() {
            throw(Error::Captured);
        }
        let prepared = Backward::<B, 1>::prepare::<NoCheckpointing>(StoreGradient, [region.node()]);
        let output = output.into_primitive();
        finished(prepared.compute_bound().stateful(), gradient, output)
    }

    fn identify(value: FloatTensor<Self>, sink: Arc<AtomicU64>) -> FloatTensor<Self> {
        sink.store(value.id().value, Ordering::Relaxed);
        value
    }
}

/// Calls [`ShardOps::unshard`].
pub(crate) fn unshard<const D: usize>(
    full: Tensor<1>,
    value: Tensor<1>,
    token: &Tensor<1>,
    weight: Arc<dyn Weight>,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::unshard(
        full.into_dispatch(),
        value.into_dispatch(),
        token.clone().into_dispatch(),
        weight,
    ))
}

/// Calls [`ShardOps::link`].
pub(crate) fn link(token: Tensor<1>, ruler: Tensor<1>, milestone: Arc<dyn Announce>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::link(
        token.into_dispatch(),
        ruler.into_dispatch(),
        milestone,
    ))
}

/// Calls [`ShardOps::extend`].
pub(crate) fn extend(ruler: Tensor<1>, links: usize) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::extend(ruler.into_dispatch(), links))
}

/// Calls [`ShardOps::attach`]. Also returns the node of `input`, if it has a gradient.
pub(crate) fn attach<const D: usize>(
    token: Tensor<1>,
    input: Tensor<D>,
) -> (Tensor<1>, Option<InputNode>) {
    let node = Arc::new(OnceLock::new());
    let token = Dispatch::attach(token.into_dispatch(), input.into_dispatch(), node.clone());
    (Tensor::from_dispatch(token), node.get().copied())
}

/// Calls [`ShardOps::recomputed`].
pub(crate) fn recomputed(token: Tensor<1>, region: Arc<dyn Region>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::recomputed(token.into_dispatch(), region))
}

/// Calls [`ShardOps::returned`].
pub(crate) fn returned<const D: usize>(
    output: Tensor<D>,
    region: Tensor<1>,
    gradient: Arc<OutputGradient>,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::returned(
        output.into_dispatch(),
        region.into_dispatch(),
        gradient,
    ))
}

/// Returns the id of a leaf's graph node.
pub(crate) fn node_of<const D: usize>(value: Tensor<D>) -> NodeId {
    let sink = Arc::new(AtomicU64::new(0));
    drop(Dispatch::identify(value.into_dispatch(), sink.clone()));
    NodeId {
        value: sink.load(Ordering::Relaxed),
    }
}
