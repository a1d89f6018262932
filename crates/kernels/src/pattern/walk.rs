//! Searches backward for the operations of a gradient.

use std::collections::BTreeSet;

use burn_ir::TensorId;

use super::kind::{Kind, bits};
use super::search::{PatternPhase, Patterns};

/// A walk through operations of backward that records the nodes it visits.
pub(crate) struct Walk<'a> {
    pub(crate) patterns: &'a Patterns,
    pub(crate) nodes: BTreeSet<usize>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(patterns: &'a Patterns) -> Self {
        Self {
            patterns,
            nodes: BTreeSet::new(),
        }
    }

    /// Walks to the result of the given kind of operation on these operands.
    pub(crate) fn step(&mut self, kind: Kind, inputs: &[TensorId]) -> Option<TensorId> {
        let node = self
            .patterns
            .find_node(kind, inputs, PatternPhase::Backward)?;
        self.nodes.insert(node);
        Some(self.patterns.output(node))
    }

    /// Walks to the result of a sum over the last dim. Burn then also sums over a dim with one element, which changes
    /// nothing.
    pub(crate) fn sum(&mut self, of: TensorId, last: usize) -> Option<TensorId> {
        let sum = self.step(Kind::SumDim(last), &[of])?;
        Some(self.step(Kind::SumDim(last), &[sum]).unwrap_or(sum))
    }

    /// Walks to the result of a sum over all dims except the last. Burn does not sum along dims of size one, but does
    /// sum along a larger dim that has size one only on this rank.
    pub(crate) fn sum_rows(&mut self, of: TensorId) -> Option<TensorId> {
        let patterns = self.patterns;
        let shape = patterns.shape(of);
        let (_, sizes) = shape.split_last()?;
        let rows: Vec<usize> = (0..sizes.len()).collect();
        let needed: Vec<usize> = rows
            .iter()
            .copied()
            .filter(|dim| sizes[*dim] != 1)
            .collect();
        let (rows, needed) = (bits(&rows)?, bits(&needed)?);
        let is_sum = |node: &usize| {
            let summed = match patterns.kind(*node) {
                Some(Kind::SumDim(dim)) => bits(&[dim]),
                Some(Kind::SumDims(dims)) => Some(dims),
                _ => None,
            };
            let is_of_rows = |dims: u64| dims & !rows == 0 && needed & !dims == 0;
            patterns.phase(*node) == PatternPhase::Backward && summed.is_some_and(is_of_rows)
        };
        let Some(node) = patterns.readers(of).find(is_sum) else {
            return (needed == 0).then_some(of);
        };
        self.nodes.insert(node);
        Some(patterns.output(node))
    }

    /// Walks along additions that start from `first` and add all `parts`, in any order. Other values may be added in
    /// between.
    pub(crate) fn total(&mut self, first: TensorId, parts: &[TensorId]) -> Option<Total> {
        let patterns = self.patterns;
        let mut parts_left = parts.to_vec();
        let (mut total, mut rests) = (first, Vec::new());
        loop {
            let mut sums = patterns.readers(total);
            let node = sums.find(|node| patterns.kind(*node) == Some(Kind::Add))?;
            self.nodes.insert(node);
            let other = the_other(&patterns.inputs(node), total)?;
            match parts_left.iter().position(|part| *part == other) {
                Some(part) => {
                    parts_left.swap_remove(part);
                }
                None => rests.push(other),
            }
            if parts_left.is_empty() {
                return Some(Total { node, rests });
            }
            total = patterns.output(node);
        }
    }

    /// Returns the first node of the walk that reads a value.
    pub(crate) fn first_reader(&self, of: TensorId) -> Option<usize> {
        let readers = self.patterns.readers(of);
        readers.filter(|node| self.nodes.contains(node)).min()
    }

    /// Walks to the first product in backward whose second factor is the given value, and returns the first factor and
    /// the product.
    pub(crate) fn product_by(&mut self, factor: TensorId) -> Option<(TensorId, TensorId)> {
        let is_product = |node: &usize| {
            let is_second = self.patterns.inputs(*node).get(1) == Some(&factor);
            self.patterns.kind(*node) == Some(Kind::Mul)
                && self.patterns.phase(*node) == PatternPhase::Backward
                && is_second
        };
        let node = self.patterns.readers(factor).find(is_product)?;
        self.nodes.insert(node);
        Some((self.patterns.inputs(node)[0], self.patterns.output(node)))
    }

    /// Walks to a gradient operation of this kind, whose first operand is the function's result. Returns the gradient
    /// of the result and the gradient of the function's input.
    pub(crate) fn gradient_of(
        &mut self,
        kind: Kind,
        result: TensorId,
    ) -> Option<(TensorId, TensorId)> {
        let of = result;
        let is_gradient = |node: &usize| {
            let is_first = self.patterns.inputs(*node).first() == Some(&of);
            self.patterns.kind(*node) == Some(kind) && is_first
        };
        let node = self.patterns.readers(of).find(is_gradient)?;
        self.nodes.insert(node);
        Some((self.patterns.inputs(node)[1], self.patterns.output(node)))
    }

    /// Returns a view of a value, without recording its node, because other nodes may read the view.
    pub(crate) fn view(&self, kind: Kind, of: TensorId) -> Option<TensorId> {
        let node = self
            .patterns
            .find_node(kind, &[of], PatternPhase::Backward)?;
        Some(self.patterns.output(node))
    }

    /// Walks to a value whose rows each repeat one element of `number`, multiplied by `times`.
    pub(crate) fn spread(&mut self, number: TensorId, times: f64) -> Option<TensorId> {
        let patterns = self.patterns;
        let spread = patterns.readers(number).find_map(|node| {
            let inputs = patterns.inputs(node);
            if patterns.kind(node) != Some(Kind::Mul) || inputs.get(1) != Some(&number) {
                return None;
            }
            let (maker, kind) = patterns.maker(inputs[0])?;
            let is_spread = match kind {
                Kind::Ones => times == 1.0,
                Kind::MulScalar(by) if (by - times).abs() <= 1e-6 * times => {
                    let ones = patterns.inputs(maker)[0];
                    patterns.made_by(ones, Kind::Ones).is_some()
                }
                _ => false,
            };
            is_spread.then_some(node)
        });
        // The ones are not recorded, because other nodes may read them.
        let node = spread?;
        self.nodes.insert(node);
        Some(patterns.output(node))
    }
}

/// A gradient that is summed from several parts, and other values that are added to it.
pub(crate) struct Total {
    /// The node that adds the last part.
    node: usize,
    /// The other values.
    rests: Vec<TensorId>,
}

impl Total {
    /// Returns the sum of the parts and the other values.
    pub(crate) fn value(&self, patterns: &Patterns) -> TensorId {
        patterns.output(self.node)
    }

    /// Returns the other values.
    pub(crate) fn rests(&self) -> &[TensorId] {
        &self.rests
    }

    /// Returns the value for the sum of only the parts: a new one if there are other values.
    pub(crate) fn of_parts(&self, patterns: &mut Patterns) -> TensorId {
        let total = self.value(patterns);
        if self.rests.is_empty() {
            total
        } else {
            patterns.value(patterns.shape(total), total)
        }
    }

    /// Adds the other values to the parts, at the position of the last addition.
    pub(crate) fn add_rests(&self, patterns: &mut Patterns, parts: TensorId) {
        let Some((last, others)) = self.rests.split_last() else {
            return;
        };
        let total = self.value(patterns);
        let mut sum = parts;
        for other in others {
            let next = patterns.value(patterns.shape(total), total);
            patterns.insert_sum(self.node, [sum, *other], next);
            sum = next;
        }
        patterns.insert_sum(self.node, [sum, *last], total);
    }
}

/// Returns the other of two operands; `None` if both or neither are `this`.
pub(crate) fn the_other(operands: &[TensorId], this: TensorId) -> Option<TensorId> {
    match *operands {
        [first, second] if first == this && second != this => Some(second),
        [first, second] if second == this && first != this => Some(first),
        _ => None,
    }
}
