//! The pass that scales gradients to keep their norm below a limit.
//!
//! Its input is a graph with collectives. It scales each rank's part of the gradients before the optimizer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::{Axis, Clip, Partition, Placement};
use burn_ir::{BinaryOpIr, CustomOpIr, NumericOperationIr, OperationIr, TensorId};

use crate::error::{Error, OptionError};
use crate::graph::{
    Collective, CollectiveKind, CollectivePart, CustomProfile, Graph, Node, Payload, Phase, Role,
    Stage, rename,
};
use crate::norm::{self, GRAD_NORM};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that scales all gradients by one factor, to keep their joint norm within the limit of the [`Clip`]. Every
/// parameter counts once, no matter how many ranks share or replicate it.
///
/// ```text
/// before                                after
/// %10 = reduce_scatter(%7)   backward   %10 = reduce_scatter(%7)                     backward
/// ...                                   ...
///                                       %20 = burn_fsdp.local_norm(%10, ..)          optimizer
///                                       %21 = all_gather(%20)                        optimizer
///                                       %22, %23 = burn_fsdp.clip_coefficients(%21)  optimizer
///                                       %24 = NumericFloat.Mul(%10, %23)             optimizer
/// %12 = NumericFloat.Sub(%0, %10)       %12 = NumericFloat.Sub(%0, %24)
/// ```
///
/// The step returns the norm under the name [`GRAD_NORM`].
#[derive(Debug, Clone)]
pub struct ClipGradients {
    /// The limit, and the kind of norm.
    pub clip: Clip,
    /// The axes of the mesh, in the order of placements in layouts.
    pub axes: Vec<Axis>,
}

/// Gradients that are sharded along the same mesh axes.
struct Group {
    axes: Vec<usize>,
    gradients: Vec<TensorId>,
}

impl GraphTransform for ClipGradients {
    fn id(&self) -> PassId {
        PassId::ClipGradients
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives]
    }

    fn before(&self) -> &'static [PassId] {
        &[
            PassId::Bucket,
            PassId::Split,
            PassId::EarlyOptimizer,
            PassId::DeferOptimizer,
            PassId::Liveness,
        ]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        if !self.clip.is_valid() {
            return Err(OptionError::Clip { clip: self.clip }.into());
        }
        let is_step = |node: &Node| node.phase == Phase::Optimizer && node.path.is_some();
        let nodes = graph.take_nodes();
        let (optimizer, mut scheduled): (Vec<Node>, Vec<Node>) =
            nodes.into_iter().partition(is_step);
        let groups = self.groups(&graph);
        let mut norms = Vec::new();
        for group in &groups {
            norms.push(self.measure(&mut graph, &mut scheduled, group)?);
        }
        let scaled = self.scale(&mut graph, &mut scheduled, norms, &groups)?;
        for parameter in graph.parameters_mut() {
            parameter.gradient = parameter.gradient.map(|gradient| scaled[&gradient]);
        }
        // Some optimizers store the first gradient unchanged as a state.
        let mut updates = graph.updates().to_vec();
        for update in updates
            .iter_mut()
            .filter(|update| graph.is_of_optimizer(update))
        {
            update.from = scaled.get(&update.from).copied().unwrap_or(update.from);
        }
        *graph.updates_mut() = updates;
        scheduled.extend(optimizer.into_iter().map(|mut node| {
            rename(&mut node.operation, &scaled);
            node
        }));
        graph.set_nodes(scheduled);
        Ok(graph)
    }
}

impl ClipGradients {
    /// Groups the gradients by the mesh axes along which their parameters are sharded, in the order of the module.
    fn groups(&self, graph: &Graph) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for parameter in graph.parameters() {
            let Some(gradient) = parameter.gradient else {
                continue;
            };
            let placements = parameter.layout.placements.iter().enumerate();
            let axes: Vec<usize> = placements
                .filter(|(_, placement)| matches!(placement, Placement::Shard(_)))
                .map(|(axis, _)| axis)
                .collect();
            match groups.iter_mut().find(|group| group.axes == axes) {
                // Parameters that are added to each other share a gradient, and each of them counts.
                Some(group) => group.gradients.push(gradient),
                None => groups.push(Group {
                    axes,
                    gradients: vec![gradient],
                }),
            }
        }
        groups
    }

    /// Returns the local norms of a group's gradients, gathered from all ranks that hold a part of them.
    fn measure(
        &self,
        graph: &mut Graph,
        scheduled: &mut Vec<Node>,
        group: &Group,
    ) -> Result<TensorId, Error> {
        let own = graph.add_value([1], DType::F32, Role::Temporary);
        let inputs = group.gradients.iter().map(|id| graph.read(*id));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        scheduled.push(custom(norm::local_norm(
            &self.clip,
            inputs,
            graph.write(own)?,
        )));
        let mut norms = own;
        let mut len = 1;
        for axis in &group.axes {
            let axis = &self.axes[*axis];
            len *= axis.size;
            let gathered = graph.add_value([len], DType::F32, Role::Temporary);
            let label: Arc<str> = GRAD_NORM.into();
            let collective = Collective {
                kind: CollectiveKind::AllGather,
                axis: axis.name.as_str().into(),
                label: label.clone(),
                parts: vec![CollectivePart {
                    path: label,
                    partition: Partition::flat(len, axis.size)?,
                    across: None,
                    dtype: DType::F32,
                    result: DType::F32,
                }],
                reduction: None,
                payload: Payload::Activation,
                stage: Stage::Whole,
            };
            let gather = graph.collective_node(collective, &[norms], &[gathered], Phase::Optimizer);
            scheduled.push(gather?);
            norms = gathered;
        }
        Ok(norms)
    }

    /// Scales every gradient, and returns a map from the gradients to the scaled ones.
    fn scale(
        &self,
        graph: &mut Graph,
        scheduled: &mut Vec<Node>,
        norms: Vec<TensorId>,
        groups: &[Group],
    ) -> Result<BTreeMap<TensorId, TensorId>, Error> {
        let gradients = groups.iter().flat_map(|group| &group.gradients).copied();
        let gradients: BTreeSet<TensorId> = gradients.collect();
        // Burn broadcasts only dims of one element, so each combination of rank and type needs its own factor.
        let mut factors: Vec<(usize, DType, TensorId)> = Vec::new();
        let mut scaling = Vec::new();
        for gradient in gradients {
            let value = graph.read(gradient)?;
            let (rank, dtype) = (value.shape.rank(), value.dtype);
            let alike = |(of, with, _): &&(usize, DType, TensorId)| *of == rank && *with == dtype;
            let factor = match factors.iter().find(alike) {
                Some((.., known)) => *known,
                None => {
                    let new = graph.add_value(vec![1; rank], dtype, Role::Temporary);
                    factors.push((rank, dtype, new));
                    new
                }
            };
            scaling.push((gradient, factor));
        }
        let total = graph.add_value([1], DType::F32, Role::Temporary);
        graph.set_output(GRAD_NORM.into(), total);
        let norms = norms.into_iter().map(|id| graph.read(id));
        let outputs = factors.iter().map(|(.., id)| graph.write(*id));
        scheduled.push(custom(norm::coefficients(
            &self.clip,
            norms.collect::<Result<_, _>>()?,
            graph.write(total)?,
            outputs.collect::<Result<_, _>>()?,
        )));
        let mut scaled = BTreeMap::new();
        for (gradient, factor) in scaling {
            let like = graph.read(gradient)?;
            let role = graph.value(gradient).map(|value| value.role.clone());
            let new = graph.add_value(
                like.shape.to_vec(),
                like.dtype,
                role.unwrap_or(Role::Temporary),
            );
            if let Some(value) = graph.value_mut(gradient)
                && !value.role.is_given()
            {
                value.role = Role::Temporary;
            }
            let dtype = like.dtype;
            let operation = NumericOperationIr::Mul(BinaryOpIr {
                lhs: like,
                rhs: graph.read(factor)?,
                out: graph.write(new)?,
            });
            let operation = OperationIr::NumericFloat(dtype, operation);
            scheduled.push(Node::new(operation, Phase::Optimizer));
            scaled.insert(gradient, new);
        }
        Ok(scaled)
    }
}

fn custom(call: CustomOpIr) -> Node {
    let mut node = Node::new(OperationIr::Custom(call), Phase::Optimizer);
    node.custom = Some(CustomProfile::default());
    node
}
