//! The root, and the state of its current step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_fsdp_collectives::{At, BufferPool, Label, ProcessGroup};
use burn_fsdp_tensors::Staged;
use parking_lot::{Mutex, MutexGuard};

use super::accumulate::Accumulation;
use super::audited::Audited;
use super::known::Known;
use super::order::Order;
use super::pass::Uses;
use super::reading::Reading;
use super::reductions::Reductions;
use super::routes::Routes;
use super::ruler::Rulers;
use super::steps::Early;
use crate::audit::Audit;
use crate::copies::{Copied, Copies, Generation, WeakCopies};
use crate::error::Error;
use crate::hooks::GradientHook;
use crate::pins::Watch;
use crate::policy::ShardPolicy;
use crate::probes::Trial;
use crate::schedule::Operation;
use crate::seal::Waiting;
use crate::thrown::throw;
use crate::unit::Unit;

/// The root of a sharded module on one rank.
pub(crate) struct Root {
    /// All ranks that train the module together.
    pub(crate) group: ProcessGroup,
    /// The memory of full parameters and transport buffers. It also counts full gradients.
    pub(crate) pool: BufferPool,
    /// The memory of reduced gradients, which belong to the shards.
    pub(super) reduced: BufferPool,
    pub(super) prefetch: usize,
    /// A number that is equal on all ranks and different for each module, to distinguish the modules' operations.
    pub(super) number: u64,
    units: Mutex<Vec<WeakCopies>>,
    pub(super) rulers: Mutex<Rulers>,
    /// True while a thread runs part of a step.
    stepping: AtomicBool,
    progress: Mutex<Progress>,
    /// False if reduced gradients stay in the shards until a later backward.
    pub(super) is_last: AtomicBool,
    pub(crate) trial: Trial,
    known: Known,
}

impl std::fmt::Debug for Root {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Root")
            .field("group", &self.group.name())
            .field("num_units", &self.units.lock().len())
            .finish_non_exhaustive()
    }
}

/// The mutable state of a root.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) phase: Phase,
    pub(super) uses: Uses,
    pub(super) reading: Reading,
    pub(super) order: Order,
    pub(super) gradients: Accumulation,
    pub(super) reductions: Reductions,
    pub(super) early: Early,
    pub(super) audited: Audited,
    pub(super) counts: Counts,
    pub(super) watch: Watch,
    /// The gradients that wait for the optimizer, and the last running states.
    pub(super) waiting: Waiting,
    /// The evaluation in progress, if any.
    pub(super) routes: Option<Arc<dyn Routes>>,
}

/// Counters that an error does not reset.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) passes: u64,
    pub(super) uses: u64,
    pub(super) finished: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    Idle,
    Forward,
    Backward,
}

impl Root {
    /// Creates a root without units, for all ranks in `group`.
    pub(crate) fn new(group: ProcessGroup, policy: &ShardPolicy, known: Known) -> Arc<Self> {
        // Roots are created collectively, so all ranks have issued the same number of operations.
        let number = group.counts().total().operations;
        // The other ranks of a fake group do not exist, so they have no gradients to audit.
        let audit = if group.is_fake() {
            Audit::Off
        } else {
            policy.audit
        };
        let progress = Progress {
            audited: Audited::new(audit, group.rank()),
            ..Progress::default()
        };
        Arc::new(Self {
            prefetch: policy.prefetch.unwrap_or(usize::from(group.overlaps())),
            group,
            number,
            pool: BufferPool::new(),
            reduced: BufferPool::new(),
            units: Mutex::default(),
            rulers: Mutex::default(),
            stepping: AtomicBool::new(false),
            is_last: AtomicBool::new(true),
            progress: Mutex::new(progress),
            trial: Trial::default(),
            known,
        })
    }

    /// Returns what is known of tensors that the units do not manage.
    pub(crate) fn known(&self) -> &Known {
        &self.known
    }

    /// Sets the root's units, in this order.
    pub(crate) fn adopt<'a>(&self, units: impl Iterator<Item = &'a Copies>) {
        let units: Vec<_> = units.collect();
        let parameters = units.iter().map(|copies| copies.unit.slots.len());
        self.progress().audited.open(parameters);
        let known = units.into_iter().enumerate().map(|(index, copies)| {
            copies.unit.set_position(index);
            copies.downgrade()
        });
        *self.units.lock() = known.collect();
    }

    /// Returns the units that still exist, in order.
    pub(crate) fn units(&self) -> Vec<Arc<Unit>> {
        self.live().into_iter().map(|copies| copies.unit).collect()
    }

    /// Returns all copies of the units that still exist, in order.
    pub(super) fn live(&self) -> Vec<Copies> {
        let units = self.units.lock();
        units.iter().filter_map(WeakCopies::upgrade).collect()
    }

    pub(crate) fn owns(&self, unit: &Arc<Unit>) -> bool {
        self.units().iter().any(|known| Arc::ptr_eq(known, unit))
    }

    /// Returns whether each unit reduces its gradients in this step.
    pub(super) fn choice(&self) -> Vec<bool> {
        let units = self.units.lock();
        let units = units.iter().map(WeakCopies::upgrade);
        units
            .map(|copies| copies.is_none_or(|copies| copies.unit.syncs()))
            .collect()
    }

    /// Returns the switches that affect gradients: whether each unit reduces them, whether it reduces across replicas,
    /// and whether they are returned.
    pub(super) fn switches(&self) -> Vec<bool> {
        let mut switches = self.choice();
        let units = self.units.lock();
        switches.extend(units.iter().map(|copies| {
            let copies = copies.upgrade();
            copies.is_none_or(|copies| copies.unit.switches.all_reduce.load(Ordering::Relaxed))
        }));
        switches.push(self.is_last());
        switches
    }

    /// Returns whether any module still holds each unit.
    pub(super) fn held(&self) -> Vec<bool> {
        let units = self.units.lock();
        let units = units.iter().map(WeakCopies::upgrade);
        units
            .map(|copies| copies.is_some_and(|copies| copies.is_held()))
            .collect()
    }

    /// Returns unit `index`, if it still exists.
    pub(crate) fn unit(&self, index: usize) -> Option<Arc<Unit>> {
        Some(self.copies(index)?.unit)
    }

    /// Returns the copies of unit `index`, if it still exists.
    pub(super) fn copies(&self, index: usize) -> Option<Copies> {
        let units = self.units.lock();
        units.get(index).and_then(WeakCopies::upgrade)
    }

    pub(super) fn label(&self, operation: std::fmt::Arguments<'_>) -> Label {
        Label::from(format!("{operation} of module {}", self.number))
    }

    /// Returns the number of units to gather ahead of their use.
    pub(crate) fn prefetch(&self) -> usize {
        self.prefetch
    }

    /// Returns the recorded order of operations, and its hash.
    pub(crate) fn order(&self) -> (Vec<Operation>, u64) {
        let progress = self.progress();
        let schedule = progress.order.schedules.last();
        (schedule.operations().collect(), schedule.hash())
    }

    /// Returns the operations that any rank asked for in the last step.
    pub(crate) fn used(&self) -> Vec<Operation> {
        self.progress().order.schedules.last().used().collect()
    }

    /// Returns the copies between host and devices that this root's units have made.
    pub(crate) fn staged(&self) -> Staged {
        let units = self.units();
        units.iter().map(|unit| unit.staging.staged()).sum()
    }

    /// Returns the bytes of pooled memory, which later operations reuse.
    pub(crate) fn pooled_bytes(&self) -> usize {
        self.pool.kept_bytes() + self.reduced.kept_bytes()
    }

    /// Returns the pooled memory to the system.
    pub(crate) fn trim(&self) {
        self.pool.trim();
        self.reduced.trim();
    }

    /// Returns the monitor of full weights, with its findings so far.
    pub(crate) fn watch(&self) -> Watch {
        self.progress().watch.clone()
    }

    pub(crate) fn num_finished(&self) -> u64 {
        self.progress().counts.finished
    }

    /// Returns the bytes of gradients that steps without reduction left on this rank.
    pub(crate) fn held_bytes(&self) -> usize {
        self.progress().gradients.held_bytes()
    }

    /// Checks that no backward is in progress.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward; `advice` is shown to the user.
    pub(crate) fn expect_outside_backward(&self, advice: &'static str) -> Result<(), Error> {
        match self.stage() {
            Phase::Idle | Phase::Forward => Ok(()),
            Phase::Backward => Err(misplaced(Phase::Backward, advice)),
        }
    }

    /// Checks that no step is in progress.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward, and while a forward waits for its backward.
    pub(crate) fn expect_between_steps(&self) -> Result<(), Error> {
        match self.stage() {
            Phase::Idle => Ok(()),
            Phase::Forward => Err(misplaced(
                Phase::Forward,
                "run the backward that the forward is waiting for, or `reset` the module if the loss is not needed; use \
                 `Module::valid` to evaluate",
            )),
            Phase::Backward => Err(misplaced(
                Phase::Backward,
                "do this between steps, after `backward` has returned",
            )),
        }
    }

    /// Returns the current phase, for calls from outside a step.
    fn stage(&self) -> Phase {
        // The state is locked only if a hook inside backward made this call.
        let Some(progress) = self.progress.try_lock() else {
            return Phase::Backward;
        };
        match (progress.phase, &progress.uses.pass) {
            // The copy of the module that ran the forward is gone.
            (Phase::Forward, None) => Phase::Idle,
            (phase, _) => phase,
        }
    }

    /// Locks the state of the step.
    ///
    /// Throws an error inside a hook: the step that calls the hook holds the lock, so waiting would deadlock.
    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        refuse_in_hook();
        self.progress.lock()
    }

    /// Returns the number of reductions that may be in progress while backward continues: the number of prefetched
    /// units, but at most one. More would keep full gradients alive without benefit.
    pub(super) fn in_flight_limit(&self) -> usize {
        self.prefetch.min(1)
    }

    /// Reshards every unit after an error, and drops all pending work.
    pub(crate) fn reset(&self) {
        let mut progress = self.progress();
        self.clear(&mut progress);
    }

    pub(super) fn clear(&self, progress: &mut Progress) {
        let watch = std::mem::take(&mut progress.watch);
        *progress = Progress {
            order: Order {
                copy: progress.order.copy,
                ..Order::default()
            },
            counts: progress.counts,
            audited: std::mem::take(&mut progress.audited).after_error(),
            watch,
            routes: progress.routes.take(),
            ..Progress::default()
        };
        for copies in self.live() {
            copies.drop_full();
        }
    }

    /// Called when the last module that holds `generation`, in `copy`, is dropped. This ends the forward that used it.
    /// The forward's graph, if it still exists, keeps what backward needs.
    pub(crate) fn forget(&self, generation: &Generation, copy: Copied) {
        // This is never inside a step, because only user code and Burn drop modules.
        let Some(mut progress) = self.progress.try_lock() else {
            return;
        };
        let is_of_pass = progress
            .uses
            .pass
            .as_ref()
            .is_some_and(|p| p.copy == copy.number);
        let forgotten = is_of_pass.then(|| progress.uses.pass.take()).flatten();
        let is_backward = progress.phase == Phase::Backward;
        drop(progress);
        if let Some(last) = forgotten.and_then(|pass| pass.current) {
            // Here and below, errors are ignored: the process group has already failed, and the next operation reports
            // that.
            last.close().ok();
        }
        if !is_backward && generation.life.is_unsharded() {
            generation.let_go().ok();
        }
    }

    /// Checks that the value and the gradient of a parameter are unchanged since they were written. Called before an
    /// optimizer reads them.
    pub(crate) fn check_before_update(
        &self,
        generation: &Generation,
        slot: usize,
    ) -> Result<(), Error> {
        generation.check(slot)?;
        let leaf = generation.node(slot);
        leaf.map_or(Ok(()), |leaf| {
            self.with_waiting(|waiting| waiting.release_of(leaf))
        })
    }

    /// Calls `body` with the sealed gradients that wait for the optimizer.
    pub(crate) fn with_waiting<T>(&self, body: impl FnOnce(&mut Waiting) -> T) -> T {
        body(&mut self.progress().waiting)
    }

    /// Runs part of a step. After an error, every unit is sharded and nothing is pending.
    pub(super) fn step<T>(
        &self,
        body: impl FnOnce(&mut MutexGuard<'_, Progress>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _turn = self.turn()?;
        let mut progress = self.progress();
        let result = body(&mut progress);
        if result.is_err() {
            self.clear(&mut progress);
        }
        result
    }

    /// Begins part of a step, exclusively. Two threads would issue operations in an arbitrary order, and a thread that
    /// is already inside would deadlock.
    fn turn(&self) -> Result<Turn<'_>, Error> {
        refuse_in_hook();
        if self.stepping.swap(true, Ordering::Acquire) {
            Err(Error::Concurrent {
                rank: self.group.rank(),
            })
        } else {
            Ok(Turn(self))
        }
    }
}

/// A guard that marks a step as running until it is dropped.
struct Turn<'a>(&'a Root);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.stepping.store(false, Ordering::Release);
    }
}

/// Throws an error if this thread is inside a hook of the policy.
fn refuse_in_hook() {
    if GradientHook::is_running() {
        throw(Error::State {
            unit: "root".to_owned(),
            expected: "used outside of the policy's hooks".to_owned(),
            got: "used in one of them".to_owned(),
            advice: "do not use a sharded module in a hook of the policy; read its values before the step",
        });
    }
}

fn misplaced(got: Phase, advice: &'static str) -> Error {
    Error::State {
        unit: "root".to_owned(),
        expected: format!("in phase {:?}", Phase::Idle),
        got: format!("in phase {got:?}"),
        advice,
    }
}

impl Progress {
    /// Selects the order for the units that currently reduce. At its start, drops the operations of units that no
    /// module holds.
    pub(super) fn begin_order(&mut self, root: &Root) {
        self.order.schedules.select(root.choice());
        let order = self.order.current();
        if order.is_at_start() {
            let held = root.held();
            order.prune(|unit| held.get(unit).is_some_and(|&held| held));
        }
        self.begin_audit(root);
    }

    /// Ends the forward, when backward first reaches the engine.
    pub(super) fn enter_backward(&mut self, root: &Root) -> Result<(), Error> {
        if self.phase == Phase::Backward {
            return Ok(());
        }
        self.phase = Phase::Backward;
        self.begin_audit(root);
        if let Some(pass) = &mut self.uses.pass {
            if let Some(last) = pass.current.take() {
                last.close()?;
            }
            pass.kept.clear();
        }
        self.watch.check_pins();
        root.group.fault_point(At::Backward)?;
        Ok(())
    }
}
