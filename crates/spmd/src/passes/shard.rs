//! The pass that inserts the collectives of data parallelism: from the graph of one rank to the graph of each rank.
//!
//! Earlier passes work on the graph of a single rank that holds everything, and later passes on the graph of each rank.

mod reductions;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::{Mesh, Partition, ReduceOp, Strategy};
use burn_fsdp_tensors::reduced_type;
use burn_ir::TensorId;

use super::casts::{cast_of, widened_early};
use super::holding::Holding;
use super::replicate::{Replicate, mesh_of};
use crate::Precision;
use crate::error::Error;
use crate::graph::{
    AxisShift, Collective, CollectiveKind, CollectivePart, Graph, Node, Payload, Phase, Role,
    Stage, rename,
};
use crate::low_bit::StateOperation;
use crate::pass_id::PassId;
use crate::place::{DataParallel, ExpandPlacements, least_communication_with};
use crate::transform::GraphTransform;

/// The pass that inserts collectives: it turns the graph of one rank into the graph of each rank, with the batch
/// divided among them.
///
/// With [`Strategy::NoShard`] every gradient is averaged by an all-reduce before the optimizer reads it. With
/// [`Strategy::FullShard`] and [`Strategy::ShardGradOp`], parameters become flat padded shards, and an all-gather
/// precedes every use. Gradients are averaged by a reduce-scatter, and the optimizer works on shards, so it must be
/// elementwise. A parameter with an owner is whole on that rank: its gather reads from the owner, and its gradient is
/// reduced to the owner. Its part of the optimizer runs only on the owner, and may combine elements.
///
/// ```text
/// before                                after (fully sharded on 2 ranks)
/// %0 parameter w f32[3, 3]              %0 parameter w f32[5]
/// %4 = Float.Matmul(%1, %0)             %9 = all_gather(%0)
///                                       %4 = Float.Matmul(%1, %9)
/// ...                                   ...
/// %7 = Float.Matmul(%8, %4)             %7 = Float.Matmul(%8, %4)
///                                       %10 = reduce_scatter(%7)
/// %11 = NumericFloat.Sub(%0, %7)        %11 = NumericFloat.Sub(%0, %10)
/// ```
///
/// The loss is also averaged, so every rank returns the loss of the whole batch. A single rank with whole parameters
/// needs no averaging. In hybrid sharding ([`Replicate`]), an all-reduce then averages both over the replicas.
///
/// With [`DataParallel::Automatic`], the pass works like [`ExpandPlacements`] with placements chosen for little
/// communication, and the graph must have been traced over the joined batch of all ranks.
#[derive(Debug, Clone)]
pub struct InsertCollectives {
    /// Number of ranks along `axis`.
    pub num_ranks: usize,
    /// How parameters are divided among these ranks.
    pub style: DataParallel,
    /// Name of the mesh axis along which parameters are sharded, if they are.
    pub axis: Arc<str>,
    /// Another mesh axis, along which ranks hold replicas of the shards and also divide the batch.
    pub replicate: Option<Replicate>,
    /// The types of computation and of gradient reduction. The graph already has the casts of parameters.
    pub precision: Precision,
    /// The parameters that one rank along the axis owns whole, and the index of that rank.
    pub owners: BTreeMap<Arc<str>, usize>,
}

impl InsertCollectives {
    /// Returns true if a single rank has whole gradients that need no averaging or cast.
    fn has_all(&self) -> bool {
        self.num_ranks == 1
            && self.replicate.is_none()
            && self.style == DataParallel::Strategy(Strategy::NoShard)
            && self.precision == Precision::default()
    }
}

impl GraphTransform for InsertCollectives {
    fn id(&self) -> PassId {
        PassId::InsertCollectives
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        if self.style == DataParallel::Automatic {
            let (axis, of) = (&self.axis, &self.precision);
            let mesh = Mesh::line(axis.as_ref(), self.num_ranks)?;
            let expand = least_communication_with(&graph, &mesh, (axis, &[]), of)?;
            let pass = ExpandPlacements::new(expand, mesh).precision(of.clone());
            return pass.transform(graph);
        }
        let mut insertion = Insertion {
            pass: self,
            graph,
            averaged: BTreeMap::new(),
            sent: BTreeMap::new(),
        };
        let mesh = mesh_of((&self.axis, self.num_ranks), self.replicate.as_ref())?;
        insertion.graph.set_mesh(mesh);
        let nodes = insertion.graph.take_nodes();
        let nodes = match self.style {
            DataParallel::Automatic | DataParallel::Strategy(Strategy::NoShard) => nodes,
            DataParallel::Strategy(Strategy::FullShard | Strategy::ShardGradOp) => {
                insertion.shard(nodes)?
            }
        };
        if self.has_all() {
            insertion.graph.set_nodes(nodes)
        } else {
            insertion.average(nodes)?
        }
        let Insertion { mut graph, .. } = insertion;
        graph.sync_nodes();
        Ok(graph)
    }
}

struct Insertion<'a> {
    pass: &'a InsertCollectives,
    graph: Graph,
    /// The averaged gradient that the optimizer reads, by local gradient and by owner (`None` for shards).
    averaged: BTreeMap<(TensorId, Option<usize>), TensorId>,
    /// Each gradient's cast to the type in which it is sent.
    sent: BTreeMap<TensorId, TensorId>,
}

impl Insertion<'_> {
    /// Shards the parameters, and inserts a gather before every use.
    fn shard(&mut self, nodes: Vec<Node>) -> Result<Vec<Node>, Error> {
        let mut sharded = BTreeMap::new();
        for index in 0..self.graph.parameters().len() {
            let parameter = &self.graph.parameters()[index];
            if parameter.is_buffer {
                continue;
            }
            let (value, path, dtype) = (parameter.value, parameter.path.clone(), parameter.dtype);
            if reduced_type(dtype).is_none() {
                return Err(Error::ElementType {
                    path: path.to_string(),
                    dtype,
                });
            }
            let owner = self.pass.owners.get(&path).copied();
            let holding = Holding::new(parameter, self.pass.num_ranks, owner)?;
            let states = parameter.states.clone();
            holding.check_states(&self.graph, &states)?;
            let parameter = &mut self.graph.parameters_mut()[index];
            parameter.layout = holding.layout(self.pass.replicate.as_ref());
            if holding.is_owned() {
                parameter.whole_states.clear();
            } else {
                self.set_shape(value, holding.local_shape());
                for id in states {
                    self.set_shape(id, holding.state_shape());
                }
            }
            sharded.insert(value, holding);
        }
        let by_path = sharded.values().map(|of| (of.path.clone(), of.clone()));
        let by_path: BTreeMap<Arc<str>, Holding> = by_path.collect();
        let (mut scheduled, nodes) = self.cast_shards(nodes, &mut sharded);
        for mut node in nodes {
            if node.phase == Phase::Optimizer {
                self.flatten(&mut node, &by_path)?;
                scheduled.push(node);
                continue;
            }
            let read: BTreeSet<TensorId> = node
                .inputs()
                .filter(|id| sharded.contains_key(id))
                .collect();
            let mut gathered = BTreeMap::new();
            for id in read {
                let full = self.gather(&mut scheduled, id, &sharded[&id], node.phase)?;
                gathered.insert(id, full);
            }
            rename(&mut node.operation, &gathered);
            scheduled.push(node);
        }
        Ok(scheduled)
    }

    /// Replaces casts of whole parameters with casts of shards, so parameters are gathered in their compute type.
    /// Returns these casts, and the other nodes.
    fn cast_shards(
        &mut self,
        nodes: Vec<Node>,
        sharded: &mut BTreeMap<TensorId, Holding>,
    ) -> (Vec<Node>, Vec<Node>) {
        let mut casts: Vec<Node> = Vec::new();
        let mut rest = Vec::with_capacity(nodes.len());
        let mut same: BTreeMap<TensorId, TensorId> = BTreeMap::new();
        for mut node in nodes {
            rename(&mut node.operation, &same);
            let found = cast_of(&node).and_then(|cast| Some((cast, sharded.get(&cast.input.id)?)));
            let Some((cast, of)) = found.filter(|(cast, of)| {
                let compute = self.pass.precision.compute_of(&of.path, cast.input.dtype);
                compute == cast.out.dtype && compute != cast.input.dtype
            }) else {
                rest.push(node);
                continue;
            };
            // Backward may cast again.
            let before = casts.iter().filter_map(cast_of);
            let before = before.filter(|other| other.input.id == cast.input.id);
            if let Some(before) = before.map(|other| other.out.id).next() {
                same.insert(cast.out.id, before);
                continue;
            }
            let (out, of) = (cast.out.id, of.clone());
            self.set_shape(out, of.local_shape());
            sharded.insert(out, of);
            node.phase = Phase::Forward;
            casts.push(node);
        }
        (casts, rest)
    }

    fn set_shape(&mut self, id: TensorId, shape: Vec<usize>) {
        if let Some(value) = self.graph.value_mut(id) {
            value.shape = shape;
        }
    }

    fn gather(
        &mut self,
        scheduled: &mut Vec<Node>,
        shard: TensorId,
        of: &Holding,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let dtype = self.graph.read(shard)?.dtype;
        let full = self
            .graph
            .add_value(of.shape.clone(), dtype, Role::Temporary);
        let collective = self.collective(
            CollectiveKind::AllGather,
            &self.pass.axis,
            &of.path,
            of.partition,
            (dtype, dtype),
        );
        let node = self
            .graph
            .collective_node(collective, &[shard], &[full], phase)?;
        scheduled.push(node);
        Ok(full)
    }

    fn collective(
        &self,
        kind: CollectiveKind,
        axis: &Arc<str>,
        path: &Arc<str>,
        partition: Partition,
        (dtype, result): (DType, DType),
    ) -> Collective {
        let (payload, reduction) = if kind.contract().reduces {
            (Payload::Gradient, Some(ReduceOp::Mean))
        } else {
            (Payload::Parameter, None)
        };
        Collective {
            kind,
            axis: axis.clone(),
            label: path.clone(),
            parts: vec![CollectivePart {
                path: path.clone(),
                partition,
                across: None,
                dtype,
                result,
            }],
            reduction,
            payload,
            stage: Stage::Whole,
        }
    }

    /// Sets the shape of an optimizer operation's results to the shard's.
    fn flatten(
        &mut self,
        node: &mut Node,
        by_path: &BTreeMap<Arc<str>, Holding>,
    ) -> Result<(), Error> {
        let Some(of) = node.path.as_ref().and_then(|path| by_path.get(path)) else {
            return Ok(());
        };
        // The operation still has the traced shapes.
        of.check_step(node)?;
        if of.is_owned() {
            return Ok(());
        }
        let is_rounded = matches!(
            StateOperation::of(&node.operation),
            Some(StateOperation::Round(_))
        );
        let shape = if is_rounded {
            // A rank's draws follow from the positions of its elements in the whole state.
            node.shift = Some(AxisShift {
                axis: self.pass.axis.clone(),
                dim: 0,
                len: of.partition.chunk_len(),
            });
            of.state_shape()
        } else {
            of.local_shape()
        };
        for output in node.outputs() {
            self.set_shape(output, shape.clone());
        }
        Ok(())
    }

    /// Averages gradients and loss right after the nodes that write them.
    fn average(&mut self, nodes: Vec<Node>) -> Result<(), Error> {
        let loss = self.graph.loss();
        let parameters = self.graph.parameters().iter().enumerate();
        // Parameters that are added to each other share a gradient.
        let mut owners: BTreeMap<TensorId, Vec<usize>> = BTreeMap::new();
        for (index, parameter) in parameters {
            if let Some(gradient) = parameter.gradient {
                owners.entry(gradient).or_default().push(index);
            }
        }
        let nodes = widened_early(nodes, &owners);
        let others = nodes.iter().filter(|node| node.phase != Phase::Optimizer);
        let read: BTreeSet<TensorId> = others.flat_map(Node::inputs).collect();
        let mut scheduled: Vec<Node> = Vec::with_capacity(nodes.len() * 2);
        for mut node in nodes {
            if node.phase == Phase::Optimizer {
                let owner = node.path.as_deref().and_then(|path| self.owner(path));
                let read: BTreeSet<TensorId> = node.inputs().collect();
                let mean = |id| Some((id, *self.averaged.get(&(id, owner))?));
                rename(
                    &mut node.operation,
                    &read.into_iter().filter_map(mean).collect(),
                );
                scheduled.push(node);
                continue;
            }
            let outputs: Vec<TensorId> = node.outputs().collect();
            let phase = node.phase;
            scheduled.push(node);
            for output in outputs {
                if Some(output) == loss {
                    let both = (output, output);
                    let mean = self.reduce(&mut scheduled, both, &"loss".into(), None, phase)?;
                    self.graph.set_loss(mean);
                }
                for index in owners.get(&output).into_iter().flatten() {
                    let mean = self.complete(&mut scheduled, (output, *index), &read, phase)?;
                    self.graph.parameters_mut()[*index].gradient = Some(mean);
                }
            }
        }
        // Some optimizers store the first gradient unchanged as a state.
        let mut updates = self.graph.updates().to_vec();
        for update in &mut updates {
            let role = self.graph.value(update.into).map(|value| &value.role);
            let owner = role.and_then(Role::path).and_then(|path| self.owner(path));
            if let Some(mean) = self.averaged.get(&(update.from, owner)) {
                update.from = *mean;
            }
        }
        *self.graph.updates_mut() = updates;
        self.graph.set_nodes(scheduled);
        Ok(())
    }

    fn owner(&self, path: &str) -> Option<usize> {
        self.graph.parameter(path)?.layout.owner
    }

    /// Returns the mean of a gradient that the last node has written, sharded like the parameter with that index.
    /// Parameters that share a gradient share its mean, unless they have different owners.
    fn complete(
        &mut self,
        scheduled: &mut Vec<Node>,
        (gradient, index): (TensorId, usize),
        read: &BTreeSet<TensorId>,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let parameter = &self.graph.parameters()[index];
        let (path, layout) = (parameter.path.clone(), &parameter.layout);
        let key = (gradient, layout.owner);
        if let Some(mean) = self.averaged.get(&key) {
            return Ok(*mean);
        }
        let partition = if layout.is_whole() {
            None
        } else {
            let of = Holding::new(parameter, self.pass.num_ranks, layout.owner)?;
            Some(of.partition)
        };
        let before = self.sent.get(&gradient).copied();
        let local = match before {
            Some(local) => local,
            None => self.travelling(scheduled, gradient, read)?,
        };
        let mean = self.reduce(scheduled, (gradient, local), &path, partition, phase)?;
        if let (Some(_), Some(value)) = (before, self.graph.value_mut(mean)) {
            value.role = Role::Gradient(path);
        }
        self.sent.insert(gradient, local);
        self.averaged.insert(key, mean);
        Ok(mean)
    }
}
