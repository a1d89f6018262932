//! The batches of a run, by step.

use std::ops::Range;

use burn_fsdp_data::{DataError, Sequence};
use burn_fsdp_models::{Batches, Rows};

use crate::train::documents::{Documents, rows_of};

/// Batches for training or evaluation.
pub(crate) enum Feed<'a> {
    /// Synthetic tokens, or windows of a text.
    Tokens(Batches),
    /// The training part of documents.
    Documents(&'a Documents),
    /// The held-out part of documents.
    HeldOut(&'a [Sequence]),
}

impl Feed<'_> {
    /// Returns the given rows of a step's batch. Held-out documents have one step with all rows.
    pub(crate) fn rows(&self, step: usize, rows: Range<usize>) -> Result<Rows, DataError> {
        match self {
            Self::Tokens(batches) => Ok(batches.rows(step, rows)),
            Self::Documents(documents) => documents.rows(step, rows),
            Self::HeldOut(sequences) => {
                // Ranks without a row of their own evaluate another one.
                let last = sequences.len().saturating_sub(rows.len());
                let start = rows.start.min(last);
                Ok(rows_of(
                    &sequences[start..(start + rows.len()).min(sequences.len())],
                ))
            }
        }
    }

    /// Returns the number of rows in one pass, or `None` if there is no end.
    pub(crate) fn num_whole_rows(&self) -> Option<usize> {
        match self {
            Self::Tokens(batches) => batches.num_whole_rows(),
            Self::Documents(_) => None,
            Self::HeldOut(sequences) => Some(sequences.len()),
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
