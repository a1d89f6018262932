//! From one placement to another.

use std::sync::Arc;

use burn::tensor::{DType, Slice};
use burn_fsdp_mesh::{Partition, Placement, ReduceOp};
use burn_ir::{BaseOperationIr as Base, OperationIr, PermuteOpIr, ShapeOpIr, SliceOpIr, TensorId};

use crate::Error;
use crate::elements::{element_type, gathered_type};
use crate::graph::AxisPlacement;
use crate::graph::{
    AxisShift, Collective, CollectiveKind, CollectivePart, Graph, Node, Payload, Phase, Role, Stage,
};

/// What a slice costs beside an operation that moves the same bytes.
const SLICE: f64 = 1e-3;

/// Bytes that a rank must receive to bring one axis of a tensor from one placement to another;
/// `None` where there is no way. `num_bytes` are those of the tensor as if this axis were replicated.
pub(super) fn cost(
    from: Placement,
    to: Placement,
    num_bytes: f64,
    num_ranks: usize,
) -> Option<f64> {
    let moved = num_bytes * (num_ranks as f64 - 1.0) / num_ranks as f64;
    Some(match (from, to) {
        (from, to) if from == to => 0.0,
        // Nothing moves, but a whole in its place would be better.
        (Placement::Replicate, Placement::Shard(_)) => moved * SLICE,
        (Placement::Shard(_), Placement::Replicate) => moved,
        (Placement::Shard(_), Placement::Shard(_)) => moved * (1.0 + SLICE),
        // As much as an all-reduce, lest a value is cut only because it has to be added up.
        (Placement::Partial(_), Placement::Replicate) => 2.0 * moved,
        (Placement::Partial(_), Placement::Shard(_)) => 2.0 * moved * (1.0 + SLICE),
        (Placement::Replicate, Placement::Replicate) => 0.0,
        (_, Placement::Partial(_)) => return None,
    })
}

/// The node for which a value is brought somewhere.
#[derive(Debug, Clone)]
pub(super) struct Reader {
    pub(super) phase: Phase,
    /// The parameter that it serves.
    pub(super) path: Option<Arc<str>>,
}

impl Reader {
    pub(super) fn of(node: &Node) -> Self {
        Self {
            phase: node.phase,
            path: node.path.clone(),
        }
    }
}

/// Appends nodes that redistribute values.
pub(super) struct Redistribution<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) scheduled: &'a mut Vec<Node>,
    /// Names the operation in ledgers: a path, or what reads the value.
    pub(super) label: Arc<str>,
    pub(super) payload: Payload,
    pub(super) reader: &'a Reader,
    /// Bytes that this rank has received so far.
    pub(super) moved: &'a mut f64,
}

impl Redistribution<'_> {
    /// The value of `id`, which lies as `from` says, as `to` says.
    pub(super) fn run(
        &mut self,
        id: TensorId,
        from: &[AxisPlacement],
        to: &[AxisPlacement],
    ) -> Result<TensorId, Error> {
        let mut now = from.to_vec();
        let mut id = id;
        let differs =
            |now: &[AxisPlacement], axis: usize| now[axis].placement != to[axis].placement;
        // First what makes dims longer, then what makes them shorter, so that as little as possible is
        // added up.
        for axis in 0..now.len() {
            if let Placement::Shard(dim) = now[axis].placement
                && differs(&now, axis)
            {
                id = self.all_gather(id, &now[axis], dim)?;
                now[axis].placement = Placement::Replicate;
            }
        }
        for axis in 0..now.len() {
            if let (Placement::Replicate, Placement::Shard(dim)) =
                (now[axis].placement, to[axis].placement)
            {
                id = self.slice(id, &now[axis], dim)?;
                now[axis].placement = Placement::Shard(dim);
            }
        }
        for axis in 0..now.len() {
            let Placement::Partial(op) = now[axis].placement else {
                continue;
            };
            if !differs(&now, axis) {
                continue;
            }
            let rest = &now[axis + 1..];
            let is_last = !rest
                .iter()
                .zip(&to[axis + 1..])
                .any(|(now, to)| now.placement != to.placement);
            match to[axis].placement {
                Placement::Shard(dim) if matches!(op, ReduceOp::Sum | ReduceOp::Mean) => {
                    id = self.reduce_scatter(id, &now[axis], op, dim, is_last)?;
                }
                Placement::Shard(dim) => {
                    id = self.all_reduce(id, &now[axis], op, false)?;
                    now[axis].placement = Placement::Replicate;
                    id = self.slice(id, &now[axis], dim)?;
                }
                _ => id = self.all_reduce(id, &now[axis], op, is_last)?,
            }
            now[axis].placement = to[axis].placement;
        }
        match (0..now.len()).find(|axis| differs(&now, *axis)) {
            None => Ok(id),
            Some(axis) => Err(Error::Internal(format!(
                "{} cannot go from {} to {}",
                self.label, now[axis], to[axis]
            ))),
        }
    }

    fn dtype(&self, id: TensorId) -> Result<DType, Error> {
        Ok(self.graph.read(id)?.dtype)
    }

    /// Shape of a value on this rank.
    fn shape(&self, id: TensorId) -> Result<Vec<usize>, Error> {
        Ok(self.graph.read(id)?.shape.to_vec())
    }

    fn all_reduce(
        &mut self,
        id: TensorId,
        axis: &AxisPlacement,
        op: ReduceOp,
        is_last: bool,
    ) -> Result<TensorId, Error> {
        let out = self.temporary(self.shape(id)?, id)?;
        self.collective(
            CollectiveKind::AllReduce,
            axis,
            Some(op),
            (id, out),
            is_last,
        )?;
        Ok(out)
    }

    /// Along dim `dim`: the pieces are put side by side in front, and moved to their dim.
    fn all_gather(
        &mut self,
        id: TensorId,
        axis: &AxisPlacement,
        dim: usize,
    ) -> Result<TensorId, Error> {
        let local = self.shape(id)?;
        let mut joined = local.clone();
        joined[dim] *= axis.num_ranks;
        let is_outermost = local[..dim].iter().all(|size| *size == 1);
        let pieces = match is_outermost {
            true => joined.clone(),
            false => [&[axis.num_ranks], &local[..]].concat(),
        };
        let gathered = self.temporary(pieces, id)?;
        self.collective(CollectiveKind::AllGather, axis, None, (id, gathered), false)?;
        if is_outermost {
            return Ok(gathered);
        }
        // [ranks, a, b, c] -> [a, ranks, b, c] -> [a, ranks * b, c]
        let mut order: Vec<usize> = (1..=local.len()).collect();
        order.insert(dim, 0);
        let side_by_side = self.permute(gathered, &order)?;
        self.reshape(side_by_side, joined)
    }

    fn reduce_scatter(
        &mut self,
        id: TensorId,
        axis: &AxisPlacement,
        op: ReduceOp,
        dim: usize,
        is_last: bool,
    ) -> Result<TensorId, Error> {
        let mut local = self.shape(id)?;
        local[dim] /= axis.num_ranks;
        let is_outermost = local[..dim].iter().all(|size| *size == 1);
        let pieces = match is_outermost {
            true => id,
            false => {
                // [a, ranks * b, c] -> [a, ranks, b, c] -> [ranks, a, b, c]
                let mut split = local.clone();
                split.insert(dim, axis.num_ranks);
                let split = self.reshape(id, split)?;
                let mut order: Vec<usize> = (0..=local.len()).collect();
                order.remove(dim);
                order.insert(0, dim);
                self.permute(split, &order)?
            }
        };
        let out = self.temporary(local, id)?;
        let kind = CollectiveKind::ReduceScatter;
        self.collective(kind, axis, Some(op), (pieces, out), is_last)?;
        Ok(out)
    }

    /// This rank's part of a dim: the slice of rank 0, moved when the step runs.
    fn slice(&mut self, id: TensorId, axis: &AxisPlacement, dim: usize) -> Result<TensorId, Error> {
        let mut local = self.shape(id)?;
        local[dim] /= axis.num_ranks;
        let ranges = local
            .iter()
            .map(|size| Slice::new(0, Some(*size as isize), 1))
            .collect();
        let len = local[dim];
        let out = self.temporary(local, id)?;
        let op = Base::Slice(SliceOpIr {
            tensor: self.graph.read(id)?,
            ranges,
            out: self.graph.write(out)?,
        });
        let mut node = self.node(id, op)?;
        node.shift = Some(AxisShift {
            axis: axis.axis.clone(),
            dim,
            len,
        });
        self.scheduled.push(node);
        Ok(out)
    }

    fn permute(&mut self, id: TensorId, axes: &[usize]) -> Result<TensorId, Error> {
        let input = self.graph.read(id)?;
        let shape: Vec<usize> = axes.iter().map(|axis| input.shape[*axis]).collect();
        let out = self.temporary(shape, id)?;
        let op = Base::Permute(PermuteOpIr {
            input,
            out: self.graph.write(out)?,
            axes: axes.to_vec(),
        });
        let node = self.node(id, op)?;
        self.scheduled.push(node);
        Ok(out)
    }

    fn reshape(&mut self, id: TensorId, shape: Vec<usize>) -> Result<TensorId, Error> {
        let out = self.temporary(shape, id)?;
        let op = Base::Reshape(ShapeOpIr {
            input: self.graph.read(id)?,
            out: self.graph.write(out)?,
        });
        let node = self.node(id, op)?;
        self.scheduled.push(node);
        Ok(out)
    }

    /// An operation on views, of the kind of tensor that `id` is.
    fn node(&self, id: TensorId, op: Base) -> Result<Node, Error> {
        let operation = match self.dtype(id)? {
            DType::Bool(_) => OperationIr::BaseBool(op),
            dtype if dtype.is_float() => OperationIr::BaseFloat(op),
            _ => OperationIr::BaseInt(op),
        };
        let mut node = Node::new(operation, self.reader.phase);
        node.path = self.reader.path.clone();
        Ok(node)
    }

    fn temporary(&mut self, shape: Vec<usize>, like: TensorId) -> Result<TensorId, Error> {
        let dtype = self.dtype(like)?;
        Ok(self.graph.add_value(shape, dtype, Role::Temporary))
    }

    fn collective(
        &mut self,
        kind: CollectiveKind,
        axis: &AxisPlacement,
        reduction: Option<ReduceOp>,
        (input, output): (TensorId, TensorId),
        is_last: bool,
    ) -> Result<(), Error> {
        let dtype = self.dtype(input)?;
        let element = match kind {
            CollectiveKind::AllGather => gathered_type(dtype),
            _ => element_type(dtype),
        };
        if element.is_none() {
            return Err(Error::Redistribution {
                value: self.label.to_string(),
                dtype,
                axis: axis.axis.to_string(),
            });
        }
        let whole = match kind {
            CollectiveKind::AllGather => output,
            _ => input,
        };
        let num_elements = self.graph.read(whole)?.shape.num_elements();
        let share = (axis.num_ranks as f64 - 1.0) / axis.num_ranks as f64;
        let ways = match kind {
            CollectiveKind::AllReduce => 2.0,
            _ => 1.0,
        };
        *self.moved += ways * share * (num_elements * dtype.size()) as f64;
        let collective = Collective {
            kind,
            axis: axis.axis.clone(),
            label: self.label.clone(),
            parts: vec![CollectivePart {
                path: self.label.clone(),
                partition: Partition::flat(num_elements, axis.num_ranks)?,
                dtype,
            }],
            reduction,
            // Only what nothing reads on its way to the optimizer may wait for others.
            payload: match self.payload {
                Payload::Gradient if !is_last => Payload::Activation,
                // Only what is given may be gathered earlier, and only for the model.
                Payload::Parameter if !self.graph.is_given(input) => Payload::Activation,
                _ if self.reader.phase == Phase::Optimizer => Payload::Activation,
                payload => payload,
            },
            stage: Stage::Whole,
        };
        let phase = self.reader.phase;
        let mut node = self
            .graph
            .collective_node(collective, &[input], &[output], phase)?;
        node.path = self.reader.path.clone();
        self.scheduled.push(node);
        Ok(())
    }
}
