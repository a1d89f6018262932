//! Finds operations by their operands, and replaces them.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::DType;
use burn_ir::{ScalarIr, TensorId};

use super::kind::Kind;

/// The phase of a train step in which an operation runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatternPhase {
    /// Computes the loss from the batch.
    Forward,
    /// Computes the gradients from the loss.
    Backward,
    /// Computes new parameters from the gradients.
    Optimizer,
}

/// An operation of the graph in which patterns are searched.
#[derive(Debug, Clone)]
pub struct PatternNode {
    /// The kind; `None` if the operation is in no pattern.
    pub kind: Option<Kind>,
    /// The operands.
    pub inputs: Vec<TensorId>,
    /// The results.
    pub outputs: Vec<TensorId>,
    /// The phase.
    pub phase: PatternPhase,
    /// True for a view other than a reshape.
    pub is_view: bool,
}

/// A change to the graph.
#[derive(Debug, Clone)]
pub enum PatternChange {
    /// Declares a value. Its id is unique among changes, and none of the graph's.
    Declare {
        /// The id.
        id: TensorId,
        /// The shape.
        shape: Vec<usize>,
        /// The type.
        dtype: DType,
    },
    /// Inserts an operation.
    Insert {
        /// The node before which it runs, in the same phase.
        at: usize,
        /// The operation.
        operation: Inserted,
        /// The operands.
        inputs: Vec<TensorId>,
        /// The results.
        outputs: Vec<TensorId>,
    },
}

/// An operation that a pattern inserts.
#[derive(Debug, Clone, PartialEq)]
pub enum Inserted {
    /// The kernel with this name and these scalars.
    Kernel(&'static str, Vec<ScalarIr>),
    /// The sum of two values.
    Add,
    /// A matrix product.
    Matmul,
    /// A reshape.
    Reshape,
    /// A view with two dims swapped.
    Swap(usize, usize),
}

/// The smallest id of a new value.
const NEW: u64 = 1 << 62;

/// A graph, and the replacements to apply to it.
#[derive(Debug)]
pub struct Patterns {
    nodes: Vec<PatternNode>,
    /// Shapes and types of all values. Further values have the ids after [`NEW`].
    values: BTreeMap<TensorId, (Vec<usize>, DType)>,
    writers: BTreeMap<TensorId, usize>,
    readers: BTreeMap<TensorId, Vec<usize>>,
    /// Values that are also needed outside the nodes: gradients, and values that outlive the step.
    kept: BTreeSet<TensorId>,
    /// The declared values and inserted operations, in order.
    changes: Vec<PatternChange>,
    /// Removed nodes.
    gone: BTreeSet<usize>,
    /// Values that the inserted nodes read.
    read_anew: BTreeSet<TensorId>,
}

impl Patterns {
    /// Starts with the nodes of a graph in order, the shapes and types of its values, and the values that are also
    /// needed outside the nodes.
    pub fn new(
        nodes: Vec<PatternNode>,
        values: BTreeMap<TensorId, (Vec<usize>, DType)>,
        kept: BTreeSet<TensorId>,
    ) -> Self {
        let mut writers = BTreeMap::new();
        let mut readers: BTreeMap<TensorId, Vec<usize>> = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            writers.extend(node.outputs.iter().map(|output| (*output, index)));
            for input in &node.inputs {
                readers.entry(*input).or_default().push(index);
            }
        }
        Self {
            nodes,
            values,
            writers,
            readers,
            kept,
            changes: Vec::new(),
            gone: BTreeSet::new(),
            read_anew: BTreeSet::new(),
        }
    }

    /// Returns the changes in order, and the removed nodes.
    pub fn finish(self) -> (Vec<PatternChange>, BTreeSet<usize>) {
        (self.changes, self.gone)
    }

    /// Returns the number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the kind of a node; `None` if it has been removed or is in no pattern.
    pub fn kind(&self, index: usize) -> Option<Kind> {
        self.nodes[index]
            .kind
            .filter(|_| !self.gone.contains(&index))
    }

    /// Returns the phase of a node.
    pub fn phase(&self, index: usize) -> PatternPhase {
        self.nodes[index].phase
    }

    /// Returns the operands of a node.
    pub fn inputs(&self, index: usize) -> Vec<TensorId> {
        self.nodes[index].inputs.clone()
    }

    /// Returns the first result of a node.
    pub fn output(&self, index: usize) -> TensorId {
        let first = self.nodes[index].outputs.first().copied();
        first.unwrap_or(TensorId::new(u64::MAX))
    }

    /// Returns the shape of a value.
    pub fn shape(&self, id: TensorId) -> Vec<usize> {
        let value = self.values.get(&id);
        value.map_or_else(Vec::new, |(shape, _)| shape.clone())
    }

    /// Returns the node that computes a value, if it has the given kind.
    pub fn made_by(&self, id: TensorId, kind: Kind) -> Option<usize> {
        let index = *self.writers.get(&id)?;
        (self.kind(index) == Some(kind)).then_some(index)
    }

    /// Returns the node that computes a value, with its kind.
    pub fn maker(&self, id: TensorId) -> Option<(usize, Kind)> {
        let index = *self.writers.get(&id)?;
        Some((index, self.kind(index)?))
    }

    /// Returns the nodes that read a value and have not been removed.
    pub fn readers(&self, id: TensorId) -> impl Iterator<Item = usize> + '_ {
        let readers = self.readers.get(&id).into_iter().flatten().copied();
        readers.filter(|index| !self.gone.contains(index))
    }

    /// Returns the node with this kind, operands and phase, if there is one.
    pub fn find_node(&self, kind: Kind, inputs: &[TensorId], phase: PatternPhase) -> Option<usize> {
        let is = |index: &usize| {
            self.kind(*index) == Some(kind)
                && self.phase(*index) == phase
                && self.nodes[*index].inputs == inputs
        };
        self.readers(*inputs.first()?).find(is)
    }

    /// Returns true if only the given nodes read a value.
    pub fn is_read_by(&self, id: TensorId, nodes: &BTreeSet<usize>) -> bool {
        let is_inner = !self.kept.contains(&id) && !self.read_anew.contains(&id);
        is_inner && self.readers(id).all(|reader| nodes.contains(&reader))
    }

    /// Returns true if nodes that compute these results from these operands can be replaced. Nothing else may read
    /// their intermediate values, and they must not compute any of the operands.
    pub fn is_closed(
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
    pub fn is_in_order(&self, id: TensorId) -> bool {
        let writer = self.writers.get(&id);
        writer.is_none_or(|index| !self.nodes[*index].is_view)
    }

    /// Returns the first node that reads a value, or the number of nodes if there is none.
    pub fn first_reader(&self, id: TensorId) -> usize {
        self.readers(id).min().unwrap_or(self.nodes.len())
    }

    /// Removes nodes from the finished graph and from later searches.
    pub fn remove(&mut self, nodes: &BTreeSet<usize>) {
        self.gone.extend(nodes.iter().copied());
    }

    /// Inserts a kernel with these inputs and outputs before the node `at`.
    pub fn insert_kernel(
        &mut self,
        at: usize,
        kernel: &'static str,
        (inputs, outputs): (&[TensorId], &[TensorId]),
        scalars: Vec<ScalarIr>,
    ) {
        let operation = Inserted::Kernel(kernel, scalars);
        self.insert(at, operation, inputs, outputs);
    }

    /// Inserts a view of a value with two dims swapped before the node `at`.
    pub fn insert_swap(
        &mut self,
        at: usize,
        (from, to): (TensorId, TensorId),
        dims: (usize, usize),
    ) {
        self.insert(at, Inserted::Swap(dims.0, dims.1), &[from], &[to]);
    }

    /// Inserts a reshape of one value to another before the node `at`.
    pub fn insert_reshape(&mut self, at: usize, from: TensorId, to: TensorId) {
        self.insert(at, Inserted::Reshape, &[from], &[to]);
    }

    /// Inserts the sum of two values before the node `at`.
    pub fn insert_sum(&mut self, at: usize, of: [TensorId; 2], to: TensorId) {
        self.insert(at, Inserted::Add, &of, &[to]);
    }

    /// Inserts the matrix product of two values before the node `at`.
    pub fn insert_product(&mut self, at: usize, of: [TensorId; 2], to: TensorId) {
        self.insert(at, Inserted::Matmul, &of, &[to]);
    }

    fn insert(
        &mut self,
        at: usize,
        operation: Inserted,
        inputs: &[TensorId],
        outputs: &[TensorId],
    ) {
        self.read_anew.extend(inputs);
        self.changes.push(PatternChange::Insert {
            at,
            operation,
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
        });
    }

    /// Declares a value with this shape and another value's type.
    pub fn value(&mut self, shape: Vec<usize>, like: TensorId) -> TensorId {
        let of_other = self.values.get(&like).map(|(_, dtype)| *dtype);
        self.value_of(shape, of_other.unwrap_or(DType::F32))
    }

    /// Declares a value.
    pub fn value_of(&mut self, shape: Vec<usize>, dtype: DType) -> TensorId {
        let id = TensorId::new(NEW + self.changes.len() as u64);
        self.values.insert(id, (shape.clone(), dtype));
        self.changes
            .push(PatternChange::Declare { id, shape, dtype });
        id
    }
}
