//! The reductions of gradients and of the loss.

use std::collections::BTreeSet;
use std::sync::Arc;

use burn_fsdp_mesh::{Axis, Partition};
use burn_ir::{BaseOperationIr, CastOpIr, OperationIr, TensorId};

use super::Insertion;
use crate::Precision;
use crate::error::Error;
use crate::graph::{CollectiveKind, Node, Phase, Role};
use crate::passes::casts::cast_of;
use crate::passes::holding::local_shape;

impl Insertion<'_> {
    /// Returns `gradient`, an output of the last scheduled node, in the type in which it is sent. May add or remove a cast.
    pub(super) fn travelling(
        &mut self,
        scheduled: &mut Vec<Node>,
        gradient: TensorId,
        read: &BTreeSet<TensorId>,
    ) -> Result<TensorId, Error> {
        let widened = self.graph.read(gradient)?;
        let cast = scheduled.last().and_then(cast_of);
        let computed = cast.map_or_else(|| widened.clone(), |cast| cast.input.clone());
        let travels = self.pass.precision.reduce_of(computed.dtype);
        if travels == widened.dtype || self.pass.precision == Precision::default() {
            return Ok(gradient);
        }
        let mut phase = Phase::Backward;
        if cast.is_some() && !read.contains(&gradient) {
            // The reduction widens the values that it combines.
            phase = scheduled.pop().map_or(phase, |node| node.phase);
        }
        if travels == computed.dtype {
            return Ok(computed.id);
        }
        let shape = computed.shape.to_vec();
        let rounded = self.graph.add_value(shape, travels, Role::Temporary);
        let cast = BaseOperationIr::Cast(CastOpIr {
            input: self.graph.read(computed.id)?,
            out: self.graph.write(rounded)?,
        });
        scheduled.push(Node::new(OperationIr::BaseFloat(cast), phase));
        Ok(rounded)
    }

    /// Averages `local`, which is a gradient or the loss in the type in which it is sent. The mean gets the role of
    /// `of`.
    pub(super) fn reduce(
        &mut self,
        scheduled: &mut Vec<Node>,
        (of, local): (TensorId, TensorId),
        path: &Arc<str>,
        partition: Option<Partition>,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let value = self.graph.value_mut(of);
        let value = value
            .ok_or_else(|| Error::Internal(format!("the gradient of {path} is not declared")))?;
        let role = std::mem::replace(&mut value.role, Role::Temporary);
        let (whole, dtype) = (value.shape.clone(), value.dtype);
        let shape = match partition {
            Some(partition) => local_shape(partition, &whole),
            None => whole,
        };
        let mean = self.graph.add_value(shape, dtype, role);
        self.push_reduce(scheduled, local, mean, path, partition, phase)
    }

    fn push_reduce(
        &mut self,
        scheduled: &mut Vec<Node>,
        local: TensorId,
        mean: TensorId,
        path: &Arc<str>,
        partition: Option<Partition>,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let tensor = self.graph.read(local)?;
        let (kind, partition) = match partition {
            Some(partition) => (CollectiveKind::ReduceScatter, partition),
            None => {
                let whole = Partition::flat(tensor.shape.num_elements(), self.pass.num_ranks)?;
                (CollectiveKind::AllReduce, whole)
            }
        };
        let axis = &self.pass.axis;
        let result = self.graph.read(mean)?.dtype;
        let collective = self.collective(kind, axis, path, partition, (tensor.dtype, result));
        let graph = &self.graph;
        let node = graph.collective_node(collective, &[local], &[mean], phase)?;
        scheduled.push(node);
        match self.pass.replicate.clone() {
            Some(other) => self.over_copies(scheduled, mean, path, &other.axis, phase),
            None => Ok(mean),
        }
    }

    /// Averages a value over the replicas of hybrid sharding.
    fn over_copies(
        &mut self,
        scheduled: &mut Vec<Node>,
        own: TensorId,
        path: &Arc<str>,
        axis: &Axis,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let tensor = self.graph.read(own)?;
        let role = self.graph.value(own).map(|value| value.role.clone());
        let role = role.unwrap_or(Role::Temporary);
        let shape = tensor.shape.to_vec();
        let mean = self.graph.add_value(shape, tensor.dtype, role);
        if let Some(value) = self.graph.value_mut(own) {
            value.role = Role::Temporary;
        }
        let partition = Partition::flat(tensor.shape.num_elements(), axis.size)?;
        let (kind, name) = (CollectiveKind::AllReduce, Arc::from(axis.name.as_str()));
        let types = (tensor.dtype, tensor.dtype);
        let collective = self.collective(kind, &name, path, partition, types);
        let graph = &self.graph;
        let node = graph.collective_node(collective, &[own], &[mean], phase)?;
        scheduled.push(node);
        Ok(mean)
    }
}
