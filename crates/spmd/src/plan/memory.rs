//! Live bytes over the step.

use std::collections::BTreeMap;

use burn_ir::{TensorId, TensorIr, TensorStatus};
use serde::Serialize;

use super::category::{Bytes, Category, categories};
use super::kernel::{self, Operand, Place};
use super::layout::Layout;
use super::scratch::scratch;
use super::transport::{Buffer, Transport};
use crate::Error;
use crate::graph::{CollectiveKind, Graph, Node, Role, Stage};

/// Bytes while one node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// Index of the node in the schedule.
    pub node: usize,
    /// What is there while it runs: its operands and its results.
    pub during: Bytes,
    /// What is there when it is done.
    pub after: u64,
    /// What the operation allocates and frees while it runs, beside its operands and results.
    pub scratch: u64,
    /// What the transport holds while it runs, beside what tensors lie in.
    pub transport: u64,
}

impl Moment {
    /// What the process's allocator has while the node runs.
    pub fn allocated(&self) -> u64 {
        self.during.total() + self.scratch + self.transport
    }
}

/// Live tensor bytes over one step on one rank.
///
/// They are counted as the executor's [`MemoryTable`](crate::run::MemoryTable) counts them: by memory, not
/// by tensor, so that views are free and an operation that writes over its operand makes nothing new.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Bytes between steps.
    pub at_rest: Bytes,
    /// The most bytes at once.
    pub peak: Bytes,
    /// The node at which that is first reached; `None` if it is when the batch comes.
    pub peak_node: Option<usize>,
    /// Every node but drops, in order.
    pub moments: Vec<Moment>,
    /// Bytes that results did not need, because they were written over an operand.
    pub reused_in_place: u64,
    /// The most bytes that one operation allocates and frees while it runs, which no tensor of the graph
    /// lies in: known of Burn's CPU backend with one thread per rank, and of operations that are not Burn's
    /// and say so.
    pub scratch: u64,
    /// The most bytes at once with scratch and with what the transport holds, which is what the process's
    /// allocator sees.
    pub allocated: u64,
    /// The node at which that is first reached; `None` if it is when the batch comes.
    pub allocated_node: Option<usize>,
}

impl MemoryPlan {
    /// The most bytes at once.
    pub fn peak_bytes(&self) -> u64 {
        self.peak.total()
    }

    /// Of a scheduled graph, on that rank, in any step after the first two.
    ///
    /// The graph must have been through the [`Liveness`](crate::passes::Liveness) pass: without
    /// it, nothing is freed.
    ///
    /// # Errors
    ///
    /// [`Error::Internal`] for a node that reads what nothing wrote.
    pub fn new(graph: &Graph, rank: usize) -> Result<Self, Error> {
        Self::simulate(graph, rank, true)
    }

    /// The same, if no operation wrote over an operand.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn without_reuse(graph: &Graph, rank: usize) -> Result<Self, Error> {
        Self::simulate(graph, rank, false)
    }

    fn simulate(graph: &Graph, rank: usize, is_reusing: bool) -> Result<Self, Error> {
        let mut heap = Heap::new(graph);
        heap.is_reusing = is_reusing;
        // What a step leaves is what the next begins with. Where the memory of new parameters and states
        // comes from is usually as it was, and settled after two steps at most.
        for _ in 0..2 {
            let before = heap.state();
            let plan = heap.step(graph, rank)?;
            if heap.state() == before {
                return Ok(plan);
            }
        }
        heap.step(graph, rank)
    }

    /// What is there when the batch has come, and what the transport holds then.
    fn begin(&mut self, live: Bytes, transport: u64) {
        self.peak = live;
        self.allocated = live.total() + transport;
    }

    fn record(&mut self, moment: Moment) {
        if moment.during.total() > self.peak.total() {
            self.peak = moment.during;
            self.peak_node = Some(moment.node);
        }
        if moment.allocated() > self.allocated {
            self.allocated = moment.allocated();
            self.allocated_node = Some(moment.node);
        }
        self.scratch = self.scratch.max(moment.scratch);
        self.moments.push(moment);
    }
}

/// Memory that one or more tensors lie in.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Memory {
    num_bytes: u64,
    num_tensors: usize,
    /// A buffer of the transport: who writes gets a copy.
    is_received: bool,
    /// The buffer of the transport that lives as long as it. Of a copy that is the buffer it was copied
    /// from, because the one tensor owns both.
    buffer: Option<Buffer>,
    category: Category,
}

#[derive(Debug, Clone)]
struct Tensor {
    memory: usize,
    layout: Layout,
    element_size: usize,
}

/// The executor's tensors, without elements.
struct Heap {
    categories: BTreeMap<TensorId, Category>,
    memories: BTreeMap<usize, Memory>,
    tensors: BTreeMap<TensorId, Tensor>,
    next_memory: usize,
    live: Bytes,
    transport: Transport,
    /// Operations write over operands that nobody else holds.
    is_reusing: bool,
}

/// A result before it is counted.
struct Written {
    id: TensorId,
    tensor: Tensor,
    /// Of memory that was not there before.
    new: Option<Memory>,
}

/// What running a node took.
#[derive(Debug, Default)]
struct Run {
    during: Bytes,
    /// Bytes written over operands.
    reused: u64,
    scratch: u64,
    /// What the transport held beside what tensors lay in.
    transport: u64,
}

/// Results of a collective.
#[derive(Default)]
struct Received {
    written: Vec<Written>,
    /// Buffers that are given back when they are there.
    spare: Vec<Buffer>,
    scratch: u64,
}

fn bytes_of(tensor: &TensorIr) -> u64 {
    (tensor.shape.num_elements() * tensor.dtype.size()) as u64
}

impl Heap {
    /// What is there between steps.
    fn new(graph: &Graph) -> Self {
        let mut heap = Self {
            categories: categories(graph),
            memories: BTreeMap::new(),
            tensors: BTreeMap::new(),
            next_memory: 0,
            live: Bytes::default(),
            transport: Transport::default(),
            is_reusing: true,
        };
        for value in graph.values() {
            if value.role.is_given() && !matches!(value.role, Role::Input(_)) {
                heap.give(value.id, &value.shape, value.dtype.size());
            }
        }
        heap
    }

    /// A tensor from outside, in memory of its own.
    fn give(&mut self, id: TensorId, shape: &[usize], element_size: usize) {
        let written = self.fresh(id, Layout::contiguous(shape), None, element_size);
        self.add(written);
    }

    fn category(&self, id: TensorId) -> Category {
        let category = self.categories.get(&id);
        category.copied().unwrap_or(Category::Temporaries)
    }

    /// In new memory of that many elements, or of as many as the layout has.
    fn fresh(
        &mut self,
        id: TensorId,
        layout: Layout,
        num_elements: Option<usize>,
        element_size: usize,
    ) -> Written {
        let num_elements = num_elements.unwrap_or_else(|| layout.num_elements());
        let memory = self.next_memory;
        self.next_memory += 1;
        Written {
            id,
            tensor: Tensor {
                memory,
                layout,
                element_size,
            },
            new: Some(Memory {
                num_bytes: (num_elements * element_size) as u64,
                num_tensors: 0,
                is_received: false,
                buffer: None,
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
                if let Some(buffer) = memory.buffer {
                    self.transport.give_back(buffer);
                }
                self.memories.remove(&tensor.memory);
            }
        }
    }

    /// All that the next step depends on.
    fn state(&self) -> (Vec<(TensorId, Layout, Option<Memory>)>, Transport) {
        let tensors = self.tensors.iter();
        let tensors = tensors
            .map(|(id, tensor)| {
                let memory = self.memories.get(&tensor.memory).cloned();
                (*id, tensor.layout.clone(), memory)
            })
            .collect();
        (tensors, self.transport.clone())
    }

    /// One step, from the batch to the new parameters.
    fn step(&mut self, graph: &Graph, rank: usize) -> Result<MemoryPlan, Error> {
        let mut plan = MemoryPlan {
            at_rest: self.live,
            peak: Bytes::default(),
            peak_node: None,
            moments: Vec::new(),
            reused_in_place: 0,
            scratch: 0,
            allocated: 0,
            allocated_node: None,
        };
        for input in graph.inputs() {
            if let Some(value) = graph.value(*input) {
                self.give(value.id, &value.shape, value.dtype.size());
            }
        }
        plan.begin(self.live, self.transport.hidden_bytes());
        for (index, node) in graph.nodes().iter().enumerate() {
            let run = self.run_node(node, rank)?;
            plan.reused_in_place += run.reused;
            if !node.is_drop() {
                plan.record(Moment {
                    node: index,
                    during: run.during,
                    after: self.live.total(),
                    scratch: run.scratch,
                    transport: run.transport,
                });
            }
        }
        self.finish(graph);
        Ok(plan)
    }

    fn run_node(&mut self, node: &Node, rank: usize) -> Result<Run, Error> {
        let stage = node.collective.as_ref().map(|collective| collective.stage);
        let taken: Vec<_> = node
            .operation
            .inputs()
            .filter(|input| input.status == TensorStatus::ReadWrite)
            .map(|input| input.id)
            .collect();
        let mut run = Run {
            transport: self.transport.hidden_bytes(),
            ..Run::default()
        };
        let written = match (&node.collective, node.is_drop()) {
            (Some(_), _) => {
                let received = self.received(node, rank)?;
                run.scratch = received.scratch;
                // At its most before what only this operation needs is given back.
                run.transport = self.transport.hidden_bytes();
                for buffer in received.spare {
                    self.transport.give_back(buffer);
                }
                received.written
            }
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
        // Results first, so that memory that they share with operands is not given up in between.
        written.into_iter().for_each(|written| self.add(written));
        taken.into_iter().for_each(|id| self.remove(id));
        Ok(run)
    }

    /// Results of a collective: received in buffers of the transport, padded in memory of their own.
    fn received(&mut self, node: &Node, rank: usize) -> Result<Received, Error> {
        let mut received = Received::default();
        let Some(collective) = &node.collective else {
            return Ok(received);
        };
        let stage = collective.stage;
        let inputs: Vec<&TensorIr> = node.operation.inputs().collect();
        if stage != Stage::Wait {
            // What does not lie in order is sent from a copy.
            for input in &inputs {
                if !self.operand(input)?.layout.is_contiguous() {
                    received.scratch += bytes_of(input);
                }
            }
        }
        let outputs: Vec<TensorIr> = node.operation.outputs().cloned().collect();
        for (index, (output, part)) in outputs.iter().zip(&collective.parts).enumerate() {
            let layout = Layout::contiguous(&output.shape);
            let mut written = self.fresh(output.id, layout, None, output.dtype.size());
            let partition = &part.partition;
            let is_padded = collective.kind == CollectiveKind::ReduceScatter
                && partition.len(rank) != partition.chunk_len();
            let size = part.dtype.size() as u64;
            let own = partition.len(rank) as u64 * size;
            // Between start and wait, the buffer is that of the reserved memory.
            let reserved = inputs.get(index).filter(|_| stage == Stage::Wait);
            let buffer = match reserved.and_then(|input| self.detach(input.id)) {
                Some(buffer) => buffer,
                None => self.transport.take(match collective.kind {
                    CollectiveKind::ReduceScatter => own,
                    _ => partition.num_elements() as u64 * size,
                }),
            };
            if collective.kind == CollectiveKind::AllReduce && stage == Stage::Whole {
                // The slice that this rank combines.
                received.spare.push(self.transport.take(own));
            }
            if is_padded && stage != Stage::Start {
                // Filled up in bytes without alignment, which are then copied to where they have it.
                received.scratch = received.scratch.max(bytes_of(output));
                let buffer = self.transport.hide(buffer);
                received.spare.push(buffer);
            } else if let Some(memory) = &mut written.new {
                memory.is_received = stage != Stage::Start;
                memory.buffer = Some(self.transport.show(buffer));
            }
            received.written.push(written);
        }
        Ok(received)
    }

    /// The buffer of the memory that a tensor lies in, which does not own it any more.
    fn detach(&mut self, id: TensorId) -> Option<Buffer> {
        let memory = self.tensors.get(&id)?.memory;
        self.memories.get_mut(&memory)?.buffer.take()
    }

    fn computed(&mut self, node: &Node, run: &mut Run) -> Result<Vec<Written>, Error> {
        let inputs: Vec<&TensorIr> = node.operation.inputs().collect();
        let operands = inputs
            .iter()
            .map(|input| self.operand(input))
            .collect::<Result<Vec<_>, _>>()?;
        let custom = node.custom.and_then(|custom| custom.written_over);
        let over = custom.and_then(|index| kernel::over_whole(operands.get(index)?, index));
        let first = over.unwrap_or_else(|| kernel::place(&node.operation, &operands));
        run.scratch = match node.custom {
            Some(custom) => custom.scratch_bytes,
            None => scratch(&node.operation, &operands),
        };
        let outputs: Vec<TensorIr> = node.operation.outputs().cloned().collect();
        let mut written = Vec::new();
        let mut places = Some(first).into_iter();
        for output in &outputs {
            let size = output.dtype.size();
            let new = Layout::contiguous(&output.shape);
            written.push(match places.next() {
                Some(Place::View(index, layout)) => {
                    self.shared(output, inputs[index].id, layout, false)
                }
                Some(Place::Over(index, layout)) => {
                    let shared = self.shared(output, inputs[index].id, layout, true);
                    if shared.new.is_none() {
                        run.reused += self.bytes_of(shared.tensor.memory);
                    }
                    shared
                }
                Some(Place::New(layout, num_elements)) => {
                    self.fresh(output.id, layout, Some(num_elements), size)
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
            // Nothing counts tensors without elements.
            if input.shape.num_elements() == 0 {
                return Ok(Operand {
                    layout: Layout::contiguous(&input.shape),
                    is_unique: false,
                    memory_elements: 0,
                });
            }
            let id = input.id.value();
            return Err(Error::Internal(format!("value {id} is read but not there")));
        };
        let memory = self.memories.get(&tensor.memory);
        let num_tensors = memory.map_or(0, |memory| memory.num_tensors);
        let num_bytes = memory.map_or(0, |memory| memory.num_bytes);
        Ok(Operand {
            layout: tensor.layout.clone(),
            is_unique: self.is_reusing
                && input.status == TensorStatus::ReadWrite
                && num_tensors == 1,
            memory_elements: num_bytes as usize / tensor.element_size,
        })
    }

    /// A result in the memory of an operand. Who writes to a buffer of the transport gets a copy.
    fn shared(&mut self, output: &TensorIr, of: TensorId, layout: Layout, writes: bool) -> Written {
        let size = output.dtype.size();
        let Some(operand) = self.tensors.get(&of) else {
            return self.fresh(output.id, layout, None, size);
        };
        let memory = operand.memory;
        let found = self.memories.get(&memory);
        if writes && found.is_some_and(|memory| memory.is_received) {
            let num_elements = self.bytes_of(memory) as usize / size.max(1);
            let buffer = self.detach(of).map(|buffer| self.transport.hide(buffer));
            let mut copy = self.fresh(output.id, layout, Some(num_elements), size);
            if let Some(memory) = &mut copy.new {
                memory.buffer = buffer;
            }
            return copy;
        }
        if writes {
            self.recategorize(memory, output.id);
        }
        Written {
            id: output.id,
            tensor: Tensor {
                memory,
                layout,
                element_size: size,
            },
            new: None,
        }
    }

    /// Memory that is written over is what its new contents are.
    fn recategorize(&mut self, key: usize, id: TensorId) {
        let category = self.category(id);
        if let Some(memory) = self.memories.get_mut(&key) {
            self.live[memory.category] -= memory.num_bytes;
            self.live[category] += memory.num_bytes;
            memory.category = category;
        }
    }

    /// Feeds back what the step computed, and frees what it leaves.
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
        for id in ends.chain(graph.loss()) {
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
