//! Replaces attention with kernels.

use std::collections::BTreeSet;

use burn_ir::{ScalarIr, TensorId};

use crate::pattern::{Kind, Patterns, Walk};
use crate::softmax::pattern::SOFTMAX;

/// The name of attention.
pub(super) const ATTENTION: &str = "models.attention";
/// The name of its gradient.
pub(super) const GRADIENT: &str = "models.attention_backward";

/// A softmax of products of queries with keys, times values. All operands are `[batch, heads, time, width]`. The
/// probabilities may be multiplied by factors, as in dropout.
struct Forward {
    queries: TensorId,
    keys: TensorId,
    /// The keys as the product reads them: `[batch, heads, width, time]`.
    turned_keys: TensorId,
    values: TensorId,
    scale: Option<Kind>,
    /// Masks with their fill values, in order of application.
    fills: Vec<(TensorId, f64)>,
    weights: Weights,
    nodes: BTreeSet<usize>,
    /// The node that computes the result.
    at: usize,
}

/// The factors of the values in the last product.
struct Weights {
    /// Result of the softmax.
    probabilities: TensorId,
    /// The probabilities times the factors, which the last product multiplies by the values.
    multiplied: TensorId,
    /// One factor for each probability.
    factors: Option<TensorId>,
    /// A common factor, applied after the individual factors.
    scale: Option<Kind>,
}

/// The gradients of an attention.
struct Backward {
    /// Gradient of the result.
    grad: TensorId,
    /// Gradients of queries, keys and values, if they are needed.
    gradients: [Option<TensorId>; 3],
    at: usize,
    nodes: BTreeSet<usize>,
}

/// Swaps the last two dims.
const TURN: Kind = Kind::SwapDims(2, 3);

/// Replaces every attention whose gradients, if any, are all recognized.
pub(super) fn replace(patterns: &mut Patterns) {
    for index in 0..patterns.num_nodes() {
        let Some(forward) = forward(patterns, index) else {
            continue;
        };
        let gradients = backward(patterns, &forward);
        let mut nodes = forward.nodes.clone();
        nodes.extend(gradients.iter().flat_map(|gradients| &gradients.nodes));
        let mut results = vec![patterns.output(forward.at)];
        results.extend(gradients.iter().flat_map(|of| of.gradients).flatten());
        let mut operands = forward.operands();
        operands.extend(gradients.iter().map(|of| of.grad));
        if patterns.is_closed(&nodes, &operands, &results) {
            insert(patterns, &forward, gradients.as_ref());
            patterns.remove(&nodes);
        }
    }
}

impl Forward {
    /// Returns the kernel's operands: queries, keys, values, masks, and the factors of the probabilities.
    fn operands(&self) -> Vec<TensorId> {
        let masks = self.fills.iter().map(|(mask, _)| *mask);
        let operands = [self.queries, self.keys, self.values].into_iter();
        operands.chain(masks).chain(self.weights.factors).collect()
    }
}

/// Returns the attention whose last node is `at`, if there is one.
fn forward(patterns: &Patterns, at: usize) -> Option<Forward> {
    let [multiplied, values] = operands(patterns, at)?;
    let mut nodes = BTreeSet::from([at]);
    let weights = weights(patterns, multiplied, &mut nodes)?;
    let softmax = patterns.made_by(weights.probabilities, Kind::Kernel(SOFTMAX.kernel.name))?;
    nodes.insert(softmax);
    let mut scores = patterns.inputs(softmax)[0];
    let (mut fills, mut scale) = (Vec::new(), None);
    let product = loop {
        let (node, kind) = patterns.maker(scores)?;
        nodes.insert(node);
        match kind {
            Kind::MaskFill(value) if scale.is_none() => {
                let [filled, mask] = patterns.inputs(node)[..] else {
                    return None;
                };
                let (of_mask, of_scores) = (patterns.shape(mask), patterns.shape(filled));
                let is_along = |(mask, scores): (&usize, &usize)| *mask == 1 || mask == scores;
                if of_mask.len() != 4 || !of_mask.iter().zip(&of_scores).all(is_along) {
                    return None;
                }
                fills.insert(0, (mask, value));
                scores = filled;
            }
            Kind::MulScalar(_) | Kind::DivScalar(_) if scale.is_none() => {
                scale = Some(kind);
                scores = patterns.inputs(node)[0];
            }
            Kind::Matmul => break node,
            _ => return None,
        }
    };
    let [queries, turned_keys] = operands(patterns, product)?;
    let turn = patterns.made_by(turned_keys, TURN)?;
    let keys = patterns.inputs(turn)[0];
    let phase = patterns.phase(at);
    let is_whole = nodes.iter().all(|node| patterns.phase(*node) == phase)
        && fills.len() < usize::from(u8::MAX)
        && fits(patterns, [queries, keys, values]);
    is_whole.then_some(Forward {
        queries,
        keys,
        turned_keys,
        values,
        scale,
        fills,
        weights,
        nodes,
        at,
    })
}

/// Walks from the factors of the values back to the probabilities.
fn weights(
    patterns: &Patterns,
    multiplied: TensorId,
    nodes: &mut BTreeSet<usize>,
) -> Option<Weights> {
    let mut probabilities = multiplied;
    let scale = match patterns.maker(probabilities)? {
        (node, kind @ (Kind::MulScalar(_) | Kind::DivScalar(_))) => {
            nodes.insert(node);
            probabilities = patterns.inputs(node)[0];
            Some(kind)
        }
        _ => None,
    };
    let mut factors = None;
    if let Some(product) = patterns.made_by(probabilities, Kind::Mul) {
        let [weights, of_each] = patterns.inputs(product)[..] else {
            return None;
        };
        let is_for_each = patterns.shape(of_each) == patterns.shape(weights);
        if !is_for_each || !patterns.is_in_order(of_each) || of_each == weights {
            return None;
        }
        nodes.insert(product);
        probabilities = weights;
        factors = Some(of_each);
    }
    // A scale without factors is not part of the pattern.
    (factors.is_some() || scale.is_none()).then_some(Weights {
        probabilities,
        multiplied,
        factors,
        scale,
    })
}

fn operands(patterns: &Patterns, product: usize) -> Option<[TensorId; 2]> {
    patterns
        .kind(product)
        .filter(|kind| *kind == Kind::Matmul)?;
    patterns.inputs(product).try_into().ok()
}

/// Returns true if all tensors have four non-empty dims and the same number of heads, and nothing is broadcast.
fn fits(patterns: &Patterns, operands: [TensorId; 3]) -> bool {
    let shapes = operands.map(|id| patterns.shape(id));
    let [queries, keys, values] = &shapes;
    shapes
        .iter()
        .all(|shape| shape.len() == 4 && !shape.contains(&0))
        && queries[..2] == keys[..2]
        && keys[..3] == values[..3]
        && queries[3] == keys[3]
}

fn backward(patterns: &Patterns, forward: &Forward) -> Option<Backward> {
    let mut walk = Walk::new(patterns);
    let (of_probabilities, mut scores) = walk.gradient_of(
        Kind::Kernel(SOFTMAX.gradient.name),
        forward.weights.probabilities,
    )?;
    let of_multiplied = forward.weights.of_multiplied(&mut walk, of_probabilities)?;
    // The gradient of the result is multiplied by the values. Several attentions whose results are added share that
    // product.
    let product = patterns.made_by(of_multiplied, Kind::Matmul)?;
    let [grad, turned_values] = operands(patterns, product)?;
    let turn = patterns.made_by(turned_values, TURN)?;
    if patterns.inputs(turn) != [forward.values] {
        return None;
    }
    let values = walk.step(TURN, &[forward.weights.multiplied]);
    let values = values.and_then(|turned| walk.step(Kind::Matmul, &[turned, grad]));
    for (mask, _) in forward.fills.iter().rev() {
        scores = walk.step(Kind::MaskFill(0.0), &[scores, *mask])?;
    }
    if let Some(scale) = forward.scale {
        scores = unscaled(&mut walk, scale, scores)?;
    }
    let queries = walk.view(TURN, forward.turned_keys);
    let queries = queries.and_then(|keys| walk.step(Kind::Matmul, &[scores, keys]));
    let keys = walk.view(TURN, forward.queries);
    let keys = keys.and_then(|queries| walk.step(Kind::Matmul, &[queries, scores]));
    let keys = keys.and_then(|keys| walk.step(TURN, &[keys]));
    let gradients = [queries, keys, values];
    // The kernel computes all gradients at once, at the position of the first one.
    let made = gradients.iter().flatten();
    let at = made.filter_map(|id| Some(patterns.maker(*id)?.0)).min()?;
    Some(Backward {
        grad,
        gradients,
        at,
        nodes: walk.nodes,
    })
}

impl Weights {
    /// Walks from the gradient of the probabilities to the gradient of the values' factors.
    fn of_multiplied(&self, walk: &mut Walk<'_>, of_probabilities: TensorId) -> Option<TensorId> {
        let patterns = walk.patterns;
        let Some(factors) = self.factors else {
            return Some(of_probabilities);
        };
        let product = patterns.made_by(of_probabilities, Kind::Mul)?;
        walk.nodes.insert(product);
        let [of_multiplied, by] = patterns.inputs(product)[..] else {
            return None;
        };
        if by != factors {
            return None;
        }
        if self.scale.is_none() {
            return Some(of_multiplied);
        }
        let (scaling, kind) = patterns.maker(of_multiplied)?;
        walk.nodes.insert(scaling);
        scales_alike(kind, factor(self.scale)).then(|| patterns.inputs(scaling)[0])
    }
}

/// Walks through the gradient of a scaling, which Burn writes as a product with a number.
fn unscaled(walk: &mut Walk<'_>, scale: Kind, scores: TensorId) -> Option<TensorId> {
    let factor = factor(Some(scale));
    let patterns = walk.patterns;
    let is_scaling = |node: &usize| {
        let kind = patterns.kind(*node);
        kind.is_some_and(|kind| scales_alike(kind, factor))
    };
    let node = patterns.readers(scores).find(is_scaling)?;
    walk.nodes.insert(node);
    Some(patterns.output(node))
}

/// Returns true for a scaling by `factor`, up to rounding.
fn scales_alike(kind: Kind, factor: f64) -> bool {
    let is_scaling = matches!(kind, Kind::MulScalar(_) | Kind::DivScalar(_));
    is_scaling && (self::factor(Some(kind)) - factor).abs() <= 1e-6 * factor.abs()
}

/// Returns the factor of a scaling, or 1 if there is none.
fn factor(scale: Option<Kind>) -> f64 {
    match scale {
        Some(Kind::MulScalar(by)) => by,
        Some(Kind::DivScalar(by)) => 1.0 / by,
        _ => 1.0,
    }
}

/// Inserts the kernels where the result and the first gradient are computed.
fn insert(patterns: &mut Patterns, forward: &Forward, backward: Option<&Backward>) {
    let mut scalars = vec![ScalarIr::Float(factor(forward.scale))];
    let values = forward.fills.iter().map(|(_, value)| *value);
    scalars.extend(values.map(ScalarIr::Float));
    let mut behind: Vec<TensorId> = forward.fills.iter().map(|(mask, _)| *mask).collect();
    if let Some(factors) = forward.weights.factors {
        behind.push(factors);
        scalars.push(ScalarIr::Float(factor(forward.weights.scale)));
    }
    let operands = [forward.queries, forward.keys, forward.values];

    let mut inputs = by_time(patterns, forward.at, &operands);
    inputs.extend(&behind);
    let result = patterns.output(forward.at);
    let mixed = swapped(patterns, result);
    patterns.insert_kernel(forward.at, ATTENTION, (&inputs, &[mixed]), scalars.clone());
    patterns.insert_swap(forward.at, (mixed, result), HEADS);

    let Some(backward) = backward else {
        return;
    };
    let at = backward.at;
    let mut inputs = by_time(patterns, at, &operands);
    inputs.extend(by_time(patterns, at, &[backward.grad]));
    inputs.extend(&behind);
    let made = operands.map(|operand| swapped(patterns, operand));
    patterns.insert_kernel(at, GRADIENT, (&inputs, &made), scalars);
    for (made, gradient) in made.into_iter().zip(backward.gradients) {
        if let Some(gradient) = gradient {
            patterns.insert_swap(at, (made, gradient), HEADS);
        }
    }
}

/// The dims of heads and time, which kernels expect in the opposite order.
const HEADS: (usize, usize) = (1, 2);

/// Inserts views of `[batch, heads, time, width]` as `[batch, time, heads, width]` before the node `at`.
fn by_time(patterns: &mut Patterns, at: usize, of: &[TensorId]) -> Vec<TensorId> {
    let turn = |id: &TensorId| {
        let view = swapped(patterns, *id);
        patterns.insert_swap(at, (*id, view), HEADS);
        view
    };
    of.iter().map(turn).collect()
}

/// Declares a value with another value's shape, but with the second and third dims swapped.
fn swapped(patterns: &mut Patterns, of: TensorId) -> TensorId {
    let mut shape = patterns.shape(of);
    shape.swap(1, 2);
    patterns.value(shape, of)
}
