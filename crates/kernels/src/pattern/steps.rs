//! Patterns as data: the operations of a function and of its gradient, with names for the values between them.

use std::collections::{BTreeMap, BTreeSet};

use burn_ir::TensorId;

use super::kind::Kind;
use super::search::{PatternPhase, Patterns};
use super::walk::Walk;

/// A function that a kernel replaces together with its gradient.
///
/// No other operation may read the values between operands and results. The kernel of the gradient reads operands and
/// the result of the function, and values that other operations compute, such as the gradient of the result.
#[derive(Debug)]
pub struct Steps {
    /// The kernel of the function.
    pub kernel: PatternKernel,
    /// The kernel of the gradient. It has one result.
    pub gradient: PatternKernel,
}

/// A kernel, and the operations that it replaces.
#[derive(Debug)]
pub struct PatternKernel {
    /// The name of the kernel.
    pub name: &'static str,
    /// The names of the operands.
    pub operands: &'static [&'static str],
    /// The operations. Those of a function are listed from its result back to its operands; those of a gradient, from
    /// values of the function to the result.
    pub steps: &'static [PatternStep],
}

/// An operation of a pattern, with names for its result and its operands.
#[derive(Debug)]
pub struct PatternStep {
    result: &'static str,
    kind: StepKind,
    operands: &'static [&'static str],
    /// The value that replaces the result if the operation is missing.
    or: Option<&'static str>,
}

/// The kind of an operation of a pattern.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StepKind {
    /// This operation.
    Is(Kind),
    /// The sum along the last dim of the function's result.
    SumLast,
    /// The maximum along the last dim.
    MaxLast,
    /// The operand repeated along the last dim, as a product with ones.
    Spread,
}

impl PatternStep {
    /// Names the result and the operands of an operation.
    pub const fn new(
        result: &'static str,
        kind: StepKind,
        operands: &'static [&'static str],
    ) -> Self {
        Self {
            result,
            kind,
            operands,
            or: None,
        }
    }

    /// As [`new`](Self::new), for an operation that may be missing. Its result is then another value.
    pub const fn optional(self, or: &'static str) -> Self {
        Self {
            or: Some(or),
            ..self
        }
    }
}

/// The values with names.
type Names = BTreeMap<&'static str, TensorId>;

impl Steps {
    /// Replaces every instance whose gradient, if any, is recognized.
    pub fn replace(&self, patterns: &mut Patterns) {
        for at in 0..patterns.num_nodes() {
            let Some((mut names, mut nodes)) = self.forward(patterns, at) else {
                continue;
            };
            let operands = |kernel: &PatternKernel, names: &Names| -> Vec<TensorId> {
                kernel.operands.iter().map(|name| names[name]).collect()
            };
            let result = patterns.output(at);
            let inputs = operands(&self.kernel, &names);
            let gradient = self.backward(patterns, &mut names).map(|(at, own)| {
                nodes.extend(own);
                (at, operands(&self.gradient, &names))
            });
            let mut outside = inputs.clone();
            let mut results = vec![result];
            if let Some((at, operands)) = &gradient {
                let others = operands.iter().filter(|id| **id != result);
                outside.extend(others);
                results.push(patterns.output(*at));
            }
            if !patterns.is_closed(&nodes, &outside, &results) {
                continue;
            }
            let (kernel, of_gradient) = (self.kernel.name, self.gradient.name);
            patterns.insert_kernel(at, kernel, (&inputs, &[result]), Vec::new());
            if let Some((at, operands)) = gradient {
                let out = patterns.output(at);
                patterns.insert_kernel(at, of_gradient, (&operands, &[out]), Vec::new());
            }
            patterns.remove(&nodes);
        }
    }

    /// Returns the values and nodes of the function whose last node is `at`, if there is one. All are in one phase, and
    /// operands have the shape of the result.
    fn forward(&self, patterns: &Patterns, at: usize) -> Option<(Names, BTreeSet<usize>)> {
        let steps = self.kernel.steps;
        let result = patterns.output(at);
        let last = patterns.shape(result).len().checked_sub(1)?;
        let mut names = Names::from([(steps.first()?.result, result)]);
        let mut nodes = BTreeSet::new();
        for step in steps {
            let node = step.maker(patterns, &mut names, last)?;
            nodes.insert(node);
        }
        let is_alike = |name: &&str| patterns.shape(names[name]) == patterns.shape(result);
        let is_whole = self.kernel.operands.iter().all(is_alike)
            && nodes
                .iter()
                .all(|node| patterns.phase(*node) == patterns.phase(at));
        is_whole.then_some((names, nodes))
    }

    /// Returns the node that computes the gradient, and all nodes of the gradient.
    fn backward(&self, patterns: &Patterns, names: &mut Names) -> Option<(usize, BTreeSet<usize>)> {
        let mut walk = Walk::new(patterns);
        let of = names.get(self.kernel.steps.first()?.result)?;
        let last = patterns.shape(*of).len().checked_sub(1)?;
        let mut result = None;
        for step in self.gradient.steps {
            let value = step.walk(&mut walk, names, last).or_else(|| {
                let other = step.or?;
                names.get(other).copied()
            })?;
            names.insert(step.result, value);
            result = Some(value);
        }
        let (at, _) = patterns.maker(result?)?;
        Some((at, walk.nodes))
    }
}

impl PatternStep {
    /// Returns the kind of an operation on tensors with this last dim.
    fn kind(&self, last: usize) -> Kind {
        match self.kind {
            StepKind::Is(kind) => kind,
            StepKind::SumLast => Kind::SumDim(last),
            StepKind::MaxLast => Kind::MaxDim(last),
            StepKind::Spread => Kind::Mul,
        }
    }

    /// Returns the node that computes the named result, and names its operands.
    fn maker(&self, patterns: &Patterns, names: &mut Names, last: usize) -> Option<usize> {
        let result = *names.get(self.result)?;
        let node = patterns.made_by(result, self.kind(last))?;
        self.fits(&patterns.inputs(node), names).then_some(node)
    }

    /// Returns true if operands have the names that are known, and names the others.
    fn fits(&self, operands: &[TensorId], names: &mut Names) -> bool {
        let fits = |(name, id): (&&'static str, &TensorId)| {
            names.get(name).is_none_or(|known| known == id)
        };
        let mut pairs = self.operands.iter().zip(operands);
        if self.operands.len() != operands.len() || !pairs.all(fits) {
            return false;
        }
        names.extend(self.operands.iter().copied().zip(operands.iter().copied()));
        // One name for two operands.
        self.operands
            .iter()
            .zip(operands)
            .all(|(name, id)| names[name] == *id)
    }

    /// Walks to the result of the operation in backward. Names operands that have no names.
    fn walk(&self, walk: &mut Walk<'_>, names: &mut Names, dim: usize) -> Option<TensorId> {
        let patterns = walk.patterns;
        if let Some(result) = names.get(self.result).copied() {
            let node = self.maker(patterns, names, dim)?;
            walk.nodes.insert(node);
            return Some(result);
        }
        let known: Vec<Option<TensorId>> = self
            .operands
            .iter()
            .map(|name| names.get(name).copied())
            .collect();
        let last = known.iter().rev().flatten().next().copied()?;
        if self.kind == StepKind::Spread {
            return walk.spread(last, 1.0);
        }
        let kind = self.kind(dim);
        let is_step = |node: &usize| {
            let operands = patterns.inputs(*node);
            let fits = |(known, own): (&Option<TensorId>, &TensorId)| {
                known.is_none_or(|known| known == *own)
            };
            patterns.kind(*node) == Some(kind)
                && patterns.phase(*node) == PatternPhase::Backward
                && operands.len() == known.len()
                && known.iter().zip(&operands).all(fits)
        };
        let node = patterns.readers(last).find(is_step)?;
        if !self.fits(&patterns.inputs(node), names) {
            return None;
        }
        walk.nodes.insert(node);
        Some(patterns.output(node))
    }
}
