//! What a rank's operations did when, for pictures of a step.

use std::fmt;
use std::time::Instant;

use crate::Operation;

/// What a rank does in a span of time that belongs to an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommStage {
    /// It starts the operation.
    Start,
    /// It waits for the result; with the `local` engine, it moves the bytes meanwhile.
    Wait,
}

impl fmt::Display for CommStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Wait => "wait",
        })
    }
}

/// A span of time that a rank spent on an operation. The spans of one thread do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommSpan {
    /// Which operation.
    pub operation: Operation,
    /// On what part of it.
    pub stage: CommStage,
    /// Bytes of its full tensors.
    pub bytes: usize,
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
    /// What was sampled then.
    pub sample: usize,
}

/// The spans of a rank since a moment, with a number that is sampled at the end of each.
pub(crate) struct Recording {
    spans: Vec<CommSpan>,
    sample: Box<dyn Fn() -> usize + Send>,
}

impl Recording {
    pub(crate) fn new(sample: impl Fn() -> usize + Send + 'static) -> Self {
        Self {
            spans: Vec::new(),
            sample: Box::new(sample),
        }
    }

    /// A span that ends now.
    pub(crate) fn add(
        &mut self,
        operation: &Operation,
        stage: CommStage,
        bytes: usize,
        start: Instant,
    ) {
        self.spans.push(CommSpan {
            operation: operation.clone(),
            stage,
            bytes,
            start,
            end: Instant::now(),
            sample: (self.sample)(),
        });
    }

    pub(crate) fn into_spans(self) -> Vec<CommSpan> {
        self.spans
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording")
            .field("spans", &self.spans.len())
            .finish_non_exhaustive()
    }
}
