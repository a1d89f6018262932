//! Runs a one-rank trace as the definition of what several ranks must compute. Each rank computes the loss and
//! gradients of its own rows, and the optimizer runs once, with the means over ranks and micro-batches.

use std::collections::BTreeMap;

use burn_fsdp_mesh::Clip;
use burn_ir::TensorId;

use super::custom::{clipped, joined, measured};
use super::field::mul;
use super::given::Given;
use super::machine::{Fault, Machine};
use super::outcome::{LOSS, Named, Outcome, mean};
use super::scalar::Scalar;
use super::tensor::Tensor;
use burn_fsdp_spmd::graph::{Graph, Node, Phase, Role};
use burn_fsdp_spmd::norm::{GRAD_NORM, scalars};

/// For each gradient, its means over ranks: one for each micro-batch.
type Gradients = BTreeMap<TensorId, Vec<Tensor>>;

/// Runs forward and backward of a one-rank graph on each rank of the machine, once per micro-batch. Then replaces
/// gradients and losses with their means, and runs the optimizer.
pub(super) fn step(
    machine: &mut Machine,
    graph: &Graph,
    clip: Option<&Clip>,
    batches: &[Given<'_>],
) -> Result<Outcome, Fault> {
    let mut gradients = Gradients::new();
    let mut seen = Named::new();
    for (index, given) in batches.iter().enumerate() {
        machine.begin(graph, given)?;
        let own = forward_and_backward(machine, graph, &mut gradients)?;
        seen.extend(of_batch(own, index, batches.len()));
    }
    let ranks = machine.num_ranks();
    let mut means: BTreeMap<TensorId, Tensor> = gradients
        .iter()
        .map(|(gradient, own)| (*gradient, mean(own)))
        .collect();
    if let Some(clip) = clip {
        let norm = clip_means(graph, &mut means, clip);
        seen.insert(format!("the output {GRAD_NORM}"), vec![norm; ranks]);
    }
    for (id, tensor) in &means {
        for rank in 0..ranks {
            machine.set(rank, *id, tensor.clone());
        }
    }
    for (index, node) in graph.nodes().iter().enumerate() {
        if is_optimizer(node) {
            machine.run_node(index, node)?;
        }
    }
    let Outcome { stepped, .. } = Outcome::of(machine, graph)?;
    let is_step = |role: &Role| !matches!(role, Role::Buffer(_));
    machine.finish(graph, is_step)?;
    Ok(Outcome { seen, stepped })
}

/// Adds the index of a micro-batch to the names of its results, if the step has several micro-batches.
pub(super) fn of_batch(seen: Named, index: usize, num_batches: usize) -> Named {
    let name = |what: String| match num_batches {
        1 => what,
        _ => format!("{what} of micro-batch {index}"),
    };
    let named = seen.into_iter();
    named.map(|(what, tensors)| (name(what), tensors)).collect()
}

fn is_optimizer(node: &Node) -> bool {
    node.phase == Phase::Optimizer
}

/// Runs the nodes before the optimizer, appends the gradients to those of earlier micro-batches, updates the buffers,
/// and returns the results.
fn forward_and_backward(
    machine: &mut Machine,
    graph: &Graph,
    gradients: &mut Gradients,
) -> Result<Named, Fault> {
    for (index, node) in graph.nodes().iter().enumerate() {
        if !is_optimizer(node) {
            machine.run_node(index, node)?;
        }
    }
    let found = graph.parameters().iter().filter_map(|p| p.gradient);
    let found: std::collections::BTreeSet<TensorId> = found.collect();
    for gradient in found {
        if let Some(own) = own(machine, gradient) {
            gradients.entry(gradient).or_default().push(mean(&own));
        }
    }
    let mut seen = Named::new();
    if let Some(losses) = graph.loss().and_then(|loss| own(machine, loss)) {
        let loss = vec![mean(&losses); machine.num_ranks()];
        seen.insert(LOSS.to_owned(), loss);
    }
    for (name, id) in graph.outputs() {
        let own = own(machine, *id).unwrap_or_default();
        seen.insert(format!("the output {name}"), own);
    }
    for update in graph.updates() {
        let role = graph.value(update.into).map(|value| &value.role);
        if let (Some(role @ Role::Buffer(_)), Some(own)) = (role, own(machine, update.from)) {
            seen.insert(role.to_string(), own);
        }
    }
    let is_buffer = |role: &Role| matches!(role, Role::Buffer(_));
    machine.update(graph, is_buffer)?;
    Ok(seen)
}

fn own(machine: &Machine, id: TensorId) -> Option<Vec<Tensor>> {
    let ranks = 0..machine.num_ranks();
    ranks.map(|rank| machine.get(rank, id).cloned()).collect()
}

/// Clips the gradients by their joint norm, and returns the norm.
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
