//! The public handle of a unit: its state, and its switches between steps.

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use burn::module::Module;

use crate::copies::{Copies, Generation, UnitState};
use crate::divide_factors::DivideFactors;
use crate::error::Error;
use crate::inspect;
use crate::root::Root;
use crate::unit::Unit;

/// A handle to one unit of a sharded module, in this copy of the module.
///
/// Switches take effect from the next step. All ranks must switch in the same way; ranks whose operations differ
/// because of a switch get [`Mismatch`](burn_fsdp_collectives::Error::Mismatch) from the next operation.
#[derive(Clone)]
pub struct UnitHandle {
    unit: Arc<Unit>,
    generation: Arc<Generation>,
    root: Arc<Root>,
}

impl fmt::Debug for UnitHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnitHandle")
            .field("name", &self.name())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

/// Memory of a unit on one rank, in bytes. For the whole module, see [`Memory`](crate::Memory).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnitMemory {
    /// Parameters that the rank holds between steps.
    pub parameters: usize,
    /// Full parameters that exist now.
    pub unsharded: usize,
    /// Full gradients that steps without reduction left on the rank.
    pub unreduced: usize,
}

/// Returns the units of a sharded module, ordered by each unit's first parameter.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn units<M: Module>(module: &M) -> Result<Vec<UnitHandle>, Error> {
    let mut units: Vec<UnitHandle> = Vec::new();
    for member in inspect::members(module) {
        let unit = &member.generation.unit;
        if units.iter().any(|known| Arc::ptr_eq(&known.unit, unit)) {
            continue;
        }
        units.push(UnitHandle {
            unit: unit.clone(),
            root: member.root_link().root().ok_or(Error::NotSharded)?,
            generation: Copies::of(&member.generation)
                .in_copy(member.copy)
                .unwrap_or(member.generation.clone()),
        });
    }
    if units.is_empty() {
        Err(Error::NotSharded)
    } else {
        Ok(units)
    }
}

impl UnitHandle {
    /// Returns the unit's name: the path of its module, or the patterns of a [joint unit](crate::ShardPolicy::unit_of);
    /// `root` for the outermost.
    pub fn name(&self) -> String {
        self.unit.label()
    }

    /// Returns the state of the unit's full parameters.
    pub fn state(&self) -> UnitState {
        self.generation.life.state()
    }

    /// Returns the current memory of the unit on this rank.
    pub fn memory(&self) -> UnitMemory {
        let rank = self.unit.groups.shard.rank();
        let slots = self.unit.slots.iter();
        UnitMemory {
            parameters: slots.map(|slot| slot.held_bytes(rank)).sum(),
            unsharded: if self.generation.life.is_unsharded() {
                self.unit.gathered_bytes()
            } else {
                0
            },
            unreduced: self.root.held_bytes_of(&self.unit),
        }
    }

    /// Returns the paths of the unit's parameters.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.unit.slots.iter().map(|slot| slot.path.as_str())
    }

    /// Sets whether gradients are reduced after backward. Otherwise full gradients stay on this rank, and the next
    /// reduction includes their sum. A forward and its backward must see the same setting.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward, and while a forward waits for its backward.
    pub fn set_requires_gradient_sync(&self, sync: bool) -> Result<(), Error> {
        self.root.expect_between_steps()?;
        self.switch(&self.unit.switches.sync, sync)
    }

    /// Sets whether gradients are also reduced across the replicas of a hybrid mesh. Otherwise they stay in the shards,
    /// and the next reduction includes their sum.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward.
    pub fn set_requires_all_reduce(&self, all_reduce: bool) -> Result<(), Error> {
        self.switch(&self.unit.switches.all_reduce, all_reduce)
    }

    /// Sets whether later backwards return the gradients of all units of the module, which is the default. If false, a
    /// backward still reduces, but the sums stay in the shards, nothing is reduced across replicas, and the returned
    /// gradients are empty. The next backward with true returns the accumulated sums of all units, including those that
    /// it does not use. Use this for micro-batches whose full gradients, which [`no_sync`] keeps, take too much memory.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward.
    pub fn set_is_last_backward(&self, is_last: bool) -> Result<(), Error> {
        self.root.expect_outside_backward(ADVICE)?;
        self.root.set_last(is_last);
        Ok(())
    }

    /// Sets whether full parameters are dropped as soon as backward no longer needs them. Otherwise they stay until the
    /// parameters change, which suits micro-batches without an optimizer step in between.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward.
    pub fn set_reshard_after_backward(&self, reshard: bool) -> Result<(), Error> {
        self.switch(&self.unit.switches.reshard_after_backward, reshard)
    }

    /// Sets whether full parameters are dropped between forward and backward.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward.
    pub fn set_reshard_after_forward(&self, reshard: bool) -> Result<(), Error> {
        self.root.expect_outside_backward(ADVICE)?;
        self.unit.set_keeps(!reshard);
        Ok(())
    }

    /// Starts gathering the full parameters ahead of their use. The first access to one of them waits for the gather;
    /// [`Unsharding::wait`] waits immediately.
    ///
    /// Collective.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward, or a failed collective.
    pub fn unshard(&self) -> Result<Unsharding<'_>, Error> {
        self.root.expect_outside_backward(ADVICE)?;
        self.root.unshard_by_hand(&self.generation)?;
        Ok(Unsharding(self))
    }

    /// Drops the full parameters, or cancels their gather. Tensors computed from them stay valid.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward; [`Error::Collective`] if ranks compare bytes and the parameters are
    /// corrupted.
    pub fn reshard(&self) -> Result<(), Error> {
        self.root.expect_outside_backward(ADVICE)?;
        self.generation.let_go()
    }

    /// Sets the divisors of the unit's gradients from the next reduction on, instead of
    /// [`ShardPolicy::divide_factors`](crate::ShardPolicy::divide_factors); `None` selects the number of ranks. These
    /// factors also divide pending gradients of earlier steps without reduction. All ranks must set the same factors.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward, while a forward waits for its backward, and while divided gradients wait in
    /// the shards for the all-reduce across replicas ([`set_requires_all_reduce`](Self::set_requires_all_reduce)) or
    /// for the last backward ([`set_is_last_backward`](Self::set_is_last_backward)).
    pub fn set_divide_factors(
        &self,
        factors: impl Into<Option<DivideFactors>>,
    ) -> Result<(), Error> {
        self.root.expect_between_steps()?;
        if self.root.holds_sums_of(&self.unit) {
            return Err(Error::State {
                unit: self.name(),
                expected: "free of waiting gradients".to_owned(),
                got: "holding gradients that wait on the shards and are already divided".to_owned(),
                advice: "reduce them in a backward with `set_requires_all_reduce(true)` and \
                    `set_is_last_backward(true)`, then set the factors",
            });
        }
        *self.unit.switches.factors.lock() = factors.into();
        Ok(())
    }

    /// Sets the units whose gathers for forward start as soon as this unit has been gathered for forward, like
    /// `set_modules_to_forward_prefetch` in PyTorch. They replace the next units in the recorded order, whose number
    /// [`ShardPolicy::prefetch`](crate::ShardPolicy::prefetch) sets; `None` selects these again. An empty list gathers
    /// nothing ahead. Unlike the recorded order, a list is already used in the first step.
    ///
    /// List units that are used soon after this one: each listed unit's full parameters exist from then on. Where a
    /// listed unit is not used next in the same direction, later steps leave it out. Forwards without autodiff use
    /// the list from the second forward of a copy on; [`evaluate`](crate::evaluate()) does not. All ranks must set the
    /// same lists.
    ///
    /// # Errors
    ///
    /// [`Error::State`] inside a backward; [`Error::Option`] for a unit of another module.
    pub fn set_forward_prefetch<'a>(
        &self,
        units: impl Into<Option<&'a [UnitHandle]>>,
    ) -> Result<(), Error> {
        let units = self.prefetchable("set_forward_prefetch", units.into())?;
        self.unit.switches.prefetch.lock().forward = units;
        Ok(())
    }

    /// Sets the units whose gathers for backward start as soon as this unit has been gathered for backward, like
    /// [`set_forward_prefetch`](Self::set_forward_prefetch). Backward uses units in reverse order. A unit that keeps its
    /// full parameters after forward is not gathered.
    ///
    /// # Errors
    ///
    /// As [`set_forward_prefetch`](Self::set_forward_prefetch).
    pub fn set_backward_prefetch<'a>(
        &self,
        units: impl Into<Option<&'a [UnitHandle]>>,
    ) -> Result<(), Error> {
        let units = self.prefetchable("set_backward_prefetch", units.into())?;
        self.unit.switches.prefetch.lock().backward = units;
        Ok(())
    }

    /// Checks the units that `option` lists for prefetching.
    fn prefetchable(
        &self,
        option: &'static str,
        units: Option<&[UnitHandle]>,
    ) -> Result<Option<Vec<Weak<Unit>>>, Error> {
        self.root.expect_outside_backward(ADVICE)?;
        let mut all = units.into_iter().flatten();
        if let Some(other) = all.find(|other| !Arc::ptr_eq(&self.root, &other.root)) {
            return Err(Error::Option {
                option,
                expected: "units of the same sharded module",
                got: format!("unit `{}` of another module", other.name()),
            });
        }
        Ok(units.map(|units| {
            let units = units.iter().map(|handle| Arc::downgrade(&handle.unit));
            units.collect()
        }))
    }

    fn switch(&self, switch: &AtomicBool, on: bool) -> Result<(), Error> {
        self.root.expect_outside_backward(ADVICE)?;
        switch.store(on, Relaxed);
        Ok(())
    }
}

const ADVICE: &str = "switch units between steps, not inside a backward";

/// A gather started by [`UnitHandle::unshard`]. Dropping this does not cancel the gather.
#[derive(Debug)]
#[must_use = "the gather continues without it, but its errors are reported later"]
pub struct Unsharding<'a>(&'a UnitHandle);

impl Unsharding<'_> {
    /// Waits until the full parameters exist.
    ///
    /// # Errors
    ///
    /// A failed collective.
    pub fn wait(self) -> Result<(), Error> {
        self.0.root.await_by_hand(&self.0.generation)
    }
}

/// Runs `body` without reducing gradients: full gradients stay on this rank, and the next backward outside reduces
/// their sum. This saves the traffic of all micro-batches except the last, at the cost of full gradients on every rank:
/// [`Memory::unreduced`](crate::Memory::unreduced).
///
/// A backward inside `body` returns empty gradients, so no optimizer step is possible yet. Call both forward and
/// backward inside.
///
/// All ranks must call this in the same way.
///
/// # Errors
///
/// [`Error::NotSharded`]; [`Error::State`] inside a backward, while a forward waits for its backward, and if `body`
/// makes units reduce.
pub fn no_sync<M: Module, T>(module: &M, body: impl FnOnce() -> T) -> Result<T, Error> {
    let units = units(module)?;
    let before: Vec<_> = units.iter().map(|handle| handle.unit.syncs()).collect();
    let restore = Restore { units, before };
    for handle in &restore.units {
        handle.set_requires_gradient_sync(false)?;
    }
    let result = body();
    match restore.units.iter().find(|handle| handle.unit.syncs()) {
        None => Ok(result),
        Some(switched) => Err(Error::State {
            unit: switched.name(),
            expected: "set to skip gradient sync".to_owned(),
            got: "set to sync gradients".to_owned(),
            advice: "do not call `set_requires_gradient_sync` inside `no_sync`",
        }),
    }
}

/// A guard that restores the gradient sync switches of units when dropped, even during a panic.
struct Restore {
    units: Vec<UnitHandle>,
    before: Vec<bool>,
}

impl Drop for Restore {
    fn drop(&mut self) {
        for (handle, before) in self.units.iter().zip(&self.before) {
            handle.unit.switches.sync.store(*before, Relaxed);
        }
    }
}

/// Returns the units whose parameters no rank used in the last complete step, such as modules that the
/// forward does not reach.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn unused_units<M: Module>(module: &M) -> Result<Vec<String>, Error> {
    let mut unused = Vec::new();
    for root in inspect::roots_of(module)? {
        let used = root.used();
        for unit in root.units() {
            let used = used
                .iter()
                .any(|operation| operation.unit() == Some(unit.position()));
            if !used {
                unused.push(unit.label());
            }
        }
    }
    Ok(unused)
}
