//! The pass that fuses chains of pointwise operations into one.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use burn::tensor::DType;
use burn_fsdp_kernels::{FusedOperation, LARGE, PointwiseOperand, PointwiseProgram};
use burn_ir::{TensorId, TensorIr};

use crate::error::Error;
use crate::graph::{Graph, Node, ScalarSlot, Sizes, Trait, is};
use crate::kernels::fused_node;
use crate::pass_id::PassId;
use crate::transform::GraphTransform;
use step::Form;

mod step;

/// Maximum number of operations in a program, whose results must all fit in the L1 cache.
const MAX_STEPS: usize = 24;

/// Maximum number of inputs of a program.
const MAX_INPUTS: usize = 12;

/// The pass that fuses every chain of pointwise operations on 32- or 16-bit floats into one operation, which reads
/// and writes memory once. Examples are the update of an optimizer, operations after a product, and a gate and its
/// gradient.
///
/// ```text
/// before                                       after
/// %7 = NumericFloat.MulScalar(%1, 0.9)         %9 = models.pointwise(%1, %2)
/// %8 = NumericFloat.MulScalar(%2, 0.1)
/// %9 = NumericFloat.Add(%7, %8)
/// ```
///
/// A single operation is also replaced if it is on 16-bit floats or on many elements.
///
/// No other operation may read the intermediate values. Results are bit-identical to the separate operations' (see
/// [`PointwiseProgram`]). Placements do not change, because the pass runs after they are chosen. Fusion does not
/// increase memory: an operation joins the readers of its result only if nothing runs between them, or if its inputs
/// are held anyway or are not larger than its result.
///
/// Scalars that change from step to step are patched in the program.
#[derive(Debug, Clone, Copy, Default)]
pub struct FusePointwise;

impl GraphTransform for FusePointwise {
    fn id(&self) -> PassId {
        PassId::FusePointwise
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let uses = Uses::of(&graph);
        let mut nodes: Vec<Option<Node>> = graph.take_nodes().into_iter().map(Some).collect();
        let mut fused = BTreeMap::new();
        let mut gone = BTreeSet::new();
        // Starting from the last node fuses each operation into its last possible reader.
        for root in (0..nodes.len()).rev() {
            if gone.contains(&root) {
                continue;
            }
            let Some(group) = Group::of(&nodes, &uses, root) else {
                continue;
            };
            if let Some(node) = group.fuse(&nodes, &uses, root) {
                gone.extend(group.members.into_iter().filter(|member| *member != root));
                fused.insert(root, node);
            }
        }
        for (root, node) in fused {
            nodes[root] = Some(node);
        }
        for index in gone {
            nodes[index] = None;
        }
        graph.set_nodes(nodes.into_iter().flatten().collect());
        Ok(graph)
    }
}

/// The writer and the readers of each value.
struct Uses {
    kept: BTreeSet<TensorId>,
    writers: BTreeMap<TensorId, usize>,
    readers: BTreeMap<TensorId, Vec<usize>>,
    /// Given values that are replaced after the step, keyed by their replacements.
    replaced: BTreeMap<TensorId, TensorId>,
    /// Values in buffers of the transport. Overwriting one makes a copy, which is held in addition to the buffer.
    received: BTreeSet<TensorId>,
    sizes: Sizes,
}

impl Uses {
    fn of(graph: &Graph) -> Self {
        let mut received = BTreeSet::new();
        for node in graph.nodes() {
            let is_received = match &node.collective {
                Some(_) => true,
                None => {
                    is(&node.operation, Trait::View)
                        && node.inputs().any(|input| received.contains(&input))
                }
            };
            if is_received {
                received.extend(node.outputs());
            }
        }
        let updates = graph.updates().iter();
        Self {
            received,
            replaced: updates.map(|update| (update.from, update.into)).collect(),
            kept: graph.kept(),
            writers: graph.writers(),
            readers: graph.readers(),
            sizes: graph.sizes().clone(),
        }
    }

    /// Returns the number of elements on which decisions about a tensor are based.
    fn elements(&self, tensor: &TensorIr) -> usize {
        self.sizes.elements(tensor.id, tensor.shape.num_elements())
    }

    fn readers(&self, id: TensorId) -> &[usize] {
        self.readers.get(&id).map_or(&[], Vec::as_slice)
    }

    /// Returns the last node that reads a value; `None` if there is none or the value outlives the step.
    fn last_reader(&self, id: TensorId) -> Option<usize> {
        if self.kept.contains(&id) {
            None
        } else {
            self.readers(id).iter().max().copied()
        }
    }
}

/// Operations to fuse; the last one computes the group's result.
struct Group {
    members: BTreeSet<usize>,
    inputs: Vec<TensorId>,
}

impl Group {
    /// Returns the group that ends with the pointwise operation `root`; `None` if fusing it gains nothing.
    fn of(nodes: &[Option<Node>], uses: &Uses, root: usize) -> Option<Self> {
        let last = nodes[root].as_ref()?;
        let form = Form::of(last)?;
        let (shape, dtype) = (&form.out.shape, form.out.dtype);
        let mut members = BTreeSet::from([root]);
        let mut num_steps = form.num_steps();
        let mut inputs = BTreeSet::new();
        let mut ready: BinaryHeap<usize> = BinaryHeap::new();
        let mut look_at = |of: &Form<'_>, ready: &mut BinaryHeap<usize>| {
            for input in of.inputs() {
                inputs.insert(input.id);
                ready.extend(uses.writers.get(&input.id));
            }
        };
        look_at(&form, &mut ready);
        // The latest comes first: its readers are in the group by now, or never will be.
        while let Some(index) = ready.pop() {
            let Some(node) = nodes[index].as_ref().filter(|_| !members.contains(&index)) else {
                continue;
            };
            let Some(form) = Form::of(node) else {
                continue;
            };
            let out = form.out.id;
            let fits = form.out.shape == *shape
                && form.out.dtype == dtype
                && node.phase == last.phase
                && num_steps + form.num_steps() <= MAX_STEPS
                && !uses.kept.contains(&out)
                && uses
                    .readers(out)
                    .iter()
                    .all(|reader| members.contains(reader));
            if !fits || !may_wait(nodes, uses, (&form, index), (&members, root)) {
                continue;
            }
            num_steps += form.num_steps();
            members.insert(index);
            look_at(&form, &mut ready);
        }
        let made: BTreeSet<TensorId> = members
            .iter()
            .filter_map(|member| Some(Form::of(nodes[*member].as_ref()?)?.out.id))
            .collect();
        inputs.retain(|input| !made.contains(input));
        // Burn processes 16-bit floats one by one, and all elements on one thread.
        let is_large = uses.elements(form.out) >= LARGE;
        let is_chain = members.len() > 1 || dtype == DType::BF16 || is_large;
        (is_chain && inputs.len() <= MAX_INPUTS).then(|| Self {
            members,
            inputs: inputs.into_iter().collect(),
        })
    }

    /// Returns the node that runs the group as one program.
    fn fuse(&self, nodes: &[Option<Node>], uses: &Uses, root: usize) -> Option<Node> {
        let mut program = PointwiseProgram::default();
        let mut known: BTreeMap<TensorId, PointwiseOperand> = self
            .inputs
            .iter()
            .enumerate()
            .map(|(index, id)| (*id, PointwiseOperand::Input(index)))
            .collect();
        let mut tensors: BTreeMap<TensorId, TensorIr> = BTreeMap::new();
        let mut slots = Vec::new();
        for member in &self.members {
            let node = nodes[*member].as_ref()?;
            let form = Form::of(node)?;
            for input in form.inputs() {
                tensors.insert(input.id, input.clone());
            }
            let (result, number) = form.add_to(&mut program, &known)?;
            known.insert(form.out.id, result);
            slots.extend(node.scalars.iter().copied().zip(number));
        }
        let last = nodes[root].as_ref()?;
        let out = Form::of(last)?.out;
        let may_take = |id: &TensorId| {
            let is_whole = tensors
                .get(id)
                .is_some_and(|input| input.shape == out.shape);
            let last = uses.last_reader(*id);
            is_whole && last.is_some_and(|last| self.members.contains(&last))
        };
        let mut inputs = self.inputs.iter();
        // The new value of a state overwrites the old one if possible.
        let replaced = uses.replaced.get(&out.id);
        let own = replaced.filter(|id| may_take(id));
        let own = match own {
            Some(id) => inputs.position(|input| input == id),
            None => inputs.position(|id| may_take(id) && !uses.received.contains(id)),
        };
        program.write_over(own);
        let slots = slots.into_iter().map(|(slot, number)| ScalarSlot {
            first: program.place_of(number),
            ..slot
        });
        let slots = slots.collect();
        let inputs = self.inputs.iter().map(|id| tensors.get(id).cloned());
        let mut node = fused_node(
            FusedOperation::Pointwise,
            (inputs.collect::<Option<_>>()?, vec![out.clone()]),
            program.to_scalars(),
            last.phase,
        );
        node.scalars = slots;
        node.path = last.path.clone();
        Some(node)
    }
}

/// Returns true if an operation may be delayed to the last operation of a group: nothing else runs in between, or the
/// delay holds no more memory.
fn may_wait(
    nodes: &[Option<Node>],
    uses: &Uses,
    (form, index): (&Form<'_>, usize),
    (members, root): (&BTreeSet<usize>, usize),
) -> bool {
    let runs_between = (index + 1..root).any(|between| {
        let is_other = |node: &Node| !is(&node.operation, Trait::View);
        !members.contains(&between) && nodes[between].as_ref().is_some_and(is_other)
    });
    if !runs_between {
        return true;
    }
    let held_longer = |input: &&TensorIr| {
        // Otherwise other nodes or the group hold it as long anyway.
        let last = uses.last_reader(input.id);
        last.is_some_and(|last| last < root && !members.contains(&last))
    };
    let bytes = |tensor: &TensorIr| uses.elements(tensor) * tensor.dtype.size();
    let longer: usize = form.inputs().filter(held_longer).map(bytes).sum();
    longer <= bytes(form.out)
}
