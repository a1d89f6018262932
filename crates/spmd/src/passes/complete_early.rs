//! The order of gradients: each is completed and reduced as soon as its parts are available.
//!
//! Burn's backward visits the first operations of forward at its very end, such as the reshape of a bias or the
//! transposition of a table. Small gradients therefore come late. In that order, their unit's bucket would wait for
//! them and keep all of the unit's gradients whole.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use burn_ir::TensorId;

use super::regather::is_gather;
use super::unit::unit_in;
use crate::graph::{CollectiveKind, Graph, Node, Payload, Phase};

/// Takes the nodes out of a graph and returns them reordered. Reductions of gradients move to where their operands are
/// complete, together with the computations and repeated gathers that serve only them. Nodes move only if another
/// collective would otherwise run before them.
pub(super) fn complete_early(graph: &mut Graph) -> Vec<Node> {
    let places = places(graph);
    let mut behind: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
    let mut stay = Vec::with_capacity(graph.nodes().len());
    for (index, node) in graph.take_nodes().into_iter().enumerate() {
        match places.get(&index) {
            Some(place) => behind.entry(*place).or_default().push(node),
            None => stay.push((index, node)),
        }
    }
    let mut scheduled = Vec::new();
    for (index, node) in stay {
        scheduled.push(node);
        scheduled.extend(behind.remove(&index).unwrap_or_default());
    }
    scheduled
}

/// The nodes that read each value.
type Readers = BTreeMap<TensorId, Vec<usize>>;

/// Returns the moved nodes, each with the unmoved node that it follows.
fn places(graph: &Graph) -> BTreeMap<usize, usize> {
    let nodes = graph.nodes();
    let readers = graph.readers();
    let served = serve_reductions(nodes, &readers, &gathered_again(graph));
    let is_fence = |index: usize| nodes[index].collective.is_some() && !served.contains(&index);
    let mut fences = vec![0];
    for index in 0..nodes.len() {
        fences.push(fences[index] + usize::from(is_fence(index)));
    }
    // Phases come in order.
    let forward = nodes.iter().rposition(|node| node.phase == Phase::Forward);
    let mut writers: HashMap<TensorId, usize> = HashMap::new();
    let mut places: BTreeMap<usize, usize> = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate() {
        let written = node.inputs().filter_map(|id| writers.get(&id).copied());
        // The result of a moved node is available at its new place.
        let ready = written.map(|writer| places.get(&writer).copied().unwrap_or(writer));
        if let Some(ready) = ready.max().max(forward)
            && node.phase == Phase::Backward
            && served.contains(&index)
            && fences[index] > fences[ready + 1]
        {
            places.insert(index, ready);
        }
        writers.extend(node.outputs().map(|id| (id, index)));
    }
    wait_for_readers(nodes, &readers, &mut places);
    places
}

/// Delays moved nodes, except reductions, to the new place of their first reader. Values that backward gathers or
/// recomputes depend only on forward, so they would otherwise exist for all units at once.
fn wait_for_readers(nodes: &[Node], readers: &Readers, places: &mut BTreeMap<usize, usize>) {
    for (index, node) in nodes.iter().enumerate().rev() {
        if is_reduction(node) || !places.contains_key(&index) {
            continue;
        }
        let read_by = node.outputs().filter_map(|id| readers.get(&id)).flatten();
        let first = read_by.filter_map(|reader| places.get(reader)).min();
        // Other readers come after the node's original place.
        match first.copied().filter(|first| *first < index) {
            Some(first) => places.insert(index, first),
            None => places.remove(&index),
        };
    }
}

/// Returns the gathers with which backward returns to a unit that it has already left. For example, at the very end,
/// Burn multiplies an adapter's factors by the gradients of the weights into which they were merged.
fn gathered_again(graph: &Graph) -> BTreeSet<usize> {
    let mut visited = Vec::new();
    let mut again = BTreeSet::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        if let Some(of) = &node.collective
            && node.phase == Phase::Backward
            && is_gather(of)
            && let Some(part) = of.parts.first()
        {
            let unit = unit_in(graph, &part.path);
            match visited.last() {
                Some(last) if *last == unit => {}
                _ if visited.contains(&unit) => {
                    again.insert(index);
                }
                _ => visited.push(unit),
            }
        }
    }
    again
}

/// Returns the reductions of gradients, and the nodes of backward that only serve them: computations, and gathers among
/// `gathers`.
fn serve_reductions(
    nodes: &[Node],
    readers: &Readers,
    gathers: &BTreeSet<usize>,
) -> BTreeSet<usize> {
    let mut served = BTreeSet::new();
    for (index, node) in nodes.iter().enumerate().rev() {
        let serves = |id| {
            readers
                .get(&id)
                .is_some_and(|all| all.iter().all(|at| served.contains(at)))
        };
        let can_serve = match &node.collective {
            Some(_) => gathers.contains(&index),
            None => node.phase == Phase::Backward && !node.is_opaque(),
        };
        if is_reduction(node) || can_serve && node.outputs().all(serves) {
            served.insert(index);
        }
    }
    served
}

fn is_reduction(node: &Node) -> bool {
    let of = node.collective.as_ref();
    of.is_some_and(|of| of.payload == Payload::Gradient && of.kind != CollectiveKind::AllGather)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use burn::module::{Lora, Module};
    use burn::optim::AdamWConfig;
    use burn::tensor::Device;
    use burn_fsdp_collectives::ProcessGroup;
    use burn_ir::TensorId;

    use super::complete_early;
    use crate::graph::{CollectiveKind, Graph, Node, Phase};
    use crate::lower::lower;
    use crate::mode::Mode;
    use crate::models::{Gpt, tokens};
    use crate::passes::schedule::Options;
    use crate::trace::{TraceConfig, trace};
    use crate::{LazyLora, Strategy};

    fn traced(init: impl Fn(&Device) -> Gpt) -> Graph {
        let batch = tokens(0, 0, 2, &Device::flex());
        let optimizer = AdamWConfig::new().build();
        trace(init, Gpt::loss, &optimizer, &batch, TraceConfig::default()).unwrap()
    }

    fn with_adapters(device: &Device) -> Gpt {
        Gpt::new(device).apply_reparameterization(LazyLora::new(Lora::new(2, 4.0)))
    }

    /// The units in the order in which they are gathered or reduced.
    fn visits(graph: &Graph) -> Vec<(CollectiveKind, String)> {
        let collectives = graph
            .nodes()
            .iter()
            .filter_map(|node| node.collective.as_ref());
        collectives
            .map(|of| (of.kind, of.label.to_string()))
            .collect()
    }

    /// In backward a block is reduced before the block below it is gathered, so only one block has whole gradients at a
    /// time.
    #[test]
    fn a_unit_is_reduced_before_the_next_one_is_gathered() {
        for traced in [traced(Gpt::new), traced(with_adapters)] {
            for options in [
                Options::default(),
                Options::default().kernels(false).fuse(false),
            ] {
                let mode = Mode::data_parallel(ProcessGroup::fake(2, 0), Strategy::FullShard)
                    .options(options);
                let plan = lower(traced.clone(), &mode).unwrap();
                let visits = visits(&plan);
                let at = |kind, unit: &str| {
                    let mut all = visits.iter().enumerate();
                    let found =
                        all.rfind(|(_, (other, label))| *other == kind && label.starts_with(unit));
                    found.unwrap_or_else(|| panic!("{unit} in {visits:?}")).0
                };
                for block in 1..3 {
                    let reduced = at(CollectiveKind::ReduceScatter, &format!("blocks.{block}"));
                    let gathered = at(CollectiveKind::AllGather, &format!("blocks.{}", block - 1));
                    assert!(reduced < gathered, "blocks.{block}: {visits:#?}");
                }
            }
        }
    }

    /// Returns the number of gathers that run between each node of backward and the first node that reads its result.
    fn waits(graph: &Graph) -> BTreeMap<TensorId, usize> {
        let (nodes, readers) = (graph.nodes(), graph.readers());
        let is_gather = |node: &&Node| {
            let of = node.collective.as_ref();
            of.is_some_and(|of| of.kind == CollectiveKind::AllGather)
        };
        let mut waits = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            let first = node.outputs().find_map(|id| readers.get(&id)?.first());
            if node.phase == Phase::Backward
                && node.collective.is_none()
                && let (Some(first), Some(id)) = (first, node.outputs().next())
            {
                let gathers = nodes[index..*first].iter().filter(is_gather).count();
                waits.insert(id, gathers);
            }
        }
        waits
    }

    /// Values that depend only on forward are recomputed when their unit is visited, not all at once.
    #[test]
    fn completing_early_waits_for_no_extra_gathers() {
        let options = Options::default().bucket(None);
        let mode =
            Mode::data_parallel(ProcessGroup::fake(2, 0), Strategy::FullShard).options(options);
        let mut graph = lower(traced(Gpt::new), &mode).unwrap();
        let order = |graph: &Graph| -> Vec<_> {
            let nodes = graph.nodes().iter();
            nodes.flat_map(Node::outputs).collect()
        };
        let (before, was) = (waits(&graph), order(&graph));
        let nodes = complete_early(&mut graph);
        graph.set_nodes(nodes);
        assert_ne!(order(&graph), was, "gradients were moved");
        for (id, gathers) in waits(&graph) {
            assert!(
                gathers <= before[&id],
                "{id:?} waits for {gathers} gathers, before {}",
                before[&id]
            );
        }
    }
}
