//! Storage of a parameter in data parallelism: in flat shards, or whole on one rank.

use std::sync::Arc;

use burn_fsdp_mesh::{Cut, Layout, Partition, Placement};
use burn_fsdp_tensors::StateFormat;
use burn_ir::TensorId;

use super::replicate::Replicate;
use crate::error::Error;
use crate::graph::{Graph, Node, Parameter, Trait, is, operation_name};
use crate::low_bit::StateOperation;

/// How the ranks along the shard axis store a parameter, its gradient and its states.
#[derive(Debug, Clone)]
pub(super) struct Holding {
    pub(super) path: Arc<str>,
    pub(super) partition: Partition,
    /// Shape of the whole tensor.
    pub(super) shape: Vec<usize>,
    /// Where shards may begin.
    cut: Cut,
    state_format: Option<StateFormat>,
}

impl Holding {
    /// Returns how `num_ranks` ranks store a parameter: in flat shards, or whole on `owner` if there is one.
    pub(super) fn new(
        parameter: &Parameter,
        num_ranks: usize,
        owner: Option<usize>,
    ) -> Result<Self, Error> {
        let num_elements = parameter.num_elements();
        let cut = parameter.cut();
        let multiple = match cut {
            Cut::Multiples(multiple) => multiple,
            Cut::Elements | Cut::Dims => 1,
        };
        Ok(Self {
            path: parameter.path.clone(),
            partition: match owner {
                Some(owner) => Partition::one_owner(num_elements, num_ranks, owner)?,
                None => Partition::multiples(num_elements, multiple, num_ranks)?,
            },
            shape: parameter.shape.clone(),
            cut: match owner {
                Some(_) => Cut::Elements,
                None => cut,
            },
            state_format: parameter.state_format,
        })
    }

    /// Returns true if one rank holds the whole parameter.
    pub(super) fn is_owned(&self) -> bool {
        self.partition.sole_owner().is_some()
    }

    /// Returns the shape of a rank's part, for ranks that hold one.
    pub(super) fn local_shape(&self) -> Vec<usize> {
        local_shape(self.partition, &self.shape)
    }

    /// Returns the shape of a rank's part of a state of the parameter's shape, as it is kept between steps.
    pub(super) fn state_shape(&self) -> Vec<usize> {
        self.kept_shape(self.local_shape())
    }

    fn kept_shape(&self, shape: Vec<usize>) -> Vec<usize> {
        match self.state_format {
            None => shape,
            Some(format) => vec![format.num_bytes(shape.iter().product())],
        }
    }

    /// Returns the layout, replicated along the axis of `copies` if there is one.
    pub(super) fn layout(&self, copies: Option<&Replicate>) -> Layout {
        let mut placements = vec![Placement::Shard(0)];
        if let Some(other) = copies {
            placements.insert(usize::from(!other.is_first), Placement::Replicate);
        }
        Layout {
            placements,
            cut: self.cut,
            owner: self.partition.sole_owner(),
        }
    }

    /// Rejects states that cannot be sharded.
    pub(super) fn check_states(&self, graph: &Graph, states: &[TensorId]) -> Result<(), Error> {
        let expected = self.kept_shape(self.shape.clone());
        let other = states.iter().find_map(|id| {
            let value = graph.value(*id)?;
            (value.shape != expected).then(|| value.role.to_string())
        });
        match other.filter(|_| !self.is_owned()) {
            Some(state) => Err(Error::OptimizerNotElementwise {
                path: self.path.to_string(),
                operation: format!("its {state} has a different shape"),
            }),
            None => Ok(()),
        }
    }

    /// Rejects an optimizer operation that cannot run on a part of the parameter.
    pub(super) fn check_step(&self, node: &Node) -> Result<(), Error> {
        if StateOperation::of(&node.operation).is_some() {
            // States of another shape are rejected before.
            return Ok(());
        }
        let mut tensors = node.operation.nodes().into_iter();
        let keeps_shape = tensors.all(|tensor| tensor.shape.to_vec() == self.shape);
        if self.is_owned() || is(&node.operation, Trait::Elementwise) && keeps_shape {
            Ok(())
        } else {
            Err(Error::OptimizerNotElementwise {
                path: self.path.to_string(),
                operation: operation_name(&node.operation),
            })
        }
    }
}

/// Returns the shape of a rank's part of a tensor: flat, unless one rank holds the whole tensor.
pub(super) fn local_shape(partition: Partition, whole: &[usize]) -> Vec<usize> {
    match partition.sole_owner() {
        Some(_) => whole.to_vec(),
        None => vec![partition.chunk_len()],
    }
}
