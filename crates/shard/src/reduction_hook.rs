//! A function of the user that takes the place of the reduction of a unit's gradients.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_collectives::{
    Buffer, BufferPool, ElementType, FullPart, Label, Part, ProcessGroup, Reduction,
};
use burn_fsdp_mesh::Partition;

use crate::ambient::{Purpose, within};
use crate::error::Error;
use crate::transport;

/// A function that reduces the gradients of a unit: it gets the full gradients and returns this rank's parts of their mean.
#[derive(Clone)]
pub(crate) struct ReductionHook(Arc<Reduce>);

/// The function of a hook.
type Reduce = dyn Fn(&UnitReduction) -> Result<Vec<Tensor<1>>, Error> + Send + Sync;

impl ReductionHook {
    /// Returns a hook that calls `reduce`.
    pub(crate) fn new(
        reduce: impl Fn(&UnitReduction) -> Result<Vec<Tensor<1>>, Error> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(reduce))
    }

    /// Returns this rank's part of each mean, as flat tensors without autodiff of the right lengths.
    pub(crate) fn call(&self, reduction: &UnitReduction) -> Result<Vec<Tensor<1>>, Error> {
        let parts = within(Purpose::Hook, || (self.0)(reduction))?;
        reduction.check(&parts, "returned", FullGradient::held_elements)?;
        Ok(parts)
    }
}

impl fmt::Debug for ReductionHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReductionHook")
    }
}

/// The gradients of one unit that wait for their reduction, for a hook of
/// [`ShardPolicy::reduction_hook`](crate::ShardPolicy::reduction_hook).
#[derive(Debug)]
pub struct UnitReduction {
    pub(crate) unit: String,
    pub(crate) label: Label,
    pub(crate) group: ProcessGroup,
    pub(crate) pool: BufferPool,
    pub(crate) mean: Reduction,
    pub(crate) gradients: Vec<FullGradient>,
}

/// The full gradient of one parameter on this rank.
#[derive(Debug)]
pub struct FullGradient {
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) tensor: Tensor<1>,
    /// The partition by which ranks hold shards; `None` where every rank holds all of the parameter.
    pub(crate) partition: Option<Partition>,
    /// The elements that this rank holds.
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

    /// Returns this rank's gradient of the whole parameter: flat, without autodiff, in the type in which the policy reduces. It
    /// is zero if this rank has none and another one has.
    pub fn tensor(&self) -> Tensor<1> {
        self.tensor.clone()
    }

    /// Returns the flat elements of the parameter that this rank holds: those whose mean the hook returns. All of them where
    /// the strategy keeps parameters whole, and none where another rank owns the parameter.
    pub fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Returns what this rank holds of a flat tensor of the parameter's length.
    pub fn held_of(&self, full: Tensor<1>) -> Tensor<1> {
        match self.held.is_empty() {
            // Burn cuts no empty slice.
            true => Tensor::empty([0], (&full.device(), full.dtype())),
            false => full.slice([self.held.clone()]),
        }
    }

    fn held_elements(&self) -> usize {
        self.held.len()
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl UnitReduction {
    /// Returns the name of the unit.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    /// Returns the group whose gradients are reduced: the ranks that hold the shards. With hybrid sharding the engine adds up
    /// what the replicas return.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the gradients in the order of the module: those of sharded parameters for which any rank has one.
    pub fn gradients(&self) -> &[FullGradient] {
        &self.gradients
    }

    /// Returns the mean over the ranks of flat tensors of any length, whole on every rank: the same bits on all. The mean is
    /// the policy's ([`divide_factors`](crate::ShardPolicy::divide_factors)), is computed in 32 bits at least, and has the
    /// type of the tensor, which is the type that travels.
    ///
    /// Collective among the ranks of [`group`](Self::group), with tensors of the same lengths and types.
    ///
    /// # Errors
    ///
    /// A failed collective; [`Error::ReductionHook`] for a tensor with autodiff.
    pub fn average(&self, tensors: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, Error> {
        let kinds = self.kinds(&tensors)?;
        let mut parts = Vec::with_capacity(tensors.len());
        let mut into = Vec::with_capacity(tensors.len());
        for (tensor, kind) in tensors.into_iter().zip(&kinds) {
            let source = transport::source(tensor, None);
            into.push(self.pool.take(source.len()));
            parts.push(FullPart::new(source, kind.wire));
        }
        let label = self.label.clone();
        let pending = self
            .group
            .start_all_reduce(label, Vec::new(), self.mean, parts, into)?;
        Ok(arrived(pending.wait_released()?.buffers, &kinds))
    }

    /// Returns what this rank holds of the mean over the ranks of full gradients, one for each of
    /// [`gradients`](Self::gradients): the engine's own reduction, with the tensors' types as those that travel.
    ///
    /// Collective among the ranks of [`group`](Self::group).
    ///
    /// # Errors
    ///
    /// A failed collective; [`Error::ReductionHook`] for tensors of other lengths, or with autodiff.
    pub fn reduce_scatter(&self, gradients: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, Error> {
        self.check(
            &gradients,
            "gave to `reduce_scatter`",
            FullGradient::elements,
        )?;
        if self.gradients.iter().any(|own| own.partition.is_none()) {
            return self.average(gradients);
        }
        let kinds = self.kinds(&gradients)?;
        let mut parts = Vec::with_capacity(gradients.len());
        let mut into = Vec::with_capacity(gradients.len());
        for ((own, full), kind) in self.gradients.iter().zip(gradients).zip(&kinds) {
            let Some(partition) = own.partition else {
                continue;
            };
            into.push(self.pool.take(own.held.len() * kind.wire.size()));
            parts.push(Part::new(
                transport::source(full, None),
                partition,
                kind.wire,
            ));
        }
        let label = self.label.clone();
        let pending = self
            .group
            .start_reduce_scatter(label, Vec::new(), self.mean, parts, into)?;
        Ok(arrived(pending.wait_released()?.buffers, &kinds))
    }

    /// Returns the kind of each tensor.
    fn kinds(&self, tensors: &[Tensor<1>]) -> Result<Vec<Kind>, Error> {
        let kind = |tensor: &Tensor<1>| {
            let wire = transport::element_type(tensor.dtype());
            match wire {
                Some(wire) if !tensor.is_autodiff() => Ok(Kind {
                    wire,
                    dtype: tensor.dtype(),
                    device: tensor.device(),
                }),
                Some(_) => Err(self.refused("plain tensors", "one with a graph".to_owned())),
                None => Err(self.refused("floats", format!("{:?}", tensor.dtype()))),
            }
        };
        tensors.iter().map(kind).collect()
    }

    /// Looks whether `tensors`, with which the hook did `what`, are one for each gradient and of the right lengths.
    fn check(
        &self,
        tensors: &[Tensor<1>],
        what: &str,
        elements: impl Fn(&FullGradient) -> usize,
    ) -> Result<(), Error> {
        if tensors.len() != self.gradients.len() {
            let got = format!("{what} {}", tensors.len());
            let expected = format!("{} tensors", self.gradients.len());
            return Err(self.refused(&expected, got));
        }
        self.kinds(tensors)?;
        for (own, tensor) in self.gradients.iter().zip(tensors) {
            let ([len], expected) = (tensor.dims(), elements(own));
            if len != expected {
                return Err(self.refused(
                    &format!("{expected} elements for `{}`", own.path),
                    format!("{what} {len}"),
                ));
            }
        }
        Ok(())
    }

    fn refused(&self, expected: &str, got: String) -> Error {
        Error::ReductionHook {
            unit: self.unit.clone(),
            rank: self.group.world_rank(),
            expected: expected.to_owned(),
            got,
        }
    }
}

/// The type and the place of a tensor.
struct Kind {
    wire: ElementType,
    dtype: DType,
    device: Device,
}

fn arrived(buffers: Vec<Buffer>, kinds: &[Kind]) -> Vec<Tensor<1>> {
    let arrived = |(buffer, kind): (Buffer, &Kind)| {
        let bytes = buffer.as_ref().to_vec();
        transport::owned(bytes, kind.dtype, &kind.device)
    };
    buffers.into_iter().zip(kinds).map(arrived).collect()
}
