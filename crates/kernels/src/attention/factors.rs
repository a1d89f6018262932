//! Factors that multiply attention probabilities, as in dropout.

use std::ops::Range;

use burn_flex::FlexTensor;

use crate::halves::Elements;
use crate::rows::contiguous;
use crate::vectors::{Kernel, vectorized};

/// A factor for each probability, and a common factor for all of them.
#[derive(Clone, Debug)]
pub(crate) struct Factors {
    tensor: FlexTensor, // [batch, heads, queries, keys], in order
    scale: f32,
    sequence: usize,
}

impl Factors {
    /// Creates the factors from `tensor`, `[batch, heads, queries, keys]`, and the common factor `scale`.
    pub(crate) fn new(tensor: FlexTensor, scale: f32) -> Self {
        Self {
            tensor: contiguous(tensor),
            scale,
            sequence: 0,
        }
    }

    pub(super) fn tensor(&self) -> &FlexTensor {
        &self.tensor
    }

    /// Returns the factors of one sequence.
    pub(super) fn of_sequence(&self, sequence: usize) -> Self {
        Self {
            sequence,
            ..self.clone()
        }
    }

    /// Multiplies the probabilities of some queries and keys, `[heads, queries, keys]`, or their gradient, by the
    /// factors.
    pub(super) fn multiply(
        &self,
        probabilities: &mut FlexTensor,
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) {
        let shape = self.tensor.layout().shape();
        let [heads, num_queries, num_keys] = [shape[1], shape[2], shape[3]];
        let elements = Elements::of(&self.tensor);
        let mut buffer = Vec::new();
        let rows = probabilities.storage_mut::<f32>();
        for (number, row) in rows.chunks_exact_mut(keys.len().max(1)).enumerate() {
            let (head, query) = (number / queries.len(), number % queries.len());
            let plane = self.sequence * heads + head;
            let start = (plane * num_queries + queries.start + query) * num_keys;
            let factors = elements.part(start + keys.start..start + keys.end, &mut buffer);
            vectorized(Multiply {
                row,
                factors,
                scale: self.scale,
            });
        }
    }
}

struct Multiply<'a> {
    row: &'a mut [f32],
    factors: &'a [f32],
    scale: f32,
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (x, factor) in self.row.iter_mut().zip(self.factors) {
            *x = *x * factor * self.scale;
        }
    }
}
