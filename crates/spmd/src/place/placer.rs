//! The placer, which builds the graph of each rank and redistributes operands to the placements that nodes need.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::Placement;
use burn_ir::TensorId;

use super::assignment::{Assignment, Candidate};
use super::expand::Expand;
use super::located::{Located, On, Reader, Values, Version, on};
use super::padding::{Padding, padded_dim};
use super::redistribute::{Redistribution, cost};
use super::rules;
use super::signature::Signature;
use crate::Precision;
use crate::error::Error;
use crate::graph::{Graph, Node, Payload, Phase, Role, local_shape, rename};

/// The uses that determine the placements of a value read by the optimizer or outside the graph.
#[derive(Debug, Clone, Default)]
pub(super) struct Destination {
    /// Indices of the parameters with this value as gradient. Parameters that are added to each other share one.
    pub(super) gradients: Vec<usize>,
    pub(super) is_loss: bool,
    /// Names under which the step returns it.
    pub(super) outputs: Vec<Arc<str>>,
    /// Indices of the updates with this value as source.
    pub(super) updates: Vec<usize>,
    /// Names under which the user requested placements for it.
    pub(super) activations: Vec<Arc<str>>,
}

/// A graph in the process of being placed, one node after the other.
pub(super) struct Placer {
    /// The user's placements.
    pub(super) expand: Expand,
    /// Types in which gradients are sent.
    pub(super) precision: Precision,
    pub(super) values: Values,
    pub(super) scheduled: Vec<Node>,
    pub(super) destinations: HashMap<TensorId, Destination>,
    /// Placements of the parameters.
    pub(super) parameters: Vec<On>,
    /// Copies of gradients with the placements that the optimizer needs.
    pub(super) settled: HashMap<TensorId, Vec<Version>>,
    pub(super) is_optimizing: bool,
    /// The placements of copies that later nodes do not read, including all copies from before the optimizer.
    pub(super) before: BTreeMap<TensorId, On>,
    /// Bytes that a rank has received so far.
    pub(super) moved: f64,
    /// The values created for padding so far.
    pub(super) padding: Padding,
}

impl Placer {
    /// Prepares for the optimizer's nodes. They read gradients with the placements of their parameters, and given
    /// values in the placements in which they are given. They must not read other copies, because forward and backward
    /// may run at another time.
    pub(super) fn begin_optimizer(&mut self) {
        self.is_optimizing = true;
        self.before = self.placements();
        for (id, versions) in std::mem::take(&mut self.settled) {
            self.values.located.insert(id, Located::Placed(versions));
        }
        for (id, located) in &mut self.values.located {
            if let Located::Placed(versions) = located
                && self.values.graph.is_given(*id)
            {
                versions.truncate(1);
            }
        }
    }

    /// Redistributes the inputs to the placements of the assignment, and appends the node.
    pub(super) fn emit(
        &mut self,
        node: &Node,
        signature: &Signature,
        assignment: Assignment,
    ) -> Result<(), Error> {
        let mut ids = BTreeMap::new();
        for (id, on) in &assignment.inputs {
            let local = self.fetch(*id, on, &Reader::of(node))?;
            let is_summed = |dim: usize| {
                let operands = signature.inputs.iter().filter(|input| input.id == *id);
                let mut letters = operands.filter_map(|input| input.letters[dim]);
                letters.any(|letter| signature.contracted.contains_key(&letter))
            };
            let local = self.cleared((*id, local), on, is_summed, &Reader::of(node))?;
            ids.insert(*id, local);
        }
        for output in &signature.outputs {
            let placements = self.values.described(&assignment.outputs[&output.id]);
            let local = local_shape(&output.shape, &placements);
            if let Some(value) = self.values.graph.value_mut(output.id) {
                value.shape = local;
            }
        }
        let mut local = node.clone();
        rename(&mut local.operation, &ids);
        self.values.graph.sync_node(&mut local);
        rules::localize(&mut local.operation);
        if let (Some(draw), Some(on)) = (&mut local.draw, assignment.outputs.values().next()) {
            draw.place(&self.values.described(on));
        }
        self.scheduled.push(local);
        for (id, on) in assignment.outputs {
            let version = Version { id, on };
            self.values
                .located
                .insert(id, Located::Placed(vec![version]));
        }
        for output in node.outputs() {
            self.settle(output, &Reader::of(node))?;
        }
        Ok(())
    }

    /// Returns a copy of a value with the given placements, and creates it if there is none.
    pub(super) fn fetch(
        &mut self,
        id: TensorId,
        to: &On,
        reader: &Reader,
    ) -> Result<TensorId, Error> {
        if let Some(Located::Floating(node)) = self.values.located.get(&id).cloned() {
            self.make(&node, id, to, reader)?;
        }
        let undeclared = || Error::Internal(format!("value {} has no placement", id.value()));
        let Some(Located::Placed(versions)) = self.values.located.get(&id) else {
            return Err(undeclared());
        };
        if let Some(version) = versions.iter().find(|version| version.on == *to) {
            return Ok(version.id);
        }
        let distance = |version: &Version| {
            let axes = self.values.axes.iter().enumerate();
            let costs = axes.map(|(k, axis)| cost(version.on[k], to[k], 1.0, axis.num_ranks));
            costs.map(|cost| cost.unwrap_or(f64::INFINITY)).sum::<f64>()
        };
        let nearest = versions
            .iter()
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
            .cloned()
            .ok_or_else(undeclared)?;
        let (from, target) = (
            self.values.described(&nearest.on),
            self.values.described(to),
        );
        let travels = self.travels(id);
        let mut redistribution = self.redistribution(id, reader)?;
        let new = redistribution.run_in(travels, nearest.id, &from, &target)?;
        if let Some(Located::Placed(versions)) = self.values.located.get_mut(&id) {
            versions.push(Version {
                id: new,
                on: to.clone(),
            });
        }
        Ok(new)
    }

    /// Returns the type in which the addends of a gradient are sent, if it differs from the parameter's type.
    fn travels(&self, id: TensorId) -> Option<DType> {
        if self.precision == Precision::default() {
            return None;
        }
        let owner = *self.destinations.get(&id)?.gradients.first()?;
        let parameter = self.values.graph.parameters().get(owner)?;
        let compute = self.precision.compute_of(&parameter.path, parameter.dtype);
        let travels = self.precision.reduce_of(compute);
        (travels != parameter.dtype).then_some(travels)
    }

    /// Prepares the redistribution of a value for a node.
    fn redistribution<'a>(
        &'a mut self,
        id: TensorId,
        reader: &'a Reader,
    ) -> Result<Redistribution<'a>, Error> {
        let (label, payload) = self.named(id);
        let whole = self.values.whole.get(&id);
        let (whole, _) =
            whole.ok_or_else(|| Error::Internal(format!("value {} has no shape", id.value())))?;
        Ok(Redistribution {
            graph: &mut self.values.graph,
            scheduled: &mut self.scheduled,
            label,
            payload,
            reader,
            moved: &mut self.moved,
            whole,
            padding: &mut self.padding,
            result: None,
        })
    }

    /// Clears the padding of a copy of a value along the sharded dims that `dims` accepts.
    fn cleared(
        &mut self,
        (id, copy): (TensorId, TensorId),
        on: &On,
        dims: impl Fn(usize) -> bool,
        reader: &Reader,
    ) -> Result<TensorId, Error> {
        let mut copy = copy;
        for axis in self.values.described(on) {
            let mut redistribution = self.redistribution(id, reader)?;
            if let Some(dim) = padded_dim(&axis, redistribution.whole).filter(|dim| dims(*dim)) {
                copy = redistribution.cleared(copy, &axis, dim)?;
            }
        }
        Ok(copy)
    }

    /// Emits a deferred node with the placements that its first reader needs.
    fn make(&mut self, node: &Node, id: TensorId, to: &On, reader: &Reader) -> Result<(), Error> {
        let signature = rules::signature(&node.operation);
        let wanted = signature.outputs.iter().find(|output| output.id == id);
        let letters = wanted.map(|output| output.letters.clone());
        let letters = letters.unwrap_or_default();
        let mut assignment = Assignment::default();
        for (axis, placement) in to.iter().enumerate() {
            let letter = match placement {
                Placement::Shard(dim) => letters.get(*dim).copied().flatten(),
                _ => None,
            };
            let cut = letter.and_then(|letter| {
                self.values
                    .extend(&signature, &assignment, axis, &Candidate::Cut(letter))
            });
            // With a seed, all ranks draw the same numbers.
            let is_random = node.is_opaque() && node.draw.is_none();
            let is_random = is_random && self.values.axes[axis].num_ranks > 1;
            let next = match cut {
                Some(next) => Some(next),
                // Without a seed, ranks draw different numbers. Each therefore draws a part, and the parts are
                // gathered.
                None if is_random => {
                    let letters = letters.iter().flatten();
                    let mut ways = letters.filter_map(|letter| {
                        self.values
                            .extend(&signature, &assignment, axis, &Candidate::Cut(*letter))
                    });
                    let way = ways.next().ok_or_else(|| Error::RandomReplicated {
                        operation: node.name(),
                        shape: wanted.map_or_else(Vec::new, |output| output.shape.clone()),
                        axis: self.values.axes[axis].axis.to_string(),
                    });
                    Some(way?)
                }
                None => self
                    .values
                    .extend(&signature, &assignment, axis, &Candidate::Whole),
            };
            assignment = next.ok_or_else(|| self.values.refused(node, axis))?;
        }
        let node = Node {
            phase: reader.phase,
            path: reader.path.clone(),
            ..node.clone()
        };
        self.emit(&node, &signature, assignment)
    }

    /// Redistributes a value that leaves the graph, or goes to the optimizer, to its destination's placements.
    pub(super) fn settle(&mut self, id: TensorId, writer: &Reader) -> Result<(), Error> {
        self.settle_activation(id, writer)?;
        let Some(destination) = self.destinations.get(&id).cloned() else {
            return Ok(());
        };
        let replicated = vec![Placement::Replicate; self.values.axes.len()];
        for index in destination.gradients {
            let on = self.parameters[index].clone();
            let settled = self.settled.get(&id).into_iter().flatten();
            let known = settled.filter(|version| version.on == on);
            let known = known.map(|version| version.id).next();
            let new = match known {
                Some(known) => known,
                None => self.gradient(id, &on, writer)?,
            };
            let parameter = &mut self.values.graph.parameters_mut()[index];
            parameter.gradient = Some(new);
            let role = Role::Gradient(parameter.path.clone());
            if new != id {
                self.set_role(id, Role::Temporary);
            }
            self.set_role(new, role);
            let settled = self.settled.entry(id).or_default();
            if !settled.iter().any(|version| version.on == on) {
                settled.push(Version { id: new, on });
            }
        }
        if destination.is_loss {
            let new = self.fetch(id, &replicated, writer)?;
            self.values.graph.set_loss(new);
        }
        for name in destination.outputs {
            let new = self.fetch(id, &replicated, writer)?;
            self.values.graph.set_output(name, new);
        }
        for index in destination.updates {
            let into = self.values.graph.updates()[index].into;
            let to = match self.values.located.get(&into) {
                Some(Located::Placed(versions)) => versions[0].on.clone(),
                _ => replicated.clone(),
            };
            // A state may be the gradient itself.
            let settled = self.settled.get(&id).into_iter().flatten();
            let known = settled
                .clone()
                .find(|version| version.on == to)
                .map(|v| v.id);
            let new = match known {
                Some(new) => new,
                None => self.fetch(id, &to, writer)?,
            };
            self.values.graph.updates_mut()[index].from = new;
        }
        self.destinations.remove(&id);
        Ok(())
    }

    /// Returns a gradient with its parameter's placements and cleared padding, which a norm would otherwise include.
    fn gradient(&mut self, id: TensorId, on: &On, writer: &Reader) -> Result<TensorId, Error> {
        let fetched = self.fetch(id, on, writer)?;
        // Backward continues with the previous copies, because this one may be delayed.
        if fetched != id {
            self.forget(id, |version| version.id == fetched);
        }
        self.cleared((id, fetched), on, |_| true, writer)
    }

    /// Removes the copies of a value that `which` selects, so later nodes do not read them.
    fn forget(&mut self, id: TensorId, which: impl Fn(&Version) -> bool) {
        if let Some(Located::Placed(versions)) = self.values.located.get_mut(&id) {
            let forgotten = versions.extract_if(.., |version| which(version));
            // The type check still needs their placements.
            self.before
                .extend(forgotten.map(|version| (version.id, version.on)));
        }
    }

    /// Redistributes a named activation to its requested placements. Readers then find no other copy, unless the value
    /// is given.
    pub(super) fn settle_activation(&mut self, id: TensorId, writer: &Reader) -> Result<(), Error> {
        let destination = self.destinations.get_mut(&id);
        let Some(destination) = destination.filter(|of| !of.activations.is_empty()) else {
            return Ok(());
        };
        let names = std::mem::take(&mut destination.activations);
        let whole = self.values.whole.get(&id);
        let shape = whole.map_or_else(Vec::new, |(shape, _)| shape.clone());
        let now = match self.values.located.get(&id) {
            Some(Located::Placed(versions)) => versions[0].on.clone(),
            _ => vec![Placement::Replicate; self.values.axes.len()],
        };
        let mut asked = self.values.described(&now);
        for name in &names {
            asked = self.expand.of_activation(name, &shape, &asked)?;
        }
        for name in &names {
            if self.expand.of_activation(name, &shape, &asked)? != asked {
                return Err(Error::Placement {
                    what: "activation",
                    name: name.to_string(),
                    placement: "placed by its name".to_owned(),
                    shape,
                    reason: "it has another name with a different placement".to_owned(),
                });
            }
        }
        let new = self.fetch(id, &on(&asked), writer)?;
        if !self.values.graph.is_given(id) {
            self.forget(id, |version| version.id != new);
        }
        Ok(())
    }

    /// Redistributes named activations that no node writes, such as inputs, to their requested placements.
    pub(super) fn settle_given(&mut self) -> Result<(), Error> {
        let named = self.destinations.iter();
        let named = named.filter(|(_, destination)| !destination.activations.is_empty());
        let given = named.filter(|(id, _)| self.values.graph.is_given(**id));
        let mut given: Vec<_> = given.map(|(id, _)| *id).collect();
        given.sort_unstable();
        let first = Reader {
            phase: Phase::Forward,
            path: None,
        };
        given
            .into_iter()
            .try_for_each(|id| self.settle_activation(id, &first))
    }

    fn set_role(&mut self, id: TensorId, role: Role) {
        if let Some(value) = self.values.graph.value_mut(id) {
            value.role = role;
        }
    }

    /// Returns the label and payload of a communicated value.
    fn named(&self, id: TensorId) -> (Arc<str>, Payload) {
        if let Some(Role::Parameter(path)) = self.values.graph.value(id).map(|value| &value.role) {
            return (path.clone(), Payload::Parameter);
        }
        match self.destinations.get(&id) {
            Some(Destination { gradients, .. }) if !gradients.is_empty() => {
                let path = self.values.graph.parameters()[gradients[0]].path.clone();
                // A padded gradient cannot be delayed, because its padding is cleared right after the reduction.
                let mut all = gradients.iter();
                let payload = if all.any(|index| self.is_padded(id, &self.parameters[*index])) {
                    Payload::Activation
                } else {
                    Payload::Gradient
                };
                (path, payload)
            }
            Some(Destination { is_loss: true, .. }) => ("loss".into(), Payload::Gradient),
            _ => (format!("%{}", id.value()).into(), Payload::Activation),
        }
    }

    /// Returns true if copies of a value with these placements have padding.
    fn is_padded(&self, id: TensorId, on: &On) -> bool {
        let Some((whole, _)) = self.values.whole.get(&id) else {
            return false;
        };
        let axes = self.values.described(on);
        axes.iter().any(|axis| padded_dim(axis, whole).is_some())
    }

    /// Settles the remaining values that have a destination, and returns the graph.
    pub(super) fn finish(mut self) -> Result<Graph, Error> {
        self.settle_rest()?;
        let placements = self.placements();
        self.values.graph.set_placements(placements);
        self.values.graph.set_nodes(self.scheduled);
        self.values.graph.sync_nodes();
        self.values.graph.prune();
        Ok(self.values.graph)
    }

    /// Returns the placements of all copies.
    fn placements(&mut self) -> BTreeMap<TensorId, On> {
        let located = self.values.located.values();
        let placed = located.filter_map(|of| match of {
            Located::Placed(versions) => Some(versions),
            Located::Floating(_) => None,
        });
        let versions = placed.chain(self.settled.values()).flatten();
        let mut placements = std::mem::take(&mut self.before);
        placements.append(&mut self.padding.lengthened);
        placements.extend(versions.map(|version| (version.id, version.on.clone())));
        placements
    }

    /// Settles the remaining values that have a destination.
    pub(super) fn settle_rest(&mut self) -> Result<(), Error> {
        let mut left: Vec<_> = self.destinations.keys().copied().collect();
        left.sort_unstable();
        let end = Reader {
            phase: Phase::Optimizer,
            path: None,
        };
        for id in left {
            self.settle(id, &end)?;
        }
        Ok(())
    }
}
