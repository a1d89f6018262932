//! The root: one per rank and sharded module. It owns the order of operations, the token of the
//! pass under way, the gradients on their way to the shards, and the buffers.

mod backward;
mod forward;
mod gather;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::tensor::Tensor;
use burn_fsdp_collectives::{Account, At, BufferPool, Label, Pending, ProcessGroup, Received};
use parking_lot::{Mutex, MutexGuard};

use crate::error::{Error, throw};
use crate::generation::{Generation, Node};
use crate::memory::Watch;
use crate::policy::{DivideFactors, GradientHook, ShardPolicy};
use crate::schedule::{Operation, Schedules};
use crate::unit::Unit;

/// The outermost unit's state on one rank.
pub(crate) struct Root {
    /// All ranks that train the module together.
    pub(crate) group: ProcessGroup,
    /// Full parameters and transport buffers; counts full gradients, too.
    pub(crate) pool: BufferPool,
    /// Memory of reduced gradients, which belong to the shards.
    reduced: BufferPool,
    prefetch: usize,
    factors: Option<DivideFactors>,
    /// Equal on all ranks for one module, different for two: tells their operations apart.
    number: u64,
    units: Mutex<Vec<Weak<Unit>>>,
    progress: Mutex<Progress>,
}

impl std::fmt::Debug for Root {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Root")
            .field("group", &self.group.name())
            .field("num_units", &self.units.lock().len())
            .finish_non_exhaustive()
    }
}

/// A shard gradient that is ready for the optimizer.
pub(crate) struct Reduced {
    /// The leaf that it belongs to.
    pub(crate) node: NodeId,
    /// The averaged gradient of this rank's elements.
    pub(crate) gradient: Tensor<1>,
}

/// Where a step stands.
#[derive(Default)]
struct Progress {
    phase: Phase,
    pass: Option<Pass>,
    again: Option<Recomputation>,
    /// The copy of the module in use: see [`Generation::epoch`].
    epoch: u64,
    num_uses: u64,
    num_finished: u64,
    schedules: Schedules,
    /// Places in the order whose gathers were started ahead of their use.
    prefetched: VecDeque<(usize, Operation)>,
    /// Full gradients by use, until the unit's last one has come.
    gradients: BTreeMap<u64, Vec<Option<Gradient>>>,
    /// Units whose gradients have all come in this backward, with those that wait for its end.
    ended: Vec<Ended>,
    /// Gradients of steps without reduction, by unit, until its next reduction.
    held: BTreeMap<usize, Vec<Option<Gradient>>>,
    /// Shards' gradients that have not crossed to the replicas yet, by unit.
    partial: BTreeMap<usize, Vec<Option<Tensor<1>>>>,
    in_flight: VecDeque<Reduction>,
    /// Gradients of reductions that are through, until Burn's `Gradients` are at hand.
    done: Vec<Reduced>,
    /// Units gathered again whose gradients have not all come.
    open: Vec<(u64, Arc<Unit>)>,
    /// The copy read last without autodiff.
    reading: Weak<Generation>,
    watch: Watch,
}

/// Where a step stands, coarsely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Idle,
    Forward,
    Backward,
}

/// One tracked forward.
struct Pass {
    /// The parameter touched first: touching it again after another unit begins a new pass.
    first: (usize, usize),
    left_first: bool,
    token: Tensor<1>,
    current: Option<Use>,
    /// Uses of units that stay unsharded, to be gone on with when touched again.
    kept: Vec<Use>,
}

/// The second forward of a checkpointed region, inside backward.
struct Recomputation {
    token: Tensor<1>,
    uses: Vec<Use>,
}

/// One use of a unit in a forward: until another unit is touched, each of its parameters has one
/// autodiff node.
struct Use {
    kind: UseKind,
    id: u64,
    generation: Arc<Generation>,
    token: Tensor<1>,
    nodes: Vec<Option<Node>>,
}

/// What a use of a unit leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UseKind {
    /// Nodes, for backward.
    Tracked,
    /// Nothing: a region that will be run again.
    Plain,
}

/// A full gradient, counted while it lives.
struct Gradient {
    tensor: Tensor<1>,
    account: Account,
}

/// A unit whose backward has ended.
struct Ended {
    generation: Arc<Generation>,
    /// Gradients of parameters kept whole, by slot.
    whole: Vec<Option<Tensor<1>>>,
}

/// A reduction under way.
struct Reduction {
    pending: Pending<Received>,
    generation: Arc<Generation>,
    slots: Vec<usize>,
}

impl Root {
    /// A root without units, of all ranks in `group`.
    pub(crate) fn new(group: ProcessGroup, policy: &ShardPolicy) -> Arc<Self> {
        // Roots are made by collective calls, before which all ranks have done the same.
        let number = group.counts().total().operations;
        Arc::new(Self {
            group,
            number,
            pool: BufferPool::new(),
            reduced: BufferPool::new(),
            prefetch: policy.prefetch,
            factors: policy.factors,
            units: Mutex::default(),
            progress: Mutex::default(),
        })
    }

    /// Makes `units` the root's units, in this order.
    pub(crate) fn adopt(self: &Arc<Self>, units: &[Arc<Unit>]) {
        for (index, unit) in units.iter().enumerate() {
            unit.join(self, index);
        }
        *self.units.lock() = units.iter().map(Arc::downgrade).collect();
    }

    /// The units that still exist, in order.
    pub(crate) fn units(&self) -> Vec<Arc<Unit>> {
        self.units.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether `unit` is one of the root's.
    pub(crate) fn owns(&self, unit: &Arc<Unit>) -> bool {
        self.units().iter().any(|known| Arc::ptr_eq(known, unit))
    }

    /// By unit: whether it reduces its gradients.
    fn choice(&self) -> Vec<bool> {
        self.units().iter().map(|unit| unit.syncs()).collect()
    }

    fn unit(&self, index: usize) -> Option<Arc<Unit>> {
        self.units.lock().get(index).and_then(Weak::upgrade)
    }

    /// What to call `operation` of one of the root's units.
    fn label(&self, operation: std::fmt::Arguments<'_>) -> Label {
        Label::from(format!("{operation} of module {}", self.number))
    }

    /// How many units are gathered ahead of their use.
    pub(crate) fn prefetch(&self) -> usize {
        self.prefetch
    }

    /// The recorded order of operations and its hash.
    pub(crate) fn order(&self) -> (Vec<Operation>, u64) {
        let progress = self.progress();
        match progress.schedules.last() {
            Some(schedule) => (schedule.recorded().to_vec(), schedule.hash()),
            None => (Vec::new(), 0),
        }
    }

    /// What the first steps found out about memory.
    pub(crate) fn watch(&self) -> Watch {
        self.progress().watch.clone()
    }

    /// How many times a backward has come to its end.
    pub(crate) fn num_finished(&self) -> u64 {
        self.progress().num_finished
    }

    /// Bytes of gradients held back on this rank, by steps without reduction.
    pub(crate) fn held_bytes(&self) -> usize {
        let progress = self.progress();
        let held = progress.held.values().flatten().flatten();
        held.map(|gradient| gradient.account.len()).sum()
    }

    /// # Errors
    ///
    /// [`Error::State`] inside a backward: `advice` says what to do.
    pub(crate) fn expect_outside_backward(&self, advice: &'static str) -> Result<(), Error> {
        match self.stage() {
            Phase::Idle | Phase::Forward => Ok(()),
            Phase::Backward => Err(misplaced(Phase::Backward, advice)),
        }
    }

    /// For what concerns the step as a whole.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward, and while a forward waits for its backward.
    pub(crate) fn expect_between_steps(&self) -> Result<(), Error> {
        match self.stage() {
            Phase::Idle => Ok(()),
            Phase::Forward => Err(misplaced(
                Phase::Forward,
                "a forward waits for its backward: run that first, or `reset` the module if the \
                 loss is not wanted; to evaluate, use `Module::valid`",
            )),
            Phase::Backward => Err(misplaced(
                Phase::Backward,
                "do this between steps, when `backward` has returned",
            )),
        }
    }

    /// Where the step stands, seen from outside of it.
    fn stage(&self) -> Phase {
        // What finds the state taken has been called from within a backward, by a hook.
        let Some(progress) = self.progress.try_lock() else {
            return Phase::Backward;
        };
        match (progress.phase, &progress.pass) {
            // The copy of the module that ran it is gone.
            (Phase::Forward, None) => Phase::Idle,
            (phase, _) => phase,
        }
    }

    /// The state of the step.
    ///
    /// Leaves with an error inside a hook: the step that calls it holds the state, and waiting for
    /// oneself has no end.
    fn progress(&self) -> MutexGuard<'_, Progress> {
        if GradientHook::is_running() {
            throw(misplaced(
                Phase::Backward,
                "a gradient hook must not use a sharded module; read its values before backward",
            ));
        }
        self.progress.lock()
    }

    /// Back to `Sharded`, with nothing pending: after an error.
    pub(crate) fn reset(&self) {
        let mut progress = self.progress();
        self.clear(&mut progress);
    }

    fn clear(&self, progress: &mut Progress) {
        let watch = std::mem::take(&mut progress.watch);
        *progress = Progress {
            num_uses: progress.num_uses,
            num_finished: progress.num_finished,
            watch,
            ..Progress::default()
        };
        for unit in self.units() {
            unit.reshard_all();
        }
    }

    /// The last module that held `generation` is gone: so is the forward that used it, as far as
    /// this root is concerned. Its graph, if it is still there, holds what its backward needs.
    pub(crate) fn forget(&self, generation: &Generation) {
        // Never from inside a step: modules are dropped by user code and by Burn.
        let forgotten = self.progress.try_lock().and_then(|mut progress| {
            let of_pass = progress.epoch == generation.epoch();
            of_pass.then(|| progress.pass.take()).flatten()
        });
        if let Some(last) = forgotten.and_then(|pass| pass.current) {
            last.close();
        }
    }

    /// Runs a part of a step; an error leaves everything sharded.
    fn step<T>(
        &self,
        body: impl FnOnce(&mut MutexGuard<'_, Progress>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut progress = self.progress();
        let result = body(&mut progress);
        if result.is_err() {
            self.clear(&mut progress);
        }
        result
    }
}

/// The step is not where a call needs it to be.
fn misplaced(got: Phase, advice: &'static str) -> Error {
    Error::State {
        unit: "root".to_owned(),
        expected: format!("{:?}", Phase::Idle),
        got: format!("{got:?}"),
        advice,
    }
}

impl Progress {
    /// Ends the forward, at the first sign of backward.
    fn enter_backward(&mut self, root: &Root) -> Result<(), Error> {
        if self.phase == Phase::Backward {
            return Ok(());
        }
        self.phase = Phase::Backward;
        if let Some(pass) = &mut self.pass {
            if let Some(last) = pass.current.take() {
                last.close();
            }
            pass.kept.clear();
        }
        self.watch.check_pins();
        root.group.fault_point(At::Backward)?;
        Ok(())
    }
}
