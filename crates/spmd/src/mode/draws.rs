//! Numbering of a step's random draws.

use crate::graph::{Draw, Graph, Phase, random_of};

/// Numbers the random draws of a traced step, so they can come from a seed. The optimizer's draws are left to the
/// backend.
pub(super) fn numbered(mut graph: Graph, seed: u64, is_own: bool) -> Graph {
    let mut number = 0;
    let mut nodes = graph.take_nodes();
    for node in nodes
        .iter_mut()
        .filter(|node| node.phase != Phase::Optimizer)
    {
        let Some(random) = random_of(&node.operation) else {
            continue;
        };
        node.draw = Some(Draw {
            seed,
            number,
            whole: random.out.shape.to_vec(),
            shifts: Vec::new(),
            is_own,
        });
        number += 1;
    }
    graph.set_nodes(nodes);
    graph
}
