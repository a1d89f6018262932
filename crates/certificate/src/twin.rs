//! Compares a graph with its twin, the graph of the same step at small shapes.
//!
//! A plan at a run's shapes has too many elements to run over the field, so its twin is proved instead. This module
//! checks that the two are the same list of operations on the same values, with the same dims, numbers, collectives and
//! liveness marks. Only sizes may differ, and only as in the two traces.

use std::collections::BTreeSet;

use burn::tensor::Slice;
use burn_fsdp_kernels::FusedOperation;
use burn_fsdp_mesh::{Mesh, Partition};
use burn_ir::{BaseOperationIr, IrVisitorMut, OperationIr, ScalarIr, TensorId, TensorIr};

use burn_fsdp_spmd::graph::{Flops, Graph, Node, Role};
use burn_fsdp_spmd::{Error, ProofError};

/// A size at the shapes of a run, and the corresponding size at small shapes.
type Sizes = (usize, usize);

/// The correspondence between a step's sizes at a run's shapes and at small shapes, derived from two traces.
#[derive(Debug, Default)]
pub(crate) struct Scale {
    /// Dims, numbers of elements, and ends of slices.
    sizes: BTreeSet<Sizes>,
    /// The sizes that differ, as fractions in lowest terms.
    ratios: BTreeSet<Sizes>,
    /// Scalars that differ between the traces, as bits.
    numbers: BTreeSet<(u64, u64)>,
    /// Numbers of ranks among which a tensor may be divided.
    ranks: Vec<usize>,
    /// The graphs traced at the shapes of the run and at small shapes.
    traced: [Graph; 2],
}

impl Scale {
    /// Compares two traces of a step and records their sizes; `small` has small shapes. The step will be divided among
    /// the ranks of `mesh`.
    ///
    /// # Errors
    ///
    /// [`ProofError::Twin`] if they are not the same list of operations.
    pub(crate) fn of(real: &Graph, small: &Graph, mesh: &Mesh) -> Result<Self, Error> {
        let mut ranks: Vec<usize> = mesh.axes().iter().map(|axis| axis.size).collect();
        ranks.push(mesh.size());
        let mut scale = Self {
            ranks,
            traced: [real, small].map(Graph::clone),
            ..Self::default()
        };
        for value in real.values() {
            if let Some(twin) = small.value(value.id) {
                let dims = value.shape.iter().zip(&twin.shape);
                dims.for_each(|(a, b)| scale.learn((*a, *b)));
                scale.learn((value.num_elements(), twin.num_elements()));
            }
        }
        for (node, twin) in real.nodes().iter().zip(small.nodes()) {
            let (a, b) = (Form::of(node), Form::of(twin));
            a.sizes
                .iter()
                .zip(&b.sizes)
                .for_each(|(a, b)| scale.learn((*a, *b)));
            let numbers = a.numbers.iter().zip(&b.numbers);
            let differ = numbers.filter(|(a, b)| a != b);
            let differ = differ.map(|(a, b)| (a.to_bits(), b.to_bits()));
            scale.numbers.extend(differ);
        }
        scale.check(real, small)?;
        Ok(scale)
    }

    fn learn(&mut self, (a, b): Sizes) {
        self.sizes.insert((a, b));
        if a != b && a > 0 && b > 0 {
            self.ratios.insert(lowest((a, b)));
        }
    }

    /// Returns true if two sizes correspond as in the traces, or if they are a rank's parts of such sizes.
    fn explains(&self, (a, b): Sizes) -> bool {
        let is_part = |ranks: &usize| {
            let part = |size: usize| size.div_ceil((*ranks).max(1));
            let mut sizes = self.sizes.iter();
            sizes.any(|(whole, twin)| (part(*whole), part(*twin)) == (a, b))
        };
        a == b
            || self.sizes.contains(&(a, b))
            || a > 0 && b > 0 && self.ratios.contains(&lowest((a, b)))
            || self.ranks.iter().any(is_part)
    }

    /// Returns true if two numbers are equal, or correspond in the traces, or are corresponding sizes or reciprocals of
    /// such sizes.
    fn explains_number(&self, (a, b): (f64, f64)) -> bool {
        let is_size = |a: f64, b: f64| {
            let is_whole = |of: f64| of >= 0.0 && of.fract() == 0.0 && of < 1e15;
            is_whole(a) && is_whole(b) && self.explains((a as usize, b as usize))
        };
        let bits = (a.to_bits(), b.to_bits());
        let over = |of: f64| {
            let size = of.recip().round();
            (size.recip() == of).then_some(size)
        };
        let over = over(a).zip(over(b));
        bits.0 == bits.1
            || self.numbers.contains(&bits)
            || is_size(a, b)
            || over.is_some_and(|(a, b)| is_size(a, b))
    }

    /// Checks that a graph at the shapes of the run and its twin are the same list of operations on the same values.
    ///
    /// # Errors
    ///
    /// [`ProofError::Twin`] with the first node that differs.
    pub(crate) fn check(&self, real: &Graph, small: &Graph) -> Result<(), Error> {
        let differs = |node: Option<usize>, reason: String| -> Result<(), Error> {
            let at = node.and_then(|index| real.nodes().get(index));
            let error = ProofError::Twin {
                pass: real.applied().last().copied(),
                node,
                operation: at.map_or_else(String::new, Node::name),
                reason,
            };
            Err(error.into())
        };
        let nodes = real.nodes().iter().zip(small.nodes()).enumerate();
        for (index, (node, twin)) in nodes {
            if let Err(reason) = self.compare(node, twin) {
                return differs(Some(index), reason);
            }
        }
        let [a, b] = [real, small].map(|graph| graph.nodes().len());
        if a != b {
            let extra = (a > b).then_some(b);
            return differs(
                extra,
                format!("it has {a} operations, but its twin has {b}"),
            );
        }
        if let Err(reason) = self.compare_graphs(real, small) {
            return differs(None, reason);
        }
        Ok(())
    }

    fn compare(&self, node: &Node, twin: &Node) -> Result<(), String> {
        let (a, b) = (Form::of(node), Form::of(twin));
        if a.node != b.node || a.sizes.len() != b.sizes.len() {
            return Err(if node.name() == twin.name() {
                "it differs from its twin in what it reads, writes or does".to_owned()
            } else {
                format!("its twin is {}", twin.name())
            });
        }
        let fixed = a.fixed.iter().zip(&b.fixed).find(|(a, b)| a != b);
        if let Some((a, b)) = fixed {
            return Err(format!("it has {a:?}, but its twin has {b:?}"));
        }
        let sizes = a.sizes.iter().copied().zip(b.sizes.iter().copied());
        if let Some((a, b)) = sizes.into_iter().find(|pair| !self.explains(*pair)) {
            return Err(format!(
                "its size is {a} and its twin's is {b}, a pair that the traces do not have"
            ));
        }
        let mut numbers = a.numbers.iter().copied().zip(b.numbers.iter().copied());
        match numbers.find(|pair| !self.explains_number(*pair)) {
            Some((a, b)) => Err(format!("its number is {a}, but its twin's is {b}")),
            None => Ok(()),
        }
    }

    /// Compares everything but the nodes.
    fn compare_graphs(&self, real: &Graph, small: &Graph) -> Result<(), String> {
        let [a, b] = [real, small].map(|graph| graph.values().len());
        if a != b {
            return Err(format!("it has {a} values, but its twin has {b}"));
        }
        for value in real.values() {
            let id = value.id.value();
            let Some(twin) = small.value(value.id) else {
                return Err(format!("its twin has no value %{id}"));
            };
            let dims = value.shape.iter().copied().zip(twin.shape.iter().copied());
            let is_alike = (value.dtype, &value.role) == (twin.dtype, &twin.role)
                && value.shape.len() == twin.shape.len()
                && real.placements(value.id) == small.placements(value.id)
                && dims.into_iter().all(|pair| self.explains(pair));
            if !is_alike {
                let (a, b) = (&value.shape, &twin.shape);
                return Err(format!(
                    "%{id}, {}, is {a:?}, but {b:?} in its twin",
                    value.role
                ));
            }
            if value.role == Role::Constant && !self.is_known(value.id, [real, small]) {
                return Err(format!(
                    "the data of the constant %{id} differ from the traced data"
                ));
            }
        }
        let rest = |graph: &Graph| {
            let mut parameters = graph.parameters().to_vec();
            parameters
                .iter_mut()
                .for_each(|parameter| parameter.shape.clear());
            let results = (graph.loss(), graph.outputs().clone());
            (parameters, graph.updates().to_vec(), results)
        };
        let fixed = |graph: &Graph| (graph.inputs().to_vec(), graph.applied().to_vec());
        let is_alike = rest(real) == rest(small) && fixed(real) == fixed(small);
        if is_alike && real.mesh() == small.mesh() {
            Ok(())
        } else {
            Err("its parameters, results or updates differ from its twin's".to_owned())
        }
    }

    /// Returns true if both graphs have the same data for a constant, or each has the data of its trace.
    fn is_known(&self, id: TensorId, graphs: [&Graph; 2]) -> bool {
        let [a, b] = graphs.map(|graph| graph.constants().get(&id));
        let is_traced = |(graph, own): (&Graph, _)| graph.constants().get(&id) == own;
        let mut traced = self.traced.iter().zip([a, b]);
        a.is_some() && (a == b || traced.all(is_traced))
    }
}

/// Returns a fraction in lowest terms.
fn lowest((a, b): Sizes) -> Sizes {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1), b / divisor.max(1))
}

/// A node whose sizes and numbers are extracted into separate lists.
struct Form {
    node: Node,
    sizes: Vec<usize>,
    numbers: Vec<f64>,
    /// Integers that must be equal in both graphs.
    fixed: Vec<u64>,
}

impl Form {
    fn of(node: &Node) -> Self {
        let mut form = Self {
            node: node.clone(),
            sizes: Vec::new(),
            numbers: Vec::new(),
            fixed: Vec::new(),
        };
        let mut operation = form.node.operation.clone();
        form.visit(&mut operation);
        if let OperationIr::BaseFloat(BaseOperationIr::RepeatDim(op))
        | OperationIr::BaseInt(BaseOperationIr::RepeatDim(op))
        | OperationIr::BaseBool(BaseOperationIr::RepeatDim(op)) = &mut operation
        {
            form.sizes.push(std::mem::take(&mut op.times));
        }
        form.node.operation = operation;
        if let Some(shift) = &mut form.node.shift {
            form.sizes.push(std::mem::take(&mut shift.len));
        }
        if let Some(draw) = &mut form.node.draw {
            form.sizes.append(&mut draw.whole);
            let lens = draw.shifts.iter_mut();
            form.sizes
                .extend(lens.map(|shift| std::mem::take(&mut shift.len)));
        }
        if let Some(custom) = &mut form.node.custom {
            custom.flops = Flops::default();
        }
        let collective = form.node.collective.as_mut();
        for part in collective.into_iter().flat_map(|of| &mut of.parts) {
            for partition in [Some(&mut part.partition), part.across.as_mut()] {
                let Some(partition) = partition else { continue };
                form.sizes
                    .extend([partition.num_rows(), partition.row_len()]);
                *partition = without_size(partition);
            }
        }
        form
    }

    fn visit(&mut self, operation: &mut OperationIr) {
        // The numbers of these operations determine what they compute.
        let is_code = match &*operation {
            OperationIr::Custom(call) => {
                FusedOperation::named(&call.id).is_some_and(|kernel| kernel.record().check.has_code)
            }
            _ => false,
        };
        struct Take<'a>(&'a mut Form, bool);
        impl IrVisitorMut for Take<'_> {
            fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
                self.0.sizes.push(tensor.shape.rank());
                self.0.sizes.extend(tensor.shape.as_slice());
                tensor.shape = Vec::<usize>::new().into();
            }
            fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
                let words = match *scalar {
                    ScalarIr::Float(number) => {
                        self.0.numbers.push(number);
                        *scalar = ScalarIr::Float(0.0);
                        return;
                    }
                    ScalarIr::Bool(_) => return,
                    ScalarIr::Int(number) => number.unsigned_abs(),
                    ScalarIr::UInt(number) => number,
                };
                if self.1 {
                    self.0.fixed.push(words);
                } else {
                    self.0.sizes.push(words as usize);
                }
                *scalar = match *scalar {
                    ScalarIr::Int(number) => ScalarIr::Int(number.signum()),
                    _ => ScalarIr::UInt(0),
                };
            }
            fn visit_range_mut(&mut self, range: &mut Slice) {
                let ends = [Some(range.start), range.end].into_iter().flatten();
                let ends = ends.map(isize::unsigned_abs);
                self.0.sizes.extend(ends);
                range.start = range.start.signum().min(0);
                range.end = range.end.map(|end| end.signum().min(0));
            }
        }
        operation.visit_mut(&mut Take(self, is_code));
    }
}

/// Returns an empty partition with the same number of shards and the same owner.
fn without_size(partition: &Partition) -> Partition {
    let shards = partition.num_shards();
    let empty = match partition.sole_owner() {
        Some(owner) => Partition::one_owner(0, shards, owner),
        None => Partition::flat(0, shards),
    };
    empty.unwrap_or(*partition)
}
