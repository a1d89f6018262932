//! The verifier: rules that every graph must satisfy, regardless of the passes that produced it.

use std::collections::{BTreeMap, BTreeSet};

use burn_fsdp_collectives::Share;
use burn_ir::{TensorId, TensorStatus};

use super::unit::unit_in;
use crate::error::Error;
use crate::graph::{
    CollectiveKind, CollectivePart, Graph, Node, Payload, Phase, Stage, Storage, storage_of,
};
use crate::pass_id::PassId;
use crate::place::check_types;

/// A rule, with its name and a function that finds violations.
type Rule = (&'static str, fn(&Graph) -> Option<Fault>);

/// The node at which a graph breaks a rule, and the reason.
pub(super) struct Fault {
    node: usize,
    reason: String,
}

impl Fault {
    fn new(node: usize, reason: impl Into<String>) -> Option<Self> {
        Some(Self {
            node,
            reason: reason.into(),
        })
    }
}

/// The rules, in the order in which they are checked.
const RULES: &[Rule] = &[
    (
        "every value is declared, with the shape and type that nodes use for it",
        declared,
    ),
    (
        "every value is written once, and given values never",
        written_once,
    ),
    ("no value is read before it is written", written_before_read),
    ("no value is read after it is dropped", alive_when_read),
    ("values outliving the step are never dropped", kept_is_kept),
    ("phases come in order", phases_in_order),
    (
        "collectives have the parts that their nodes read and write",
        parts_match,
    ),
    ("every start has one wait after it", waits_follow_starts),
    (
        "a unit is a module that contains its parameters",
        units_contain,
    ),
    (
        "gathered weights die before the unit after next",
        gathered_die,
    ),
    (
        "updates feed values of their own shape and type",
        updates_match,
    ),
    TYPES,
];

const TYPES: Rule = ("ranks hold what the readers of each value need", types_fit);

/// Returns the names of the rules, in the order in which they are checked.
pub fn rules() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|(name, _)| *name)
}

/// Checks every rule.
///
/// # Errors
///
/// [`Error::InvalidGraph`] with the first rule broken and the node at fault.
pub fn verify(graph: &Graph) -> Result<(), Error> {
    RULES.iter().try_for_each(|rule| keeps(graph, rule))
}

/// Checks only that each value has the type (replicated, sharded, addends) that its readers need. Every plan is checked
/// before it runs.
///
/// # Errors
///
/// [`Error::InvalidGraph`] with the node at fault.
pub fn verify_types(graph: &Graph) -> Result<(), Error> {
    keeps(graph, &TYPES)
}

fn keeps(graph: &Graph, (rule, check): &Rule) -> Result<(), Error> {
    match check(graph) {
        None => Ok(()),
        Some(Fault { node, reason }) => Err(Error::InvalidGraph {
            rule,
            after: graph.applied().last().copied(),
            node,
            operation: graph.nodes().get(node).map_or_else(String::new, Node::name),
            reason,
        }),
    }
}

/// Checks that ranks start the same collectives in the same order.
///
/// # Errors
///
/// [`Error::InvalidGraph`] with the first node of a rank that differs from rank 0.
pub fn verify_ranks<'a>(graphs: impl IntoIterator<Item = &'a Graph>) -> Result<(), Error> {
    let mut graphs = graphs.into_iter();
    let Some(first) = graphs.next() else {
        return Ok(());
    };
    for (index, other) in graphs.enumerate() {
        let mut expected = first.collectives();
        let mut got = other.collectives();
        loop {
            let (node, reason) = match (expected.next(), got.next()) {
                (None, None) => break,
                (Some((_, a)), Some((_, b))) if a == b => continue,
                (Some((_, a)), Some((node, b))) => (
                    node,
                    format!(
                        "{} {}, but rank 0 has {} {}",
                        b.name(),
                        b.label,
                        a.name(),
                        a.label
                    ),
                ),
                (Some((_, a)), None) => (
                    other.nodes().len(),
                    format!("{} {} is missing", a.name(), a.label),
                ),
                (None, Some((node, b))) => {
                    (node, format!("{} {} is one too many", b.name(), b.label))
                }
            };
            return Err(Error::InvalidGraph {
                rule: "every rank starts the same collectives in the same order",
                after: other.applied().last().copied(),
                node,
                operation: other.nodes().get(node).map_or_else(String::new, Node::name),
                reason: format!("on rank {}: {reason}", index + 1),
            });
        }
    }
    Ok(())
}

fn declared(graph: &Graph) -> Option<Fault> {
    for (index, node) in graph.nodes().iter().enumerate() {
        for tensor in node.operation.nodes() {
            let Some(value) = graph.value(tensor.id) else {
                return Fault::new(index, format!("%{} is not declared", tensor.id.value()));
            };
            if value.shape != tensor.shape.to_vec() || value.dtype != tensor.dtype {
                return Fault::new(
                    index,
                    format!(
                        "%{} is {:?} {:?} here, but declared as {:?} {:?}",
                        tensor.id.value(),
                        tensor.dtype,
                        tensor.shape.to_vec(),
                        value.dtype,
                        value.shape
                    ),
                );
            }
        }
    }
    None
}

fn written_once(graph: &Graph) -> Option<Fault> {
    let mut written = BTreeSet::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        for output in node.outputs() {
            if graph.is_given(output) {
                return Fault::new(
                    index,
                    format!("it writes %{}, which is given", output.value()),
                );
            }
            if !written.insert(output) {
                return Fault::new(index, format!("it writes %{} again", output.value()));
            }
        }
    }
    None
}

/// Finds a value that is read, or is a result of the graph, but has not been written.
pub(super) fn written_before_read(graph: &Graph) -> Option<Fault> {
    let mut written = BTreeSet::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        let early = |id: &TensorId| !graph.is_given(*id) && !written.contains(id);
        if let Some(id) = node.inputs().find(early) {
            return Fault::new(index, format!("%{} has not been written yet", id.value()));
        }
        written.extend(node.outputs());
    }
    let end = graph.nodes().len();
    let sources = graph
        .updates()
        .iter()
        .map(|update| update.from)
        .chain(graph.results());
    let missing = sources
        .into_iter()
        .find(|id| !graph.is_given(*id) && !written.contains(id))?;
    Fault::new(end, format!("nothing writes %{}", missing.value()))
}

fn alive_when_read(graph: &Graph) -> Option<Fault> {
    let mut dropped: BTreeMap<TensorId, usize> = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        if let Some((id, at)) = node.inputs().find_map(|id| Some((id, dropped.get(&id)?))) {
            return Fault::new(index, format!("node {at} dropped %{}", id.value()));
        }
        let taken = node.operation.inputs();
        let taken = taken.filter(|tensor| tensor.status == TensorStatus::ReadWrite);
        for tensor in taken {
            let mentions = node.inputs().filter(|id| *id == tensor.id).count();
            if mentions > 1 {
                return Fault::new(
                    index,
                    format!("it takes %{} over and also reads it", tensor.id.value()),
                );
            }
            dropped.insert(tensor.id, index);
        }
    }
    None
}

fn kept_is_kept(graph: &Graph) -> Option<Fault> {
    let kept = graph.kept();
    for (index, node) in graph.nodes().iter().enumerate() {
        let taken = |tensor: &&burn_ir::TensorIr| tensor.status == TensorStatus::ReadWrite;
        let gone = node
            .operation
            .inputs()
            .filter(taken)
            .find(|tensor| kept.contains(&tensor.id));
        if let Some(tensor) = gone {
            return Fault::new(index, format!("it takes %{} over", tensor.id.value()));
        }
    }
    None
}

fn phases_in_order(graph: &Graph) -> Option<Fault> {
    // Optimizer nodes may run as soon as their gradient is available; forward never follows backward.
    let mut seen_backward = false;
    for (index, node) in graph.nodes().iter().enumerate() {
        match node.phase {
            Phase::Backward => seen_backward = true,
            Phase::Forward if seen_backward => {
                return Fault::new(index, "a forward node follows backward ones");
            }
            _ => {}
        }
    }
    None
}

fn parts_match(graph: &Graph) -> Option<Fault> {
    for (index, node) in graph.nodes().iter().enumerate() {
        let Some(collective) = &node.collective else {
            continue;
        };
        let inputs: Vec<_> = node.operation.inputs().collect();
        let outputs: Vec<_> = node.operation.outputs().collect();
        let num_parts = collective.parts.len();
        if inputs.len() != num_parts || outputs.len() != num_parts {
            return Fault::new(
                index,
                format!(
                    "{num_parts} parts, {} inputs, {} outputs",
                    inputs.len(),
                    outputs.len()
                ),
            );
        }
        for ((part, input), output) in collective.parts.iter().zip(inputs).zip(outputs) {
            if let Some(reason) = cuts_fault(collective.kind, part) {
                return Fault::new(index, reason);
            }
            let contract = collective.kind.contract();
            let expected_out = part.padded_len(contract.gets.share);
            let expected_in = match collective.stage {
                Stage::Wait => expected_out,
                Stage::Whole | Stage::Start => part.padded_len(contract.gives.share),
            };
            let types = match collective.stage {
                Stage::Wait => (part.result, part.result),
                Stage::Whole | Stage::Start => (part.dtype, part.result),
            };
            if (input.dtype, output.dtype) != types {
                return Fault::new(
                    index,
                    format!(
                        "part {} goes from {:?} to {:?} instead of {types:?}",
                        part.path, input.dtype, output.dtype
                    ),
                );
            }
            let (got_in, got_out) = (input.shape.num_elements(), output.shape.num_elements());
            if (got_in, got_out) != (expected_in, expected_out) {
                return Fault::new(
                    index,
                    format!(
                        "part {} goes from {got_in} to {got_out} elements instead of \
                         {expected_in} to {expected_out}",
                        part.path
                    ),
                );
            }
        }
    }
    None
}

/// Finds a wrong partition of a part. An all-to-all partitions along two dims, in equal parts; any other collective
/// along one.
fn cuts_fault(kind: CollectiveKind, part: &CollectivePart) -> Option<String> {
    let is_crossed = kind.contract().gets.share == Share::Across;
    let path = &part.path;
    match (is_crossed, &part.across) {
        (true, None) => Some(format!("part {path} is cut along only one dim")),
        (false, Some(_)) => Some(format!("part {path} is cut along two dims")),
        (false, None) => None,
        (true, Some(across)) => [&part.partition, across]
            .iter()
            .any(|cut| cut.padded_len() != cut.num_elements())
            .then(|| format!("part {path} is cut into unequal parts")),
    }
}

fn waits_follow_starts(graph: &Graph) -> Option<Fault> {
    let mut started: BTreeMap<TensorId, usize> = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        match node.collective.as_ref().map(|collective| collective.stage) {
            Some(Stage::Start) => started.extend(node.outputs().map(|output| (output, index))),
            Some(Stage::Wait) => {
                for input in node.inputs() {
                    if started.remove(&input).is_none() {
                        return Fault::new(index, format!("%{} was not started", input.value()));
                    }
                }
            }
            Some(Stage::Whole) | None => {
                if let Some(id) = node.inputs().find(|id| started.contains_key(id)) {
                    return Fault::new(index, format!("%{} is still in flight", id.value()));
                }
            }
        }
    }
    let (id, node) = started.into_iter().next()?;
    Fault::new(node, format!("nothing waits for %{}", id.value()))
}

/// Checks that every unit is a module that contains its parameters.
fn units_contain(graph: &Graph) -> Option<Fault> {
    graph.parameters().iter().find_map(|parameter| {
        let (path, unit) = (&parameter.path, graph.unit(&parameter.path)?);
        let rest = path.strip_prefix(unit);
        let is_inside = unit.is_empty() || rest.is_some_and(|rest| rest.starts_with('.'));
        if is_inside {
            None
        } else {
            Fault::new(0, format!("{path} is declared to be in {unit}"))
        }
    })
}

/// Returns the last node that reads each value or a view of it.
fn last_reads(graph: &Graph) -> BTreeMap<TensorId, usize> {
    let mut last: BTreeMap<TensorId, usize> = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate().rev() {
        if node.is_drop() {
            continue;
        }
        for input in node.inputs() {
            last.entry(input).or_insert(index);
        }
        // Views come after their bases, so their own last reads are known here.
        if let Storage::View(base) = storage_of(node) {
            let of_views = node
                .outputs()
                .filter_map(|view| last.get(&view).copied())
                .max();
            let known = last.entry(base).or_insert(index);
            *known = of_views.map_or(*known, |last| last.max(*known));
        }
    }
    last
}

/// A visit of a unit: its consecutive gathers.
struct Visit<'a> {
    unit: &'a str,
    gathers: Vec<(usize, &'a Node)>,
    /// True if the same phase visited the unit before; it then stays until its last use there.
    is_back: bool,
}

/// Checks that a unit's weights are freed before the unit after the next one begins.
fn gathered_die(graph: &Graph) -> Option<Fault> {
    if !graph.applied().contains(&PassId::Regather) {
        return None;
    }
    let last_reads = last_reads(graph);
    let last_read = |node: &Node| {
        let outputs = node.outputs();
        outputs.filter_map(|id| last_reads.get(&id).copied()).max()
    };
    let is_gather = |node: &Node| {
        node.collective.as_ref().is_some_and(|collective| {
            collective.kind == CollectiveKind::AllGather
                && collective.payload == Payload::Parameter
                && collective.stage != Stage::Start
        })
    };
    let mut visits: Vec<Visit<'_>> = Vec::new();
    let mut seen: BTreeSet<(&str, Phase)> = BTreeSet::new();
    let nodes = graph.nodes().iter().enumerate();
    for (index, node) in nodes.filter(|(_, node)| is_gather(node)) {
        let parts = node.collective.as_ref().and_then(|c| c.parts.first());
        let unit = parts.map_or("", |part| unit_in(graph, &part.path));
        match visits.last_mut() {
            Some(last) if last.unit == unit => last.gathers.push((index, node)),
            _ => visits.push(Visit {
                unit,
                gathers: vec![(index, node)],
                is_back: !seen.insert((unit, node.phase)),
            }),
        }
    }
    for (at, visit) in visits
        .iter()
        .enumerate()
        .filter(|(_, visit)| !visit.is_back)
    {
        // Revisited units stay, and displace no other unit.
        let mut others = visits[at + 1..].iter().filter(|other| !other.is_back);
        let after_next = others.nth(1);
        let Some((next, begins)) = after_next.and_then(|v| Some((v.unit, v.gathers.first()?.0)))
        else {
            continue;
        };
        for (index, node) in &visit.gathers {
            if last_read(node).is_some_and(|last| last > begins) {
                let unit = visit.unit;
                let reason =
                    format!("weights of {unit} are read after {next} is gathered at node {begins}");
                return Fault::new(*index, reason);
            }
        }
    }
    None
}

fn types_fit(graph: &Graph) -> Option<Fault> {
    let ill = check_types(graph).err()?;
    Fault::new(ill.node, ill.reason)
}

fn updates_match(graph: &Graph) -> Option<Fault> {
    let end = graph.nodes().len();
    let mut replaced = BTreeSet::new();
    for update in graph.updates() {
        let (into, from) = (graph.value(update.into), graph.value(update.from));
        let (Some(into), Some(from)) = (into, from) else {
            return Fault::new(
                end,
                format!("update of %{} is undeclared", update.into.value()),
            );
        };
        if (&into.shape, into.dtype) != (&from.shape, from.dtype) {
            return Fault::new(
                end,
                format!("{} {:?} becomes {:?}", into.role, into.shape, from.shape),
            );
        }
        if !into.role.is_given() || !replaced.insert(into.id) {
            return Fault::new(
                end,
                format!("%{} cannot be replaced (again)", into.id.value()),
            );
        }
    }
    None
}
