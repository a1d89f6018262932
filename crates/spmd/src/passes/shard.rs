//! The pass that inserts the collectives of data parallelism: from the graph of one rank to that of each rank.
//!
//! Passes before this one think of one rank that has everything; those after it of a schedule of many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::{Axis, Cut, Layout, Mesh, Partition, Placement, ReduceOp, Strategy};
use burn_ir::{BaseOperationIr, CastOpIr, OperationIr, TensorId};

use super::casts::{cast_of, widened_early};
use super::replicate::{Replicate, mesh_of};
use crate::Precision;
use crate::elements::element_type;
use crate::error::Error;
use crate::graph::{
    Collective, CollectiveKind, CollectivePart, Graph, Node, Payload, Phase, Role, Stage, Trait,
    is, operation_name, rename,
};
use crate::pass_id::PassId;
use crate::place::{DataParallel, ExpandPlacements, least_communication_with};
use crate::transform::GraphTransform;

/// Insertion of collectives: turns a graph of one rank into that of each of several ranks which
/// divide the batch among them.
///
/// With [`Strategy::NoShard`] every gradient is averaged by an all-reduce before the optimizer reads it. With
/// [`Strategy::FullShard`] parameters become flat padded shards, an all-gather precedes every use, gradients are averaged by a
/// reduce-scatter, and the optimizer works on shards, which needs an optimizer that treats all elements alike.
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
/// The loss is averaged, too, so that every rank returns that of the whole batch. Of a rank that is alone and has whole
/// parameters nothing is averaged. With copies of the shards
/// ([`Replicate`]) gradients and loss are then averaged over the copies, by an all-reduce.
///
/// With [`DataParallel::Automatic`] it is [`ExpandPlacements`] with placements that move few bytes, and
/// the graph must have been traced over the joined batch.
#[derive(Debug, Clone)]
pub struct InsertCollectives {
    /// Number of ranks along the axis: those that divide parameters, where parameters are divided.
    pub num_ranks: usize,
    /// Division of the parameters among them.
    pub style: DataParallel,
    /// Name of the mesh axis.
    pub axis: Arc<str>,
    /// Another axis of the mesh, along which ranks hold copies of the shards and divide the batch, too.
    pub replicate: Option<Replicate>,
    /// Types in which parameters compute and gradients travel. The casts of parameters are in the graph already.
    pub precision: Precision,
}

impl InsertCollectives {
    /// Returns true if a rank that is alone has whole gradients as they are averaged: in the type in which it computes them.
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
        match self.has_all() {
            true => insertion.graph.set_nodes(nodes),
            false => insertion.average(nodes)?,
        }
        let Insertion { mut graph, .. } = insertion;
        graph.sync_nodes();
        Ok(graph)
    }
}

struct Insertion<'a> {
    pass: &'a InsertCollectives,
    graph: Graph,
    /// The averaged value that the optimizer reads instead of each gradient.
    averaged: BTreeMap<TensorId, TensorId>,
}

impl Insertion<'_> {
    /// Cuts the parameters, and puts a gather before every use.
    fn shard(&mut self, nodes: Vec<Node>) -> Result<Vec<Node>, Error> {
        let mut sharded = BTreeMap::new();
        for index in 0..self.graph.parameters().len() {
            let parameter = &self.graph.parameters()[index];
            if parameter.is_buffer {
                continue;
            }
            let (value, path, dtype) = (parameter.value, parameter.path.clone(), parameter.dtype);
            if element_type(dtype).is_none() {
                return Err(Error::ElementType {
                    path: path.to_string(),
                    dtype,
                });
            }
            let partition = Partition::flat(parameter.num_elements(), self.pass.num_ranks)?;
            let states = parameter.states.clone();
            let shape = parameter.shape.clone();
            self.check_states(&path, &states, &shape)?;
            let mut placements = vec![Placement::Shard(0)];
            if let Some(other) = &self.pass.replicate {
                placements.insert(usize::from(!other.is_first), Placement::Replicate);
            }
            self.graph.parameters_mut()[index].layout = Layout {
                placements,
                cut: Cut::Elements,
            };
            for id in states.into_iter().chain([value]) {
                self.set_shape(id, vec![partition.chunk_len()]);
            }
            sharded.insert(value, (path, partition, shape));
        }
        let by_path: BTreeMap<_, _> = sharded
            .values()
            .map(
                |(path, partition, shape): &(Arc<str>, Partition, Vec<usize>)| {
                    (path.clone(), (*partition, shape.clone()))
                },
            )
            .collect();
        let (mut scheduled, nodes) = self.cast_shards(nodes, &mut sharded);
        for mut node in nodes {
            if node.phase == Phase::Optimizer {
                self.flatten(&node, &by_path)?;
                scheduled.push(node);
                continue;
            }
            let read: BTreeSet<TensorId> = node
                .inputs()
                .filter(|id| sharded.contains_key(id))
                .collect();
            let mut gathered = BTreeMap::new();
            for id in read {
                let (path, partition, shape) = &sharded[&id];
                let full = self.gather(&mut scheduled, id, path, *partition, shape, node.phase)?;
                gathered.insert(id, full);
            }
            rename(&mut node.operation, &gathered);
            scheduled.push(node);
        }
        Ok(scheduled)
    }

    /// Returns casts of the shards, for parameters that compute in another type, and the nodes without the casts of
    /// whole parameters that they replace: what is gathered is what computes.
    fn cast_shards(
        &mut self,
        nodes: Vec<Node>,
        sharded: &mut BTreeMap<TensorId, (Arc<str>, Partition, Vec<usize>)>,
    ) -> (Vec<Node>, Vec<Node>) {
        let mut casts: Vec<Node> = Vec::new();
        let mut rest = Vec::with_capacity(nodes.len());
        let mut same: BTreeMap<TensorId, TensorId> = BTreeMap::new();
        for mut node in nodes {
            rename(&mut node.operation, &same);
            let found = cast_of(&node).and_then(|cast| Some((cast, sharded.get(&cast.input.id)?)));
            let Some((cast, of)) = found.filter(|(cast, (path, ..))| {
                let compute = self.pass.precision.compute_of(path, cast.input.dtype);
                compute == cast.out.dtype && compute != cast.input.dtype
            }) else {
                rest.push(node);
                continue;
            };
            // Backward may cast once more.
            let before = casts.iter().filter_map(cast_of);
            let before = before.filter(|other| other.input.id == cast.input.id);
            if let Some(before) = before.map(|other| other.out.id).next() {
                same.insert(cast.out.id, before);
                continue;
            }
            let (out, of) = (cast.out.id, of.clone());
            self.set_shape(out, vec![of.1.chunk_len()]);
            sharded.insert(out, of);
            node.phase = Phase::Forward;
            casts.push(node);
        }
        (casts, rest)
    }

    fn check_states(&self, path: &str, states: &[TensorId], shape: &[usize]) -> Result<(), Error> {
        let other = states.iter().find_map(|id| {
            let value = self.graph.value(*id)?;
            (value.shape != shape).then(|| value.role.to_string())
        });
        match other {
            Some(state) => Err(Error::OptimizerNotElementwise {
                path: path.to_owned(),
                operation: format!("its {state} has another shape"),
            }),
            None => Ok(()),
        }
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
        path: &Arc<str>,
        partition: Partition,
        shape: &[usize],
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let dtype = self.graph.read(shard)?.dtype;
        let full = self.graph.add_value(shape.to_vec(), dtype, Role::Temporary);
        let collective = self.collective(
            CollectiveKind::AllGather,
            &self.pass.axis,
            path,
            partition,
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
        let reduces = kind.contract().reduces;
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
            reduction: reduces.then_some(ReduceOp::Mean),
            payload: match reduces {
                false => Payload::Parameter,
                true => Payload::Gradient,
            },
            stage: Stage::Whole,
        }
    }

    /// Gives the results of an optimizer's operation the shape of the shard.
    fn flatten(
        &mut self,
        node: &Node,
        by_path: &BTreeMap<Arc<str>, (Partition, Vec<usize>)>,
    ) -> Result<(), Error> {
        let Some(path) = &node.path else {
            return Ok(());
        };
        let Some((partition, shape)) = by_path.get(path) else {
            return Ok(());
        };
        // Shapes in the operation are still those of the trace.
        let keeps_shape = node
            .operation
            .nodes()
            .iter()
            .all(|tensor| tensor.shape.to_vec() == *shape);
        if !is(&node.operation, Trait::Elementwise) || !keeps_shape {
            return Err(Error::OptimizerNotElementwise {
                path: path.to_string(),
                operation: operation_name(&node.operation),
            });
        }
        for output in node.outputs() {
            self.set_shape(output, vec![partition.chunk_len()]);
        }
        Ok(())
    }

    /// Averages gradients and loss after the node that writes them.
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
                rename(&mut node.operation, &self.averaged);
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
                if let Some(owners) = owners.get(&output) {
                    let parameter = &self.graph.parameters()[owners[0]];
                    let path = parameter.path.clone();
                    let num_elements = parameter.num_elements();
                    let partition = match parameter.layout.is_whole() {
                        true => None,
                        false => Some(Partition::flat(num_elements, self.pass.num_ranks)?),
                    };
                    let local = self.travelling(&mut scheduled, output, &read)?;
                    let both = (output, local);
                    let mean = self.reduce(&mut scheduled, both, &path, partition, phase)?;
                    self.averaged.insert(output, mean);
                    for owner in owners {
                        self.graph.parameters_mut()[*owner].gradient = Some(mean);
                    }
                }
            }
        }
        // Some optimizers keep the first gradient as it is.
        for update in self.graph.updates_mut() {
            if let Some(mean) = self.averaged.get(&update.from) {
                update.from = *mean;
            }
        }
        self.graph.set_nodes(scheduled);
        Ok(())
    }

    /// Returns the gradient in the type in which it travels, of one that the last node has written.
    fn travelling(
        &mut self,
        scheduled: &mut Vec<Node>,
        gradient: TensorId,
        read: &BTreeSet<TensorId>,
    ) -> Result<TensorId, Error> {
        let widened = self.graph.read(gradient)?;
        let cast = scheduled.last().and_then(cast_of);
        let computed = cast.map_or_else(|| widened.clone(), |cast| cast.input.clone());
        let travels = self.pass.precision.reduce_of(computed.dtype);
        if travels == widened.dtype || self.pass.precision == Precision::default() {
            return Ok(gradient);
        }
        let mut phase = Phase::Backward;
        if cast.is_some() && !read.contains(&gradient) {
            // The reduction widens what it combines.
            phase = scheduled.pop().map_or(phase, |node| node.phase);
        }
        if travels == computed.dtype {
            return Ok(computed.id);
        }
        let shape = computed.shape.to_vec();
        let rounded = self.graph.add_value(shape, travels, Role::Temporary);
        let cast = BaseOperationIr::Cast(CastOpIr {
            input: self.graph.read(computed.id)?,
            out: self.graph.write(rounded)?,
        });
        scheduled.push(Node::new(OperationIr::BaseFloat(cast), phase));
        Ok(rounded)
    }

    /// Reduces `local`, which is a gradient or the loss as it travels. The mean takes the role of what it is of.
    fn reduce(
        &mut self,
        scheduled: &mut Vec<Node>,
        (of, local): (TensorId, TensorId),
        path: &Arc<str>,
        partition: Option<Partition>,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let (shape, dtype) = match self.graph.value_mut(of) {
            Some(value) => {
                let role = std::mem::replace(&mut value.role, Role::Temporary);
                let known = (value.shape.clone(), value.dtype);
                let shape = match partition {
                    Some(partition) => vec![partition.chunk_len()],
                    None => known.0.clone(),
                };
                let mean = self.graph.add_value(shape, known.1, role);
                return self.push_reduce(scheduled, local, mean, path, partition, phase);
            }
            None => (Vec::<usize>::new(), "undeclared"),
        };
        Err(Error::Internal(format!(
            "gradient of {path} is {dtype} {shape:?}"
        )))
    }

    fn push_reduce(
        &mut self,
        scheduled: &mut Vec<Node>,
        local: TensorId,
        mean: TensorId,
        path: &Arc<str>,
        partition: Option<Partition>,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let tensor = self.graph.read(local)?;
        let (kind, partition) = match partition {
            Some(partition) => (CollectiveKind::ReduceScatter, partition),
            None => {
                let whole = Partition::flat(tensor.shape.num_elements(), self.pass.num_ranks)?;
                (CollectiveKind::AllReduce, whole)
            }
        };
        let axis = &self.pass.axis;
        let result = self.graph.read(mean)?.dtype;
        let collective = self.collective(kind, axis, path, partition, (tensor.dtype, result));
        let node = self
            .graph
            .collective_node(collective, &[local], &[mean], phase)?;
        scheduled.push(node);
        match self.pass.replicate.clone() {
            Some(other) => self.over_copies(scheduled, mean, path, &other.axis, phase),
            None => Ok(mean),
        }
    }

    /// Averages what each copy of the shards has over the copies.
    fn over_copies(
        &mut self,
        scheduled: &mut Vec<Node>,
        own: TensorId,
        path: &Arc<str>,
        axis: &Axis,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let tensor = self.graph.read(own)?;
        let role = self.graph.value(own).map(|value| value.role.clone());
        let role = role.unwrap_or(Role::Temporary);
        let mean = self
            .graph
            .add_value(tensor.shape.to_vec(), tensor.dtype, role);
        if let Some(value) = self.graph.value_mut(own) {
            value.role = Role::Temporary;
        }
        let partition = Partition::flat(tensor.shape.num_elements(), axis.size)?;
        let (kind, name) = (CollectiveKind::AllReduce, Arc::from(axis.name.as_str()));
        let types = (tensor.dtype, tensor.dtype);
        let collective = self.collective(kind, &name, path, partition, types);
        let node = self
            .graph
            .collective_node(collective, &[own], &[mean], phase)?;
        scheduled.push(node);
        Ok(mean)
    }
}
