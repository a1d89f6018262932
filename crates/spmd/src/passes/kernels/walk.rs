//! Walks along the operations of a gradient.

use std::collections::BTreeSet;

use burn_ir::TensorId;

use super::pattern::{Kind, Patterns};
use crate::graph::Phase;

/// A walk along operations of backward, which notes them.
pub(super) struct Walk<'a> {
    pub(super) patterns: &'a Patterns,
    pub(super) nodes: BTreeSet<usize>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(patterns: &'a Patterns) -> Self {
        Self {
            patterns,
            nodes: BTreeSet::new(),
        }
    }

    /// Goes to the result of the operation of that kind on these operands.
    pub(super) fn step(&mut self, kind: Kind, inputs: &[TensorId]) -> Option<TensorId> {
        let node = self.patterns.find_node(kind, inputs, Phase::Backward)?;
        self.nodes.insert(node);
        Some(self.patterns.output(node))
    }

    /// Goes to the result of a sum over the last dim. Burn sums once more what has one element there, which changes
    /// nothing.
    pub(super) fn sum(&mut self, of: TensorId, last: usize) -> Option<TensorId> {
        let sum = self.step(Kind::SumDim(last), &[of])?;
        Some(self.step(Kind::SumDim(last), &[sum]).unwrap_or(sum))
    }

    /// Goes to the sum over all dims but the last, which Burn writes in another way where there are two.
    pub(super) fn sum_rows(&mut self, of: TensorId) -> Option<TensorId> {
        match self.patterns.shape(of).len() {
            2 => self.step(Kind::SumDim(0), &[of]),
            _ => self.step(Kind::SumDims, &[of]),
        }
    }

    /// Goes to the first product that a value is the second factor of, and returns the first factor and the product.
    pub(super) fn product_by(&mut self, factor: TensorId) -> Option<(TensorId, TensorId)> {
        let is_product = |node: &usize| {
            let is_second = self.patterns.inputs(*node).get(1) == Some(&factor);
            self.patterns.kind(*node) == Some(Kind::Mul) && is_second
        };
        let node = self.patterns.readers(factor).find(is_product)?;
        self.nodes.insert(node);
        Some((self.patterns.inputs(node)[0], self.patterns.output(node)))
    }

    /// Goes to the gradient of a softmax, and returns that of its result and that of its input.
    pub(super) fn softmax_gradient(&mut self, of: TensorId) -> Option<(TensorId, TensorId)> {
        let is_gradient = |node: &usize| {
            let is_first = self.patterns.inputs(*node).first() == Some(&of);
            self.patterns.kind(*node) == Some(Kind::SoftmaxBackward) && is_first
        };
        let node = self.patterns.readers(of).find(is_gradient)?;
        self.nodes.insert(node);
        Some((self.patterns.inputs(node)[1], self.patterns.output(node)))
    }

    /// Returns a view of a value, which others may read, too.
    pub(super) fn view(&self, kind: Kind, of: TensorId) -> Option<TensorId> {
        let node = self.patterns.find_node(kind, &[of], Phase::Backward)?;
        Some(self.patterns.output(node))
    }

    /// Goes to a value that has a number for each row in all elements of the row, `times` the number.
    pub(super) fn spread(&mut self, number: TensorId, times: f64) -> Option<TensorId> {
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
        // The ones are of a shape, and others of that shape read them, too.
        let node = spread?;
        self.nodes.insert(node);
        Some(patterns.output(node))
    }
}
