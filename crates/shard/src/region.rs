//! What the engine's other parts know of recomputed regions: the region that this thread is in, the uses of units to
//! which it belongs, and its gradients.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::tensor::{Shape, Tensor};
use burn_fsdp_tensors::Staging;
use parking_lot::Mutex;

use crate::ambient::{self, Purpose};

/// The phase of a recomputed region that this thread is running, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum RegionState {
    /// No region, or an ordinary forward and backward.
    #[default]
    Off,
    /// The region's forward, without a graph.
    Plain,
    /// The region's second forward, or its backward.
    Again,
}

/// A gradient that a region passes on, with its node and shape.
pub(crate) struct HandedOn {
    /// The leaf or input in the outer graph.
    pub(crate) node: NodeId,
    /// The gradient, flat and without autodiff.
    pub(crate) gradient: Tensor<1>,
    /// Shape of the leaf or input.
    pub(crate) shape: Shape,
}

/// A type-erased region of the model, which runs again in backward.
pub(crate) trait Region: fmt::Debug + Send + Sync {
    /// Runs the region again with a graph, backpropagates the gradients of its outputs through it, and returns the
    /// resulting gradients.
    fn backward(&self) -> Vec<HandedOn>;
}

/// The node of a region's input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputNode {
    pub(crate) id: NodeId,
    /// True for a leaf, which needs no gradient. Burn requires a gradient for every other node that backward visits.
    pub(crate) is_leaf: bool,
}

/// The gradient of a region's output, flat and without autodiff, once backward has computed it.
#[derive(Debug, Default)]
pub(crate) struct OutputGradient(Mutex<Option<Tensor<1>>>);

impl OutputGradient {
    pub(crate) fn set(&self, gradient: Tensor<1>) {
        *self.0.lock() = Some(gradient);
    }

    /// Takes the gradient; `None` if the loss does not depend on the output.
    pub(crate) fn take(&self) -> Option<Tensor<1>> {
        self.0.lock().take()
    }
}

/// A root whose units a region may use.
pub(crate) trait Recomputed: Send + Sync {
    /// Ends the second forward of the region.
    fn end_recomputation(&self);

    /// Returns the counter for copies of the region's inputs.
    fn staging(&self) -> Arc<Staging>;
}

/// One use of a unit in a forward, as its regions and its nodes outside of regions share it.
///
/// All of them share the unit's full parameters, one gather of these in backward, and one reduction. The use ends at
/// its link, after all of them. If it has only one region and nothing else, it ends inside the region's backward, so a
/// region over many units frees them one after the other.
#[derive(Debug)]
pub(crate) struct SharedUse {
    pub(crate) id: u64,
    /// The values of the unit, which are compared by address. A weak reference keeps the address from being reused.
    values: Weak<dyn Any + Send + Sync>,
    num_regions: AtomicUsize,
    has_nodes: AtomicBool,
    has_ended: AtomicBool,
}

impl SharedUse {
    pub(crate) fn new<T: Send + Sync + 'static>(id: u64, values: &Arc<T>) -> Arc<Self> {
        let values: Weak<T> = Arc::downgrade(values);
        Arc::new(Self {
            id,
            values,
            num_regions: AtomicUsize::new(0),
            has_nodes: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        })
    }

    fn is_of<T>(&self, values: &Arc<T>) -> bool {
        std::ptr::addr_eq(self.values.as_ptr(), Arc::as_ptr(values))
    }

    /// Notes that the use has nodes outside of regions.
    pub(crate) fn add_nodes(&self) {
        self.has_nodes.store(true, Ordering::Relaxed);
    }

    /// Returns true if more than one region belongs to the use, or nodes outside of regions.
    pub(crate) fn is_shared(&self) -> bool {
        self.has_nodes.load(Ordering::Relaxed) || self.num_regions.load(Ordering::Relaxed) > 1
    }

    /// Ends the use. Returns false if it has already ended.
    pub(crate) fn end(&self) -> bool {
        !self.has_ended.swap(true, Ordering::Relaxed)
    }
}

/// A root with a unit that the region has used.
pub(crate) struct Touched {
    pub(crate) by: Arc<dyn Recomputed>,
    /// The token of the pass in which the region runs, after the region's last use of a unit.
    pub(crate) token: Tensor<1>,
    /// The uses to which the region belongs, in order.
    pub(crate) uses: Vec<Arc<SharedUse>>,
}

thread_local! {
    static TOUCHED: RefCell<Vec<Touched>> = const { RefCell::new(Vec::new()) };
    /// The uses to which the region that is running again belongs.
    static USES: RefCell<Vec<Arc<SharedUse>>> = const { RefCell::new(Vec::new()) };
}

/// Returns the phase of the region that this thread is running, if any.
pub(crate) fn state() -> RegionState {
    match ambient::innermost(&[Purpose::Region, Purpose::RegionAgain]) {
        Some(Purpose::Region) => RegionState::Plain,
        Some(Purpose::RegionAgain) => RegionState::Again,
        _ => RegionState::Off,
    }
}

/// Notes that a region uses a unit of `root`, in the use `used`. `token` is the token of the pass in which the region
/// runs.
pub(crate) fn touch<R: Recomputed + 'static>(
    root: &Arc<R>,
    token: &Tensor<1>,
    used: &Arc<SharedUse>,
) {
    TOUCHED.with_borrow_mut(|touched| {
        let is_root =
            |known: &Touched| std::ptr::addr_eq(Arc::as_ptr(&known.by), Arc::as_ptr(root));
        let index = touched.iter().position(is_root).unwrap_or(touched.len());
        if index == touched.len() {
            touched.push(Touched {
                by: root.clone(),
                token: token.clone(),
                uses: Vec::new(),
            });
        }
        let known = &mut touched[index];
        known.token = token.clone();
        if !known.uses.iter().any(|known| Arc::ptr_eq(known, used)) {
            if state() == RegionState::Plain {
                used.num_regions.fetch_add(1, Ordering::Relaxed);
            }
            known.uses.push(used.clone());
        }
    });
}

/// Returns the uses of the unit with `values` to which the region that is running again belongs, in order.
pub(crate) fn uses_of<T>(values: &Arc<T>) -> Vec<Arc<SharedUse>> {
    USES.with_borrow(|uses| {
        let of_unit = uses.iter().filter(|used| used.is_of(values));
        of_unit.cloned().collect()
    })
}

/// Runs `body` as a phase of a region; returns the roots whose units it used.
pub(crate) fn within<T>(purpose: Purpose, body: impl FnOnce() -> T) -> (T, Vec<Touched>) {
    TOUCHED.take();
    let result = ambient::within(purpose, body);
    (result, TOUCHED.take())
}

/// Runs `body` as the second forward of a region that belongs to `uses`; returns the roots whose units it used.
pub(crate) fn again<T>(uses: &[Arc<SharedUse>], body: impl FnOnce() -> T) -> (T, Vec<Touched>) {
    USES.set(uses.to_vec());
    let result = within(Purpose::RegionAgain, body);
    USES.take();
    result
}
