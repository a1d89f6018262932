//! A call of a kernel, with the operands of its composed form.

use std::fmt::Debug;

use burn_ir::CustomOpIr;

use super::array::Array;
use super::number::{FormScalar, Number};

/// A call of a kernel, with the operands of its composed form.
#[derive(Debug)]
pub struct FormCall<'a, N> {
    /// The call in the graph.
    pub call: &'a CustomOpIr,
    /// The operands.
    pub inputs: &'a [Array<N>],
    /// The scalars.
    pub scalars: &'a [FormScalar<N>],
    /// Converts logarithms back to probabilities.
    pub logarithms: &'a dyn Logarithms<N>,
}

/// Converts logarithms of probabilities back to the probabilities.
pub trait Logarithms<N>: Debug {
    /// Records a probability under its logarithm.
    fn keep(&self, logarithm: N, probability: N);
    /// Returns the probability with this logarithm.
    fn probability(&self, logarithm: N) -> N;
}

/// The first operands of a call, and those that follow.
type Operands<'a, N, const K: usize> = ([&'a Array<N>; K], &'a [Array<N>]);

impl<N: Number> FormCall<'_, N> {
    /// Returns all operands.
    pub(crate) fn operands<const K: usize>(&self) -> Result<[&Array<N>; K], String> {
        match self.first_operands()? {
            (operands, []) => Ok(operands),
            _ => Err(self.takes(K)),
        }
    }

    /// Returns the first operands, and those that follow.
    pub(crate) fn first_operands<const K: usize>(&self) -> Result<Operands<'_, N, K>, String> {
        let parts = self.inputs.split_first_chunk::<K>();
        let (first, rest) = parts.ok_or_else(|| self.takes(K))?;
        Ok((first.each_ref(), rest))
    }

    fn takes(&self, num: usize) -> String {
        format!("it has {} operands, but takes {num}", self.inputs.len())
    }

    /// Returns a scalar as a number.
    pub(crate) fn scalar(&self, index: usize) -> Result<N, String> {
        let scalar = self.scalars.get(index).copied();
        scalar
            .map(N::of_scalar)
            .ok_or_else(|| format!("it has no scalar {index}"))
    }
}
