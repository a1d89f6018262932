//! What a sharded module holds, and what keeps full weights alive against the policy.

use std::fmt;
use std::sync::Weak;

use burn::module::{Module, Param};
use burn::tensor::{GradientCheckpointingStrategy, Tensor};
use burn_fsdp_collectives::BufferPool;

use crate::error::{Error, catch};
use crate::inspect;
use crate::path::{self, Place};
use crate::root::Root;
use crate::unit::Unit;

/// Memory of one rank, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Parameters that this rank holds between steps: its shards and what is kept whole.
    pub parameters: usize,
    /// Full parameters, full gradients and transport buffers alive now.
    pub unsharded_live: usize,
    /// The most of them alive at once since the start or the last [`reset_peak`].
    pub unsharded_peak: usize,
    /// Bytes of gradients that steps without reduction have left on this rank, whole; among those
    /// alive.
    pub unreduced: usize,
    /// Units whose full weights outlived their forward though the policy drops them.
    pub pinned: Vec<Pinned>,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "parameters held    {:>12} B", self.parameters)?;
        writeln!(f, "unsharded, now     {:>12} B", self.unsharded_live)?;
        writeln!(f, "unsharded, peak    {:>12} B", self.unsharded_peak)?;
        writeln!(f, "gradients unreduced{:>12} B", self.unreduced)?;
        self.pinned
            .iter()
            .try_for_each(|pinned| writeln!(f, "{pinned}"))
    }
}

/// A unit whose full weights are kept alive by something other than the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pinned {
    /// Path of the unit.
    pub unit: String,
    /// Bytes still alive when backward began.
    pub bytes: usize,
    /// Bytes of the unit's full parameters.
    pub of: usize,
}

impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unit `{}`: {} of {} bytes of full weights stayed alive from forward to backward; an \
             operation saved a view, a cast or the weight itself. Use a device with \
             `.autodiff().gradient_checkpointing()`, and keep embeddings in the root",
            self.unit, self.bytes, self.of
        )
    }
}

/// The memory of this rank that the sharded `module` accounts for.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn memory<M: Module>(module: &M) -> Result<Memory, Error> {
    let roots = inspect::roots_of(module)?;
    let members = inspect::members(module);
    let held = members.iter().map(|member| {
        let rank = member.generation.unit.group.rank();
        member.slot().held_bytes(rank)
    });
    Ok(Memory {
        parameters: held.sum(),
        unsharded_live: roots.iter().map(|root| root.pool.live_bytes()).sum(),
        unsharded_peak: roots.iter().map(|root| root.pool.peak_bytes()).sum(),
        unreduced: roots.iter().map(|root| root.held_bytes()).sum(),
        pinned: roots.iter().flat_map(|root| root.watch().pinned).collect(),
    })
}

/// Reads [`Memory::unsharded_live`] of a module without holding the module, from any thread.
#[derive(Debug, Clone)]
pub struct LiveBytes(Vec<BufferPool>);

impl LiveBytes {
    /// Of the sharded `module`, and of what later steps make of it.
    ///
    /// # Errors
    ///
    /// [`Error::NotSharded`].
    pub fn of<M: Module>(module: &M) -> Result<Self, Error> {
        let roots = inspect::roots_of(module)?;
        Ok(Self(roots.iter().map(|root| root.pool.clone()).collect()))
    }

    /// Bytes alive now.
    pub fn now(&self) -> usize {
        self.0.iter().map(BufferPool::live_bytes).sum()
    }
}

/// Starts the peak of [`Memory::unsharded_peak`] anew from what is alive now.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn reset_peak<M: Module>(module: &M) -> Result<(), Error> {
    for root in inspect::roots_of(module)? {
        root.pool.reset_peak();
    }
    Ok(())
}

/// A loss that reads every float parameter once and computes nothing else: the sum of their means.
/// What it makes [`memory()`] show is what the parameters cost without activations.
///
/// Collective: all ranks call it with the same module.
///
/// # Errors
///
/// [`Error::NotSharded`], or a failed collective.
pub fn dummy_forward<M: Module>(module: &M) -> Result<Tensor<1>, Error> {
    inspect::root_of(module)?;
    let mut means = Means::default();
    // Not `inspect::visit`, which asks parameters who they are and gets their stand-ins.
    catch(|| path::visit(module, &mut means))?;
    means.sum.ok_or(Error::NotSharded)
}

#[derive(Default)]
struct Means {
    sum: Option<Tensor<1>>,
}

impl path::Visitor for Means {
    fn float<const D: usize>(&mut self, _place: &Place, param: &Param<Tensor<D>>) {
        let mean = param.val().mean();
        self.sum = Some(match self.sum.take() {
            Some(sum) => sum + mean,
            None => mean,
        });
    }
}

/// One buffer of full weights, by its life.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    /// Its size.
    pub(crate) bytes: usize,
    /// Dropped with it.
    pub(crate) life: Weak<()>,
}

/// Follows the buffers of dropped full weights to the start of backward.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watch {
    /// By unit: its name, the bytes of its full parameters, the buffers.
    marks: Vec<(String, usize, Vec<Mark>)>,
    pinned: Vec<Pinned>,
}

impl Watch {
    /// A new forward begins.
    pub(crate) fn begin(&mut self) {
        self.marks.clear();
    }

    /// The full weights of `unit` now exist.
    pub(crate) fn unsharded(&mut self, unit: &Unit, marks: Vec<Mark>) {
        self.marks
            .push((unit.label(), unit.gathered_bytes(), marks));
    }

    /// Forward is over: no full weight of a unit that drops them should be alive.
    pub(crate) fn check_pins(&mut self) {
        for (unit, of, marks) in std::mem::take(&mut self.marks) {
            let alive = marks.iter().filter(|mark| mark.life.strong_count() > 0);
            let bytes: usize = alive.map(|mark| mark.bytes).sum();
            let known = self.pinned.iter().any(|pinned| pinned.unit == unit);
            if bytes == 0 || known {
                continue;
            }
            let pinned = Pinned { unit, bytes, of };
            tracing::warn!(target: "burn_fsdp", "{pinned}");
            self.pinned.push(pinned);
        }
    }
}

/// Says at wrap time what can be known then.
pub(crate) fn warn_at_wrap(root: &Root) {
    let units = root.units();
    let dropped: Vec<_> = units
        .iter()
        .filter(|unit| !unit.keeps() && unit.is_gathered())
        .filter(|unit| unit.strategy == Some(GradientCheckpointingStrategy::Disabled))
        .collect();
    if !dropped.is_empty() {
        let bytes: usize = dropped.iter().map(|unit| unit.gathered_bytes()).sum();
        let names: Vec<_> = dropped.iter().map(|unit| unit.label()).collect();
        tracing::warn!(
            target: "burn_fsdp",
            "the device has no gradient checkpointing: units {} may stay unsharded until \
             backward, up to {bytes} bytes; build the module on \
             `device.autodiff().gradient_checkpointing()`",
            names.join(", "),
        );
    }
}
