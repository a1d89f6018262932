//! Runs a graph in lockstep on all ranks, with exact tensors.

use std::collections::{BTreeMap, HashMap};

use burn_fsdp_mesh::{Mesh, Placement};
use burn_ir::{BaseOperationIr, OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus};

use super::call::{Call, Known, Place, Values};
use super::given::{Given, part_of};
use super::scalar::Scalar;
use super::tensor::Tensor;
use super::transport::exchanged;
use burn_fsdp_spmd::graph::{Absent, Collective, Graph, Node, Role, Stage, Update, Value};
use burn_fsdp_spmd::low_bit::StateOperation;
use burn_fsdp_spmd::place::owned_of;

/// An invalid action of a graph, such as a read of a missing value.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    /// The node, or the number of nodes for a fault after the last one.
    pub(super) node: usize,
    pub(super) rank: usize,
    pub(super) reason: String,
}

/// The state of one rank.
#[derive(Default)]
struct Rank {
    values: Values,
    /// Results of collectives in flight, by the first output of the node that started them.
    started: HashMap<TensorId, Vec<Tensor>>,
    /// A hash of each value that a node wrote, if the machine records them.
    written: HashMap<TensorId, u64>,
    /// The values of the running graph that this rank lacks, because another rank owns them.
    absent: Absent,
}

/// The ranks of a mesh. Each node runs on all ranks before the next node runs.
pub(super) struct Machine {
    mesh: Mesh,
    ranks: Vec<Rank>,
    known: Known,
    run: u64,
    /// The placements of random values, if the ranks share one joined batch.
    draws: Option<BTreeMap<TensorId, Vec<Placement>>>,
    notes: bool,
}

impl Machine {
    /// Creates ranks without values.
    pub(super) fn new(mesh: Mesh) -> Self {
        Self {
            ranks: (0..mesh.size()).map(|_| Rank::default()).collect(),
            mesh,
            known: Known::default(),
            run: 0,
            draws: None,
            notes: false,
        }
    }

    /// Makes the machine record a hash of each value that a node writes.
    pub(super) fn noting(mut self) -> Self {
        self.notes = true;
        self
    }

    pub(super) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    pub(super) fn num_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the names of operations that were treated as uninterpreted functions of whole tensors.
    pub(super) fn opaque(&self) -> Vec<String> {
        self.known.opaque.borrow().iter().cloned().collect()
    }

    /// Returns the hash of a value that a node wrote on a rank, if it was recorded.
    pub(super) fn written(&self, rank: usize, id: TensorId) -> Option<u64> {
        self.ranks.get(rank)?.written.get(&id).copied()
    }

    /// Returns a value of a rank, if it exists there.
    pub(super) fn get(&self, rank: usize, id: TensorId) -> Option<&Tensor> {
        self.ranks[rank].values.get(&id)
    }

    /// Returns true if another rank owns this value of the running graph.
    pub(super) fn is_absent(&self, rank: usize, id: TensorId) -> bool {
        self.ranks[rank].absent.contains(id)
    }

    /// Sets a value of a rank.
    pub(super) fn set(&mut self, rank: usize, id: TensorId, tensor: Tensor) {
        self.ranks[rank].values.insert(id, tensor);
    }

    /// Begins a run: on all ranks, sets a new batch, and sets the given values that the previous run did not leave
    /// there.
    pub(super) fn begin(&mut self, graph: &Graph, given: &Given<'_>) -> Result<(), Fault> {
        self.run = given.run;
        let owned = owned_of(graph);
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            let absent = graph.absent_of(number, &owned);
            rank.absent = absent.map_err(|error| Fault {
                node: 0,
                rank: number,
                reason: error.to_string(),
            })?;
        }
        self.draws = given.joined.map(|_| {
            let drawn = graph.nodes().iter().filter(|node| node.is_opaque());
            let drawn = drawn.flat_map(Node::outputs);
            let placed = drawn.filter_map(|id| Some((id, graph.placements(id)?.to_vec())));
            placed.collect()
        });
        for input in graph.inputs() {
            self.ranks.iter_mut().for_each(|rank| {
                rank.values.remove(input);
            });
        }
        // A pending value exists only if the previous step left it. Otherwise no node may read it.
        let is_new =
            |value: &&Value| value.role.is_given() && !matches!(value.role, Role::Pending(_));
        for value in graph.values().filter(is_new) {
            for rank in 0..self.ranks.len() {
                if self.ranks[rank].values.contains_key(&value.id) || self.is_absent(rank, value.id)
                {
                    continue;
                }
                if rank > 0
                    && is_alike(graph, value)
                    && let Some(first) = self.get(0, value.id).cloned()
                {
                    self.set(rank, value.id, first);
                    continue;
                }
                let tensor = given.of(graph, value, rank).map_err(|reason| Fault {
                    node: 0,
                    rank,
                    reason: format!("{}: {reason}", value.role),
                })?;
                self.set(rank, value.id, tensor);
            }
        }
        Ok(())
    }

    /// Runs a node on all ranks.
    pub(super) fn run_node(&mut self, index: usize, node: &Node) -> Result<(), Fault> {
        let fault = |rank: usize| {
            move |reason| Fault {
                node: index,
                rank,
                reason,
            }
        };
        match &node.collective {
            Some(collective) => self
                .run_collective(node, collective)
                .map_err(|(rank, reason)| fault(rank)(reason))?,
            None if node.is_drop() => {}
            None => {
                let scalars = Scalar::all_of(node);
                for rank in 0..self.ranks.len() {
                    if self.ranks[rank].absent.skips(node) {
                        continue;
                    }
                    let results = self.call(rank, node, &scalars).map_err(fault(rank))?;
                    let results = node.operation.outputs().zip(results);
                    self.write(rank, results).map_err(fault(rank))?;
                }
            }
        }
        let taken = |input: &&TensorIr| input.status == TensorStatus::ReadWrite;
        for input in node.operation.inputs().filter(taken) {
            for rank in &mut self.ranks {
                rank.values.remove(&input.id);
            }
        }
        Ok(())
    }

    fn call(&self, rank: usize, node: &Node, scalars: &[Scalar]) -> Result<Vec<Tensor>, String> {
        let shifted = self.shifted(rank, node)?;
        let own = shifted.or_else(|| self.ranks[rank].absent.node_without(node));
        let node = own.as_ref().unwrap_or(node);
        let call = Call {
            node,
            values: &self.ranks[rank].values,
            scalars: scalars.to_vec(),
            place: Place {
                mesh: &self.mesh,
                rank,
                run: self.run,
                draws: self.draws.as_ref(),
            },
            known: &self.known,
        };
        match &node.operation {
            OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
                call.base(op)
            }
            OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => call.numeric(op),
            OperationIr::Bool(op) => call.bool(op),
            OperationIr::Int(op) => call.int(op),
            OperationIr::Float(_, op) => call.float(op),
            OperationIr::Module(op) => call.module(op),
            OperationIr::Activation(op) => call.activation(op),
            OperationIr::Custom(op) => call.custom(op),
            OperationIr::Drop(_) => Ok(Vec::new()),
            OperationIr::Init(_) => Err("nothing provides it".to_owned()),
            OperationIr::Distributed(_) => Err("it is not an operation of these ranks".to_owned()),
        }
    }

    /// Returns the node with this rank's slice; `None` if the slice is the same on all ranks.
    fn shifted(&self, rank: usize, node: &Node) -> Result<Option<Node>, String> {
        let Some(shift) = &node.shift else {
            return Ok(None);
        };
        let index = self.mesh.index_on(&shift.axis, rank);
        let start = index.map_err(|error| error.to_string())? * shift.len;
        let mut node = node.clone();
        match &mut node.operation {
            OperationIr::BaseFloat(BaseOperationIr::Slice(op))
            | OperationIr::BaseInt(BaseOperationIr::Slice(op))
            | OperationIr::BaseBool(BaseOperationIr::Slice(op)) => {
                let range = op
                    .ranges
                    .get_mut(shift.dim)
                    .ok_or("it does not have that dim")?;
                range.start = start as isize;
                range.end = Some((start + shift.len) as isize);
            }
            OperationIr::Custom(call) if StateOperation::named(&call.id).is_some() => {
                call.scalars.push(ScalarIr::UInt(start as u64));
            }
            _ => return Err("only slices can depend on the rank".to_owned()),
        }
        Ok(Some(node))
    }

    fn write<'a>(
        &mut self,
        rank: usize,
        results: impl IntoIterator<Item = (&'a TensorIr, Tensor)>,
    ) -> Result<(), String> {
        for (output, tensor) in results {
            if tensor.shape != output.shape.as_slice() {
                return Err(format!(
                    "it produces {:?}, but {:?} is declared",
                    tensor.shape,
                    output.shape.as_slice()
                ));
            }
            if self.notes {
                let hash = Tensor::new([tensor.len()], tensor.elements.to_vec()).hash();
                self.ranks[rank].written.insert(output.id, hash);
            }
            self.ranks[rank].values.insert(output.id, tensor);
        }
        Ok(())
    }

    fn run_collective(
        &mut self,
        node: &Node,
        collective: &Collective,
    ) -> Result<(), (usize, String)> {
        if collective.stage != Stage::Wait {
            self.exchange(node, collective)?;
        }
        if collective.stage == Stage::Start {
            return Ok(());
        }
        let key = match collective.stage {
            Stage::Wait => node.inputs().next(),
            _ => node.outputs().next(),
        };
        for rank in 0..self.ranks.len() {
            let started = key.and_then(|key| self.ranks[rank].started.remove(&key));
            let results = started.ok_or_else(|| (rank, "it was not started".to_owned()))?;
            let own = node.operation.outputs().zip(results);
            let own = own.filter(|(output, _)| !self.is_absent(rank, output.id));
            let shaped = own.map(|(output, result)| {
                let shaped = result.reshaped(output.shape.as_slice())?;
                Ok((output, shaped))
            });
            let shaped = shaped.collect::<Result<Vec<_>, _>>();
            let shaped = shaped.map_err(|reason| (rank, reason))?;
            self.write(rank, shaped).map_err(|reason| (rank, reason))?;
        }
        Ok(())
    }

    /// Runs a collective on every group of ranks along its axis.
    fn exchange(&mut self, node: &Node, collective: &Collective) -> Result<(), (usize, String)> {
        let inputs: Vec<&TensorIr> = node.operation.inputs().collect();
        let key = node.outputs().next();
        let key = key.ok_or_else(|| (0, "it writes nothing".to_owned()))?;
        let mut all: Vec<Vec<Tensor>> = vec![Vec::new(); self.ranks.len()];
        for first in 0..self.ranks.len() {
            let group = self.mesh.ranks_along(&collective.axis, first);
            let group = group.map_err(|error| (first, error.to_string()))?;
            if group.first() != Some(&first) {
                continue;
            }
            for (part, input) in collective.parts.iter().zip(&inputs) {
                let given = group.iter().map(|rank| {
                    let own = self.ranks[*rank].values.get(&input.id);
                    let own = own.map(|own| own.elements.as_slice());
                    let own = if self.is_absent(*rank, input.id) {
                        Some(&[][..])
                    } else {
                        own
                    };
                    let id = input.id.value();
                    own.ok_or_else(|| (*rank, format!("it reads %{id}, which does not exist")))
                });
                let given = given.collect::<Result<Vec<_>, _>>()?;
                let results = exchanged(collective, part, &given);
                let results = results.map_err(|reason| (first, reason))?;
                for (rank, result) in group.iter().zip(results) {
                    all[*rank].push(Tensor::new([result.len()], result));
                }
            }
        }
        for (rank, results) in self.ranks.iter_mut().zip(all) {
            rank.started.insert(key, results);
        }
        Ok(())
    }

    /// Applies the updates of values whose role satisfies `is_meant`, all at once.
    pub(super) fn update(
        &mut self,
        graph: &Graph,
        is_meant: impl Fn(&Role) -> bool,
    ) -> Result<(), Fault> {
        let is_meant = |update: &&Update| {
            let into = graph.value(update.into);
            into.is_some_and(|value| is_meant(&value.role))
        };
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            let updates = graph.updates().iter().filter(is_meant);
            let updates = updates.filter(|update| !rank.absent.contains(update.from));
            let fresh = updates.map(|update| {
                let from = rank.values.get(&update.from).cloned();
                let from = from.ok_or_else(|| Fault {
                    node: graph.nodes().len(),
                    rank: number,
                    reason: format!(
                        "an update reads %{}, which does not exist",
                        update.from.value()
                    ),
                })?;
                Ok((update.into, from))
            });
            let fresh = fresh.collect::<Result<Vec<_>, Fault>>()?;
            rank.values.extend(fresh);
        }
        Ok(())
    }

    /// Ends a run: applies the updates of values whose role satisfies `is_meant`, and drops the values that no later
    /// run may read.
    pub(super) fn finish(
        &mut self,
        graph: &Graph,
        is_meant: impl Fn(&Role) -> bool,
    ) -> Result<(), Fault> {
        self.update(graph, is_meant)?;
        let used_up = graph.used_up();
        for rank in &mut self.ranks {
            rank.values
                .retain(|id, _| graph.is_given(*id) && !used_up.contains(id));
        }
        Ok(())
    }
}

/// Returns true if a given value is the same on all ranks.
fn is_alike(graph: &Graph, value: &Value) -> bool {
    match &value.role {
        Role::Constant => true,
        Role::Parameter(path) | Role::State { path, .. } => part_of(graph, path, value).is_none(),
        _ => false,
    }
}
