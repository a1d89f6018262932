//! The batches of a run, by step.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_data::DataError;
use burn_fsdp_models::{Batches, Rows};

use crate::train::documents::Documents;

/// Input tokens `[rows, seq]`, their targets, and the weights of the targets if they have any.
pub(crate) type Tokens = (Tensor<2, Int>, (Tensor<2, Int>, Option<Tensor<2>>));

/// Converts rows to tensors on a device.
pub(crate) fn tokens_of(rows: &Rows, device: &Device) -> Tokens {
    let (inputs, targets) = rows.to_tensors(device);
    (inputs, (targets, rows.weights_on(device)))
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
