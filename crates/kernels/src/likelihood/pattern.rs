//! Replaces log-probabilities of chosen classes with kernels. A cross entropy is the negative of their mean.

use std::collections::BTreeSet;

use burn::tensor::DType;
use burn_ir::TensorId;

use crate::pattern::{Kind, Patterns, Walk};
use crate::softmax::pattern::LOG_SOFTMAX;

/// The name of the likelihood.
pub(super) const LIKELIHOOD: &str = "models.log_likelihood";
/// The name of its gradient.
pub(super) const GRADIENT: &str = "models.log_likelihood_backward";

/// The logarithm of a softmax, of which one element per row is read.
struct Forward {
    logits: TensorId,
    /// Logarithms of all probabilities.
    all: TensorId,
    /// Indices along the last dim, one for each row.
    classes: TensorId,
    nodes: BTreeSet<usize>,
}

/// The gradient of the logits.
struct Backward {
    /// Gradient of the elements that are read.
    grad: TensorId,
    /// The node that computes the gradient.
    at: usize,
    nodes: BTreeSet<usize>,
}

/// Replaces every likelihood whose gradient, if any, is recognized.
pub(super) fn replace(patterns: &mut Patterns) {
    for index in 0..patterns.num_nodes() {
        let Some(forward) = forward(patterns, index) else {
            continue;
        };
        let gradient = backward(patterns, &forward);
        let chosen = patterns.output(index);
        let mut nodes = forward.nodes.clone();
        let mut operands = vec![forward.logits, forward.classes];
        let mut results = vec![chosen];
        if let Some(gradient) = &gradient {
            nodes.extend(&gradient.nodes);
            operands.push(gradient.grad);
            results.push(patterns.output(gradient.at));
        }
        if !patterns.is_closed(&nodes, &operands, &results) {
            continue;
        }
        let Forward {
            logits, classes, ..
        } = forward;
        let mut shape = patterns.shape(chosen);
        if let Some(last) = shape.last_mut() {
            *last = 2;
        }
        let kept = patterns.value_of(shape, DType::F32);
        let operands = (&[logits, classes][..], &[chosen, kept][..]);
        patterns.insert_kernel(index, LIKELIHOOD, operands, Vec::new());
        if let Some(Backward { grad, at, .. }) = gradient {
            let result = patterns.output(at);
            let operands = (&[logits, classes, kept, grad][..], &[result][..]);
            patterns.insert_kernel(at, GRADIENT, operands, Vec::new());
        }
        patterns.remove(&nodes);
    }
}

/// Returns the likelihood whose last node is `at`, if there is one.
fn forward(patterns: &Patterns, at: usize) -> Option<Forward> {
    let Kind::Gather(dim) = patterns.kind(at)? else {
        return None;
    };
    let [all, classes] = patterns.inputs(at)[..] else {
        return None;
    };
    let softmax = patterns.made_by(all, Kind::Kernel(LOG_SOFTMAX.kernel.name))?;
    let (mut of_all, of_classes) = (patterns.shape(all), patterns.shape(classes));
    let is_last = dim + 1 == of_all.len();
    if let Some(last) = of_all.last_mut() {
        *last = 1;
    }
    let is_one_of_each = is_last && of_all == of_classes && !of_all.contains(&0);
    let is_whole = is_one_of_each && patterns.phase(softmax) == patterns.phase(at);
    is_whole.then(|| Forward {
        logits: patterns.inputs(softmax)[0],
        all,
        classes,
        nodes: BTreeSet::from([at, softmax]),
    })
}

fn backward(patterns: &Patterns, forward: &Forward) -> Option<Backward> {
    let mut walk = Walk::new(patterns);
    let (of_all, result) =
        walk.gradient_of(Kind::Kernel(LOG_SOFTMAX.gradient.name), forward.all)?;
    let dim = patterns.shape(forward.all).len() - 1;
    let scatter = patterns.made_by(of_all, Kind::ScatterAdd(dim))?;
    let [zeros, classes, grad] = patterns.inputs(scatter)[..] else {
        return None;
    };
    patterns.made_by(zeros, Kind::Zeros)?;
    walk.nodes.insert(scatter);
    let (at, _) = patterns.maker(result)?;
    (classes == forward.classes).then_some(Backward {
        grad,
        at,
        nodes: walk.nodes,
    })
}
