//! The memory of a sharded module, and full weights that stay alive although the policy drops them.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{GradientCheckpointingStrategy, Tensor};
use burn_fsdp_collectives::BufferPool;
use burn_fsdp_tensors::Staged;

use crate::error::Error;
use crate::inspect::{self, Member};
use crate::path::{self, Location};
use crate::pins::Pinned;
use crate::report;
use crate::root::Root;
use crate::survey::survey;
use crate::thrown::{catch, throw};

/// Memory of one rank in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Parameters that this rank holds between steps: its shards and the parameters kept whole.
    pub parameters: usize,
    /// Full parameters, full gradients and transport buffers alive now. For a device with its own memory, this counts
    /// only the host memory used during collectives.
    pub unsharded_live: usize,
    /// The maximum of `unsharded_live` since the start or the last [`reset_peak`].
    pub unsharded_peak: usize,
    /// The maximum of the reduced gradients of this rank's shards that existed together during a backward, since the
    /// start or the last [`reset_peak`]. [`backward_and_step`](crate::backward_and_step) lowers it.
    pub gradients_peak: usize,
    /// Full gradients left on this rank by steps without reduction; included in `unsharded_live`.
    pub unreduced: usize,
    /// Unused memory kept for later operations, to avoid system allocations; [`trim`] frees it.
    pub pooled: usize,
    /// Copies between the host and the computing device in forward and backward, since the module was sharded.
    pub staged: Staged,
    /// Units whose full weights outlived forward, although the policy drops them after it.
    pub pinned: Vec<Pinned>,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "parameters held    {:>12} B", self.parameters)?;
        writeln!(f, "unsharded, now     {:>12} B", self.unsharded_live)?;
        writeln!(f, "unsharded, peak    {:>12} B", self.unsharded_peak)?;
        writeln!(f, "unreduced gradients{:>12} B", self.unreduced)?;
        writeln!(f, "kept for later use {:>12} B", self.pooled)?;
        if self.staged != Staged::default() {
            writeln!(f, "copied to host     {}", self.staged.to_host)?;
            writeln!(f, "copied to devices  {}", self.staged.to_device)?;
        }
        self.pinned
            .iter()
            .try_for_each(|pinned| writeln!(f, "{pinned}"))
    }
}

/// Returns the memory that the sharded `module` uses on this rank.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn memory<M: Module>(module: &M) -> Result<Memory, Error> {
    let roots = inspect::roots_of(module)?;
    let members = inspect::members(module);
    let held = members.iter().map(|member| {
        let rank = member.generation.unit.groups.shard.rank();
        member.slot().held_bytes(rank)
    });
    Ok(Memory {
        parameters: held.sum(),
        unsharded_live: roots.iter().map(|root| root.pool.live_bytes()).sum(),
        unsharded_peak: roots.iter().map(|root| root.pool.peak_bytes()).sum(),
        gradients_peak: roots.iter().map(|root| root.gradients_peak()).sum(),
        unreduced: roots.iter().map(|root| root.held_bytes()).sum(),
        pooled: pools(&roots).map(BufferPool::kept_bytes).sum::<usize>()
            + roots.iter().map(|root| root.pooled_bytes()).sum::<usize>(),
        staged: roots.iter().map(|root| root.staged()).sum(),
        pinned: roots.iter().flat_map(|root| root.watch().pinned).collect(),
    })
}

/// Returns the distinct buffer pools of `roots`. Groups split from one group share a pool.
fn pools(roots: &[Arc<Root>]) -> impl Iterator<Item = &BufferPool> {
    roots.iter().take(1).map(|root| root.group.pool())
}

/// Returns unused pooled memory to the system, for example before an evaluation or another model.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn trim<M: Module>(module: &M) -> Result<(), Error> {
    let roots = inspect::roots_of(module)?;
    roots.iter().for_each(|root| root.trim());
    pools(&roots).for_each(BufferPool::trim);
    Ok(())
}

/// Reads [`Memory::unsharded_live`] from any thread, without holding the module.
#[derive(Debug, Clone)]
pub struct LiveBytes(Vec<BufferPool>);

impl LiveBytes {
    /// Returns a reader for the sharded `module` that remains valid for later versions of the module.
    ///
    /// # Errors
    ///
    /// [`Error::NotSharded`].
    pub fn of<M: Module>(module: &M) -> Result<Self, Error> {
        let roots = inspect::roots_of(module)?;
        Ok(Self(roots.iter().map(|root| root.pool.clone()).collect()))
    }

    /// Returns the current number of bytes.
    pub fn now(&self) -> usize {
        self.0.iter().map(BufferPool::live_bytes).sum()
    }
}

/// Resets [`Memory::unsharded_peak`] and [`Memory::gradients_peak`] to the memory alive now.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn reset_peak<M: Module>(module: &M) -> Result<(), Error> {
    for root in inspect::roots_of(module)? {
        root.pool.reset_peak();
        root.reset_gradients_peak();
    }
    Ok(())
}

/// Returns a loss that reads every float parameter once and computes nothing else: the sum of their means.
/// With it, [`memory()`] shows the cost of the parameters without activations.
///
/// Collective: all ranks call it with the same module. It gathers each unit once, and its backward works like any
/// other.
///
/// # Errors
///
/// [`Error::NotSharded`], or a failed collective.
pub fn dummy_forward<M: Module>(module: &M) -> Result<Tensor<1>, Error> {
    inspect::root_of(module)?;
    let buffers = survey(module)?.buffers;
    let mut means = Means {
        // The visitor sees stand-ins, and looks up the parameters that they represent.
        members: inspect::fields(module).into_iter().collect(),
        left_out: buffers,
        sum: None,
    };
    catch(|| inspect::visit(module, &mut means))?;
    means.sum.ok_or(Error::NotSharded)
}

struct Means {
    members: HashMap<String, Member>,
    /// Paths of running states, which the loss does not read.
    left_out: Vec<String>,
    sum: Option<Tensor<1>>,
}

impl path::Visitor for Means {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        if self.left_out.contains(&path) || param.lazy_shape().num_elements() == 0 {
            return;
        }
        let value: Tensor<D> = match self.members.remove(&path) {
            Some(member) if member.is_tied => return,
            Some(member) => member.full().unwrap_or_else(|error| throw(error)),
            None => param.val(),
        };
        let mean = value.mean();
        self.sum = Some(match self.sum.take() {
            Some(sum) => sum + mean,
            None => mean,
        });
    }
}

/// Warns at wrap time about units that may stay unsharded until backward because the device has no gradient
/// checkpointing.
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
        report::warn(format!(
            "units {} may stay unsharded until backward, up to {bytes} bytes, because the device has no gradient \
             checkpointing; build the module on `device.autodiff().gradient_checkpointing()`",
            names.join(", "),
        ));
    }
}
