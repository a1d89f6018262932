//! A model of the executor's tensors, without elements.

use std::collections::BTreeMap;

use burn_ir::{TensorId, TensorIr, TensorStatus};

use super::memory::{MemoryPlan, Moment};
use crate::backend::{Allocation, Operand, Strides, over_whole, place};
use crate::category::{Bytes, Category, categories};
use burn_fsdp_spmd::Error;
use burn_fsdp_spmd::graph::{Absent, Collective, Graph, Node, Role, Stage};

/// The memory of one or more tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Memory {
    num_bytes: u64,
    num_tensors: usize,
    /// True if the memory is a transport buffer. An operation copies it instead of overwriting it.
    is_received: bool,
    category: Category,
}

#[derive(Debug, Clone)]
struct Tensor {
    memory: usize,
    strides: Strides,
    element_size: usize,
}

/// A rank's tensors and their memory.
pub(super) struct Heap {
    categories: BTreeMap<TensorId, Category>,
    memories: BTreeMap<usize, Memory>,
    tensors: BTreeMap<TensorId, Tensor>,
    next_memory: usize,
    live: Bytes,
    /// True if operations overwrite operands whose memory no other tensor uses.
    is_reusing: bool,
    /// The values that this rank lacks because another rank owns them.
    absent: Absent,
    rank: usize,
}

/// The part of the heap's state that affects the next step.
pub(super) type State = Vec<(TensorId, Strides, Option<Memory>)>;

/// A result that is not yet in the heap.
struct Written {
    id: TensorId,
    tensor: Tensor,
    /// The memory, if it is new.
    new: Option<Memory>,
}

/// The live bytes while one node runs, and the bytes saved by reuse.
#[derive(Debug, Default)]
struct Run {
    during: Bytes,
    /// Bytes of operands that results overwrite.
    reused: u64,
}

impl Heap {
    /// Creates a heap with the tensors that a rank has between steps.
    pub(super) fn new(graph: &Graph, rank: usize, is_reusing: bool) -> Result<Self, Error> {
        let mut heap = Self {
            categories: categories(graph),
            memories: BTreeMap::new(),
            tensors: BTreeMap::new(),
            next_memory: 0,
            live: Bytes::default(),
            is_reusing,
            absent: graph.absent_on(rank)?,
            rank,
        };
        for value in graph.values() {
            if value.role.is_given() && !matches!(value.role, Role::Input(_)) {
                heap.give(value.id, &value.shape, value.dtype.size());
            }
        }
        Ok(heap)
    }

    /// Adds a tensor that no node computes, in new memory, unless another rank owns it.
    fn give(&mut self, id: TensorId, shape: &[usize], element_size: usize) {
        if self.absent.contains(id) {
            return;
        }
        let written = self.fresh(id, Strides::contiguous(shape), None, element_size);
        self.add(written);
    }

    fn category(&self, id: TensorId) -> Category {
        let category = self.categories.get(&id);
        category.copied().unwrap_or(Category::Temporaries)
    }

    /// Creates a result in new memory with this many elements, or as many as its shape has.
    fn fresh(
        &mut self,
        id: TensorId,
        strides: Strides,
        num_elements: Option<usize>,
        element_size: usize,
    ) -> Written {
        let num_elements = num_elements.unwrap_or_else(|| strides.num_elements());
        let memory = self.next_memory;
        self.next_memory += 1;
        Written {
            id,
            tensor: Tensor {
                memory,
                strides,
                element_size,
            },
            new: Some(Memory {
                num_bytes: (num_elements * element_size) as u64,
                num_tensors: 0,
                is_received: false,
                category: self.category(id),
            }),
        }
    }

    fn add(&mut self, written: Written) {
        let Written { id, tensor, new } = written;
        let key = tensor.memory;
        if let Some(memory) = new {
            if memory.num_bytes == 0 {
                return;
            }
            self.live[memory.category] += memory.num_bytes;
            self.memories.insert(key, memory);
        }
        if let Some(memory) = self.memories.get_mut(&key) {
            memory.num_tensors += 1;
            self.tensors.insert(id, tensor);
        }
    }

    fn remove(&mut self, id: TensorId) {
        let Some(tensor) = self.tensors.remove(&id) else {
            return;
        };
        if let Some(memory) = self.memories.get_mut(&tensor.memory) {
            memory.num_tensors -= 1;
            if memory.num_tensors == 0 {
                self.live[memory.category] -= memory.num_bytes;
                self.memories.remove(&tensor.memory);
            }
        }
    }

    /// Returns the state that affects the next step.
    pub(super) fn state(&self) -> State {
        let tensors = self.tensors.iter();
        let tensors = tensors.map(|(id, tensor)| {
            let memory = self.memories.get(&tensor.memory).cloned();
            (*id, tensor.strides.clone(), memory)
        });
        tensors.collect()
    }

    /// Replays one step, from the batch to the new parameters.
    pub(super) fn step(&mut self, graph: &Graph) -> Result<MemoryPlan, Error> {
        // Pending values that an optimizer step consumes without producing new ones come from the previous step.
        for value in graph.values() {
            if matches!(value.role, Role::Pending(_)) && !self.tensors.contains_key(&value.id) {
                self.give(value.id, &value.shape, value.dtype.size());
            }
        }
        let at_rest = self.live;
        for input in graph.inputs() {
            if let Some(value) = graph.value(*input) {
                self.give(value.id, &value.shape, value.dtype.size());
            }
        }
        let mut plan = MemoryPlan::begin(at_rest, self.live, graph.nodes().len());
        for (index, node) in graph.nodes().iter().enumerate() {
            if self.absent.skips(node) {
                self.skip(node);
                continue;
            }
            let run = self.run_node(node)?;
            plan.reused_in_place += run.reused;
            if !node.is_drop() {
                plan.record(Moment {
                    node: index,
                    during: run.during,
                    after: self.live.total(),
                });
            }
        }
        self.finish(graph);
        Ok(plan)
    }

    /// Frees the operands that a node would have consumed if this rank ran it.
    fn skip(&mut self, node: &Node) {
        let taken = node.operation.inputs();
        let taken = taken.filter(|input| input.status == TensorStatus::ReadWrite);
        taken.for_each(|input| self.remove(input.id));
    }

    fn run_node(&mut self, node: &Node) -> Result<Run, Error> {
        let stage = node.collective.as_ref().map(|collective| collective.stage);
        let taken: Vec<_> = node
            .operation
            .inputs()
            .filter(|input| input.status == TensorStatus::ReadWrite)
            .map(|input| input.id)
            .collect();
        let mut run = Run::default();
        let written = match (&node.collective, node.is_drop()) {
            (Some(collective), _) => self.received(node, collective)?,
            (None, true) => Vec::new(),
            (None, false) => self.computed(node, &mut run)?,
        };
        if stage == Some(Stage::Wait) {
            // The results were counted when their memory was reserved.
            taken.into_iter().for_each(|id| self.remove(id));
            written.into_iter().for_each(|written| self.add(written));
            run.during = self.live;
            return Ok(run);
        }
        run.during = self.live;
        for memory in written.iter().filter_map(|written| written.new.as_ref()) {
            run.during[memory.category] += memory.num_bytes;
        }
        // Results are added first, so memory that they share with operands is not freed in between.
        written.into_iter().for_each(|written| self.add(written));
        taken.into_iter().for_each(|id| self.remove(id));
        Ok(run)
    }

    /// Creates the results of a collective in transport buffers, or in new memory if they were padded.
    fn received(&mut self, node: &Node, collective: &Collective) -> Result<Vec<Written>, Error> {
        let is_here = |input: &&TensorIr| !self.absent.contains(input.id);
        for input in node.operation.inputs().filter(is_here) {
            self.operand(input)?;
        }
        let gets = collective.kind.contract().gets.share;
        let mut received = Vec::new();
        for (output, part) in node.operation.outputs().zip(&collective.parts) {
            if self.absent.contains(output.id) {
                continue;
            }
            let strides = Strides::contiguous(&output.shape);
            let mut written = self.fresh(output.id, strides, None, output.dtype.size());
            // On a mesh with several axes, a group contains only some of the ranks. The last axis varies fastest.
            let rank = self.rank % part.partition.num_shards();
            let is_padded = part.share_len(gets, rank) != part.padded_len(gets);
            if let Some(memory) = &mut written.new {
                memory.is_received = collective.stage != Stage::Start && !is_padded;
            }
            received.push(written);
        }
        Ok(received)
    }

    fn computed(&mut self, node: &Node, run: &mut Run) -> Result<Vec<Written>, Error> {
        // A norm covers only the tensors that this rank has.
        let is_here = |input: &&TensorIr| !self.absent.contains(input.id);
        let inputs: Vec<&TensorIr> = node.operation.inputs().filter(is_here).collect();
        let operands = inputs
            .iter()
            .map(|input| self.operand(input))
            .collect::<Result<Vec<_>, _>>()?;
        let custom = node.custom.and_then(|custom| custom.written_over);
        let over = custom.and_then(|index| over_whole(operands.get(index)?, index));
        let first = over.unwrap_or_else(|| place(&node.operation, &operands));
        let outputs: Vec<TensorIr> = node.operation.outputs().cloned().collect();
        let mut written = Vec::new();
        let mut places = Some(first).into_iter();
        for output in &outputs {
            let size = output.dtype.size();
            let new = Strides::contiguous(&output.shape);
            written.push(match places.next() {
                Some(Allocation::View(index, strides)) => {
                    self.shared(output, inputs[index].id, strides, false)
                }
                Some(Allocation::Over(index, strides)) => {
                    let shared = self.shared(output, inputs[index].id, strides, true);
                    if shared.new.is_none() {
                        run.reused += self.bytes_of(shared.tensor.memory);
                    }
                    shared
                }
                Some(Allocation::New(strides, num_elements)) => {
                    self.fresh(output.id, strides, Some(num_elements), size)
                }
                None => self.fresh(output.id, new, None, size),
            });
        }
        Ok(written)
    }

    fn bytes_of(&self, memory: usize) -> u64 {
        self.memories.get(&memory).map_or(0, |m| m.num_bytes)
    }

    fn operand(&self, input: &TensorIr) -> Result<Operand, Error> {
        let Some(tensor) = self.tensors.get(&input.id) else {
            // Tensors without elements are not tracked.
            if input.shape.num_elements() == 0 {
                return Ok(Operand {
                    strides: Strides::contiguous(&input.shape),
                    is_unique: false,
                    memory_elements: 0,
                });
            }
            let id = input.id.value();
            return Err(Error::Internal(format!(
                "value {id} is read but does not exist"
            )));
        };
        let memory = self.memories.get(&tensor.memory);
        let num_tensors = memory.map_or(0, |memory| memory.num_tensors);
        let num_bytes = memory.map_or(0, |memory| memory.num_bytes);
        Ok(Operand {
            strides: tensor.strides.clone(),
            is_unique: self.is_reusing
                && input.status == TensorStatus::ReadWrite
                && num_tensors == 1,
            memory_elements: num_bytes as usize / tensor.element_size,
        })
    }

    /// Creates a result in the memory of an operand, or in a copy if it would overwrite a transport buffer.
    fn shared(
        &mut self,
        output: &TensorIr,
        of: TensorId,
        strides: Strides,
        writes: bool,
    ) -> Written {
        let size = output.dtype.size();
        let Some(operand) = self.tensors.get(&of) else {
            return self.fresh(output.id, strides, None, size);
        };
        let memory = operand.memory;
        let found = self.memories.get(&memory);
        if writes && found.is_some_and(|memory| memory.is_received) {
            let num_elements = self.bytes_of(memory) as usize / size.max(1);
            return self.fresh(output.id, strides, Some(num_elements), size);
        }
        if writes {
            self.recategorize(memory, output.id);
        }
        Written {
            id: output.id,
            tensor: Tensor {
                memory,
                strides,
                element_size: size,
            },
            new: None,
        }
    }

    /// Moves overwritten memory to the category of its new contents.
    fn recategorize(&mut self, key: usize, id: TensorId) {
        let category = self.category(id);
        if let Some(memory) = self.memories.get_mut(&key) {
            self.live[memory.category] -= memory.num_bytes;
            self.live[category] += memory.num_bytes;
            memory.category = category;
        }
    }

    /// Moves the step's updates into the tensors that the next step reads, and frees the rest.
    fn finish(&mut self, graph: &Graph) {
        let updates: Vec<_> = graph
            .updates()
            .iter()
            .filter_map(|update| Some((update.into, self.tensors.get(&update.from)?.clone())))
            .collect();
        for (_, tensor) in &updates {
            if let Some(memory) = self.memories.get_mut(&tensor.memory) {
                memory.num_tensors += 1;
            }
        }
        let ends = graph.updates().iter().map(|update| update.from);
        for id in ends.chain(graph.results()) {
            if !graph.is_given(id) {
                self.remove(id);
            }
        }
        for (into, tensor) in updates {
            self.remove(into);
            self.tensors.insert(into, tensor);
        }
        for input in graph.inputs() {
            self.remove(*input);
        }
    }
}
