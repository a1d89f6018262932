//! Finds operations by their operands, and replaces them.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{DType, IndexingUpdateOp};
use burn_fsdp_kernels::FusedOperation;
use burn_fsdp_mesh::Placement;
use burn_ir::{
    ActivationOperationIr, BaseOperationIr, BinaryOpIr, FloatOperationIr, MatmulOpIr,
    NumericOperationIr, OperationIr, ScalarIr, ShapeOpIr, SwapDimsOpIr, TensorId,
};

use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role, Trait, is};
use crate::kernels::{are_alike, fused_node};

/// An operation of a pattern on 32- or 16-bit floats, without its operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Add,
    Sub,
    Mul,
    Div,
    Neg,
    /// Cast from 16 to 32 bits.
    Widen,
    /// Cast from 32 to 16 bits.
    Narrow,
    Exp,
    Log,
    Sqrt,
    Recip,
    Ones,
    Matmul,
    Reshape,
    SwapDims(usize, usize),
    SumDim(usize),
    MeanDim(usize),
    MaxDim(usize),
    /// Along several dims, as a bit mask.
    SumDims(u64),
    AddScalar(f64),
    MulScalar(f64),
    DivScalar(f64),
    PowfScalar(f64),
    /// Operands: a tensor, then a mask.
    MaskFill(f64),
    Sigmoid,
    /// Operands: a result, then its gradient.
    SigmoidBackward,
    Softmax,
    SoftmaxBackward,
    LogSoftmax,
    LogSoftmaxBackward,
    Zeros,
    /// Along a dim. Operands: a tensor, then indices.
    Gather(usize),
    /// Along a dim. Operands: a tensor, indices, then values.
    ScatterAdd(usize),
}

/// A graph, and the replacements to apply to it.
pub(super) struct Patterns {
    pub(super) graph: Graph,
    nodes: Vec<Node>,
    kinds: Vec<Option<Kind>>,
    writers: BTreeMap<TensorId, usize>,
    readers: BTreeMap<TensorId, Vec<usize>>,
    /// Values that are also needed outside the nodes: gradients, and values that outlive the step.
    kept: BTreeSet<TensorId>,
    /// Nodes to insert before each node.
    before: BTreeMap<usize, Vec<Node>>,
    /// Removed nodes.
    gone: BTreeSet<usize>,
    /// Values that the inserted nodes read.
    read_anew: BTreeSet<TensorId>,
}

impl Patterns {
    pub(super) fn new(mut graph: Graph) -> Self {
        let (writers, readers) = (graph.writers(), graph.readers());
        let gradients = graph.parameters().iter().filter_map(|p| p.gradient);
        let kept = graph.kept().into_iter().chain(gradients).collect();
        let nodes = graph.take_nodes();
        Self {
            graph,
            kinds: nodes.iter().map(kind_of).collect(),
            nodes,
            writers,
            readers,
            kept,
            before: BTreeMap::new(),
            gone: BTreeSet::new(),
            read_anew: BTreeSet::new(),
        }
    }

    /// Returns the graph with all replacements applied. It still contains values that are no longer read.
    pub(super) fn finish(mut self) -> Graph {
        let mut scheduled = Vec::with_capacity(self.nodes.len());
        for (index, node) in self.nodes.into_iter().enumerate() {
            scheduled.extend(self.before.remove(&index).unwrap_or_default());
            if !self.gone.contains(&index) {
                scheduled.push(node);
            }
        }
        self.graph.set_nodes(scheduled);
        self.graph.sync_nodes();
        self.graph
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the kind of a node; `None` if it has been removed or is in no pattern.
    pub(super) fn kind(&self, index: usize) -> Option<Kind> {
        self.kinds[index].filter(|_| !self.gone.contains(&index))
    }

    pub(super) fn phase(&self, index: usize) -> Phase {
        self.nodes[index].phase
    }

    /// Returns the operands of a node.
    pub(super) fn inputs(&self, index: usize) -> Vec<TensorId> {
        self.nodes[index].inputs().collect()
    }

    /// Returns the first result of a node.
    pub(super) fn output(&self, index: usize) -> TensorId {
        self.nodes[index]
            .outputs()
            .next()
            .unwrap_or(TensorId::new(u64::MAX))
    }

    pub(super) fn shape(&self, id: TensorId) -> Vec<usize> {
        let value = self.graph.value(id);
        value.map_or_else(Vec::new, |value| value.shape.clone())
    }

    /// Returns the node that computes a value, if it has the given kind.
    pub(super) fn made_by(&self, id: TensorId, kind: Kind) -> Option<usize> {
        let index = *self.writers.get(&id)?;
        (self.kind(index) == Some(kind)).then_some(index)
    }

    /// Returns the node that computes a value, with its kind.
    pub(super) fn maker(&self, id: TensorId) -> Option<(usize, Kind)> {
        let index = *self.writers.get(&id)?;
        Some((index, self.kind(index)?))
    }

    /// Returns the nodes that read a value and have not been removed.
    pub(super) fn readers(&self, id: TensorId) -> impl Iterator<Item = usize> + '_ {
        let readers = self.readers.get(&id).into_iter().flatten().copied();
        readers.filter(|index| !self.gone.contains(index))
    }

    /// Returns the node with this kind, operands and phase, if there is one.
    pub(super) fn find_node(&self, kind: Kind, inputs: &[TensorId], phase: Phase) -> Option<usize> {
        let is = |index: &usize| {
            self.kind(*index) == Some(kind)
                && self.phase(*index) == phase
                && self.nodes[*index].inputs().eq(inputs.iter().copied())
        };
        self.readers(*inputs.first()?).find(is)
    }

    /// Returns true if only the given nodes read a value.
    pub(super) fn is_read_by(&self, id: TensorId, nodes: &BTreeSet<usize>) -> bool {
        let is_inner = !self.kept.contains(&id) && !self.read_anew.contains(&id);
        is_inner && self.readers(id).all(|reader| nodes.contains(&reader))
    }

    /// Returns true if nodes that compute these results from these operands can be replaced. Nothing else may read
    /// their intermediate values, and they must not compute any of the operands.
    pub(super) fn is_closed(
        &self,
        nodes: &BTreeSet<usize>,
        operands: &[TensorId],
        results: &[TensorId],
    ) -> bool {
        let made = nodes.iter().map(|node| self.output(*node));
        let mut inner = made.filter(|id| !results.contains(id));
        inner.all(|id| !operands.contains(&id) && self.is_read_by(id, nodes))
    }

    /// Returns true unless a value is a view other than a reshape. Its elements are then usually in row-major order,
    /// and a reshape copies nothing.
    pub(super) fn is_in_order(&self, id: TensorId) -> bool {
        let operation = self
            .writers
            .get(&id)
            .map(|index| &self.nodes[*index].operation);
        operation.is_none_or(|operation| {
            let is_reshape = matches!(
                operation,
                OperationIr::BaseFloat(BaseOperationIr::Reshape(_))
            );
            is_reshape || !is(operation, Trait::View)
        })
    }

    /// Returns the first node that reads a value, or the number of nodes if there is none.
    pub(super) fn first_reader(&self, id: TensorId) -> usize {
        self.readers(id).min().unwrap_or(self.nodes.len())
    }

    /// Removes nodes from the finished graph and from later searches.
    pub(super) fn remove(&mut self, nodes: &BTreeSet<usize>) {
        self.gone.extend(nodes.iter().copied());
    }

    /// Inserts a node before another one.
    pub(super) fn insert(&mut self, at: usize, node: Node) {
        self.read_anew.extend(node.inputs());
        self.before.entry(at).or_default().push(node);
    }

    /// Inserts a kernel with these inputs and outputs before the node `at`.
    pub(super) fn insert_kernel(
        &mut self,
        at: usize,
        operation: FusedOperation,
        (inputs, outputs): (&[TensorId], &[TensorId]),
        scalars: Vec<ScalarIr>,
    ) -> Result<(), Error> {
        let inputs = inputs.iter().map(|id| self.graph.read(*id));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let outputs = outputs.iter().map(|id| self.graph.write(*id));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        let phase = self.phase(at);
        let node = fused_node(operation, (inputs, outputs), scalars, phase);
        self.insert(at, node);
        Ok(())
    }

    /// Declares a value with this shape and another value's type.
    pub(super) fn value(&mut self, shape: Vec<usize>, like: TensorId) -> TensorId {
        let of_other = self.graph.value(like).map(|value| value.dtype);
        let dtype = of_other.unwrap_or(DType::F32);
        self.graph.add_value(shape, dtype, Role::Temporary)
    }

    /// Inserts a view of a value with two dims swapped before the node `at`.
    pub(super) fn insert_swap(
        &mut self,
        at: usize,
        (from, to): (TensorId, TensorId),
        (dim1, dim2): (usize, usize),
    ) -> Result<(), Error> {
        let operation = BaseOperationIr::SwapDims(SwapDimsOpIr {
            input: self.graph.read(from)?,
            out: self.graph.write(to)?,
            dim1,
            dim2,
        });
        let swapped = |dim| match dim {
            _ if dim == dim1 => dim2,
            _ if dim == dim2 => dim1,
            other => other,
        };
        self.place_as(from, to, swapped);
        self.place_as(to, from, swapped);
        let phase = self.phase(at);
        self.insert(at, Node::new(OperationIr::BaseFloat(operation), phase));
        Ok(())
    }

    /// Inserts a reshape of one value to another before the node `at`.
    pub(super) fn insert_reshape(
        &mut self,
        at: usize,
        from: TensorId,
        to: TensorId,
    ) -> Result<(), Error> {
        let operation = BaseOperationIr::Reshape(ShapeOpIr {
            input: self.graph.read(from)?,
            out: self.graph.write(to)?,
        });
        self.place_as(from, to, |dim| dim);
        let phase = self.phase(at);
        self.insert(at, Node::new(OperationIr::BaseFloat(operation), phase));
        Ok(())
    }

    /// Places a value like its view or base `view`, unless it is given or already placed.
    fn place_as(&mut self, value: TensorId, view: TensorId, dim_of: impl Fn(usize) -> usize) {
        if self.graph.placements(value).is_some()
            || self
                .graph
                .value(value)
                .is_some_and(|value| value.role.is_given())
        {
            return;
        }
        let Some(on) = self.graph.placements(view) else {
            return;
        };
        let on = on.iter().map(|placement| match placement {
            Placement::Shard(dim) => Placement::Shard(dim_of(*dim)),
            other => *other,
        });
        let on = on.collect();
        self.graph.place(value, on);
    }

    /// Inserts an operation on two values before the node `at`.
    pub(super) fn insert_binary(
        &mut self,
        at: usize,
        of: BinaryKind,
        (lhs, rhs): (TensorId, TensorId),
        to: TensorId,
    ) -> Result<(), Error> {
        let (lhs, rhs) = (self.graph.read(lhs)?, self.graph.read(rhs)?);
        let (dtype, out) = (lhs.dtype, self.graph.write(to)?);
        let operation = match of {
            BinaryKind::Add => {
                let add = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out });
                OperationIr::NumericFloat(dtype, add)
            }
            BinaryKind::Matmul => {
                let product = FloatOperationIr::Matmul(MatmulOpIr { lhs, rhs, out });
                OperationIr::Float(dtype, product)
            }
        };
        let phase = self.phase(at);
        self.insert(at, Node::new(operation, phase));
        Ok(())
    }
}

/// A binary operation that the pass inserts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BinaryKind {
    Add,
    Matmul,
}

/// Returns the kind of an operation whose operands have several types: one is a mask, indices, or a float of a
/// different type.
fn mixed_kind_of(node: &Node) -> Option<Kind> {
    match &node.operation {
        OperationIr::BaseFloat(BaseOperationIr::Gather(op))
            if are_alike([&op.tensor, &op.out]) && op.indices.dtype.is_int() =>
        {
            Some(Kind::Gather(op.dim))
        }
        OperationIr::BaseFloat(BaseOperationIr::Scatter(op))
            if are_alike([&op.tensor, &op.value, &op.out])
                && op.indices.dtype.is_int()
                && op.update == IndexingUpdateOp::Add =>
        {
            Some(Kind::ScatterAdd(op.dim))
        }
        OperationIr::BaseFloat(BaseOperationIr::MaskFill(op))
            if are_alike([&op.tensor, &op.out]) && matches!(op.mask.dtype, DType::Bool(_)) =>
        {
            Some(Kind::MaskFill(op.value.elem::<f64>()))
        }
        OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => match (op.input.dtype, op.out.dtype) {
            (DType::BF16, DType::F32) => Some(Kind::Widen),
            (DType::F32, DType::BF16) => Some(Kind::Narrow),
            _ => None,
        },
        _ => None,
    }
}

fn kind_of(node: &Node) -> Option<Kind> {
    if !node.scalars.is_empty() {
        return None;
    }
    if !are_alike(node.operation.nodes()) {
        return mixed_kind_of(node);
    }
    let number = |scalar: &ScalarIr| scalar.elem::<f64>();
    Some(match &node.operation {
        OperationIr::NumericFloat(_, operation) => match operation {
            NumericOperationIr::Add(_) => Kind::Add,
            NumericOperationIr::Sub(_) => Kind::Sub,
            NumericOperationIr::Mul(_) => Kind::Mul,
            NumericOperationIr::Div(_) => Kind::Div,
            NumericOperationIr::Neg(_) => Kind::Neg,
            NumericOperationIr::SumDim(op) => Kind::SumDim(op.axis),
            NumericOperationIr::MeanDim(op) => Kind::MeanDim(op.axis),
            NumericOperationIr::MaxDim(op) => Kind::MaxDim(op.axis),
            NumericOperationIr::SumDims(op) => Kind::SumDims(bits(&op.axes)?),
            NumericOperationIr::AddScalar(op) => Kind::AddScalar(number(&op.rhs)),
            NumericOperationIr::MulScalar(op) => Kind::MulScalar(number(&op.rhs)),
            NumericOperationIr::DivScalar(op) => Kind::DivScalar(number(&op.rhs)),
            _ => return None,
        },
        OperationIr::Float(_, operation) => match operation {
            FloatOperationIr::Exp(_) => Kind::Exp,
            FloatOperationIr::Log(_) => Kind::Log,
            FloatOperationIr::Sqrt(_) => Kind::Sqrt,
            FloatOperationIr::Recip(_) => Kind::Recip,
            FloatOperationIr::Matmul(_) => Kind::Matmul,
            FloatOperationIr::PowfScalar(op) => Kind::PowfScalar(number(&op.rhs)),
            _ => return None,
        },
        OperationIr::Activation(operation) => match operation {
            ActivationOperationIr::Sigmoid(_) => Kind::Sigmoid,
            ActivationOperationIr::SigmoidBackward(_) => Kind::SigmoidBackward,
            _ => return None,
        },
        OperationIr::BaseFloat(operation) => match operation {
            BaseOperationIr::Ones(_) => Kind::Ones,
            BaseOperationIr::Zeros(_) => Kind::Zeros,
            BaseOperationIr::Reshape(_) => Kind::Reshape,
            BaseOperationIr::SwapDims(op) => {
                Kind::SwapDims(op.dim1.min(op.dim2), op.dim1.max(op.dim2))
            }
            _ => return None,
        },
        OperationIr::Custom(call) => kernel_kind(&call.id)?,
        _ => return None,
    })
}

fn kernel_kind(name: &str) -> Option<Kind> {
    let all = [
        (FusedOperation::Softmax, Kind::Softmax),
        (FusedOperation::SoftmaxBackward, Kind::SoftmaxBackward),
        (FusedOperation::LogSoftmax, Kind::LogSoftmax),
        (FusedOperation::LogSoftmaxBackward, Kind::LogSoftmaxBackward),
    ];
    let known = all.into_iter().find(|(kernel, _)| kernel.name() == name);
    known.map(|(_, kind)| kind)
}

/// Returns a set of dims as a bit mask; `None` if a dim is too large.
pub(super) fn bits(dims: &[usize]) -> Option<u64> {
    dims.iter().try_fold(0, |bits, dim| {
        let bit = u32::try_from(*dim)
            .ok()
            .and_then(|dim| 1_u64.checked_shl(dim));
        bit.map(|bit| bits | bit)
    })
}
