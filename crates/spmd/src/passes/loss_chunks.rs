//! The pass that computes the loss and its gradients for some rows at a time.

mod region;
mod sums;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn::tensor::{DType, Slice};
use burn_fsdp_kernels::FusedOperation;
use burn_fsdp_tensors::is_half;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CastOpIr, CatOpIr, NumericOperationIr, OperationIr, ScalarIr,
    ScalarOpIr, ShapeOpIr, SliceOpIr, TensorId, TensorIr,
};

use super::dead_code::DeadCode;
use crate::error::{Error, OptionError};
use crate::graph::{Graph, Node, Phase, Role, rename};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;
use region::{Region, Rows, Share};

/// The pass that computes the loss, the gradient of the logits and the gradients of the head for some rows at a time, so
/// that the logits are never whole.
///
/// The logits are the result of the last matrix product on the way to the loss, `[rows, ...]`. Each operation that reads
/// or writes a tensor as large as the logits runs once for each part of the rows. A part's gradient of the logits follows
/// its forward, so no operation runs twice. What sums over the rows, such as the gradients of the head, is summed over the
/// parts, in 32 bits if it has 16. A mean over the rows is the sum of the parts' means, each times its share of the rows.
///
/// ```text
/// before                             after, for each half of the rows
/// %3 = Float.Matmul(%1, %0)          %10 = BaseFloat.Slice(%1)
/// %4, %5 = cross_entropy(%3, %2)     %11 = Float.Matmul(%10, %0)
/// %6 = Float.Matmul(%4, %8)          %13, %14 = cross_entropy(%11, %12)
/// %7 = Float.Matmul(%9, %4)          ...
///                                    %6 = BaseFloat.Cat(%15, %25)
///                                    %7 = NumericFloat.Add(%16, %26)
/// ```
///
/// In an evaluation, it leaves a graph as it is if the rows cannot be divided, for example because it returns the
/// logits.
#[derive(Debug, Clone, Copy)]
pub struct LossChunks {
    /// Number of parts. 0 and 1 leave the graph as it is.
    pub parts: usize,
}

impl GraphTransform for LossChunks {
    fn id(&self) -> PassId {
        PassId::LossChunks
    }

    fn before(&self) -> &'static [PassId] {
        &[
            PassId::UseKernels,
            PassId::RecomputeUnits,
            PassId::InsertCollectives,
        ]
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        if self.parts < 2 {
            return Ok(graph);
        }
        let trains = graph
            .nodes()
            .iter()
            .any(|node| node.phase != Phase::Forward);
        let joined = sums::joined(graph.clone());
        match Region::find(&joined, self.parts) {
            Ok(region) => Parts::new(joined, region, self.parts).run(),
            Err(reason) if !trains => {
                tracing::debug!(reason, "the loss of an evaluation is not in parts");
                Ok(graph)
            }
            Err(reason) => Err(OptionError::LossChunks {
                chunks: self.parts,
                reason,
            }
            .into()),
        }
    }
}

/// The graph while its region is repeated for each part of the rows.
struct Parts {
    graph: Graph,
    region: Region,
    num_parts: usize,
    scheduled: Vec<Node>,
    /// The phase of the region: backward, except in an evaluation.
    phase: Phase,
    /// The sums so far, by the value that they become.
    sums: BTreeMap<TensorId, TensorId>,
    /// The rows of each part, by the value that they become.
    pieces: BTreeMap<TensorId, Vec<TensorId>>,
}

impl Parts {
    fn new(graph: Graph, region: Region, num_parts: usize) -> Self {
        let phases = region.nodes.keys().map(|index| graph.nodes()[*index].phase);
        Self {
            phase: phases.max().unwrap_or(Phase::Forward),
            graph,
            region,
            num_parts,
            scheduled: Vec::new(),
            sums: BTreeMap::new(),
            pieces: BTreeMap::new(),
        }
    }

    fn run(mut self) -> Result<Graph, Error> {
        let nodes = self.graph.take_nodes();
        let (region, before) = (&self.region, &self.region.before);
        let is_own = |index: &usize| region.nodes.contains_key(index) && !before.contains(index);
        let end = (0..nodes.len())
            .rev()
            .find(is_own)
            .map_or(0, |last| last + 1);
        let mut after = Vec::new();
        for (index, node) in nodes.iter().enumerate() {
            if index >= end || region.later.contains(&index) {
                after.push(node.clone());
            } else if !is_own(&index) {
                self.scheduled.push(node.clone());
            }
        }
        let mut read_later: BTreeSet<TensorId> = after.iter().flat_map(Node::inputs).collect();
        read_later.extend(self.graph.kept());
        for part in 0..self.num_parts {
            self.run_part(&nodes, part)?;
        }
        for (id, pieces) in std::mem::take(&mut self.pieces) {
            if read_later.contains(&id) {
                self.join(id, &pieces)?;
            }
        }
        for mut node in after {
            // Phases come in order.
            node.phase = node.phase.max(self.phase);
            self.scheduled.push(node);
        }
        self.graph.set_nodes(self.scheduled);
        DeadCode.transform(self.graph)
    }

    /// Runs the region on the rows of a part.
    fn run_part(&mut self, nodes: &[Node], part: usize) -> Result<(), Error> {
        let mut own = BTreeMap::new();
        let region: Vec<usize> = self.region.nodes.keys().copied().collect();
        for index in region {
            let cut = self.region.nodes[&index].clone();
            for (id, rows) in &cut.inputs {
                if let Some(rows) = rows
                    && !own.contains_key(id)
                {
                    let slice = self.slice(*id, *rows, part)?;
                    own.insert(*id, slice);
                }
            }
            let mut names = own.clone();
            let mut node = nodes[index].clone();
            node.phase = self.phase;
            if let Some((factor, scaled)) = self.factor_of(&node, part)? {
                names.insert(factor, scaled);
            }
            for (id, share) in &cut.outputs {
                let mut shape = self.graph.read(*id)?.shape.to_vec();
                if let Share::Rows(rows) = share {
                    self.shorten(&mut shape, *rows, part);
                }
                let dtype = self.graph.read(*id)?.dtype;
                names.insert(*id, self.graph.add_value(shape, dtype, Role::Temporary));
            }
            let taken_whole = whole_dims(&node.operation);
            rename(&mut node.operation, &names);
            self.graph.sync_node(&mut node);
            take_whole(&mut node.operation, &taken_whole);
            self.scheduled.push(node);
            let is_before = self.region.before.contains(&index);
            for (id, share) in cut.outputs {
                let result = names[&id];
                match share {
                    Share::Rows(_) => {
                        own.insert(id, result);
                        if !is_before {
                            self.pieces.entry(id).or_default().push(result);
                        }
                    }
                    Share::Addend | Share::Mean => self.add(id, (result, share), part)?,
                }
            }
        }
        Ok(())
    }

    /// Returns the rows of a part.
    fn range(&self, part: usize) -> Range<usize> {
        let all = self.region.num_rows;
        part * all / self.num_parts..(part + 1) * all / self.num_parts
    }

    /// Changes the shape of all rows to that of a part, whose rows are in the last of their dims.
    fn shorten(&self, shape: &mut [usize], rows: Rows, part: usize) {
        let dims = &mut shape[rows.dims()];
        dims.fill(1);
        if let Some(last) = dims.last_mut() {
            *last = self.range(part).len();
        }
    }

    /// Returns the rows of a part, of a value that the region does not compute.
    fn slice(&mut self, id: TensorId, rows: Rows, part: usize) -> Result<TensorId, Error> {
        let whole = self.graph.read(id)?.shape.to_vec();
        let mut flat = whole.clone();
        flat.splice(rows.dims(), [self.region.num_rows]);
        let tensor = self.reshape(id, &flat)?;
        let tensor = self.graph.read(tensor)?;
        let mut ranges: Vec<Slice> = flat.iter().map(|size| Slice::from(0..*size)).collect();
        ranges[rows.first] = Slice::from(self.range(part));
        flat[rows.first] = self.range(part).len();
        let out = self.graph.add_value(flat, tensor.dtype, Role::Temporary);
        let slice = BaseOperationIr::Slice(SliceOpIr {
            tensor,
            ranges,
            out: self.graph.write(out)?,
        });
        self.push_base(slice, out)?;
        let mut shape = whole;
        self.shorten(&mut shape, rows, part);
        self.reshape(out, &shape)
    }

    /// Returns a value in another shape.
    fn reshape(&mut self, id: TensorId, shape: &[usize]) -> Result<TensorId, Error> {
        let input = self.graph.read(id)?;
        if *input.shape.to_vec() == *shape {
            return Ok(id);
        }
        let out = self.graph.add_value(shape, input.dtype, Role::Temporary);
        self.reshape_into(id, out)?;
        Ok(out)
    }

    fn reshape_into(&mut self, id: TensorId, out: TensorId) -> Result<(), Error> {
        let view = BaseOperationIr::Reshape(ShapeOpIr {
            input: self.graph.read(id)?,
            out: self.graph.write(out)?,
        });
        self.push_base(view, out)
    }

    /// The kernel of the cross entropy divides by the number of rows, which are those of a part here. Returns the factor
    /// of its gradient, and the factor for a part.
    fn factor_of(
        &mut self,
        node: &Node,
        part: usize,
    ) -> Result<Option<(TensorId, TensorId)>, Error> {
        let OperationIr::Custom(call) = &node.operation else {
            return Ok(None);
        };
        if FusedOperation::named(&call.id) != Some(FusedOperation::CrossEntropyBackward) {
            return Ok(None);
        }
        let Some(factor) = call.inputs.get(1).map(|factor| factor.id) else {
            return Ok(None);
        };
        Ok(Some((factor, self.weighed(factor, part)?)))
    }

    /// Returns a value times the part's share of all rows. Both numbers are whole, which the certificate knows exactly.
    fn weighed(&mut self, id: TensorId, part: usize) -> Result<TensorId, Error> {
        let (rows, all) = (self.range(part).len(), self.region.num_rows);
        let product = self.scaled(id, rows, NumericOperationIr::MulScalar)?;
        self.scaled(product, all, NumericOperationIr::DivScalar)
    }

    /// Returns the result of an operation of a float and a number.
    fn scaled(
        &mut self,
        id: TensorId,
        number: usize,
        operation: fn(ScalarOpIr) -> NumericOperationIr,
    ) -> Result<TensorId, Error> {
        let lhs = self.graph.read(id)?;
        let dtype = lhs.dtype;
        let shape = lhs.shape.to_vec();
        let out = self.graph.add_value(shape, dtype, Role::Temporary);
        let operation = operation(ScalarOpIr {
            lhs,
            rhs: ScalarIr::Float(number as f64),
            out: self.graph.write(out)?,
        });
        self.push(OperationIr::NumericFloat(dtype, operation));
        Ok(out)
    }

    /// Adds a part's addend, or its mean, to the sum that becomes the value `id`.
    fn add(
        &mut self,
        id: TensorId,
        (result, share): (TensorId, Share),
        part: usize,
    ) -> Result<(), Error> {
        let TensorIr { shape, dtype, .. } = self.graph.read(id)?;
        let shape = shape.to_vec();
        let wide = if is_half(dtype) { DType::F32 } else { dtype };
        let mut addend = self.cast(result, wide)?;
        if share == Share::Mean {
            addend = self.weighed(addend, part)?;
        }
        let Some(sum) = self.sums.remove(&id) else {
            self.sums.insert(id, addend);
            return Ok(());
        };
        let is_last = part + 1 == self.num_parts;
        let out = if is_last && wide == dtype {
            id
        } else {
            self.graph.add_value(shape, wide, Role::Temporary)
        };
        let added = NumericOperationIr::Add(BinaryOpIr {
            lhs: self.graph.read(sum)?,
            rhs: self.graph.read(addend)?,
            out: self.graph.write(out)?,
        });
        self.push(if wide.is_float() {
            OperationIr::NumericFloat(wide, added)
        } else {
            OperationIr::NumericInt(wide, added)
        });
        if !is_last {
            self.sums.insert(id, out);
        } else if out != id {
            self.cast_into(out, id)?;
        }
        Ok(())
    }

    fn cast(&mut self, id: TensorId, dtype: DType) -> Result<TensorId, Error> {
        let input = self.graph.read(id)?;
        if input.dtype == dtype {
            return Ok(id);
        }
        let out = self
            .graph
            .add_value(input.shape.to_vec(), dtype, Role::Temporary);
        self.cast_into(id, out)?;
        Ok(out)
    }

    fn cast_into(&mut self, id: TensorId, out: TensorId) -> Result<(), Error> {
        let cast = CastOpIr {
            input: self.graph.read(id)?,
            out: self.graph.write(out)?,
        };
        self.push(OperationIr::BaseFloat(BaseOperationIr::Cast(cast)));
        Ok(())
    }

    /// Joins the rows of all parts.
    fn join(&mut self, id: TensorId, pieces: &[TensorId]) -> Result<(), Error> {
        let rows = self.region.rows[&id];
        let whole = self.graph.read(id)?;
        let mut shape = whole.shape.to_vec();
        let is_one = rows.len == 1;
        shape[rows.dims()].fill(1);
        shape[rows.first + rows.len - 1] = self.region.num_rows;
        let out = if is_one {
            id
        } else {
            self.graph.add_value(shape, whole.dtype, Role::Temporary)
        };
        let tensors = pieces.iter().map(|piece| self.graph.read(*piece));
        let cat = BaseOperationIr::Cat(CatOpIr {
            tensors: tensors.collect::<Result<_, _>>()?,
            dim: rows.first + rows.len - 1,
            out: self.graph.write(out)?,
        });
        self.push_base(cat, out)?;
        if is_one {
            return Ok(());
        }
        self.reshape_into(out, id)
    }

    fn push(&mut self, operation: OperationIr) {
        self.scheduled.push(Node::new(operation, self.phase));
    }

    /// Adds an operation that returns `id`, of any kind of elements.
    fn push_base(&mut self, operation: BaseOperationIr, id: TensorId) -> Result<(), Error> {
        let dtype = self.graph.read(id)?.dtype;
        self.push(if dtype.is_float() {
            OperationIr::BaseFloat(operation)
        } else if dtype.is_bool() {
            OperationIr::BaseBool(operation)
        } else {
            OperationIr::BaseInt(operation)
        });
        Ok(())
    }
}

/// Returns the dims that a slice, or an assignment to a slice, takes whole.
fn whole_dims(operation: &OperationIr) -> Vec<usize> {
    let mut operation = operation.clone();
    let Some((shape, ranges)) = ranges_of(&mut operation) else {
        return Vec::new();
    };
    let is_whole = |(range, size): (&Slice, &usize)| {
        let ends = range.end.is_none_or(|end| end >= *size as isize);
        range.start == 0 && range.step == 1 && ends
    };
    let dims = ranges.iter().zip(&shape).map(is_whole).enumerate();
    dims.filter_map(|(dim, is_whole)| is_whole.then_some(dim))
        .collect()
}

/// Makes a slice of a part take these dims whole, whatever their sizes are in the part.
fn take_whole(operation: &mut OperationIr, dims: &[usize]) {
    if let Some((shape, ranges)) = ranges_of(operation) {
        for dim in dims {
            ranges[*dim] = Slice::from(0..shape[*dim]);
        }
    }
}

/// Returns the shape of the tensor that is sliced, and the ranges.
fn ranges_of(operation: &mut OperationIr) -> Option<(Vec<usize>, &mut Vec<Slice>)> {
    let (OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base)) =
        operation
    else {
        return None;
    };
    match base {
        BaseOperationIr::Slice(op) => Some((op.tensor.shape.to_vec(), &mut op.ranges)),
        BaseOperationIr::SliceAssign(op) => Some((op.tensor.shape.to_vec(), &mut op.ranges)),
        _ => None,
    }
}
