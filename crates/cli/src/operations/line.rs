//! The lines of a rank's file: a header, and one line for each operation.

use burn_fsdp::internals::collectives::Carried;
use serde::{Deserialize, Serialize};

/// The contents of an operation; see [`Carried`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) step: Option<u64>,
    pub(super) group: String,
    /// The number of the operation in its group.
    pub(super) sequence: u64,
    pub(super) kind: String,
    pub(super) label: String,
    pub(super) given: Vec<u64>,
    pub(super) got: Vec<u64>,
}

impl From<Carried> for Line {
    fn from(carried: Carried) -> Self {
        let operation = carried.operation;
        Self {
            step: carried.step,
            group: operation.group.as_str().to_owned(),
            sequence: operation.sequence,
            kind: operation.kind.to_string(),
            label: operation.label.as_str().to_owned(),
            given: carried.given,
            got: carried.got,
        }
    }
}

/// The first line of a file, which identifies its rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) rank: usize,
    /// Number of ranks of the run.
    pub(super) ranks: usize,
}

/// Returns the name of a rank's file.
pub(super) fn file_name(rank: usize) -> String {
    format!("rank-{rank}.jsonl")
}
