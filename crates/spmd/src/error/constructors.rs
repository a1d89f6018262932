//! Constructors of errors that several places return.

use std::sync::Arc;

use burn::tensor::{DType, TensorData};

use super::Error;

impl Error {
    /// Wraps the error of a collective that is not a node of a graph.
    pub(crate) fn among_ranks(source: burn_fsdp_collectives::Error) -> Self {
        Self::Collective {
            node: 0,
            source: Arc::new(source),
        }
    }

    /// Returns the error for a tensor of a different shape or type.
    pub(crate) fn mismatch(
        what: &'static str,
        name: impl Into<String>,
        expected: (&[usize], DType),
        data: &TensorData,
    ) -> Self {
        let text = |shape: &[usize], dtype: DType| format!("{dtype:?} {shape:?}");
        Self::TensorMismatch {
            what,
            name: name.into(),
            expected: text(expected.0, expected.1),
            got: text(&data.shape().to_vec(), data.dtype()),
        }
    }
}
