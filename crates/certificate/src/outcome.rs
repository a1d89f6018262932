//! The results of a step on all ranks, independent of sharding.

use std::collections::{BTreeMap, BTreeSet};

use burn_fsdp_mesh::Layout;

use super::field::{Element, inverse, mul, of_integer};
use super::given::{part_of, places};
use super::machine::{Fault, Machine};
use super::tensor::Tensor;
use burn_fsdp_spmd::graph::{Graph, Role, Value};

/// Whole tensors by name, one for each rank.
pub(super) type Named = BTreeMap<String, Vec<Tensor>>;

/// The results of a step, as whole tensors of each rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Outcome {
    /// The loss, the outputs, and the new values of buffers.
    pub(super) seen: Named,
    /// The new values of parameters and of the optimizer's states.
    pub(super) stepped: Named,
}

/// The first tensor that differs between two outcomes.
#[derive(Debug, Clone)]
pub(super) struct Difference {
    pub(super) what: String,
    pub(super) rank: usize,
    pub(super) reason: String,
}

/// The name of the loss in an outcome.
pub(super) const LOSS: &str = "the loss";

impl Outcome {
    /// Returns the outcome of a run whose nodes have run but whose updates are not applied yet.
    pub(super) fn of(machine: &Machine, graph: &Graph) -> Result<Self, Fault> {
        let mut outcome = Self::default();
        let ranks = 0..machine.num_ranks();
        let all = |id| {
            let own = ranks.clone().map(|rank| {
                if machine.is_absent(rank, id) {
                    return Ok(Tensor::new([0], Vec::new()));
                }
                let tensor = machine.get(rank, id).cloned();
                tensor.ok_or_else(|| Fault {
                    node: graph.nodes().len(),
                    rank,
                    reason: format!("%{}, a result of the step, no longer exists", id.value()),
                })
            });
            own.collect::<Result<Vec<_>, _>>()
        };
        if let Some(loss) = graph.loss() {
            outcome.seen.insert(LOSS.to_owned(), all(loss)?);
        }
        for (name, id) in graph.outputs() {
            let what = format!("the output {name}");
            outcome.seen.insert(what, all(*id)?);
        }
        for update in graph.updates() {
            let Some(into) = graph.value(update.into) else {
                continue;
            };
            let what = into.role.to_string();
            match &into.role {
                Role::Buffer(_) | Role::PassState(_) => {
                    outcome.seen.insert(what, all(update.from)?);
                }
                Role::Parameter(path) | Role::State { path, .. } => {
                    let parts = all(update.from)?;
                    let whole = whole(machine, graph, (path, into), parts)?;
                    outcome.stepped.insert(what, whole);
                }
                _ => {}
            }
        }
        Ok(outcome)
    }

    /// Divides the outcome into values that this graph's updates replace, and all others.
    pub(super) fn divided(self, graph: &Graph) -> (Self, Self) {
        let replaced = graph.updates().iter().map(|update| update.into);
        let values = replaced.filter_map(|id| graph.value(id));
        let names: BTreeSet<String> = values.map(|value| value.role.to_string()).collect();
        let divide = |of: Named| of.into_iter().partition(|(name, _)| names.contains(name));
        let ((seen, other_seen), (stepped, other_stepped)) =
            (divide(self.seen), divide(self.stepped));
        let replaced = Self { seen, stepped };
        let others = Self {
            seen: other_seen,
            stepped: other_stepped,
        };
        (replaced, others)
    }

    /// Returns the tensors with their names.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&String, &Vec<Tensor>)> {
        self.seen.iter().chain(&self.stepped)
    }

    fn get(&self, what: &str) -> Option<&Vec<Tensor>> {
        self.seen.get(what).or(self.stepped.get(what))
    }

    /// Returns the first difference between this outcome and `got`.
    pub(super) fn difference(&self, got: &Self) -> Option<Difference> {
        for (what, expected) in self.tensors() {
            let difference = |rank, reason: String| {
                Some(Difference {
                    what: what.clone(),
                    rank,
                    reason,
                })
            };
            let Some(got) = got.get(what) else {
                return difference(0, "it is not a result of the step".to_owned());
            };
            for (rank, (expected, got)) in expected.iter().zip(got).enumerate() {
                if expected.shape.iter().product::<usize>() != got.len() {
                    let reason = format!("{:?} instead of {:?}", got.shape, expected.shape);
                    return difference(rank, reason);
                }
                let pairs = expected.elements.iter().zip(got.elements.iter());
                let wrong: Vec<usize> = pairs
                    .enumerate()
                    .filter(|(_, (a, b))| a != b)
                    .map(|(at, _)| at)
                    .collect();
                if let Some(first) = wrong.first() {
                    let (all, len) = (wrong.len(), got.len());
                    let reason = format!("{all} of {len} elements, the first at {first}");
                    return difference(rank, reason);
                }
            }
        }
        let mut names = got.tensors().map(|(what, _)| what);
        let added = names.find(|what| self.get(what).is_none())?;
        Some(Difference {
            what: added.clone(),
            rank: 0,
            reason: "the traced step has no result of that name".to_owned(),
        })
    }

    /// Returns the number of elements of all tensors.
    pub(super) fn num_elements(&self) -> usize {
        let tensors = self.tensors().flat_map(|(_, tensors)| tensors);
        tensors.map(Tensor::len).sum()
    }
}

/// Returns the whole tensor of a value for each rank, from the parts of all ranks.
fn whole(
    machine: &Machine,
    graph: &Graph,
    (path, into): (&str, &Value),
    parts: Vec<Tensor>,
) -> Result<Vec<Tensor>, Fault> {
    // A rounded state holds its elements first, and the rest depends on the cuts.
    let is_state = matches!(into.role, Role::State { .. });
    let parameter = graph.parameter(path).filter(|parameter| {
        let is_rounded = is_state && parameter.state_format.is_some();
        is_rounded && !parameter.whole_states.contains(&into.id)
    });
    let own = |of: Tensor| match parameter {
        Some(parameter) if of.len() >= parameter.num_elements() => {
            let elements = of.elements[..parameter.num_elements()].to_vec();
            Tensor::new(parameter.shape.clone(), elements)
        }
        _ => of,
    };
    let Some((layout, shape)) = part_of(graph, path, into) else {
        return Ok(parts.into_iter().map(own).collect());
    };
    let whole = joined(machine, (shape, layout), &parts);
    let whole = whole.map_err(|(rank, reason)| Fault {
        node: graph.nodes().len(),
        rank,
        reason: format!("{}: {reason}", into.role),
    })?;
    Ok(vec![own(whole); parts.len()])
}

/// Joins the parts of all ranks into the whole tensor. Ranks that hold the same elements must agree on them.
fn joined(
    machine: &Machine,
    (shape, layout): (&[usize], &Layout),
    parts: &[Tensor],
) -> Result<Tensor, (usize, String)> {
    let mut whole: Vec<Option<Element>> = vec![None; shape.iter().product()];
    for (rank, part) in parts.iter().enumerate().take(machine.num_ranks()) {
        let places = places(layout, (shape, &part.shape), machine.mesh(), rank);
        let places = places.map_err(|reason| (rank, reason))?;
        for (place, own) in places {
            let element = part.elements[own];
            match whole[place].replace(element) {
                Some(other) if other != element => {
                    return Err((rank, format!("copies differ in element {place}")));
                }
                _ => {}
            }
        }
    }
    let elements: Option<Vec<Element>> = whole.into_iter().collect();
    let elements = elements.ok_or_else(|| (0, "no rank has some of its elements".to_owned()))?;
    Ok(Tensor::new(shape, elements))
}

/// Returns the mean of a tensor over ranks.
pub(super) fn mean(tensors: &[Tensor]) -> Tensor {
    let share = inverse(of_integer(tensors.len() as i64));
    Tensor::from_fn(&tensors[0].shape, |at| {
        let all = tensors.iter().map(|tensor| tensor.elements[at]);
        mul(all.fold(0, super::field::add), share)
    })
}
