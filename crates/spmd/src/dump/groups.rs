//! Neighbouring nodes of a schedule that are drawn as one.

use std::collections::BTreeMap;
use std::ops::Range;

use burn_ir::TensorId;

use crate::graph::{Graph, Node, Payload, Phase, Role};
use crate::passes::unit_of;

/// Consecutive nodes of one phase and one unit that either all compute or all run collectives of one kind.
pub(super) struct Group {
    /// The nodes, by index.
    pub(super) nodes: Range<usize>,
    pub(super) phase: Phase,
    /// Unit of the weights that the nodes read, or of the weights read last.
    pub(super) unit: String,
    /// Name of the collectives; `None` for computation.
    pub(super) collective: Option<String>,
}

impl Group {
    /// Divides a schedule into groups.
    pub(super) fn of(graph: &Graph) -> Vec<Self> {
        let nodes = graph.nodes();
        let mut units = Units::of(graph);
        let units: Vec<Option<&str>> = nodes.iter().map(|node| units.unit(node)).collect();
        // Nodes before the first weight belong to its unit.
        let mut unit = units.iter().flatten().next().copied().unwrap_or_default();
        let mut groups: Vec<Self> = Vec::new();
        for (index, (node, own)) in nodes.iter().zip(&units).enumerate() {
            let collective = node.collective.as_ref().map(|of| of.name());
            unit = own.unwrap_or(unit);
            let fits = |last: &&mut Self| {
                let is_same = last.phase == node.phase && last.unit == unit;
                node.is_drop() || is_same && last.collective == collective
            };
            match groups.last_mut().filter(fits) {
                Some(last) => last.nodes.end = index + 1,
                None => groups.push(Self {
                    nodes: index..index + 1,
                    phase: node.phase,
                    unit: unit.to_owned(),
                    collective,
                }),
            }
        }
        groups
    }

    /// Returns the nodes with their indices, excluding drops.
    pub(super) fn nodes<'a>(&self, graph: &'a Graph) -> impl Iterator<Item = (usize, &'a Node)> {
        let nodes = self.nodes.clone().zip(&graph.nodes()[self.nodes.clone()]);
        nodes.filter(|(_, node)| !node.is_drop())
    }
}

/// The units of nodes.
struct Units<'a> {
    /// The unit of each parameter.
    by_path: BTreeMap<&'a str, &'a str>,
    /// The unit of weights, gathered or not, and of their views and casts.
    weights: BTreeMap<TensorId, &'a str>,
    /// The unit of gradients, before and after they are reduced.
    gradients: BTreeMap<TensorId, &'a str>,
}

impl<'a> Units<'a> {
    fn of(graph: &'a Graph) -> Self {
        let parameters = || graph.parameters().iter().filter(|of| !of.is_buffer);
        let unit = |path: &'a str| graph.unit(path).unwrap_or_else(|| unit_of(path));
        let by_path: BTreeMap<&str, &str> =
            parameters().map(|of| (&*of.path, unit(&of.path))).collect();
        let complete = graph.values().filter_map(|value| match &value.role {
            Role::Gradient(path) => Some((value.id, *by_path.get(&**path)?)),
            _ => None,
        });
        let reduced = graph.nodes().iter().flat_map(|node| {
            let collective = node.collective.as_ref();
            let collective = collective.filter(|of| of.payload == Payload::Gradient);
            let parts = collective.map_or(&[][..], |of| &of.parts);
            node.inputs().zip(parts)
        });
        let reduced = reduced.filter_map(|(id, part)| Some((id, *by_path.get(&*part.path)?)));
        Self {
            gradients: complete.chain(reduced).collect(),
            by_path,
            weights: parameters().map(|of| (of.value, unit(&of.path))).collect(),
        }
    }

    /// Returns the unit of a node, if its weights or gradients determine one.
    fn unit(&mut self, node: &Node) -> Option<&'a str> {
        if let Some(collective) = &node.collective {
            let units = collective.parts.iter();
            let units = units.map(|part| self.by_path.get(&*part.path).copied());
            let units: Vec<_> = units.collect();
            if collective.payload == Payload::Parameter {
                let gathered = node.outputs().zip(&units);
                let gathered = gathered.filter_map(|(id, unit)| Some((id, (*unit)?)));
                self.weights.extend(gathered);
            }
            return units.into_iter().flatten().next();
        }
        let read: Vec<_> = node
            .inputs()
            .map(|id| self.weights.get(&id).copied())
            .collect();
        let is_weight = !read.is_empty() && read.iter().all(|unit| *unit == read[0]);
        if let Some(unit) = read.first().copied().flatten().filter(|_| is_weight) {
            self.weights.extend(node.outputs().map(|id| (id, unit)));
        }
        let mut written = node.outputs();
        let served = node.path.as_deref();
        let served = served.and_then(|path| self.by_path.get(path).copied());
        served
            .or_else(|| read.into_iter().flatten().next())
            .or_else(|| written.find_map(|id| self.gradients.get(&id).copied()))
    }
}
