//! The batches of a run, by step.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fsdp_data::DataError;
use burn_fsdp_models::{Batches, Rows};

use crate::train::documents::{BesideTokens, Documents};

/// Input tokens `[rows, seq]` and their targets. The inputs have positions if rows have several documents, and the targets
/// have weights if only some are learned.
pub(crate) type Tokens = (
    (Tensor<2, Int>, Option<Tensor<2, Int>>),
    (Tensor<2, Int>, Option<Tensor<2>>),
);

/// Returns a batch of this shape for a trace. Each tensor is one element, expanded to the full shape, because only shapes
/// and element types are used.
pub(crate) fn tokens_of_shape(shape: [usize; 2], beside: BesideTokens) -> Tokens {
    let one = || Tensor::<2, Int>::from_data(TensorData::new(vec![0i64], [1, 1]), &Device::flex());
    let tokens = || one().expand(shape);
    let positions = beside.positions.then(tokens);
    let weights = || one().float().cast(DType::F32).expand(shape);
    let weights = beside.weights.then(weights);
    ((tokens(), positions), (tokens(), weights))
}

/// Converts rows to tensors on a device.
pub(crate) fn tokens_of(rows: &Rows, device: &Device) -> Tokens {
    let (inputs, targets) = rows.to_tensors(device);
    let (positions, weights) = (rows.positions_on(device), rows.weights_on(device));
    ((inputs, positions), (targets, weights))
}

/// Batches for training or evaluation.
pub(crate) enum Feed<'a> {
    /// Synthetic tokens, or windows of a text.
    Tokens(Batches),
    /// The training part of documents.
    Documents(&'a Documents),
    /// The held-out part of documents.
    HeldOut(&'a Documents),
}

impl Feed<'_> {
    /// Returns the given rows of a step's batch. Held-out documents have one step with all rows.
    pub(crate) fn rows(&self, step: usize, rows: Range<usize>) -> Result<Rows, DataError> {
        match self {
            Self::Tokens(batches) => Ok(batches.rows(step, rows)),
            Self::Documents(documents) => documents.rows(step, rows),
            Self::HeldOut(documents) => Ok(documents.held_out_rows(rows)),
        }
    }

    /// Returns the number of rows in one pass, or `None` if there is no end.
    pub(crate) fn num_whole_rows(&self) -> Option<usize> {
        match self {
            Self::Tokens(batches) => batches.num_whole_rows(),
            Self::Documents(_) => None,
            Self::HeldOut(documents) => Some(documents.held_out.len()),
        }
    }

    /// Returns the tokens after the whole rows, or `None` if there are none.
    pub(crate) fn rest(&self) -> Option<Rows> {
        match self {
            Self::Tokens(batches) => batches.rest(),
            Self::Documents(_) | Self::HeldOut(_) => None,
        }
    }
}
