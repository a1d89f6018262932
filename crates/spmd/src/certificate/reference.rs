//! What a step means that was traced for one rank, when several divide the batch: each computes loss and gradients of
//! its own rows, and the optimizer steps once, with the means.

use std::collections::BTreeMap;

use burn_fsdp_mesh::Clip;
use burn_ir::TensorId;

use super::custom::{clipped, joined, measured};
use super::field::mul;
use super::machine::{Fault, Machine};
use super::outcome::{LOSS, Outcome, mean};
use super::scalar::Scalar;
use super::tensor::Tensor;
use crate::graph::{Graph, Node, Phase};
use crate::norm::{GRAD_NORM, scalars};

/// Runs a graph of one rank on each rank of the machine, with the means of gradients and loss in place of its own.
pub(super) fn averaged(
    machine: &mut Machine<'_>,
    graph: &Graph,
    clip: Option<&Clip>,
) -> Result<Outcome, Fault> {
    let is_optimizer = |node: &Node| node.phase == Phase::Optimizer;
    let nodes = || graph.nodes().iter().enumerate();
    for (index, node) in nodes().filter(|(_, node)| !is_optimizer(node)) {
        machine.run_node(index, node)?;
    }
    let losses = graph.loss().and_then(|loss| own(machine, loss));
    let mut means: BTreeMap<TensorId, Tensor> = BTreeMap::new();
    for parameter in graph.parameters() {
        if let Some(gradient) = parameter.gradient
            && let Some(own) = own(machine, gradient)
        {
            means.entry(gradient).or_insert_with(|| mean(&own));
        }
    }
    let norm = clip.map(|clip| clip_means(graph, &mut means, clip));
    for (id, tensor) in &means {
        for rank in 0..machine.num_ranks() {
            machine.set(rank, *id, tensor.clone());
        }
    }
    for (index, node) in nodes().filter(|(_, node)| is_optimizer(node)) {
        machine.run_node(index, node)?;
    }
    let mut outcome = Outcome::of(machine, graph)?;
    let alike = |tensor: Tensor| vec![tensor; machine.num_ranks()];
    if let Some(losses) = losses {
        outcome.insert(LOSS.to_owned(), alike(mean(&losses)));
    }
    if let Some(norm) = norm {
        outcome.insert(format!("the output {GRAD_NORM}"), alike(norm));
    }
    Ok(outcome)
}

fn own(machine: &Machine<'_>, id: TensorId) -> Option<Vec<Tensor>> {
    let ranks = 0..machine.num_ranks();
    ranks.map(|rank| machine.get(rank, id).cloned()).collect()
}

/// Scales the gradients by the factor that their norm as one vector asks for, and returns the norm.
fn clip_means(graph: &Graph, means: &mut BTreeMap<TensorId, Tensor>, clip: &Clip) -> Tensor {
    let numbers = scalars(clip);
    let [limit, order] = [numbers[0], numbers[1]].map(Scalar::Number);
    let gradients = graph.parameters().iter().filter_map(|p| p.gradient);
    let mut total = 0;
    for tensor in gradients.filter_map(|gradient| means.get(&gradient)) {
        let parts = tensor.elements.iter().map(|of| measured(*of, order));
        total = parts.fold(total, |total, part| joined(total, part, order));
    }
    let [norm, factor] = clipped(total, limit, order);
    for tensor in means.values_mut() {
        *tensor = Tensor::from_fn(&tensor.shape, |at| mul(tensor.elements[at], factor));
    }
    Tensor::full(&[1], norm)
}
