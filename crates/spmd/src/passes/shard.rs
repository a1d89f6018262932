//! The pass that inserts the collectives of data parallelism: from the graph of one rank to that of each rank.
//!
//! Passes before this one think of one rank that has everything; those after it of a schedule of many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn_fsdp_mesh::{Axis, Cut, Layout, Mesh, Partition, Placement, ReduceOp, Strategy};
use burn_ir::TensorId;

use crate::elements::element_type;
use crate::error::Error;
use crate::graph::{
    Collective, CollectiveKind, CollectivePart, Graph, Node, Payload, Phase, Role, Stage, Trait,
    is, operation_name, rename,
};
use crate::pass_id::PassId;
use crate::place::{DataParallel, ExpandPlacements, least_communication};
use crate::transform::GraphTransform;

/// Insertion of collectives: turns a graph of one rank into that of each of several ranks which
/// divide the batch among them.
///
/// With [`Strategy::NoShard`] every gradient is averaged by an all-reduce before the optimizer
/// reads it. With [`Strategy::FullShard`] parameters become flat padded shards, an all-gather
/// precedes every use, gradients are averaged by a reduce-scatter, and the optimizer works on shards,
/// which needs an optimizer that treats all elements alike.
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
/// The loss is averaged, too, so that every rank returns that of the whole batch. With copies of the shards
/// ([`Replicate`]) gradients and loss are then averaged over the copies, by an all-reduce.
///
/// With [`DataParallel::Automatic`] it is [`ExpandPlacements`] with the placements that move the fewest bytes, and
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
}

/// The axis of copies in hybrid sharding.
#[derive(Debug, Clone)]
pub struct Replicate {
    /// The axis, with the number of copies.
    pub axis: Axis,
    /// True if it comes before the axis of the shards in the mesh.
    pub is_first: bool,
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
            let mesh = Mesh::line(self.axis.as_ref(), self.num_ranks)?;
            let expand = least_communication(&graph, &mesh, &self.axis)?;
            return ExpandPlacements { expand, mesh }.transform(graph);
        }
        let mut insertion = Insertion {
            pass: self,
            graph,
            averaged: BTreeMap::new(),
        };
        let copies = self.replicate.as_ref().map_or(1, |other| other.axis.size);
        insertion.graph.set_num_ranks(self.num_ranks * copies);
        let nodes = insertion.graph.take_nodes();
        let nodes = match self.style {
            DataParallel::Automatic | DataParallel::Strategy(Strategy::NoShard) => nodes,
            DataParallel::Strategy(Strategy::FullShard | Strategy::ShardGradOp) => {
                insertion.shard(nodes)?
            }
        };
        insertion.average(nodes)?;
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
        let mut scheduled = Vec::with_capacity(nodes.len() * 2);
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
            dtype,
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
        dtype: burn::tensor::DType,
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
                    let mean = self.reduce(&mut scheduled, output, &"loss".into(), None, phase)?;
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
                    let mean = self.reduce(&mut scheduled, output, &path, partition, phase)?;
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

    fn reduce(
        &mut self,
        scheduled: &mut Vec<Node>,
        local: TensorId,
        path: &Arc<str>,
        partition: Option<Partition>,
        phase: Phase,
    ) -> Result<TensorId, Error> {
        let (shape, dtype) = match self.graph.value_mut(local) {
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
        let collective = self.collective(kind, axis, path, partition, tensor.dtype);
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
        let collective = self.collective(kind, &name, path, partition, tensor.dtype);
        let node = self
            .graph
            .collective_node(collective, &[own], &[mean], phase)?;
        scheduled.push(node);
        Ok(mean)
    }
}
