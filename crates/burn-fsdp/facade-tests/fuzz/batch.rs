//! Batches whose shapes change from step to step, and from rank to rank where ranks may differ.

use burn::tensor::{Device, Tensor, TensorData};
use proptest::prelude::*;

use super::layer::VOCAB;
use super::model::{Batch, Plan};
use super::values::mixed;

/// The shapes of batches.
#[derive(Debug, Clone)]
pub(crate) struct Shapes {
    /// Rows and tokens per row, in turn by step.
    in_turn: Vec<(usize, usize)>,
    /// True if micro-batches of a step also have shapes in turn.
    by_micro_batch: bool,
    /// The additional rows of odd ranks, where ranks may differ.
    more: usize,
}

pub(crate) fn shapes() -> impl Strategy<Value = Shapes> {
    let in_turn = prop::collection::vec((1..4_usize, 2..5_usize), 1..4);
    (in_turn, any::<bool>(), 0..3_usize).prop_map(|(in_turn, by_micro_batch, more)| Shapes {
        in_turn,
        by_micro_batch,
        more,
    })
}

/// The position of a batch in a training run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) step: usize,
    /// The part of the ranks' batches.
    pub(crate) part: usize,
    pub(crate) micro: usize,
    /// True if the rows of ranks may differ.
    pub(crate) is_uneven: bool,
}

impl Shapes {
    /// Returns true if the shapes change between steps.
    pub(crate) fn change(&self) -> bool {
        self.in_turn.iter().any(|shape| *shape != self.in_turn[0])
    }

    fn at(&self, place: Place) -> (usize, usize) {
        let Place { step, micro, .. } = place;
        let turn = if self.by_micro_batch {
            step + micro
        } else {
            step
        };
        let (rows, length) = self.in_turn[turn % self.in_turn.len()];
        if place.is_uneven && place.part % 2 == 1 {
            (rows + self.more, length)
        } else {
            (rows, length)
        }
    }
}

impl Plan {
    /// Returns a batch, of numbers that all differ.
    pub(crate) fn batch(&self, place: Place, device: &Device) -> Batch {
        let (rows, length) = self.shapes.at(place);
        let number = (place.step * 8 + place.part) * 4 + place.micro;
        let tokens = |salt: u64| {
            let draw = |i: usize| {
                let value = (number * 31 + i) as u64 * 7 + salt + self.seed;
                (mixed(value) % VOCAB as u64) as i64
            };
            let tokens: Vec<_> = (0..rows * length).map(draw).collect();
            let data = TensorData::new(tokens, [rows, length]);
            Tensor::from_data(data, device)
        };
        // If no target counts, the mean has no items.
        let (inputs, targets) = (tokens(1), tokens(2));
        let one = Tensor::ones([1, 1], device);
        (inputs, targets.slice_assign([0..1, 0..1], one))
    }
}

/// Returns the rows of several batches as one.
pub(crate) fn joined(batches: impl Iterator<Item = Batch>) -> Batch {
    let (tokens, targets) = batches.unzip::<_, _, Vec<_>, Vec<_>>();
    (Tensor::cat(tokens, 0), Tensor::cat(targets, 0))
}
