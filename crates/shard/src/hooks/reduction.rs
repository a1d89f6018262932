//! A user's function that replaces a reduction of gradients.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_collectives::{
    BufferPool, ElementType, FullPart, Label, Part, Pending, ProcessGroup, Received, Reduction,
};
use burn_fsdp_mesh::Partition;
use burn_fsdp_tensors as tensors;

use super::pending::PendingTensors;
use super::replacement::{Replaceable, Replacement};
use super::results::{check, float_type};
use crate::error::Error;

/// A function that reduces gradients: it receives this rank's gradients, and returns this rank's parts of their divided
/// sums.
pub(crate) type ReductionHook = Replacement<UnitReduction>;

impl Replaceable for UnitReduction {
    fn check_results(&self, parts: &[Tensor<1>]) -> Result<(), Error> {
        self.check(parts, "returned", FullGradient::held_elements)
    }
}

/// The ranks over which a hook reduces gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReductionStage {
    /// A unit's gradients are reduced over the ranks that hold its shards, or with
    /// [`Strategy::NoShard`](crate::Strategy::NoShard) over all ranks.
    Shards,
    /// The results of `Shards` are summed over the replicas of hybrid sharding.
    Replicas,
    /// The gradients of the parameters that every rank keeps whole are reduced over all ranks, at the end of backward.
    Whole,
}

/// The gradients of one unit, or of the parameters kept whole, to be reduced by a hook; see
/// [`ShardPolicy::reduction_hook`](crate::ShardPolicy::reduction_hook) and
/// [`ShardPolicy::all_reduce_hook`](crate::ShardPolicy::all_reduce_hook).
#[derive(Debug)]
pub struct UnitReduction {
    pub(crate) unit: String,
    pub(crate) stage: ReductionStage,
    pub(crate) label: Label,
    pub(crate) group: ProcessGroup,
    pub(crate) pool: BufferPool,
    pub(crate) mean: Reduction,
    pub(crate) divisor: f64,
    pub(crate) gradients: Vec<FullGradient>,
}

/// The gradient of one parameter on this rank: the full gradient, or at [`ReductionStage::Replicas`] the sum of this
/// rank's elements.
#[derive(Debug)]
pub struct FullGradient {
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) tensor: Tensor<1>,
    /// The partition into the shards that a reduction leaves on the ranks; `None` if every rank gets all of `tensor`.
    pub(crate) partition: Option<Partition>,
    pub(crate) held: Range<usize>,
}

impl FullGradient {
    /// Returns the path of the parameter.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the shape of the whole parameter.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns this rank's gradient of the whole parameter: flat, without autodiff, in the policy's reduction type. It
    /// is zero if only other ranks have one. At [`ReductionStage::Replicas`], it has only the elements in
    /// [`held`](Self::held), in the parameter's stored type.
    pub fn tensor(&self) -> Tensor<1> {
        self.tensor.clone()
    }

    /// Returns the range of the parameter's flat elements that this rank holds, whose sum the hook returns. It contains
    /// all elements if the strategy keeps parameters whole, and none if another rank owns the parameter.
    pub fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Returns this rank's elements of `reduced`, a flat tensor with the length of [`tensor`](Self::tensor).
    pub fn held_of(&self, reduced: Tensor<1>) -> Tensor<1> {
        if self.held.is_empty() {
            // Burn does not support empty slices.
            Tensor::empty([0], (&reduced.device(), reduced.dtype()))
        } else if self.held.len() == self.elements() {
            reduced
        } else {
            reduced.slice([self.held.clone()])
        }
    }

    fn held_elements(&self) -> usize {
        self.held.len()
    }

    fn elements(&self) -> usize {
        let [elements] = self.tensor.dims();
        elements
    }
}

impl UnitReduction {
    /// Returns the name of the unit; the root's at [`ReductionStage::Whole`].
    pub fn unit(&self) -> &str {
        &self.unit
    }

    /// Returns the stage of the reduction.
    pub fn stage(&self) -> ReductionStage {
        self.stage
    }

    /// Returns the group over which gradients are reduced, which the [`stage`](Self::stage) determines.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the divisor of the sum over the [`group`](Self::group): the number of all ranks, including replicas, or
    /// the product of the unit's [factors](crate::ShardPolicy::divide_factors). It is 1 at
    /// [`ReductionStage::Replicas`], where the sums have already been divided.
    pub fn divisor(&self) -> f64 {
        self.divisor
    }

    /// Returns the gradients to reduce, in the same order on all ranks. Gradients that no rank has are left out.
    pub fn gradients(&self) -> &[FullGradient] {
        &self.gradients
    }

    /// Starts to sum flat tensors of any length over the ranks, and to divide by [`divisor`](Self::divisor). Returns the
    /// whole results on every rank, with the same bits on all. The tensors are sent in their own type. Sums are computed and
    /// returned in at least 32 bits, even for 16-bit tensors.
    ///
    /// Collective among the ranks of [`group`](Self::group), with tensors of the same lengths and types.
    ///
    /// # Errors
    ///
    /// A failed collective; [`Error::Hook`] for a tensor with autodiff.
    pub fn average(&self, tensors: Vec<Tensor<1>>) -> Result<PendingTensors, Error> {
        self.by_kind(tensors.into_iter().enumerate(), |mean, tensors| {
            let mut parts = Vec::with_capacity(tensors.len());
            let mut into = Vec::with_capacity(tensors.len());
            for (_, tensor, kind) in tensors {
                let [elements] = tensor.dims();
                into.push(self.pool.take(elements * kind.sum.size()));
                parts.push(FullPart::new(tensors::source(tensor, None), kind.wire));
            }
            let label = self.label.clone();
            self.group
                .start_all_reduce(label, Vec::new(), mean, parts, into)
        })
    }

    /// Starts to sum full gradients, one for each of [`gradients`](Self::gradients), over the ranks, and to divide by
    /// [`divisor`](Self::divisor). Returns this rank's part of each. This is the engine's own reduction: an
    /// [`average`](Self::average) if every rank gets all elements. The tensors are sent in their own types, and the sums
    /// have the types that `average` returns.
    ///
    /// Collective among the ranks of [`group`](Self::group).
    ///
    /// # Errors
    ///
    /// A failed collective; [`Error::Hook`] for tensors of other lengths, or with autodiff.
    pub fn reduce_scatter(&self, gradients: Vec<Tensor<1>>) -> Result<PendingTensors, Error> {
        self.check(
            &gradients,
            "passed `reduce_scatter`",
            FullGradient::elements,
        )?;
        if self.gradients.iter().any(|own| own.partition.is_none()) {
            return self.average(gradients);
        }
        self.by_kind(gradients.into_iter().enumerate(), |mean, tensors| {
            let mut parts = Vec::with_capacity(tensors.len());
            let mut into = Vec::with_capacity(tensors.len());
            for (index, full, kind) in tensors {
                let own = &self.gradients[index];
                let Some(partition) = own.partition else {
                    continue;
                };
                into.push(self.pool.take(own.held.len() * kind.sum.size()));
                let source = tensors::source(full, None);
                parts.push(Part::new(source, partition, kind.wire));
            }
            let label = self.label.clone();
            self.group
                .start_reduce_scatter(label, Vec::new(), mean, parts, into)
        })
    }

    /// Starts to reduce tensors with one collective for each type of sum. Returns the sums in the order of the tensors.
    fn by_kind(
        &self,
        tensors: impl Iterator<Item = (usize, Tensor<1>)>,
        mut start: impl FnMut(
            Reduction,
            Vec<(usize, Tensor<1>, Kind)>,
        ) -> Result<Pending<Received>, burn_fsdp_collectives::Error>,
    ) -> Result<PendingTensors, Error> {
        let mut lists: Vec<Vec<(usize, Tensor<1>, Kind)>> = Vec::new();
        let mut number = 0;
        for (index, tensor) in tensors {
            let kind = self.kind(&tensor)?;
            number += 1;
            match lists.iter_mut().find(|list| list[0].2.sum == kind.sum) {
                Some(list) => list.push((index, tensor, kind)),
                None => lists.push(vec![(index, tensor, kind)]),
            }
        }
        let mut started = Vec::with_capacity(lists.len());
        for list in lists {
            let mean = self.mean.output(list[0].2.sum);
            let kinds = list.iter().map(|(index, _, kind)| (*index, kind.clone()));
            let kinds: Vec<_> = kinds.collect();
            started.push((kinds, start(mean, list)?));
        }
        Ok(PendingTensors::new(move || {
            let mut sums: Vec<Option<Tensor<1>>> = vec![None; number];
            for (kinds, pending) in started {
                let received = pending.wait_released()?;
                for ((index, kind), buffer) in kinds.into_iter().zip(received.buffers) {
                    let bytes = buffer.as_ref().to_vec();
                    sums[index] = Some(tensors::owned(bytes, kind.dtype, &kind.device));
                }
            }
            Ok(sums.into_iter().flatten().collect())
        }))
    }

    fn kind(&self, tensor: &Tensor<1>) -> Result<Kind, Error> {
        let wire = float_type(&self.subject(), tensor)?;
        let (sum, dtype) = match wire {
            ElementType::F64 => (ElementType::F64, DType::F64),
            _ => (ElementType::F32, DType::F32),
        };
        Ok(Kind {
            wire,
            sum,
            dtype,
            device: tensor.device(),
        })
    }

    /// Checks that there is one tensor for each gradient, of the right length; `what` describes the tensors in errors.
    fn check(
        &self,
        tensors: &[Tensor<1>],
        what: &str,
        elements: impl Fn(&FullGradient) -> usize,
    ) -> Result<(), Error> {
        let expected = self.gradients.iter();
        let expected = expected.map(|own| (own.path.as_str(), elements(own)));
        check(&self.subject(), what, tensors, expected)
    }

    /// Returns the subject of errors.
    fn subject(&self) -> String {
        let what = match self.stage {
            ReductionStage::Shards => format!("reduction of unit `{}`", self.unit),
            ReductionStage::Replicas => format!("sum of unit `{}` over replicas", self.unit),
            ReductionStage::Whole => "reduction of parameters kept whole".to_owned(),
        };
        format!("{what}, rank {}", self.group.world_rank())
    }
}

/// The types of a tensor and its sum, and the tensor's device.
#[derive(Clone)]
struct Kind {
    /// The type in which the gradient is sent.
    wire: ElementType,
    /// The type of the sum.
    sum: ElementType,
    /// The type of the sum, as Burn's type.
    dtype: DType,
    device: Device,
}
