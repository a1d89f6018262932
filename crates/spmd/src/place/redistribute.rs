//! Redistribution of values from one placement to another.

use std::sync::Arc;

use burn::tensor::{DType, Slice};
use burn_fsdp_mesh::{Partition, Placement, ReduceOp};
use burn_ir::{BaseOperationIr as Base, OperationIr, PermuteOpIr, ShapeOpIr, SliceOpIr, TensorId};

use super::located::Reader;
use super::padding::Padding;
use crate::error::Error;
use crate::graph::AxisPlacement;
use crate::graph::{
    AxisShift, Collective, CollectiveKind, CollectivePart, Graph, Node, Payload, Phase, Role, Stage,
};

/// The cost of slicing a byte, relative to receiving it.
const SLICE: f64 = 1e-3;

/// Returns the cost of redistributing a tensor on one axis, for comparing assignments; `None` if it is impossible. The
/// cost is the number of bytes that a rank receives, except that slices and reduce-scatters cost more. `num_bytes` is
/// the tensor's size as if this axis were replicated.
pub(super) fn cost(
    from: Placement,
    to: Placement,
    num_bytes: f64,
    num_ranks: usize,
) -> Option<f64> {
    let moved = num_bytes * (num_ranks as f64 - 1.0) / num_ranks as f64;
    Some(match (from, to) {
        (from, to) if from == to => 0.0,
        // A slice moves nothing, but the whole value is preferred.
        (Placement::Replicate, Placement::Shard(_)) => moved * SLICE,
        (Placement::Shard(_), Placement::Replicate) => moved,
        (Placement::Shard(_), Placement::Shard(_)) => moved / num_ranks as f64,
        // Costs as much as an all-reduce, so the need for a reduction does not cause sharding.
        (Placement::Partial(_), Placement::Replicate) => 2.0 * moved,
        (Placement::Partial(_), Placement::Shard(_)) => 2.0 * moved * (1.0 + SLICE),
        (Placement::Replicate, Placement::Replicate) => 0.0,
        (_, Placement::Partial(_)) => return None,
    })
}

/// Returns the same cost as [`cost`], except that a reduce-scatter costs the bytes that a rank receives. Use it for
/// values that will be sharded anyway.
pub(super) fn moved(
    from: Placement,
    to: Placement,
    num_bytes: f64,
    num_ranks: usize,
) -> Option<f64> {
    match (from, to) {
        (Placement::Partial(_), Placement::Shard(_)) => {
            Some(num_bytes * (num_ranks as f64 - 1.0) / num_ranks as f64)
        }
        _ => cost(from, to, num_bytes, num_ranks),
    }
}

/// The partition of a value among the ranks of an axis, and the second partition of an all-to-all.
struct Cut {
    partition: Partition,
    across: Option<Partition>,
}

/// Returns the shape of the gathered pieces of a value, which are in rank order. It is the whole shape if adjacent
/// pieces along `dim` are consecutive in memory.
fn stacked(piece: &[usize], dim: usize, num_pieces: usize) -> Vec<usize> {
    if is_outermost(piece, dim) {
        let mut joined = piece.to_vec();
        joined[dim] *= num_pieces;
        joined
    } else {
        [&[num_pieces], piece].concat()
    }
}

/// Returns true if adjacent pieces along a dim are consecutive in memory.
fn is_outermost(piece: &[usize], dim: usize) -> bool {
    piece[..dim].iter().all(|size| *size == 1)
}

/// Redistributes a value by appending nodes to a schedule.
pub(super) struct Redistribution<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) scheduled: &'a mut Vec<Node>,
    /// Label of the collectives: a path, `loss`, or the value's id.
    pub(super) label: Arc<str>,
    pub(super) payload: Payload,
    pub(super) reader: &'a Reader,
    /// Bytes that this rank has received so far.
    pub(super) moved: &'a mut f64,
    /// Shape of the whole value.
    pub(super) whole: &'a [usize],
    /// The values created for padding so far.
    pub(super) padding: &'a mut Padding,
    /// Type of the results of reductions, if it differs from the type of their addends.
    pub(super) result: Option<DType>,
}

impl Redistribution<'_> {
    /// Redistributes the value `id` from the placements `from` to the placements `to`, and returns the new value.
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
        // An all-to-all moves directly from dim to dim, unless another axis already shards the target dim.
        let is_free = |now: &[AxisPlacement], dim| {
            let mut placements = now.iter().map(|axis| axis.placement);
            placements.all(|placement| placement != Placement::Shard(dim))
        };
        let crossing = |now: &[AxisPlacement]| {
            (0..now.len()).find_map(|axis| match (now[axis].placement, to[axis].placement) {
                (Placement::Shard(from), Placement::Shard(to)) if is_free(now, to) => {
                    Some((axis, from, to))
                }
                _ => None,
            })
        };
        while let Some((axis, from, dim)) = crossing(&now) {
            id = self.all_to_all(id, (&now, axis), from, dim)?;
            now[axis].placement = Placement::Shard(dim);
        }
        // Gathers come first, then slices, then reductions, so as little as possible is reduced.
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
                id = self.slice(id, (&now, axis), dim)?;
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
                    id = self.reduce_scatter(id, (&now, axis), op, dim, is_last)?;
                }
                Placement::Shard(dim) => {
                    id = self.all_reduce(id, &now[axis], op, false)?;
                    now[axis].placement = Placement::Replicate;
                    id = self.slice(id, (&now, axis), dim)?;
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

    pub(super) fn dtype(&self, id: TensorId) -> Result<DType, Error> {
        Ok(self.graph.read(id)?.dtype)
    }

    /// Returns the shape of a value on this rank.
    pub(super) fn shape(&self, id: TensorId) -> Result<Vec<usize>, Error> {
        Ok(self.graph.read(id)?.shape.to_vec())
    }

    fn all_reduce(
        &mut self,
        id: TensorId,
        axis: &AxisPlacement,
        op: ReduceOp,
        is_last: bool,
    ) -> Result<TensorId, Error> {
        let out = self.sum(self.shape(id)?, id)?;
        let (kind, cut) = (CollectiveKind::AllReduce, self.flat(id, axis)?);
        self.collective(kind, axis, Some(op), cut, (id, out), is_last)?;
        Ok(out)
    }

    /// Gathers a value along `dim`. The gathered pieces are stacked, then moved side by side and trimmed to the whole
    /// size.
    fn all_gather(
        &mut self,
        id: TensorId,
        axis: &AxisPlacement,
        dim: usize,
    ) -> Result<TensorId, Error> {
        let local = self.shape(id)?;
        let gathered = self.temporary(stacked(&local, dim, axis.num_ranks), id)?;
        let cut = self.flat(gathered, axis)?;
        self.collective(
            CollectiveKind::AllGather,
            axis,
            None,
            cut,
            (id, gathered),
            false,
        )?;
        let joined = self.side_by_side(gathered, &local, dim, axis.num_ranks)?;
        self.trimmed(joined, dim)
    }

    fn reduce_scatter(
        &mut self,
        id: TensorId,
        (now, axis): (&[AxisPlacement], usize),
        op: ReduceOp,
        dim: usize,
        is_last: bool,
    ) -> Result<TensorId, Error> {
        let id = self.lengthened(id, (now, axis), dim)?;
        let axis = &now[axis];
        let mut local = self.shape(id)?;
        local[dim] /= axis.num_ranks;
        let pieces = self.one_after_the_other(id, &local, dim, axis.num_ranks)?;
        let out = self.sum(local, id)?;
        let (kind, cut) = (CollectiveKind::ReduceScatter, self.flat(pieces, axis)?);
        self.collective(kind, axis, Some(op), cut, (pieces, out), is_last)?;
        Ok(out)
    }

    /// Exchanges a part along dim `from` for a part along dim `to`. Each rank sends to each other rank the elements
    /// that its old part shares with the other's new part.
    fn all_to_all(
        &mut self,
        id: TensorId,
        (now, axis): (&[AxisPlacement], usize),
        from: usize,
        to: usize,
    ) -> Result<TensorId, Error> {
        let id = self.lengthened(id, (now, axis), to)?;
        let axis = &now[axis];
        let num_ranks = axis.num_ranks;
        let local = self.shape(id)?;
        let mut piece = local.clone();
        piece[to] /= num_ranks;
        let pieces = self.one_after_the_other(id, &piece, to, num_ranks)?;
        let received = self.temporary(stacked(&piece, from, num_ranks), id)?;
        let others = local.iter().enumerate();
        let others = others.filter(|(dim, _)| *dim != from && *dim != to);
        let row: usize = others.map(|(_, size)| size).product();
        let cut = Cut {
            partition: Partition::rows(&[local[from] * num_ranks, row], num_ranks)?,
            across: Some(Partition::flat(local[to], num_ranks)?),
        };
        let kind = CollectiveKind::AllToAll;
        self.collective(kind, axis, None, cut, (pieces, received), false)?;
        let joined = self.side_by_side(received, &piece, from, num_ranks)?;
        self.trimmed(joined, from)
    }

    /// Makes the pieces of a value along a dim consecutive in memory, in rank order.
    fn one_after_the_other(
        &mut self,
        id: TensorId,
        piece: &[usize],
        dim: usize,
        num_pieces: usize,
    ) -> Result<TensorId, Error> {
        if is_outermost(piece, dim) {
            return Ok(id);
        }
        // [a, ranks * b, c] -> [a, ranks, b, c] -> [ranks, a, b, c]
        let mut split = piece.to_vec();
        split.insert(dim, num_pieces);
        let split = self.reshape(id, split)?;
        let mut order: Vec<usize> = (0..=piece.len()).collect();
        order.remove(dim);
        order.insert(0, dim);
        self.permute(split, &order)
    }

    /// Arranges the pieces of a value, which has the shape [`stacked`], side by side along their dim.
    fn side_by_side(
        &mut self,
        id: TensorId,
        piece: &[usize],
        dim: usize,
        num_pieces: usize,
    ) -> Result<TensorId, Error> {
        if is_outermost(piece, dim) {
            return Ok(id);
        }
        // [ranks, a, b, c] -> [a, ranks, b, c] -> [a, ranks * b, c]
        let mut order: Vec<usize> = (1..=piece.len()).collect();
        order.insert(dim, 0);
        let side_by_side = self.permute(id, &order)?;
        let mut joined = piece.to_vec();
        joined[dim] *= num_pieces;
        self.reshape(side_by_side, joined)
    }

    /// Returns the flat partition of a whole value.
    fn flat(&self, whole: TensorId, axis: &AxisPlacement) -> Result<Cut, Error> {
        let num_elements = self.graph.read(whole)?.shape.num_elements();
        Ok(Cut {
            partition: Partition::flat(num_elements, axis.num_ranks)?,
            across: None,
        })
    }

    /// Takes this rank's part of a dim. The node has the slice of rank 0, which is shifted when the step runs.
    fn slice(
        &mut self,
        id: TensorId,
        (now, axis): (&[AxisPlacement], usize),
        dim: usize,
    ) -> Result<TensorId, Error> {
        let id = self.lengthened(id, (now, axis), dim)?;
        let len = self.shape(id)?[dim] / now[axis].num_ranks;
        let shift = AxisShift {
            axis: now[axis].axis.clone(),
            dim,
            len,
        };
        self.taken(id, dim, Some(shift), len)
    }

    /// Takes the first `len` elements along a dim; with a shift, each rank takes its own `len` elements.
    pub(super) fn taken(
        &mut self,
        id: TensorId,
        dim: usize,
        shift: Option<AxisShift>,
        len: usize,
    ) -> Result<TensorId, Error> {
        let mut shape = self.shape(id)?;
        shape[dim] = len;
        let ranges = shape
            .iter()
            .map(|size| Slice::new(0, Some(*size as isize), 1))
            .collect();
        let out = self.temporary(shape, id)?;
        let op = Base::Slice(SliceOpIr {
            tensor: self.graph.read(id)?,
            ranges,
            out: self.graph.write(out)?,
        });
        let mut node = self.node(id, op)?;
        node.shift = shift;
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
        self.append(id, op)?;
        Ok(out)
    }

    pub(super) fn reshape(&mut self, id: TensorId, shape: Vec<usize>) -> Result<TensorId, Error> {
        let out = self.temporary(shape, id)?;
        let op = Base::Reshape(ShapeOpIr {
            input: self.graph.read(id)?,
            out: self.graph.write(out)?,
        });
        self.append(id, op)?;
        Ok(out)
    }

    /// Appends the node of a base operation on `id`.
    pub(super) fn append(&mut self, id: TensorId, op: Base) -> Result<(), Error> {
        let node = self.node(id, op)?;
        self.scheduled.push(node);
        Ok(())
    }

    /// Creates the node of a base operation, for the tensor kind of `id`.
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

    pub(super) fn temporary(
        &mut self,
        shape: Vec<usize>,
        like: TensorId,
    ) -> Result<TensorId, Error> {
        let dtype = self.dtype(like)?;
        Ok(self.graph.add_value(shape, dtype, Role::Temporary))
    }

    fn collective(
        &mut self,
        kind: CollectiveKind,
        axis: &AxisPlacement,
        reduction: Option<ReduceOp>,
        cut: Cut,
        (input, output): (TensorId, TensorId),
        is_last: bool,
    ) -> Result<(), Error> {
        let dtype = self.dtype(input)?;
        if kind.element_of(dtype).is_none() {
            return Err(Error::Redistribution {
                value: self.label.to_string(),
                dtype,
                axis: axis.axis.to_string(),
            });
        }
        let part = CollectivePart {
            path: self.label.clone(),
            partition: cut.partition,
            across: cut.across,
            dtype,
            result: self.dtype(output)?,
        };
        let num_bytes = kind.circulating_bytes(part.num_bytes() as u64, axis.num_ranks);
        let share = (axis.num_ranks as f64 - 1.0) / axis.num_ranks as f64;
        *self.moved += f64::from(kind.rounds()) * share * num_bytes as f64;
        let collective = Collective {
            kind,
            axis: axis.axis.clone(),
            label: self.label.clone(),
            parts: vec![part],
            reduction,
            // Only the last reduction of a gradient may be delayed, because its result is read only after backward.
            payload: match self.payload {
                Payload::Gradient if !is_last => Payload::Activation,
                // The result is a part of a weight, not a weight.
                _ if kind == CollectiveKind::AllToAll => Payload::Activation,
                // Only given values may be gathered earlier, and not for the optimizer.
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
