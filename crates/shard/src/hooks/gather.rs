//! A user's function that replaces the gather of a unit's parameters.

use std::ops::Range;

use burn::tensor::Tensor;
use burn_fsdp_collectives::{BufferPool, Label, Part, ProcessGroup};
use burn_fsdp_mesh::Partition;
use burn_fsdp_tensors as tensors;

use super::pending::PendingTensors;
use super::replacement::{Replaceable, Replacement};
use super::results::{check, float_type};
use crate::error::Error;

/// A function that gathers the parameters of a unit: it receives this rank's shards, and returns the full parameters.
pub(crate) type GatherHook = Replacement<UnitGather>;

impl Replaceable for UnitGather {
    fn check_results(&self, full: &[Tensor<1>]) -> Result<(), Error> {
        self.check(full, "returned", ParameterShard::num_elements)
    }
}

/// The shards of one unit, to be gathered by a hook; see [`ShardPolicy::gather_hook`](crate::ShardPolicy::gather_hook).
#[derive(Debug)]
pub struct UnitGather {
    pub(crate) unit: String,
    pub(crate) label: Label,
    pub(crate) group: ProcessGroup,
    /// The memory of gathered tensors. The engine counts the full parameters, so the pool must not count them.
    pub(crate) pool: BufferPool,
    pub(crate) shards: Vec<ParameterShard>,
}

/// The shard of one parameter on this rank.
#[derive(Debug)]
pub struct ParameterShard {
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) tensor: Tensor<1>,
    pub(crate) partition: Partition,
    pub(crate) held: Range<usize>,
}

impl ParameterShard {
    /// Returns the path of the parameter.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the shape of the whole parameter.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns this rank's elements: flat, without autodiff, in the type in which the model computes with the parameter.
    pub fn tensor(&self) -> Tensor<1> {
        self.tensor.clone()
    }

    /// Returns the range of the parameter's flat elements that this rank holds. It is empty if another rank owns the
    /// parameter.
    pub fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Returns the partition of the parameter's flat elements over the ranks of [`UnitGather::group`].
    pub fn partition(&self) -> Partition {
        self.partition
    }

    fn num_elements(&self) -> usize {
        self.partition.num_elements()
    }
}

impl UnitGather {
    /// Returns the name of the unit.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    /// Returns the group over which the parameters are gathered: the ranks that hold the shards. After a forward with
    /// [`reshard_after_forward_to`](crate::ShardPolicy::reshard_after_forward_to), it is the neighbours, and the shards
    /// are their pieces.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the shards to gather, in module order.
    pub fn shards(&self) -> &[ParameterShard] {
        &self.shards
    }

    /// Starts to gather flat tensors of floats, one for each of [`shards`](Self::shards) and as long as it, in one
    /// collective.
    /// Returns the full tensors on every rank, with the same bits on all. The tensors are sent and returned in their own
    /// types. This is the engine's own gather.
    ///
    /// Collective among the ranks of [`group`](Self::group), with tensors of the same types.
    ///
    /// # Errors
    ///
    /// A failed collective; [`Error::Hook`] for tensors of other lengths, or with autodiff.
    pub fn all_gather(&self, shards: Vec<Tensor<1>>) -> Result<PendingTensors, Error> {
        self.check(&shards, "passed `all_gather`", |own| own.held.len())?;
        let of = self.subject();
        let mut parts = Vec::with_capacity(shards.len());
        let mut into = Vec::with_capacity(shards.len());
        let mut kinds = Vec::with_capacity(shards.len());
        for (own, tensor) in self.shards.iter().zip(shards) {
            let wire = float_type(&of, &tensor)?;
            kinds.push((tensor.dtype(), tensor.device()));
            into.push(self.pool.take(own.num_elements() * wire.size()));
            let source = tensors::source(tensor, None);
            parts.push(Part::new(source, own.partition, wire));
        }
        let label = self.label.clone();
        let pending = self
            .group
            .start_all_gather(label, Vec::new(), parts, into)?;
        Ok(PendingTensors::new(move || {
            let full = pending.wait()?.buffers.into_iter().zip(kinds);
            let full =
                full.map(|(buffer, (dtype, device))| tensors::tensor(buffer, dtype, &device));
            Ok(full.collect())
        }))
    }

    /// Checks that there is one tensor for each shard, of the right length; `what` describes the tensors in errors.
    fn check(
        &self,
        tensors: &[Tensor<1>],
        what: &str,
        elements: impl Fn(&ParameterShard) -> usize,
    ) -> Result<(), Error> {
        let expected = self.shards.iter();
        let expected = expected.map(|own| (own.path.as_str(), elements(own)));
        check(&self.subject(), what, tensors, expected)
    }

    /// Returns the subject of errors.
    fn subject(&self) -> String {
        let rank = self.group.world_rank();
        format!("gather of unit `{}`, rank {rank}", self.unit)
    }
}
