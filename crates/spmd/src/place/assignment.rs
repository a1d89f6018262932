//! Chooses the cheapest way to run an operation among those that its signature allows.

use std::collections::BTreeMap;

use burn_fsdp_mesh::{Placement, ReduceOp};
use burn_fsdp_tensors::{moved_type, reduced_type};
use burn_ir::TensorId;

use super::located::{Located, On, Values, Version};
use super::redistribute::{cost, moved};
use super::signature::{Letter, Signature};
use crate::error::Error;
use crate::graph::Node;

/// The placements with which an operation runs: the required placements of its inputs and the resulting placements of
/// its outputs.
#[derive(Debug, Clone, Default)]
pub(super) struct Assignment {
    pub(super) inputs: BTreeMap<TensorId, On>,
    pub(super) outputs: BTreeMap<TensorId, On>,
}

/// A way to run an operation on one axis.
#[derive(Debug, Clone)]
pub(super) enum Candidate {
    Whole,
    Cut(Letter),
    /// These inputs are addends with this placement, and all others are whole.
    Addends(Vec<TensorId>, Placement),
}

impl Values {
    /// Chooses the cheapest way to run a node, one axis after the other.
    pub(super) fn choose(&self, node: &Node, signature: &Signature) -> Result<Assignment, Error> {
        let mut assignment = Assignment::default();
        for axis in 0..self.axes.len() {
            let mut best: Option<(f64, u8, Assignment)> = None;
            for candidate in self.candidates(signature, axis) {
                let Some(next) = self.extend(signature, &assignment, axis, &candidate) else {
                    continue;
                };
                let asked = self.asked_of(&next, axis);
                let Some(cost) = self.cost(&next, axis, asked.is_some()) else {
                    continue;
                };
                let cost = cost + asked.unwrap_or(0.0);
                let rank = match candidate {
                    Candidate::Whole => 1,
                    _ if self.is_given(&next, axis) => 0,
                    _ => 2,
                };
                let is_better = match &best {
                    None => true,
                    Some((least, other, _)) => (cost, rank) < (*least, *other),
                };
                if is_better {
                    best = Some((cost, rank, next));
                }
            }
            let Some((_, _, next)) = best else {
                return Err(self.refused(node, axis));
            };
            assignment = next;
        }
        Ok(assignment)
    }

    fn candidates(&self, signature: &Signature, axis: usize) -> Vec<Candidate> {
        let mut candidates = vec![Candidate::Whole];
        if self.axes[axis].num_ranks == 1 {
            return candidates;
        }
        // Sharding along a dim that only the results have divides no work.
        let is_given = |letter: &Letter| {
            let mut inputs = signature.inputs.iter();
            inputs.any(|input| input.dim_of(*letter).is_some())
        };
        let letters = signature.letters().into_iter().filter(is_given);
        candidates.extend(letters.map(Candidate::Cut));
        for set in &signature.linear {
            let first = set.first().and_then(|id| self.addend(*id, axis));
            if let Some(placement) = first
                && set.iter().all(|id| self.addend(*id, axis) == first)
            {
                candidates.push(Candidate::Addends(set.clone(), placement));
            }
        }
        candidates
    }

    /// Returns the placement of a value on an axis, if its only copy is addends of a sum or mean there.
    fn addend(&self, id: TensorId, axis: usize) -> Option<Placement> {
        match self.located.get(&id) {
            Some(Located::Placed(versions)) if versions.len() == 1 => {
                let placement = versions[0].on[axis];
                let is_sum = matches!(
                    placement,
                    Placement::Partial(ReduceOp::Sum | ReduceOp::Mean)
                );
                is_sum.then_some(placement)
            }
            _ => None,
        }
    }

    /// Returns the assignment with one more axis; `None` if the operation cannot run that way.
    pub(super) fn extend(
        &self,
        signature: &Signature,
        assignment: &Assignment,
        axis: usize,
        candidate: &Candidate,
    ) -> Option<Assignment> {
        if let Candidate::Cut(letter) = candidate
            && !self.divides(signature, axis, *letter)
        {
            return None;
        }
        let is_cut =
            |on: Option<&On>, dim: usize| on.is_some_and(|on| on.contains(&Placement::Shard(dim)));
        let mut next = assignment.clone();
        let mut seen: BTreeMap<TensorId, Placement> = BTreeMap::new();
        for input in &signature.inputs {
            let placement = match candidate {
                Candidate::Whole => Placement::Replicate,
                Candidate::Addends(set, placement) => {
                    if set.contains(&input.id) {
                        *placement
                    } else {
                        Placement::Replicate
                    }
                }
                Candidate::Cut(letter) => match input.dim_of(*letter) {
                    None => Placement::Replicate,
                    Some(dim) => {
                        if is_cut(assignment.inputs.get(&input.id), dim) {
                            return None;
                        }
                        Placement::Shard(dim)
                    }
                },
            };
            // A tensor that is read twice must have the same placement for both reads.
            match seen.insert(input.id, placement) {
                Some(other) if other != placement => return None,
                Some(_) => {}
                None => next.inputs.entry(input.id).or_default().push(placement),
            }
        }
        for output in &signature.outputs {
            let placement = match candidate {
                Candidate::Whole => Placement::Replicate,
                Candidate::Addends(_, placement) => *placement,
                Candidate::Cut(letter) => match output.dim_of(*letter) {
                    Some(dim) => {
                        if is_cut(assignment.outputs.get(&output.id), dim) {
                            return None;
                        }
                        Placement::Shard(dim)
                    }
                    None => {
                        let op = *signature.contracted.get(letter)?;
                        // Only floats can be reduced. Other sums are allowed, because they may be converted to float
                        // first.
                        let (_, dtype) = self.whole.get(&output.id)?;
                        if reduced_type(*dtype).is_none() && op != ReduceOp::Sum {
                            return None;
                        }
                        Placement::Partial(op)
                    }
                },
            };
            next.outputs.entry(output.id).or_default().push(placement);
        }
        Some(next)
    }

    /// Returns true if the operation can be sharded along a letter on an axis. Padding is allowed only where the user's
    /// placements need it.
    fn divides(&self, signature: &Signature, axis: usize, letter: Letter) -> bool {
        let num_ranks = self.axes[axis].num_ranks;
        signature.divides(letter, num_ranks)
            || self.is_padded[axis] && signature.divides_padded(letter, num_ranks)
    }

    /// Returns true if an input is already sharded, or already an addend, on this axis as the assignment requires.
    fn is_given(&self, assignment: &Assignment, axis: usize) -> bool {
        assignment.inputs.iter().any(|(id, on)| {
            let lies = |version: &Version| version.on[axis] == on[axis];
            match self.located.get(id) {
                Some(Located::Placed(versions)) => {
                    on[axis] != Placement::Replicate && versions.iter().any(lies)
                }
                _ => false,
            }
        })
    }

    /// Returns the cost of redistributing results to their requested placements on one axis; `None` if none is
    /// requested.
    fn asked_of(&self, assignment: &Assignment, axis: usize) -> Option<f64> {
        let costs = assignment.outputs.iter().filter_map(|(id, on)| {
            let asked = (*self.asked.get(id)?.get(axis)?)?;
            let num_bytes = self.num_bytes(id)?;
            // Without a way to the requested placement, settling the value later returns the error.
            let way = moved(on[axis], asked, num_bytes, self.axes[axis].num_ranks);
            Some(way.unwrap_or(f64::INFINITY))
        });
        costs.reduce(|a, b| a + b)
    }

    /// Returns the size of the whole value in bytes; `None` if it is unknown.
    fn num_bytes(&self, id: &TensorId) -> Option<f64> {
        let (shape, dtype) = self.whole.get(id)?;
        Some((shape.iter().product::<usize>() * dtype.size()) as f64)
    }

    /// Returns the cost of the redistributions on one axis before a node can run; `None` if there is no way. If
    /// `is_asked`, a placement is requested for the result, so a reduce-scatter costs only the bytes that it moves.
    fn cost(&self, assignment: &Assignment, axis: usize, is_asked: bool) -> Option<f64> {
        let mut total = 0.0;
        for (id, on) in &assignment.inputs {
            let (_, dtype) = self.whole.get(id)?;
            let num_bytes = self.num_bytes(id)?;
            let Located::Placed(versions) = self.located.get(id)? else {
                continue;
            };
            let num_ranks = self.axes[axis].num_ranks;
            let ways = versions.iter().filter_map(|version| {
                let (from, to) = (version.on[axis], on[axis]);
                // More types can be gathered than reduced: only floats can be reduced.
                let movable = match from {
                    Placement::Replicate => true,
                    Placement::Shard(_) => moved_type(*dtype).is_some(),
                    Placement::Partial(_) => reduced_type(*dtype).is_some(),
                };
                if from != to && !movable {
                    return None;
                }
                if is_asked {
                    moved(from, to, num_bytes, num_ranks)
                } else {
                    cost(from, to, num_bytes, num_ranks)
                }
            });
            total += ways.min_by(f64::total_cmp)?;
        }
        Some(total)
    }

    pub(super) fn refused(&self, node: &Node, axis: usize) -> Error {
        let operands = node.operation.inputs().map(|input| {
            let shape = self.whole.get(&input.id).map(|whole| &whole.0);
            let on = match self.located.get(&input.id) {
                Some(Located::Placed(versions)) => versions[0].on[axis].to_string(),
                _ => "anywhere".to_owned(),
            };
            format!("{:?} {:?} {on}", input.dtype, shape.map_or(&[][..], |s| s))
        });
        Error::NoRule {
            operation: node.name(),
            axis: self.axes[axis].axis.to_string(),
            operands: operands.collect::<Vec<_>>().join(", "),
        }
    }
}
