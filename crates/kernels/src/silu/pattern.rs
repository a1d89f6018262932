//! Replaces SiLU, as a function and as a gate, with kernels.

use std::collections::BTreeSet;

use burn_ir::TensorId;

use crate::pattern::{Kind, Patterns, Total, Walk, the_other};

/// The name of SiLU.
pub(super) const SILU: &str = "models.silu";
/// The name of its gradient.
pub(super) const SILU_GRADIENT: &str = "models.silu_backward";
/// The name of products gated by SiLU.
pub(super) const GATE: &str = "models.swiglu";
/// The name of their gradients.
pub(super) const GATE_GRADIENT: &str = "models.swiglu_backward";

/// A value times its sigmoid.
struct Silu {
    x: TensorId,
    y: TensorId,
    sigmoid: TensorId,
    nodes: BTreeSet<usize>,
    at: usize,
}

/// The gradient of a SiLU.
struct SiluGradient {
    /// Gradient of `y`.
    grad: TensorId,
    of_x: Total,
}

/// Replaces every SiLU whose gradient, if any, is recognized, together with the gated product if nothing else reads the
/// SiLU.
pub(super) fn replace(patterns: &mut Patterns) {
    for index in 0..patterns.num_nodes() {
        let Some(silu) = silu(patterns, index) else {
            continue;
        };
        if !gate(patterns, &silu) {
            alone(patterns, &silu);
        }
    }
}

/// Returns the SiLU whose last node is `at`, if there is one.
fn silu(patterns: &Patterns, at: usize) -> Option<Silu> {
    patterns.kind(at).filter(|kind| *kind == Kind::Mul)?;
    let phase = patterns.phase(at);
    let factors = patterns.inputs(at);
    factors.iter().find_map(|sigmoid| {
        let node = patterns.made_by(*sigmoid, Kind::Sigmoid)?;
        let x = the_other(&factors, *sigmoid)?;
        let is_whole = patterns.inputs(node) == [x] && patterns.phase(node) == phase;
        is_whole.then(|| Silu {
            x,
            y: patterns.output(at),
            sigmoid: *sigmoid,
            nodes: BTreeSet::from([at, node]),
            at,
        })
    })
}

impl Silu {
    fn gradient(&self, walk: &mut Walk<'_>) -> Option<SiluGradient> {
        // Burn computes the sigmoid again.
        let again = walk.step(Kind::Sigmoid, &[self.x]);
        let mut candidates = again.into_iter().chain([self.sigmoid]);
        let (grad, direct) = candidates.find_map(|sigmoid| walk.product_by(sigmoid))?;
        let of_sigmoid = walk.step(Kind::Mul, &[grad, self.x])?;
        let mut candidates = again.into_iter().chain([self.sigmoid]);
        let through = candidates
            .find_map(|sigmoid| walk.step(Kind::SigmoidBackward, &[sigmoid, of_sigmoid]))?;
        let of_x = walk.total(direct, &[through])?;
        Some(SiluGradient { grad, of_x })
    }
}

/// Replaces only a SiLU, not the product that it gates.
fn alone(patterns: &mut Patterns, silu: &Silu) {
    let mut walk = Walk::new(patterns);
    let gradient = silu.gradient(&mut walk);
    let mut nodes = silu.nodes.clone();
    let (mut operands, mut results) = (vec![silu.x], vec![silu.y]);
    let at = gradient.as_ref().and_then(|of| walk.first_reader(of.grad));
    if let Some(gradient) = &gradient {
        nodes.extend(&walk.nodes);
        operands.push(gradient.grad);
        operands.extend(gradient.of_x.rests());
        results.push(gradient.of_x.value(patterns));
    }
    if !patterns.is_closed(&nodes, &operands, &results) {
        return;
    }
    patterns.insert_kernel(silu.at, SILU, (&[silu.x], &[silu.y]), Vec::new());
    if let Some((gradient, at)) = gradient.zip(at) {
        let parts = gradient.of_x.of_parts(patterns);
        let operands = (&[silu.x, gradient.grad][..], &[parts][..]);
        patterns.insert_kernel(at, SILU_GRADIENT, operands, Vec::new());
        gradient.of_x.add_rests(patterns, parts);
    }
    patterns.remove(&nodes);
}

/// The product that a SiLU gates.
struct Gated {
    /// The node of the product.
    product: usize,
    values: TensorId,
}

/// Returns the first product that a SiLU gates without broadcasting.
fn gated(patterns: &Patterns, silu: &Silu) -> Option<Gated> {
    let phase = patterns.phase(silu.at);
    let is_product =
        |node: &usize| patterns.kind(*node) == Some(Kind::Mul) && patterns.phase(*node) == phase;
    let product = patterns.readers(silu.y).find(is_product)?;
    let values = the_other(&patterns.inputs(product), silu.y)?;
    let is_alike = patterns.shape(values) == patterns.shape(silu.y);
    is_alike.then_some(Gated { product, values })
}

/// The gradients of a gate and of the gated values.
struct GatedGradient {
    /// Gradient of the result.
    grad: TensorId,
    of_gate: Total,
    /// Gradient of the values, if it is needed.
    of_values: Option<TensorId>,
}

impl Gated {
    fn gradient(&self, silu: &Silu, walk: &mut Walk<'_>) -> Option<GatedGradient> {
        let patterns = walk.patterns;
        let SiluGradient { grad: of_y, of_x } = silu.gradient(walk)?;
        let product = patterns.made_by(of_y, Kind::Mul)?;
        let grad = the_other(&patterns.inputs(product), self.values)?;
        walk.step(Kind::Mul, &[grad, self.values])
            .filter(|product| *product == of_y)?;
        Some(GatedGradient {
            grad,
            of_gate: of_x,
            of_values: walk.step(Kind::Mul, &[grad, silu.y]),
        })
    }
}

/// Replaces a SiLU with the product that it gates. Returns false if there is none, or if other nodes read the
/// intermediate values.
fn gate(patterns: &mut Patterns, silu: &Silu) -> bool {
    let Some(gated) = gated(patterns, silu) else {
        return false;
    };
    let result = patterns.output(gated.product);
    let mut nodes = silu.nodes.clone();
    nodes.insert(gated.product);
    let (x, values) = (silu.x, gated.values);
    let (mut operands, mut results) = (vec![x, values], vec![result]);
    let mut walk = Walk::new(patterns);
    let gradient = gated.gradient(silu, &mut walk);
    let at = gradient.as_ref().and_then(|of| walk.first_reader(of.grad));
    if let Some(gradient) = &gradient {
        nodes.extend(&walk.nodes);
        operands.push(gradient.grad);
        operands.extend(gradient.of_gate.rests());
        results.push(gradient.of_gate.value(patterns));
        results.extend(gradient.of_values);
    }
    if !patterns.is_closed(&nodes, &operands, &results) {
        return false;
    }
    let operands = (&[x, values][..], &[result][..]);
    patterns.insert_kernel(gated.product, GATE, operands, Vec::new());
    if let Some((gradient, at)) = gradient.zip(at) {
        let parts = gradient.of_gate.of_parts(patterns);
        let of_values = match gradient.of_values {
            Some(of_values) => of_values,
            None => patterns.value(patterns.shape(values), values),
        };
        let operands = (&[x, values, gradient.grad][..], &[parts, of_values][..]);
        patterns.insert_kernel(at, GATE_GRADIENT, operands, Vec::new());
        gradient.of_gate.add_rests(patterns, parts);
    }
    patterns.remove(&nodes);
    true
}
